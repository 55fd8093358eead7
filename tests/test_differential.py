"""Programs drawn from a grammar: what the check accepts gives on every mesh what the same text gives on whole arrays."""

import contextlib
import inspect
from random import Random
from typing import NamedTuple

import jax
import numpy as np
import pytest
from grammar import programs
from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from right_programs import RIGHT

from shardlib.mesh import make_mesh
from shardlib.shardtypes import ShardingError, map_type, typed_shard_map

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
# What a program that does not fit its arrays raises while it is traced.
MISFITS = (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError)


# -- Running -----------------------------------------------------------------------------------------------------------
def refusals(program) -> list[str | None]:
    """The check's verdict on each mesh: the text of the refusal, or None."""
    mapped, texts = typed_shard_map(program.build()), []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), list(program.arguments()))
    for mesh in MESHES:
        try:
            mapped.check(jax.sharding.AbstractMesh(mesh, ("d", "t")), *shapes)
            texts.append(None)
        except ShardingError as error:
            texts.append(str(error))
    return texts


def run(batch, mesh=None) -> list:
    """Each program's results, or what it raises; on a mesh, or without one on whole arrays. They are compiled together: that takes
    most of the time."""
    outcomes = [None] * len(batch)

    def together(arguments):
        results = {}
        for k, program in enumerate(batch):
            function = program.build(whole=mesh is None)
            try:
                results[k] = (function if mesh is None else typed_shard_map(function, check=False))(*arguments[k])
            except MISFITS as error:
                outcomes[k] = error
        return results

    arguments = [list(program.arguments()) for program in batch]
    on = make_mesh(dict(d=mesh[0], t=mesh[1])) if mesh else None
    try:
        with jax.set_mesh(on) if mesh else contextlib.nullcontext():
            results = jax.jit(together)(arguments)
    except (*MISFITS, jax.errors.JaxRuntimeError) as error:  # one of them does not compile
        half = len(batch) // 2
        return [*run(batch[:half], mesh), *run(batch[half:], mesh)] if half else [error]
    for k, result in results.items():
        outcomes[k] = jax.tree.leaves(result)
    return outcomes


def difference(ours, truth) -> str | None:
    """What is wrong with results, in words. What should be the same on several devices is looked at on each."""
    if isinstance(ours, Exception):
        return f"raises {type(ours).__name__}: {ours}"
    for k, (one, whole) in enumerate(zip(ours, map(np.asarray, truth), strict=True)):
        if one.shape != whole.shape:
            return f"result {k} has shape {one.shape}, not {whole.shape}"
        rounding = 1e-3 * np.max(np.abs(np.nan_to_num(whole)), initial=1e-3)
        for shard in one.addressable_shards:
            part, true = np.asarray(shard.data), whole[shard.index]
            if not np.allclose(part, true, rtol=0, atol=rounding, equal_nan=True):
                return f"result {k} is {part.ravel()[:4]} ... on device {shard.device.id}, not {true.ravel()[:4]} ..."
    return None


def faults(programs) -> list[str | None]:
    """Of each program, in words, where it gives something else than on whole arrays."""
    found = []
    for start in range(0, len(programs), 25):
        batch = programs[start : start + 25]
        truths = run(batch)
        wrong = [
            f"on whole arrays {difference(truth, [])}" if isinstance(truth, Exception) else None for truth in truths
        ]
        for mesh in MESHES:
            for k, ours in enumerate(run(batch, mesh)):
                if wrong[k] is None and (text := difference(ours, truths[k])):
                    wrong[k] = f"on {mesh[0]} x {mesh[1]} {text}"
        found += wrong
    return found


# -- Drawn programs ----------------------------------------------------------------------------------------------------
def smallest(count: int, condition):
    """The smallest of `count` programs that meets a condition, the same programs each time; or None."""
    seeded = settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate, Phase.shrink])
    try:
        return find(programs(), condition, settings=seeded, random=Random(0))
    except NoSuchExample:
        return None


def hole(program) -> str | None:
    """How the check is wrong about a program, if it accepts it."""
    texts = refusals(program)
    if None in texts and any(texts):
        k, other = texts.index(None), next(k for k, text in enumerate(texts) if text)
        return f"the verdict depends on the mesh: accepted on {MESHES[k]}, refused on {MESHES[other]}: {texts[other]}"
    return faults([program])[0] if None in texts else None


@pytest.mark.parametrize("count", [50, pytest.param(1500, marks=pytest.mark.slow)])
def test_what_is_accepted_is_right(count, record_property):
    """No drawn program is accepted whose values or gradients on some mesh are not those on whole arrays; of those that are right at least
    a third are accepted."""
    drawn = {}
    smallest(count, lambda program: drawn.setdefault(program.source, program) is None)
    texts = {source: refusals(program) for source, program in drawn.items()}
    accepted = [program for source, program in drawn.items() if not any(texts[source])]
    refused = [program for source, program in drawn.items() if all(texts[source])]
    known = dict.fromkeys(drawn) | dict(zip((program.source for program in accepted), faults(accepted)))
    known |= {source: hole(drawn[source]) for source in drawn if None in texts[source] and any(texts[source])}
    wrong = [source for source in drawn if known[source]]
    sample = refused[:200]
    right = faults(sample).count(None) / max(len(sample), 1) * len(refused)
    text = (
        f"{len(drawn)} programs on {len(MESHES)} meshes: {len(accepted)} accepted, of them {len(wrong)} wrong; "
        f"{len(refused)} refused, of them about {right:.0f} right"
    )
    record_property("summary", text)
    if wrong:
        program = smallest(
            count, lambda program: known.get(program.source) or (program.source not in known and hole(program))
        )
        pytest.fail(f"{text}\nthe smallest one that is wrong: {hole(program)}\n{program}")
    assert len(accepted) / (len(accepted) + right) >= 1 / 3, text


# -- Right programs ----------------------------------------------------------------------------------------------------
SIZES = dict(B=16, L=8, M=16, M2=16, N=16, O=16, F=32, V=24, E=24, C=8, S=8)


class Written(NamedTuple):
    """A program by hand and its meaning, to be run like a drawn one."""

    function: object
    meaning: object

    def build(self, whole=False):
        return self.meaning if whole else self.function

    def arguments(self):
        random = np.random.default_rng(3)

        def array(type_):
            shape = [int(name) if name.isdigit() else SIZES[name] for name in type_.spec.names]
            floats = type_.element.dtype == np.float32
            return random.normal(size=shape).astype(np.float32) if floats else random.integers(0, 8, shape, np.int32)

        parameters = inspect.signature(self.function).parameters.values()
        return [map_type(array, parameter.annotation) for parameter in parameters]


@pytest.fixture(scope="module")
def of_right_programs():
    return dict(zip((function.__name__ for function, _ in RIGHT), faults([Written(*pair) for pair in RIGHT])))


@pytest.mark.parametrize("function, meaning", RIGHT, ids=[function.__name__ for function, _ in RIGHT])
def test_right_programs_are_accepted(function, meaning, of_right_programs):
    """A program by hand is accepted on every mesh, and gives on each what plain JAX gives on whole arrays."""
    assert refusals(Written(function, meaning)) == [None] * len(MESHES)
    assert of_right_programs[function.__name__] is None
