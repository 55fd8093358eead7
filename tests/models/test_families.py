"""The families of models/ beside what the golden files hold: their first weights, adapters, what is refused,
config.json both ways, and the check of all that they send."""

import copy
import functools
import importlib
import json
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small
from mutation import proofs
from pages import ROOT
from parts import assert_refuses
from published import (
    FOLDER,
    NAMES,
    SIZES,
    batch_of,
    check_family,
    config_of,
    decoded,
    loss_and_logits,
    on_mesh,
    published_as,
    weights_of,
)
from safetensors.numpy import load_file

from models import bert, gemma, gpt2, gptj, huggingface, layers, llama, mixtral, safetensors, t5
from models.context import ALONE
from runtime.checkpoints.checkpoint import named_leaves
from runtime.terminal import RunError
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import narrowed, u32
from train import act

SMALL = {**SIZES, "attention": "einsum"}
GEMMA = {"n_q_per_kv": 2, "logits_scale": 0.3}
GEMMA2 = {**GEMMA, "norm_after": True, "window": 5, "global_every": 2, "attention_cap": 2.0, "logits_cap": 3.0}
GEMMA3 = {**GEMMA, "norm_after": True, "qk_norm": "head", "window": 5, "global_every": 2, "rope_local_timescale": 10.0}
VARIANTS = {
    "gemma": [GEMMA, GEMMA2, GEMMA3],
    "gpt2": [{"positions": 64}, {"positions": 66, "first_position": 2, "activation": "relu"}],
    "gptj": [{"d_rotary": 4}],
}
CASES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]
CASES = [case if case[1] == VARIANTS[case[0]][-1] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


def source_of(family, variant):
    return types.SimpleNamespace(family=family, model=family.Model(**SMALL, **variant))


def shapes_of(source):
    return jax.eval_shape(functools.partial(source.family.init, source.model), np.uint32(0))


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name, variant", CASES)
def test_the_loss_of_the_first_weights_is_that_of_guessing(name, variant):
    """The loss is within 1.5 nats of ln(vocabulary), since Gemma's tied table makes it repeat its input; each weight
    has a gradient."""
    source = source_of(importlib.import_module(f"models.{name}"), variant)
    targets = np.random.default_rng(0).integers(0, 128, (8, 24)).astype(np.uint32)
    with on_mesh(1, 1):
        step = jax.jit(typed_shard_map(loss_and_logits(source, narrowed(source.family.Weights, shapes_of(source)))))
        loss, _, gradient = step(source.family.init(source.model, np.uint32(0)), batch_of({"targets": targets}))
    assert abs(loss - np.log(128)) < 1.5
    assert all(np.abs(leaf).max() > 1e-5 for leaf in jax.tree.leaves(gradient))


def embedded(family, model, tokens):
    """The bfloat16 rows that a family's layers begin with, of the embedding of ones."""
    with on_mesh(1, 1, "bfloat16"):
        weights = jax.tree.map(jnp.ones_like, family.init(model, np.uint32(0)))

        def embed(weights: narrowed(family.Weights, weights), tokens: u32['B/b L']) -> act['B/b L/c M/t']:
            position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] + 0 * tokens.astype(jnp.int32)
            layers.require_positions(model, tokens.shape[1])
            return family.embed(model, family.gather_ends(weights), ALONE.part(tokens), ALONE.part(position), 'M/t')

        return np.asarray(jax.jit(typed_shard_map(embed))(weights, tokens))


@pytest.mark.usefixtures("proved_elsewhere")
def test_gemma_rounds_the_factor_of_its_embedding():
    """√3072 = 55.4 is 55.5 in bfloat16, as when the published weights were trained."""
    model = gemma.Model(**{**SMALL, "d_model": 3072}, **GEMMA)
    assert (embedded(gemma, model, np.zeros((1, 3), np.uint32)) == ml_dtypes.bfloat16(55.5)).all()


def test_rows_longer_than_the_learned_positions_are_refused():
    """GPT-2 and OPT have no row in their table for later positions."""
    model = gpt2.Model(**SMALL, positions=34, first_position=2)
    assert embedded(gpt2, model, np.zeros((1, 32), np.uint32)).shape == (1, 32, 64)
    with pytest.raises(RunError, match="rows of 33 tokens: the model has 32 positions"):
        embedded(gpt2, model, np.zeros((1, 33), np.uint32))


# -- config.json and published names -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_config_json_is_made_of_each_model(name, pool):
    """`model_of(config_of(model))` is the model: an export that no config.json came with has one."""
    source = huggingface.open_weights(FOLDER / name, pool)
    fields = huggingface.Fields(json.loads(json.dumps(source.family.config_of(source.model))), "config.json")
    made = source.family.model_of(fields)
    fields.finish()
    assert not huggingface.different(made, source.model) and not huggingface.different(source.model, made)


