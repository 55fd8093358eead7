"""Decoding: transformers' tokens on every mesh, the model's distribution, and texts that depend on nothing else."""

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from mutation import proofs
from pages import module_of
from published import FOLDER, NAMES, SIZES, on_mesh, weights_of

from models import huggingface
from models.decoding import Drawing, Generator, Slots
from models.reading import Reader
from shardlib.shardtypes import map_type, narrowed

MESHES = [(1, 1), (2, 2), (8, 1)]
TEXTS = [name for name in NAMES if (FOLDER / name / "texts.json").exists()]
QUICK = ("llama", "t5_gated")
CASES = [
    pytest.param(name, mesh, marks=[] if name in QUICK and mesh == (2, 2) else pytest.mark.slow)
    for name in TEXTS
    for mesh in MESHES
]


def generator_of(name, pool, ends=(2,), kept=None):
    source = huggingface.open_weights(FOLDER / name, pool)
    weights, _ = weights_of(source, pool)
    return Generator(source.family, source.model, weights, ends, 0 if name.startswith("t5") else None, kept)


def all_of(generator, prompts, drawings):
    """The whole of what is drawn for each prompt."""
    texts = [[] for _ in prompts]
    for burst in generator.draw(prompts, drawings):
        for text, drawn in zip(texts, burst):
            text += drawn.tokens
    return texts


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name, mesh", CASES, ids=str)
def test_tokens_are_those_of_transformers(name, mesh, pool):
    """Greedy, which no filter changes, with a repetition penalty, and by four beams, token for token; four prompts of 1
    to 17 tokens at once."""
    expected = json.loads((FOLDER / name / "texts.json").read_text())
    prompts = [text["prompt"] for text in expected]
    with on_mesh(*mesh):
        generator = generator_of(name, pool)
        for key, penalty in (("greedy", 1.0), ("penalized", 1.4)):
            drawing = Drawing(tokens=20, temperature=0.0, top_k=3, repetition_penalty=penalty)
            assert all_of(generator, prompts, [drawing] * 4) == [text[key] for text in expected], key
        beams = generator.search(prompts, tokens=20, beams=4, length_penalty=0.7)
        assert [beam.tokens for beam in beams] == [text["beams"] for text in expected]


@pytest.mark.usefixtures("proved_elsewhere")
def test_as_many_beams_as_tokens_find_the_likeliest_text(pool):
    """The likeliest of all texts of two tokens, by a forward pass; a device holds fewer tokens than beams take."""
    prompt = [3, 7, 11]
    with on_mesh(1, 2):
        generator = generator_of("llama", pool, ends=())
        (found,) = generator.search([prompt], tokens=2, beams=40, length_penalty=1.0)
        tokens = np.array([[*prompt, first] for first in range(40)])
        targets, family, model = np.roll(tokens, -1, axis=1), generator.programs.family, generator.programs.model
        reader = Reader(family, model, weights_of(huggingface.open_weights(FOLDER / "llama", pool), pool)[0])
        rows = [tokens, targets, np.ones_like(tokens), np.zeros_like(tokens)]
        targets[:, -1] = reader.predict(rows)[1][:, -1]
        log_probs = reader.predict(rows)[0][:, -2:].sum(axis=1)
    assert found.tokens == targets[log_probs.argmax(), -2:].tolist()


@pytest.mark.usefixtures("proved_elsewhere")
def test_weights_that_stay_split_write_the_same(pool):
    """Weights that are gathered over d, layer by layer and anew for each token, give transformers' tokens."""
    expected = json.loads((FOLDER / "qwen2/texts.json").read_text())
    with on_mesh(4, 2):
        generator = generator_of("qwen2", pool, kept="split")
        assert {matrix.sharding.spec[1] for matrix in (generator.weights[1].w_up, generator.weights[1].w_gate)} == {"d"}
        drawings = [Drawing(tokens=20, temperature=0.0)] * 4
        found = all_of(generator, [text["prompt"] for text in expected], drawings)
    assert found == [text["greedy"] for text in expected]


@pytest.mark.usefixtures("proved_elsewhere")
def test_a_row_that_comes_later_reads_its_own_prompt(pool):
    """A second text joins a model with an encoder while the first is written: both are transformers'."""
    first, second, *_ = json.loads((FOLDER / "t5_gated/texts.json").read_text())
    greedy = Drawing(tokens=20, temperature=0.0)
    with on_mesh(1, 1):
        slots = Slots(generator_of("t5_gated", pool), 2, prompt=20, length=21)
        slots.admit({0: (first["prompt"], greedy)})
        texts = [slots.advance()[0].tokens, []]
        slots.admit({1: (second["prompt"], greedy)})
        while slots.left.any():
            texts = [text + drawn.tokens for text, drawn in zip(texts, slots.advance())]
    assert texts == [first["greedy"], second["greedy"]]


