"""models/bert.py: its layer with the residual whole, what is published, and the check of all that it sends."""

import functools
import json

import jax
import numpy as np
import pytest
from mutation import proofs
from published import FOLDER, Masked, check_family, loss_and_logits_of_masked, on_mesh, oracle_of, weights_of
from safetensors.numpy import load_file, save_file

from models import huggingface
from models.context import ALONE, attention_where, deal_heads
from models.layers import TokenBatch
from runtime.checkpoints.checkpoint import named_leaves
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import i32
from train import act


def split(source, Weights):
    """What predicts, as `layers.through` computes it."""
    family, model = source.family, source.model

    def forward(weights: Weights, batch: TokenBatch, masked: Masked, segment: i32["B/b L"]) -> act["B/b L/c M"]:
        ends, (_, _, position) = family.gather_ends(weights), family.layers.inputs_of(batch, 0)
        tokens, kinds, place = map(ALONE.part, (masked.tokens, masked.kinds, position))
        x = family.embed(model, ends, tokens, place, "M/t", kinds)
        given = (weights.transformer,), None, None
        x, _ = family.layers.through(
            family, model, x, given, family.gather_layer, segment, position, family.layers.FORWARD, ALONE
        )
        return family.final(model, ends, x, "M/t")

    return forward


def whole(source, Weights):
    """What predicts, by layers that take the residual as a whole on each device of t."""
    family, model = source.family, source.model

    def forward(weights: Weights, batch: TokenBatch, masked: Masked) -> act["B/b L/c M"]:
        layers, ends = family.layers, family.gather_ends(weights)
        _, segment, position = layers.inputs_of(batch, 0)

        def one(x, w):
            def attend(q, k, v):
                same = segment[:, :, None] == segment[:, None, :]
                return deal_heads(functools.partial(attention_where, allowed=same), q, k, v), None

            return family.layer(model, x, family.gather_layer(w), attend, position, "M")[0], None

        tokens, kinds, position = map(ALONE.part, (masked.tokens, masked.kinds, position))
        x = family.embed(model, ends, tokens, position, "M", kinds)
        return family.final(model, ends, jax.lax.scan(one, x, weights.transformer)[0], "M")

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

        run, segment = jax.jit(typed_shard_map(split(source, type_))), np.cumsum(starts, axis=1).astype(np.int32)
        expected, beside, within = [
            np.asarray(run(weights, batch, Masked(ids, kinds), segment)) for ids in (tokens, *changed)
        ]
        found = jax.jit(typed_shard_map(whole(source, type_)))(weights, batch, Masked(tokens, kinds))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert beside[:, :16].tobytes() == expected[:, :16].tobytes()
    assert (within[:, 0] != expected[:, 0]).any(axis=-1).all()  # an earlier token sees a later one


def test_old_files_are_read(pool, tmp_path):
    """A file like google-bert/bert-base-uncased is read: norms' gamma and beta, position numbers, heads that are not
    computed."""
    tensors, old = load_file(FOLDER / "bert/model.safetensors"), {}
    for name, value in tensors.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[name] = value
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = np.arange(24, dtype=np.int64)[None]
    old["bert.pooler.dense.weight"], old["cls.seq_relationship.bias"] = np.ones((16, 16)), np.ones(2)
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    save_file(old, tmp_path / "model.safetensors")
    config = json.loads((FOLDER / "bert/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "absolute"}))
    with on_mesh(2, 2):
        found, expected = [
            weights_of(huggingface.open_weights(at, pool), pool)[0] for at in (tmp_path, FOLDER / "bert")
        ]
    for (names, one), (_, other) in zip(named_leaves(found), named_leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), names


# -- The check ---------------------------------------------------------------------------------------------------------
SMALL = {"d_model": 64, "n_kv": 8, "d_head": 8, "layers": 2, "vocab": 128, "d_ff": 96, "positions": 32}
SHAPES = Masked(jax.ShapeDtypeStruct((16, 32), np.uint32), jax.ShapeDtypeStruct((16, 32), np.int32))


def check_bert(path, source):
    return check_family(path, source, [SMALL], [loss_and_logits_of_masked, whole], SHAPES)


FILE = "models/bert.py"
test_it_is_accepted, test_every_mutant_is_refused = proofs({FILE: (check_bert, 100, 40)}, quick=[FILE])