# What the models of these sizes were published with, in the words of transformers before 5.
PUBLISHED = json.loads((ROOT / "tests/models/older_configs.json").read_text())
EXPECTED = [
    ("gemma 2B", gemma, {"n_q_per_kv": 8, "logits_scale": 1 / 16, "window": None, "norm_after": False}),
    ("gemma 2 27B", gemma, {"logits_scale": 1 / 12, "attention_cap": 50.0, "logits_cap": 30.0}),
    ("gemma 2 27B", gemma, {"window": 4096, "global_every": 2, "qk_norm": "none", "rope_local_timescale": None}),
    ("gemma 3, scaled", gemma, {"rope_max_timescale": 1000000, "rope_local_timescale": 10000, "window": 512}),
    ("gemma 3, scaled", gemma, {"rope_scaling": layers.RopeScaling(kind="linear", factor=8.0), "global_every": 6}),
    ("llama 2 7B", llama, {"n_q_per_kv": 1, "d_head": 128, "tied": False}),
    ("distilgpt2", gpt2, {"layers": 6, "d_head": 64, "positions": 1024}),
    ("gpt2", gpt2, {"d_head": 64, "d_ff": 3072, "positions": 1024, "activation": "gelu_tanh"}),
    ("opt 125M", gpt2, {"d_ff": 3072, "positions": 2050, "first_position": 2, "activation": "relu"}),
    ("gpt-j 6B", gptj, {"d_head": 256, "d_ff": 16384, "d_rotary": 64}),
    ("mixtral 8x7B", mixtral,
     {"n_q_per_kv": 4, "d_head": 128, "experts": 8, "experts_per_token": 2, "weights_add_to_one": True,
      "qk_norm": "none"}),
    ("olmoe 1B-7B", mixtral,
     {"d_ff": 1024, "experts": 64, "experts_per_token": 8, "weights_add_to_one": False, "qk_norm": "all"}),
    ("qwen 3 30B-A3B", mixtral,
     {"d_ff": 768, "d_head": 128, "experts": 128, "weights_add_to_one": True, "qk_norm": "head", "window": None}),
    ("t5 small", t5, {"encoder_layers": 6, "layers": 6, "max_distance": 128, "gated": False, "tied": True}),
    ("flan-t5 base", t5, {"encoder_layers": 12, "layers": 12, "gated": True, "tied": False}),
    ("bert base", bert, {"d_head": 64, "positions": 512, "kinds": 2, "norm_eps": 1e-12}),
    ("bert multilingual", bert, {"vocab": 119547, "norm_eps": 1e-12}),
]  # fmt: skip


@pytest.mark.parametrize("name, family, expected", EXPECTED)
def test_a_config_json_of_older_transformers_is_read(name, family, expected):
    """An old config.json is read: old names, missing defaults, and fields that change no result."""
    fields = huggingface.Fields(PUBLISHED[name], name)
    model = family.model_of(fields)
    fields.finish()
    assert {key: getattr(model, key) for key in expected} == expected


