"""models/t5.py: decoding with what was encoded once, its buckets, and the check of all it sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from mutation import proofs
from published import (
    FOLDER,
    SIZES,
    Read,
    check_family,
    config_of,
    loss_and_logits_of_read,
    on_mesh,
    oracle_of,
    published_as,
    weights_of,
)

from models import huggingface, layers, t5
from models.context import ALONE, attention_where
from models.decoding import part, whole
from models.layers import TokenBatch
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Scope
from train import act


def decoded_in(chunks):
    """Hidden states by the layer as decoding calls it: some tokens at a time; keys and values are kept."""

    def made(source, Weights):
        family, model = source.family, source.model

        def forward(weights: Weights, batch: TokenBatch, read: Read) -> act["B/b L M"]:
            inputs, _, _ = layers.inputs_of(batch, 1)
            ends = family.gather_ends(weights)
            memory = family.memory(weights, family.encode(model, weights, read.tokens, read.segment))
            is_read = jnp.broadcast_to((read.segment == 1)[:, None], (inputs.shape[0], 1, read.tokens.shape[1]))
            written, outputs, start = None, [], 0
            for count in chunks:
                query, key = jnp.arange(start, start + count), jnp.arange(start + count)
                distance = (query[:, None] - key[None]).astype(jnp.int32)
                bias = family.relative_bias(model, ends.decoder_bias, distance, both_ways=False)
                with Scope():
                    bias = shardops.all_gather("K/h L S -> K/t L S", bias)

                def one(x, of_layer, distance=distance, bias=bias):
                    w, of_read, before = of_layer

                    def attend(q, k, v):
                        q, k, v = whole(q), whole(k[:, :, None])[:, :, 0], whole(v[:, :, None])[:, :, 0]
                        if before is not None:
                            k = jnp.concatenate([before[0], k], axis=1)
                            v = jnp.concatenate([before[1], v], axis=1)
                        allowed = jnp.broadcast_to(distance >= 0, (q.shape[0], *distance.shape))
                        return part(attention_where(q, k, v, allowed, bias=bias, K="K/t")), jnp.stack([k, v])

                    def cross(q, project):
                        q = whole(q)
                        allowed = jnp.broadcast_to(is_read, (q.shape[0], q.shape[1], is_read.shape[2]))
                        return part(attention_where(q, of_read[0], of_read[1], allowed, K="K/t"))

                    return family.layer(model, x, family.gather_layer(w), attend, cross, "M")[:2]

                x = family.embed(model, ends, ALONE.part(inputs[:, start : start + count]), None, "M")
                x, written = jax.lax.scan(one, x, (weights.decoder, memory, written))
                with Scope():
                    x = family.final(model, ends, x, "M")
                    outputs.append(shardops.all_gather("B/b L/c M -> B/b L M", x))
                start += count
            return jnp.concatenate(outputs, axis=1)

        return forward

    return made


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name", [*small.slow("t5"), "t5_gated"])
def test_decoding_computes_what_training_does(name, pool):
    """A text that is encoded once and decoded five tokens, one, and six at a time has training's hidden states to 1e-5;
    padding that is read changes no bit."""
    source, oracle = huggingface.open_weights(FOLDER / name, pool), oracle_of(name)
    starts = np.zeros((8, 12), bool)
    batch = TokenBatch(oracle["targets"][:, :12], starts, np.ones_like(starts))
    segment = np.ones(oracle["read"].shape, np.int32)
    segment[:, 15:] = 0
    other = np.where(segment == 1, oracle["read"], 39 - oracle["read"])
    with on_mesh(4, 2):
        weights, type_ = weights_of(source, pool)

        def trained(weights: type_, batch: TokenBatch, read: Read) -> act["B/b L/c M"]:
            inputs, of_written, _ = layers.inputs_of(batch, 1)
            return t5.hidden(source.model, weights, read.tokens, read.segment, inputs, of_written)

        expected = jax.jit(typed_shard_map(trained))(weights, batch, Read(oracle["read"], segment))
        padded = jax.jit(typed_shard_map(trained))(weights, batch, Read(other, segment))
        forward = decoded_in([5, 1, 6])(source, type_)
        found = jax.jit(typed_shard_map(forward))(weights, batch, Read(oracle["read"], segment))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert np.asarray(padded).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize(("buckets", "max_distance", "firsts"), [
    (16, 128, [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]),
    (32, 128, [*range(1, 17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]),
    (16, 1000, [1, 2, 3, 4, 5, 6, 7, 8, 15, 27, 49, 90, 164, 300, 547]),
])  # fmt: skip
def test_buckets_begin_where_those_of_transformers_do(buckets, max_distance, firsts):
    """The bucket changes at the same distances as in T5Attention._relative_position_bucket (transformers 5.23.0)."""
    assert t5.first_distances(buckets, max_distance) == firsts


@pytest.mark.parametrize("said, start", [({"decoder_start_token_id": 2}, 2), ({"decoder_start_token_id": None}, 5)])
def test_what_the_decoder_reads_first(said, start, pool, tmp_path):
    """What config.json says; where it says null, the padding token, as in T5's own files."""
    folder = published_as(tmp_path, "t5", {**config_of("t5"), "pad_token_id": 5, **said})
    assert huggingface.open_weights(folder, pool).decoder_start == start


# -- The check ---------------------------------------------------------------------------------------------------------
SMALL = {**SIZES, "encoder_layers": 3, "buckets": 16, "max_distance": 40}
VARIANTS = [{**SMALL, "gated": False, "tied": True}, {**SMALL, "gated": True}]
SHAPES = Read(jax.ShapeDtypeStruct((16, 24), np.uint32), jax.ShapeDtypeStruct((16, 24), np.int32))

STEPS = [loss_and_logits_of_read, decoded_in([32])]
check = functools.partial(check_family, variants=VARIANTS, steps=STEPS, others=[SHAPES])
FILE = "models/t5.py"
test_it_is_accepted, test_every_mutant_is_refused = proofs({FILE: (check, 300, 40)}, quick=[FILE])
