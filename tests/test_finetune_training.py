"""python -m finetune with what optimizers.py adds to train.py: runs that stop and resume, and their averages."""

import json
import shutil

import numpy as np
import pytest
from test_finetune import arrays_of, start  # noqa: F401 a fixture

from models import huggingface
from runtime.checkpoints.checkpoint import read_leaf

ALL = """
    training.optimizer=muon training.moment_dtype=bfloat16 training.ema_decay=0.5 training.dropout=0.1
    training.z_loss=1e-3 training.schedule=constant training.microbatches=2 train='embed|transformer/w_q'
""".split()
FOUR = "mesh={d: 2, t: 2}"


def metrics_of(folder, key):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def whole(start):  # noqa: F811
    """A run with all of it on four devices."""
    assert start("whole", *ALL, FOUR) == 0
    return start.folder / "whole"


@pytest.fixture(scope="module")
def half(start):  # noqa: F811
    """The same, after two of four steps."""
    assert start("half", *ALL, FOUR, "training.steps=2") == 0
    return start.folder / "half"


def test_it_resumes_bit_for_bit(whole, half, start, pool):  # noqa: F811
    """With the average, the rounded moments and dropout: the same checkpoint as without a stop."""
    shutil.copytree(half, start.folder / "resumed")
    assert start("resumed", *ALL, FOUR) == 0
    expected = arrays_of(whole, pool)
    names = {"embed", "transformer/w_q"}
    assert expected.keys() == {f"{tree}/{name}" for tree in ("weights", "ema", "adam_mu") for name in names} | {
        "adam_nu/embed"
    }
    assert expected["adam_mu/embed"].dtype == expected["adam_nu/embed"].dtype == np.uint16
    for name, values in arrays_of(start.folder / "resumed", pool).items():
        assert values.tobytes() == expected[name].tobytes(), name


def test_the_average_is_exported(whole, pool):
    """What is read of the run is the average, not the last weights."""
    arrays, source = arrays_of(whole, pool), huggingface.open_weights(whole, pool)
    for name in ("weights/embed", "weights/transformer/w_q"):
        read = read_leaf(source.checkpoint, name, pool)
        assert read.tobytes() == arrays[name.replace("weights", "ema")].tobytes() != arrays[name].tobytes()


def test_another_optimizer_is_refused(half, start, capsys):  # noqa: F811
    """When a run resumes, its moments would be none of the other's."""
    assert start("half", *ALL, FOUR, "training.optimizer=adamw", "training.ema_decay=0.6") == 1
    assert 'training.optimizer: "muon" -> "adamw" (command line)' in capsys.readouterr().err


@pytest.mark.slow
def test_a_constant_run_can_be_resumed_with_its_decay(half, start):  # noqa: F811
    """Of ten times less at the end: at step 4 it is half way there."""
    shutil.copytree(half, start.folder / "decays")
    assert start("decays", *ALL, FOUR, "training.decay_from=2") == 0
    assert metrics_of(start.folder / "decays", "learning_rate") == pytest.approx({1: 0.01, 2: 0.01, 3: 0.01, 4: 0.0055})


@pytest.mark.slow
def test_dropout_of_microbatches_is_the_same_on_one_device(whole, start):  # noqa: F811
    """Of rows that another mesh has in another microbatch: the first loss is that of four devices, to rounding."""
    assert start("one", *ALL, "training.steps=1") == 0
    one = metrics_of(start.folder / "one", "loss")[1]
    assert abs(metrics_of(whole, "loss")[1] - one) <= 1e-6 * one


@pytest.mark.slow
def test_the_average_is_validated(whole, start):  # noqa: F811
    """The validation loss was that of the weights which are read: those of a run from them that changes nothing."""
    still = ["training.learning_rate=1e-30", "training.weight_decay=0", "training.steps=1"]
    assert start("still", f"initial_weights={whole}", *still) == 0
    again = metrics_of(start.folder / "still", "validation_loss")[1]
    assert abs(metrics_of(whole, "validation_loss")[4] - again) <= 1e-6 * again


def test_what_does_not_fit_is_refused(start, capsys):  # noqa: F811
    """Before anything is compiled, with what to set."""
    for keys, message in [
        (["lora.rank=2", "training.optimizer=muon"], "training.optimizer = muon: it is for the matrices of layers; of"),
        (
            ["training.dropout=0.1", "model.attention=blockwise"],
            "model.attention = blockwise: with training.dropout attention",
        ),
        (["training.decay_from=2"], "training.decay_from = 2: schedule cosine falls from the warmup on"),
    ]:
        assert start("refused", *keys) == 1
        assert message in capsys.readouterr().err