REFUSED = [
    ("gemma", {"hidden_act": "silu"}, "hidden_act = 'silu' is not what models/ computes"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not .*expected 'gelu_pytorch_tanh'"),
    ("gemma2", {"attention_bias": True}, "attention_bias = True is not .*expected False"),
    ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
     "at the end of each 1 layers"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "this family does not compute attn_logit_softcapping = 50.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "does not compute use_bidirectional_attention = true"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {}}},
     "rope_parameters = .*the kinds are linear"),
    ("gpt2", {"activation_function": "swish"}, "activation_function = 'swish' .*expected one of gelu_new, "),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "does not compute scale_attn_by_inverse_layer_idx = true"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings = False is not .*expected True"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False is not .*expected True"),
    ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim = 8 is not .*expected 16, as hidden_size"),
    ("opt", {"enable_bias": False}, "enable_bias = False is not .*expected True"),
    ("gptj", {"rotary_dim": 3}, "d_rotary: expected an even number up to d_head"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not .*expected \[\]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not .*expected 1"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not .*expected None"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not .*expected 0.0"),
    ("t5", {"dtype": "flnat32"}, "dtype = 'flnat32': expected float32, float16, bfloat16"),
    ("t5", {"feed_forward_proj": "gated-silu"}, "relu .* T5 1.0, gated-gelu .* 1.1"),
    ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder = False is not .*expected True"),
    ("t5", {"is_gated_act": True}, "is_gated_act = True is not .*expected False"),
    ("bert", {"hidden_act": "relu"}, "hidden_act = 'relu' is not .*expected 'gelu'"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = .*expected 'absolute'"),
    ("bert", {"is_decoder": True}, "is_decoder = True is not .*expected False"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_what_a_family_does_not_compute_is_refused(name, change, message, pool, tmp_path):
    """The message names the field of config.json, before a weight is read."""
    with pytest.raises(RunError, match=message):
        huggingface.open_weights(published_as(tmp_path, name, {**config_of(name), **change}), pool)


ODD = [
    10**12, 2**31, 2**63, 10**30, 10**5, -1, 0, 1.5, 1e300, float("inf"), float("nan"), True, None, "16", "x" * 10**5,
    "\ud800", [], [16], [[]], {}, {"a": 1},
]  # fmt: skip


def fields_of(content, above=()):
    for key, value in content.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from fields_of(value, (*above, key))


@pytest.mark.parametrize("name", ["gpt2", *small.slow(*(name for name in NAMES if name != "gpt2"))])
def test_odd_values_of_any_field(name):
    """Each field with each value: it has no effect, or the message is one line, or two."""
    folder, refused = FOLDER / name, 0
    original, tensors = config_of(name), safetensors.read(folder)
    for path in fields_of(original):
        for value in ODD:
            content = inner = copy.deepcopy(original)
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            try:
                huggingface.described(content, tensors, folder)
            except RunError as error:
                refused += 1
                assert str(error).count("\n") <= 1 and len(str(error)) < 1000, (path, value)
    assert refused > 100


def older(name, config, tensors):
    """The fields and the tensors of a folder that an earlier release wrote, or the hub has."""
    if name in ("gpt2", "opt"):  # whose names lack their first part; one has a buffer
        buffer = {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)} if name == "gpt2" else {}
        return config, {key.split(".", 1)[1]: value for key, value in tensors.items()} | buffer
    if name == "bert":  # norms' gamma and beta, position numbers, heads that are not computed
        words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        old = {re.sub("|".join(words), lambda word: words[word[0]], key): value for key, value in tensors.items()}
        old["bert.embeddings.position_ids"] = np.arange(24, dtype=np.int64)[None]
        old["bert.pooler.dense.weight"], old["cls.seq_relationship.bias"] = np.ones((16, 16)), np.ones(2)
        old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
        return {**config, "position_embedding_type": "absolute"}, old
    # T5 1.0 has copies of its embedding, and a bias that it does not add; 1.1 says that it is not tied.
    table, is_gated = tensors["shared.weight"], name == "t5_gated"
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    old = {"encoder.embed_tokens.weight": table, "decoder.embed_tokens.weight": table, unused: table[:8, :2].copy()}
    missing = ["scale_decoder_outputs", "dense_act_fn", "is_gated_act", *([] if is_gated else ["feed_forward_proj"])]
    config = {key: value for key, value in config.items() if key not in missing}
    return {**config, "tie_word_embeddings": not is_gated}, tensors | old


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "t5", "t5_gated"])
def test_folders_of_earlier_releases_are_read(name, pool, tmp_path):
    """The model and the bits of the weights are the same."""
    tensors = load_file(FOLDER / name / "model.safetensors")
    config, old = older(name, config_of(name), tensors)
    assert old.keys() != tensors.keys()
    folders = published_as(tmp_path, name, config, old), FOLDER / name
    found, expected = [huggingface.open_weights(folder, pool) for folder in folders]
    assert found.model == expected.model
    with on_mesh(2, 2):
        found, expected = [named_leaves(weights_of(source, pool)[0]) for source in (found, expected)]
    for (names, one), (_, other) in zip(found, expected, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), names


# -- The check ---------------------------------------------------------------------------------------------------------
test_it_is_accepted, test_every_mutant_is_refused = proofs(
    {
        f"models/{name}.py": (
            functools.partial(check_family, variants=[SMALL | of for of in variants], steps=[loss_and_logits, decoded]),
            100,
            5 if name == "gemma" else 25,
        )
        for name, variants in VARIANTS.items()
    },
    quick=["models/gptj.py"],
)


@pytest.mark.parametrize("changed, said", [
    ({"Model": "models.llama"}, "models.gptj: Model is that of models.llama"),
    ({"CONFIG": "models.llama"}, "models.gptj and models.llama … kind llama: give one"),
])  # fmt: skip
def test_a_copy_of_a_family_is_told_from_it(changed, said, monkeypatch):
    """A new file that keeps another's Model, or its kinds, would be taken for that one."""
    for name, other in changed.items():
        monkeypatch.setattr(importlib.import_module("models.gptj"), name, getattr(importlib.import_module(other), name))
    assert_refuses(said, huggingface.families.__wrapped__)