SMALL = {
    "qwen2": {"n_q_per_kv": 2, "rope_max_timescale": 256, "qkv_bias": True},
    "t5": {"encoder_layers": 3, "buckets": 16, "max_distance": 40},
}


@pytest.mark.slow
def test_a_prompt_costs_what_it_is_long(pool):
    """What is read of a prompt: the power of two that holds it, of as few rows a device; and the tokens, with other
    rows under way, are those of the prompt alone."""
    with on_mesh(2, 2):
        generator, shapes = generator_of("llama", pool), []
        compiled = generator.programs.compiled
        slots = Slots(generator, 8, 600, 640)

        def recorded(which, **settings):
            def call(*given):
                shapes.append(given[3].shape)
                return compiled(which, **settings)(*given)

            return call if which == "read" else compiled(which, **settings)

        generator.programs.compiled = recorded
        rng = np.random.default_rng(0)
        prompts = {n: rng.integers(3, 40, n).tolist() for n in (1, 33, 64, 66, 600)}
        greedy, found = Drawing(tokens=12, temperature=0.0), {}
        read = {1: [], 33: [32], 64: [64], 66: [128], 600: [256, 256, 128]}
        for row, (length, prompt) in enumerate(prompts.items()):
            shapes.clear()
            slots.admit({row: (prompt, greedy)})
            assert shapes == [(2, size) for size in read[length]]
        shapes.clear()
        slots.admit({5: (prompts[33], greedy), 6: (prompts[33], greedy), 7: (prompts[64], greedy)})
        assert shapes == [(8, 64)]
        found = [drawn.tokens for drawn in slots.advance()]
        generator.programs.compiled = compiled

        def flops(size):
            given = np.zeros((2, size), np.uint32), np.zeros(2, np.int32), np.zeros(2, np.int32)
            program = jax.jit(generator.programs.mapped("read")).lower(*generator.weights, slots.cache, *given)
            return program.cost_analysis()["flops"]

        assert flops(sum(read[33])) < 0.6 * flops(sum(read[64]))
        alone = [next(generator.draw([prompts[n]], [greedy]))[0].tokens for n in (*prompts, 33, 33, 64)]
    assert found == alone


def check_decoding(path, source, names=tuple(SMALL)):
    """Checks all programs of a models/decoding.py with a small model of each; returns the number of claims."""
    module, proved = module_of(path, source), 0
    mesh = jax.sharding.AbstractMesh((2, 2, 1, 1, 2), tuple("rdcet"))

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def given(type_, **sizes):
        sizes = {"layers": 2, "B": 16, "K": 8, "S": 32, "R": 48, "D": 8, "V": 128, **sizes}
        return map_type(
            lambda array: shape(array.element.dtype, *(sizes.get(x.name) or int(x.name) for x in array.spec.dims)),
            type_,
        )

    rows, ids = given(module.Rows), shape(np.int32, 128)
    is_new, tokens, counts = shape(bool, 16), shape(np.uint32, 16, 4), shape(np.int32, 16)
    for name in names:
        family = huggingface.family_of(name, "here")
        model = family.Model(**SIZES, **SMALL[name])
        weights = jax.eval_shape(functools.partial(family.init, model), np.uint32(0))
        programs = module.Programs(family, model, weights, {"t5": "int8", "qwen2": "split"}[name])
        of_encoder = (0, 0) if name == "t5" else ()
        cache = given(narrowed(module.Cache, module.Cache(0, 0, 0, *of_encoder)))
        with jax.sharding.use_abstract_mesh(mesh):
            gathered = jax.eval_shape(programs.mapped("gather"), weights)
        sizes, some_slots = ({"read": 48}, {}) if name == "t5" else ({}, {"used": 16})
        proved += programs.mapped("gather").check(mesh, weights)
        proved += programs.mapped("empty", count=16, slots=32, **sizes).check(mesh)
        proved += programs.mapped("admit").check(mesh, cache, rows, rows, is_new)
        proved += programs.mapped("read", **some_slots).check(mesh, *gathered, cache, tokens, counts)
        if name != "t5":
            some = shape(np.uint32, 8, 4), shape(np.int32, 8), shape(np.int32, 8)
            proved += programs.mapped("read", **some_slots).check(mesh, *gathered, cache, *some)
        if name == "t5":
            proved += programs.mapped("encode").check(mesh, weights, cache, shape(np.uint32, 16, 48), counts, is_new)
        decode = programs.mapped("decode", is_drawn=True, is_filtered=True, **some_slots)
        proved += decode.check(mesh, *gathered, cache, rows, ids, shape(np.uint32, 1), shape(np.int32))
        search = programs.mapped("candidates", N=8)
        proved += search.check(mesh, *gathered, cache, shape(np.uint32, 16), counts, ids)
    return proved


