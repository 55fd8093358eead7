"""Programs that are ended again and again, robbed of their disk and files, or attacked: tests/torture*.py, in small."""

import subprocess
import sys

import pytest

NOT_LOST = "no checkpoint was lost, and the losses of all 60 steps are bit for bit those of a run left alone"


@pytest.mark.slow
@pytest.mark.parametrize("arguments, last_line", [
    ("torture kills=12 faults=[]", NOT_LOST),
    ("torture kills=1 faults=[file_size,descriptors]", NOT_LOST),
    ("torture program=train_any kills=4 faults=[descriptors]", NOT_LOST),
    ("torture_tools kills=20", "nothing was lost: "),
    ("torture_server minutes=1", "the answers are those of before"),
])  # fmt: skip
def test_nothing_is_lost(tmp_path, arguments, last_line):
    """Inputs, checkpoints and data are as those of programs left alone, and a server answers as before it."""
    name, *arguments = arguments.split()
    command = [sys.executable, "-m", f"tests.{name}", f"folder={tmp_path}/torture", "seed=1", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(last_line)
