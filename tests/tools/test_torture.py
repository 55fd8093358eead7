"""A run in processes of its own, killed again and again."""

import pytest

from runtime.terminal import RunError
from tests.torture import Torture, torture


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(tmp_path, record_property):
    """Six kills with SIGKILL, two of them as soon as a save begins: no checkpoint is lost, and the losses are bit for
    bit
    those of a run left alone."""
    count = torture(
        Torture(folder=str(tmp_path / "torture"), seed=1, kills=6, steps=200, checkpoint_interval=10, epochs=1)
    )
    assert count.kills == count.restarts == 6 and count.in_saving > 0 and count.lost_checkpoints == 0
    record_property("summary", f"torture: {count}")


@pytest.mark.slow
def test_torture_says_when_the_run_is_too_short(tmp_path):
    """A run that ends before its last kill is no proof: the message says how many steps it takes."""
    config = Torture(folder=str(tmp_path / "torture"), seed=0, kills=50, steps=10, checkpoint_interval=5, epochs=1)
    with pytest.raises(RunError, match=r"the run ended after \d of 50 kills: raise steps, to 1530 say"):
        torture(config)