CONTRACTED = {
    "w_q": (1,), "w_kv": (2,), "w_o": (2, 3, 4), "w_gate": (1,), "w_up": (1,), "w_down": (2,),
    "expert_gate": (2,), "expert_up": (2,), "expert_down": (3,),
}  # fmt: skip


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name, mesh", [
    ("llama", (2, 2)), *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (("mixtral", (2, 2)), ("llama", (8, 1)), ("olmoe", (4, 2)))),
], ids=str)  # fmt: skip
def test_int8_weights_are_rounded_once_a_column(name, mesh, pool):
    """Log probabilities of a text are those of a model whose matrices numpy has rounded, experts' too, on every mesh;
    and the layers' matrices have a byte an element."""
    prompt = [3, 7, 11, 5]
    with on_mesh(*mesh):
        source = huggingface.open_weights(FOLDER / name, pool)
        weights, _ = weights_of(source, pool)
        generator = Generator(source.family, source.model, weights, (), kept="int8")
        stack = generator.weights[1]
        matrices = [stack.w_q, stack.w_down if name == "llama" else stack.expert_down]
        assert [leaf.dtype for leaf in jax.tree.leaves(matrices)] == ["int8", "float32"] * 2
        (found,) = generator.search([prompt], tokens=8, beams=1, length_penalty=1.0)

        def rounded(w, axes):  # over the dims of each layer that are contracted
            w = np.asarray(w)
            scale = np.abs(w).max(axis=axes, keepdims=True) / np.float32(127)
            return np.round(w / scale).astype(np.float32) * scale

        layer = weights.transformer
        there = {name: (getattr(layer, name, None), axes) for name, axes in CONTRACTED.items()}
        by_hand = {name: jax.device_put(rounded(w, axes), w.sharding)
                   for name, (w, axes) in there.items() if w is not None}  # fmt: skip
        weights = replace(weights, transformer=replace(layer, **by_hand))
        (expected,) = Generator(source.family, source.model, weights, ()).search([prompt], 8, 1, 1.0)
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=2e-6)


test_it_is_accepted, test_every_mutant_is_refused = proofs(
    {"models/decoding.py": (check_decoding, 600, 30)}, ["models/decoding.py"], place=r"(decoding|llama|t5|layers)\.py"
)


FIVE = [(1, 1), (2, 2), (4, 2), (8, 1), (1, 2)]


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("dtype, meshes", [
    pytest.param("float32", FIVE, marks=pytest.mark.slow),
    pytest.param("bfloat16", FIVE, marks=pytest.mark.slow),
    ("bfloat16", FIVE[:1]),
], ids=str)  # fmt: skip
def test_drawn_tokens_are_the_same_on_every_mesh_and_alone(dtype, meshes, pool):
    """What is drawn is a function of the row: on some meshes, in a batch and alone, with filters and without."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, length).tolist() for length in (3, 17, 1, 9)]
    ways = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "repetition_penalty": 1.3}]
    drawings = [Drawing(tokens=16, temperature=1.0, seed=n, **way) for n, way in enumerate(ways)]
    drawn = []
    for mesh in meshes:
        with on_mesh(*mesh, dtype):
            generator = generator_of("llama", pool)
            drawn.append(all_of(generator, prompts, drawings))
            drawn.append([all_of(generator, [prompt], [drawing])[0] for prompt, drawing in zip(prompts, drawings)])
    assert all(texts == drawn[0] for texts in drawn)


def filtered(p, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of tokens by numpy, as transformers' filters leave them."""
    p = p ** (1 / temperature) / np.sum(p ** (1 / temperature))
    order = np.argsort(-p)
    keep = np.ones(len(p), bool)
    if top_k:
        keep[order[top_k:]] = False
    q = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(q[order]) - q[order]
    keep[order[before >= top_p]] = False
    keep &= p >= min_p * p.max()
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.slow
def test_the_distribution_is_the_models(pool, record_property):
    """By each filter, 20,000 draws after one prompt, each with its own seed, have the model's softmax by chi²."""
    prompt, rows, batches = [5, 9, 11], 1000, 20
    with on_mesh(2, 2):
        generator = generator_of("llama", pool, ends=())
        p = np.zeros(40)
        for way in ({}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5}):
            counts = np.zeros(40)
            for batch in range(batches):
                settings = [
                    Drawing(**{"tokens": 1, "temperature": 1.0, "seed": batch * rows + n, **way}) for n in range(rows)
                ]
                for drawn in next(generator.draw([prompt] * rows, settings)):
                    counts[drawn.tokens[0]] += 1
                    p[drawn.tokens[0]] = np.exp(drawn.log_probs[0])
            if not way:  # what the model says of each token; of those that never came it is next to nothing
                assert abs(p.sum() - 1) < 0.001
            expected = filtered(p, **way) * counts.sum()
            assert not counts[expected == 0].any()
            often = expected >= 5
            chi2, free = np.sum((counts - expected)[often] ** 2 / expected[often]), often.sum() - 1
            record_property("summary", f"{way}: chi² {chi2:.1f} with {free} degrees of freedom")
            assert chi2 < free + 4 * np.sqrt(2 * free)
