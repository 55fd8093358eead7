"""models/bert.py: its layer with the residual whole, and the check of all that it sends."""

import functools

import jax
import numpy as np
import pytest
from mutation import proofs
from published import FOLDER, SIZES, Masked, check_family, loss_and_logits_of_masked, on_mesh, oracle_of, weights_of

from models import huggingface
from models.context import ALONE, attention_where, deal_heads
from models.layers import TokenBatch
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32


def whole(source, Weights):
    """The logits, by layers that take the residual as a whole on each device of t."""
    family, model = source.family, source.model

    def forward(weights: Weights, batch: TokenBatch, masked: Masked) -> f32["B/b L/c V/t"]:
        layers, ends = family.layers, family.gather_ends(weights)
        _, segment, position = layers.inputs_of(batch, 0)

        def one(x, w):
            def attend(q, k, v):
                same = segment[:, :, None] == segment[:, None, :]
                return deal_heads(functools.partial(attention_where, allowed=same), q, k, v), None

            return family.layer(model, x, family.gather_layer(w), attend, position, "M")[0], None

        tokens, kinds, position = map(ALONE.part, (masked.tokens, masked.kinds, position))
        x = family.embed(model, ends, tokens, position, "M", kinds)
        x = family.final(model, ends, jax.lax.scan(one, x, weights.transformer)[0], "M")
        return layers.logits_of(ends.unembed, x)

    return forward


@pytest.mark.usefixtures("proved_elsewhere")
def test_predictions_do_not_depend_on_how_the_residual_lies_nor_on_padding(pool):
    """Whole on each device, or split: the same to 1e-5; tokens of another segment change no bit, its own do."""
    source, oracle = huggingface.open_weights(FOLDER / "bert", pool), oracle_of("bert")
    starts = np.zeros((8, 24), bool)
    starts[:, 16] = True
    batch = TokenBatch(oracle["targets"], starts, np.ones_like(starts))
    tokens, kinds = oracle["inputs"].astype(np.uint32), oracle["kinds"].astype(np.int32)
    changed = [tokens.copy(), tokens.copy()]
    changed[0][:, 16:] = 39 - tokens[:, 16:]
    changed[1][:, 15] = 39 - tokens[:, 15]
    with on_mesh(4, 2):
        weights, type_ = weights_of(source, pool)
        run = jax.jit(typed_shard_map(loss_and_logits_of_masked(source, type_)))
        expected, beside, within = [
            np.asarray(run(weights, batch, Masked(ids, kinds))[1]) for ids in (tokens, *changed)
        ]
        found = jax.jit(typed_shard_map(whole(source, type_)))(weights, batch, Masked(tokens, kinds))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert beside[:, :16].tobytes() == expected[:, :16].tobytes()
    assert (within[:, 0] != expected[:, 0]).any(axis=-1).all()  # an earlier token sees a later one


# -- The check ---------------------------------------------------------------------------------------------------------
SHAPES = Masked(jax.ShapeDtypeStruct((16, 32), np.uint32), jax.ShapeDtypeStruct((16, 32), np.int32))
check = functools.partial(
    check_family,
    variants=[{**SIZES, "positions": 32}],
    steps=[loss_and_logits_of_masked, whole],
    others=[SHAPES],
)
FILE = "models/bert.py"
test_it_is_accepted, test_every_mutant_is_refused = proofs({FILE: (check, 100, 40)}, quick=[FILE])
