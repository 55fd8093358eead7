"""Sizes that a mesh cannot split are refused before anything is compiled, by what the types say."""

import re

import pytest

import train
from runtime.config.command_line import load
from runtime.terminal import RunError

FILE = "configs/local_test_synthetic.yaml"
WRONG = [
    (["training.tokens.batch=63"], "command line: training.tokens.batch = 63: dim B has size 63, which axis d=4 cannot divide: set it to 60 or 64, or mesh.d to 3 or 7\n  in targets: B/d L"),
    (["training.microbatches=3"], f"{FILE}: training.tokens.batch = 64: it is divided into training.microbatches = 3 parts: set it to 63 or 66"),
    (["training.microbatches=32"], "training.tokens.batch / training.microbatches = 64 / 32: dim B has size 2, which axis d=4 cannot divide: set it to 4, or mesh.d to 2\n  in targets: B/d L"),
    (["model.n_kv=3"], "command line: model.n_kv = 3: dim K has size 3, which axis t=2 cannot divide: set it to 2 or 4, or mesh.t to 1 or 3\n  in weights/transformer/w_q: layers M/d Q K/t D"),
    (["model.d_ff=1023"], "command line: model.d_ff = 1023: dim F has size 1023, which axis t=2 cannot divide: set it to 1022 or 1024, or mesh.t to 1 or 3\n  in weights/transformer/w_gate: layers M/d F/t"),
    (["model.d_model=260"], "command line: model.d_model = 260: dim M has size 260, which axes d=4 × t=2 cannot divide: set it to 256 or 264\n  in weights/transformer/ln1: layers M/d/t"),
    (["model.vocab=1281", "model.layers=7", "model.n_kv=7"], "command line: model.vocab = 1281: dim V has size 1281, which axis t=2 cannot divide: set it to 1280 or 1282, or mesh.t to 1 or 3\n  in weights/embed: V/t M/d\ncommand line: model.n_kv or model.layers = 7: dim K has size 7"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, text", WRONG, ids=[" ".join(overrides) for overrides, _ in WRONG])
def test_sizes_that_the_mesh_cannot_split(overrides, text):
    """Every dim that its axes do not divide is named, with the keys of its size, the leaf, and the nearest sizes that fit."""
    with pytest.raises(RunError, match=re.escape(text)) as caught:
        train.shapes(load(train.Config, "local_test_synthetic", overrides))
    assert str(caught.value).startswith(text)


def test_sizes_that_it_can():
    """The global shapes of all weights and of a batch."""
    state, batch = train.shapes(load(train.Config, "local_test_synthetic", ["training.microbatches=4"]))
    assert state.weights.transformer.w_q.shape == (2, 256, 2, 2, 32) and batch.targets.shape == (64, 64)
