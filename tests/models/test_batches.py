"""Batches with weights and with pairs: losses against numpy, against the loss without them, and one pair at a time."""

import jax
import numpy as np
import pytest
from published import FOLDER, batch_of, on_mesh, oracle_of, reduced, weights_of

from models import huggingface, layers, t5
from models.layers import WeightedBatch
from models.t5 import PairBatch
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, make_shardings
from train import act

pytestmark = pytest.mark.usefixtures("proved_elsewhere")


@pytest.fixture
def drawn():
    """The same numbers, whatever ran before."""
    return np.random.default_rng(3)


def on_device(batch):
    return jax.device_put(batch, make_shardings(type(batch)))


def losses_of(source, Weights, is_weighted):
    """The sum of losses, its gradient, and the logits, of a decoder's batch."""
    family, model = source.family, source.model

    def step(weights: Weights, batch: WeightedBatch) -> tuple[f32[""], f32["B/b L/c V/t"], Weights]:
        def loss(weights, batch):
            ends = family.gather_ends(weights)
            x = layers.hidden(family, model, weights, *layers.inputs_of(batch, 1), ends=ends)[0]
            weight = batch.weight if is_weighted else None
            return layers.loss_sum(ends.unembed, x, batch, weight=weight), layers.logits_of(ends.unembed, x)

        (value, logits), gradient = shardops.value_and_grad(loss, has_aux=True)(weights, batch)
        return shardops.psum("+b +c +t -> ", value), logits, reduced(Weights, gradient)

    return jax.jit(typed_shard_map(step))


def test_weights_of_the_loss(pool, drawn):
    """Weights of 0 and 1 give the loss and the gradient of is_target bit for bit; any others multiply each target's
    -log softmax, as numpy computes it in float64 from the logits."""
    source, oracle = huggingface.open_weights(FOLDER / "llama", pool), oracle_of("llama")
    with on_mesh(2, 1):
        weights, type_ = weights_of(source, pool)
        batch = jax.tree.map(np.asarray, batch_of(oracle))
        is_target = drawn.random(batch.targets.shape) < 0.5
        ones = on_device(WeightedBatch(batch.targets, batch.is_seq_start, is_target, is_target.astype(np.float32)))
        weighted = losses_of(source, type_, True)
        of_weights, of_targets = weighted(weights, ones), losses_of(source, type_, False)(weights, ones)
        jax.tree.map(np.testing.assert_array_equal, of_weights, of_targets)
        assert float(of_targets[0]) > 0
        others = np.where(is_target, drawn.choice([0.25, 1, 3], is_target.shape), 0).astype(np.float32)
        batch_of_others = on_device(WeightedBatch(batch.targets, batch.is_seq_start, is_target, others))
        found, logits, _ = weighted(weights, batch_of_others)
    logits = np.asarray(logits, np.float64)
    scores = np.take_along_axis(logits, batch.targets[..., None].astype(int), axis=-1)[..., 0]
    expected = (others * (np.log(np.exp(logits).sum(axis=-1)) - scores)).sum()
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["t5_gated"])
def test_pairs_in_one_row(pool, name, drawn):
    """The losses of pairs in one row are those of the same pairs, each in a row of its own."""
    source = huggingface.open_weights(FOLDER / name, pool)
    draw = lambda length: drawn.integers(2, 39, length).astype(np.uint32)  # noqa: E731
    pairs = [(draw(read), draw(written)) for read, written in ((5, 4), (7, 2), (3, 6), (9, 5))]
    weight = (0.5, 1, 2, 3)

    def rows_of(groups):
        """A PairBatch, with rows of these pairs, in which 16 tokens are read and 12 written."""
        count = len(groups)
        rows = {name: np.zeros((count, length), np.uint32) for name, length in (("read", 16), ("targets", 12))}
        starts = {name: np.zeros(values.shape, bool) for name, values in rows.items()}
        weights = np.zeros((count, 12), np.float32)
        for row, group in enumerate(groups):
            for part, name in enumerate(rows):
                at = 0
                for number in group:
                    ids = pairs[number][part]
                    rows[name][row, at : at + len(ids)], starts[name][row, at] = ids, True
                    if name == "targets":
                        weights[row, at : at + len(ids)] = weight[number]
                    at += len(ids)
                starts[name][row, at : at + 1] = True  # padding
        both = {"is_seq_start": starts["targets"], "read_starts": starts["read"]}
        return on_device(PairBatch(**rows, **both, is_target=weights > 0, weight=weights))

    with on_mesh(2, 1):
        weights, type_ = weights_of(source, pool)

        def losses(weights: type_, batch: PairBatch) -> tuple[f32[""], act["B/b L/c M"]]:
            ends = t5.gather_ends(weights)
            x = t5.hidden(source.model, weights, *t5.pairs_of(batch, 0), ends=ends)
            loss = layers.loss_sum(ends.unembed, x, batch, weight=batch.weight)
            return shardops.psum("+b +c +t -> ", loss), x

        losses = jax.jit(typed_shard_map(losses))
        together, x = losses(weights, rows_of([(0, 1), (2, 3)]))
        alone, y = losses(weights, rows_of([(0,), (1,), (2,), (3,)]))
    assert float(together) == pytest.approx(float(alone), rel=1e-5) and float(alone) > 1
    for (row, first), number in {(0, 0): 0, (0, 4): 1, (1, 0): 2, (1, 6): 3}.items():
        length = len(pairs[number][1])
        np.testing.assert_allclose(x[row, first : first + length], y[number, :length], atol=2e-5, rtol=0)
