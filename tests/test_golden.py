"""The small run's losses are those that tests/golden has for this platform; a real run's metrics are those of
docs/runs.md."""

import json
import re
from pathlib import Path

import jax
import pytest
import small
from renew_golden import FOLDER, NAME, RUN
from several_hosts import logged, where

from runtime.tracking.recorded import read_run
from tests.runtime.tracking.test_trackers import tensorboard_curves
from tools.compare import equal

# Relative. With and without XLA:CPU's optimizations the values differ by 4e-6, with SSE 4.2 instead of AVX2 by 5e-7. A
# larger difference is another computation: tests/renew_golden.py says what to do.
TOLERANCE = 1e-4
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "runs.md"


@pytest.fixture(scope="module")
@small.proved_elsewhere()
@small.followed()
def folder(tmp_path_factory):
    """The run that golden losses are of."""
    root = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert small.start_training(monkeypatch, *RUN, *where(root / NAME), "tracking.to=[tensorboard]") == 0
    return root / NAME


def test_losses_are_golden(folder):
    """Every loss, gradient norm and learning rate, validation included, to TOLERANCE."""
    expected = FOLDER / f"{jax.default_backend()}.jsonl"
    if not expected.exists() and jax.default_backend() != "cpu":
        pytest.skip(
            f"no golden losses of this platform yet: `make golden` writes {expected.relative_to(FOLDER.parents[1])}"
        )
    print(equal(read_run(folder), read_run(expected), TOLERANCE))


def test_a_run_leaves_its_report(folder):
    """The page with the last step, and the environment."""
    page = (folder / "report.html").read_text()
    assert "step 10 of 10" in page and "A step: " in page and "plotly.js" in page
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__ and environment["ledger"]


def test_a_tracker_that_is_asked_for_has_the_run(folder):
    """TensorBoard's files have the last step's loss, bit for bit that of metrics.jsonl, and the validation's."""
    names, shown = ("loss", "validation_loss"), tensorboard_curves(folder)
    written = {(step, name): value for name in names for step, value in logged(folder, name).items()}
    assert {key: value for key, value in shown.items() if key[1] in names} == written
    assert (10, "validation_loss") in written


def test_metrics_are_those_that_are_documented(folder):
    """A real run's keys are the names in the tables of docs/runs.md, no more and no fewer; <...> in a name stands for
    several that differ there. Those of a mixture and of eval_tasks are of other runs."""
    cells = re.findall(r"^\| (`.+?`) \|", DOCUMENT.read_text().partition("## Trackers")[0], re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    of_others = {"tokens_per_source/<path>", "validation_loss_of/<path>", "score/<file>/<metric>"}
    assert of_others < names
    names -= of_others
    patterns = {name: re.compile(re.sub(r"<\w+>", ".+", re.escape(name))) for name in names}
    written = {name for line in read_run(folder).lines for name in line}
    undocumented = {name for name in written if not any(pattern.fullmatch(name) for pattern in patterns.values())}
    unwritten = {name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, written))}
    assert (undocumented, unwritten) == (set(), set())
