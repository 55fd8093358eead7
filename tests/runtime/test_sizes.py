"""Sizes that a mesh cannot split are refused before anything is compiled, by what the types say."""

import pytest
from parts import assert_refuses

import train
import train_any
from models.t5 import PairBatch
from runtime.check import batch_shapes
from runtime.config.command_line import load

WRONG = """
training.tokens.batch=63 | command line: training.tokens.batch = 63: dim B … d=4 … to 60 or 64, or mesh.d to 3 or 7
training.microbatches=3 | configs/local_test_synthetic.yaml: training.tokens.batch = 64: … = 3 parts: set it to 63 or 66
training.microbatches=32 | batch / training.microbatches = 64 / 32: … size 2 … to 4, or mesh.d to 2 … in targets: B/d L
mesh.d=2147483647 | model.d_model = 256: dim M … d=2147483647 cannot divide: set it to 2147483647, or mesh.d to 256
model.n_kv=3 | model.n_kv = 3: dim K … 2 or 4, or mesh.t to 1 or 3 … weights/transformer/w_q: layers M/d Q K/t D
model.d_model=260 | model.d_model = 260: dim M … d=4 × t=2 … to 256 or 264 … in weights/transformer/ln1: layers M/d/t
model.vocab=1281 model.layers=7 model.n_kv=7 | model.vocab = 1281: dim V … weights/embed: V/t M/d … model.n_kv = 7
"""
CASES = [case.split(" | ") for case in WRONG.strip().split("\n")]


@pytest.mark.parametrize("overrides, text", CASES, ids=[overrides for overrides, _ in CASES])
def test_sizes_that_the_mesh_cannot_split(overrides, text):
    """Every dim that its axes do not divide is named, with the keys of its size, the leaf, and the nearest sizes that
    fit."""
    assert_refuses(text, train.shapes, load(train.Config, "local_test_synthetic", overrides.split()))


def test_a_batch_for_an_encoder():
    """Its fields have a column for each token that is read, beside those for each that is written, and a row for each
    of the global batch."""
    keys = ["training.tokens={batch: 64, len: 64, read_len: 24}", "training.microbatches=4"]
    batch = batch_shapes(load(train_any.Config, overrides=keys), PairBatch)
    assert batch.read.shape == batch.read_starts.shape == (64, 24) and batch.weight.shape == (64, 64)
