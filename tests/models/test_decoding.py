"""Decoding: transformers' tokens on every mesh, the model's distribution, and texts that depend on nothing else."""

import json

import pytest
from published import FOLDER, NAMES, on_mesh, weights_of

from models import huggingface
from models.decoding import Drawing, Generator

MESHES = [(1, 1), (2, 2), (8, 1)]
TEXTS = [name for name in NAMES if (FOLDER / name / "texts.json").exists()]
QUICK = ("llama", "gemma3", "gpt2", "mixtral")
CASES = [
    pytest.param(name, mesh, marks=[] if name in QUICK and mesh == (2, 2) else pytest.mark.slow)
    for name in TEXTS
    for mesh in MESHES
]


def generator_of(name, pool, ends=(2,)):
    source = huggingface.open_weights(FOLDER / name, pool)
    weights, _ = weights_of(source, pool)
    return Generator(source.family, source.model, weights, ends)


def all_of(generator, prompts, drawings):
    """The whole of what is drawn for each prompt."""
    texts = [[] for _ in prompts]
    for burst in generator.draw(prompts, drawings):
        for text, drawn in zip(texts, burst):
            text += drawn.tokens
    return texts


@pytest.mark.parametrize("name, mesh", CASES, ids=str)
def test_tokens_are_those_of_transformers(name, mesh, pool):
    """Greedy, with a repetition penalty, and by four beams, token for token; four prompts of 1 to 17 tokens at once."""
    expected = json.loads((FOLDER / name / "texts.json").read_text())
    prompts = [each["prompt"] for each in expected]
    with on_mesh(*mesh):
        generator = generator_of(name, pool)
        for key, penalty in (("greedy", 1.0), ("penalized", 1.4)):
            drawing = Drawing(tokens=20, temperature=0.0, repetition_penalty=penalty)
            assert all_of(generator, prompts, [drawing] * 4) == [each[key] for each in expected], key
        beams = generator.search(prompts, tokens=20, beams=4, length_penalty=0.7)
        assert [each.tokens for each in beams] == [each["beams"] for each in expected]
