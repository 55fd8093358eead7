"""The check against programs: what it accepts gives on every mesh what the same text gives on whole arrays."""

import contextlib
import inspect
from collections.abc import Callable
from random import Random
from types import FunctionType
from typing import NamedTuple

import jax
import numpy as np
import prove
import pytest
import right_programs
import small
from grammar import Whole, programs
from hypothesis import Phase, find, settings
from prove import each_row, program, table

from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.spec import ShardingError

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
# What a program that does not fit its arrays raises while it is traced.
MISFITS = (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError)


# -- Checking and running ----------------------------------------------------------------------------------------------
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
    """Each program's results, or what it raises; on a mesh, or without one on whole arrays.

    They are compiled together, which takes most of the time.
    """
    outcomes = [None] * len(batch)

    def together(arguments):
        results = {}
        for k in range(len(batch)):
            function = batch[k].build(whole=mesh is None)
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
        return f"it raises {type(ours).__name__}: {ours}"
    for k, (one, whole) in enumerate(zip(ours, map(np.asarray, truth), strict=True)):
        if one.shape != whole.shape:
            return f"result {k} has shape {one.shape}, not {whole.shape}"
        rounding = 1e-3 * np.max(np.abs(np.nan_to_num(whole)), initial=1e-3)
        for shard in one.addressable_shards:
            part, true = np.asarray(shard.data), whole[shard.index]
            if not np.allclose(part, true, rtol=0, atol=rounding, equal_nan=True):
                return f"result {k} is {part.ravel()[:4]} ... on device {shard.device.id}, not {true.ravel()[:4]} ..."
    return None


def faults(programs, meshes=MESHES) -> list[list[str | None]]:
    """Each program's faults, by mesh: in words, where it gives something else than on whole arrays."""
    found = []
    for start in range(0, len(programs), 25):
        batch = programs[start : start + 25]
        truths = run(batch)
        by_mesh = [run(batch, mesh) for mesh in meshes]
        for k, truth in enumerate(truths):
            text = f"on whole arrays {difference(truth, ())}" if isinstance(truth, Exception) else None
            found.append([text or difference(results[k], truth) for results in by_mesh])
    return found


# -- Drawn programs ----------------------------------------------------------------------------------------------------
def search(condition, phases, examples=10_000):
    """The smallest of the drawn programs that meets a condition; the same programs each time."""
    seeded = settings(max_examples=examples, database=None, deadline=None, phases=phases)
    return find(programs(), condition, settings=seeded, random=Random(0))


def draw(count: int) -> list:
    """Different programs."""
    drawn = {}
    search(lambda program: drawn.setdefault(program.source, program) and len(drawn) == count, [Phase.generate])
    return list(drawn.values())


def hole(texts, wrong, by_size) -> str | None:
    """How the check is wrong about a program, from its verdicts and what is wrong with the results, by mesh."""
    for mesh, text, fault in zip(MESHES, texts, wrong):
        if text is None and fault:
            return f"accepted on {mesh[0]} x {mesh[1]}, and there {fault}"
        # What Python decides by the size of a part can be seen on the meshes alone where it is decided otherwise.
        if text and None in texts and not (by_size and any(wrong)):
            return f"not one verdict: refused on {mesh[0]} x {mesh[1]}, though not on others: {text}"
    return None


def hole_of(program) -> str | None:
    texts = refusals(program)
    return hole(texts, faults([program])[0], program.by_size) if None in texts else None


@pytest.mark.parametrize("count, least", [(25, 1 / 3), pytest.param(1500, 0.86, marks=pytest.mark.slow)])
def test_what_is_accepted_is_right(count, least, record_property):
    """No drawn program is accepted whose values or gradients on some mesh are not those on whole arrays; of those that
    are right at least so many are accepted. Fails with the smallest wrong one."""
    drawn = draw(count)
    texts = [refusals(program) for program in drawn]
    accepted = [k for k, by_mesh in enumerate(texts) if None in by_mesh]
    refused = [k for k, by_mesh in enumerate(texts) if None not in by_mesh]
    wrong = dict(zip(accepted, faults([drawn[k] for k in accepted])))
    holes = {k: text for k in accepted if (text := hole(texts[k], wrong[k], drawn[k].by_size))}
    sample = refused[:: max(len(refused) // 200, 1)]  # the first ones are alike
    right = sum(not any(by_mesh) for by_mesh in faults([drawn[k] for k in sample])) / max(len(sample), 1) * len(refused)
    text = (
        f"{count} programs on {len(MESHES)} meshes: {len(accepted)} accepted, of them {len(holes)} wrongly; "
        f"{len(refused)} refused, of them about {right:.0f} right"
    )
    record_property("summary", text)
    if holes:
        known = {program.source: holes.get(k) for k, program in enumerate(drawn)}

        def is_hole(program):
            if program.source not in known:
                known[program.source] = hole_of(program)
            return known[program.source] is not None

        program = search(is_hole, [Phase.generate, Phase.shrink])
        pytest.fail(f"{text}\nthe smallest of them: {known[program.source]}\n{program.source}")
    assert len(accepted) / (len(accepted) + right) >= least, text


# -- Right programs ----------------------------------------------------------------------------------------------------
SIZES = dict(B=16, L=8, M=16, M2=16, F=32, V=24, E=24, C=8, S=8)


class Written(NamedTuple):
    """A program by hand, to be run like a drawn one."""

    function: Callable
    sizes: tuple[dict[str, int], ...]  # of its letters
    whole: Callable

    def __str__(self):
        return inspect.getsource(self.function).rpartition("return ")[2].strip()[:60]

    def build(self, whole=False):
        return self.whole if whole else self.function

    def arguments(self):
        random = np.random.default_rng(3)

        def array(shape):
            if shape.dtype == bool:
                return random.random(shape.shape) < 0.5
            if shape.dtype == np.float32:
                return random.normal(size=shape.shape).astype(np.float32)
            return random.integers(0, 8, shape.shape, np.int32)

        parameters = inspect.signature(self.function, eval_str=True).parameters.values()
        return [jax.tree.map(array, prove.abstract(parameter.annotation, self.sizes[0])) for parameter in parameters]


def on_whole_arrays(sizes) -> dict[str, object]:
    """The names of right_programs.py, with operations that know of no devices."""
    names = vars(right_programs) | dict(shardops=Whole(sizes), typed=lambda function: function)
    names["check"] = lambda dtype, spec, value: value
    for name, value in vars(right_programs).items():
        if inspect.isfunction(value) and value.__module__ == right_programs.__name__:
            value = inspect.unwrap(value)
            names[name] = FunctionType(value.__code__, names, name, value.__defaults__)
    return names


def written() -> list[Written]:
    small, large = on_whole_arrays(SIZES), on_whole_arrays(prove.SIZES)
    owed = "shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, y)"
    body = f"shardops.psum('B/d M +t -> B/d M', (lambda u: {{}})({owed}))"
    linear = [("B/d F/t, M F/t -> B/d M", body.format(row)) for (row,) in table(right_programs.LINEAR)]
    rows = [
        Written(
            program(*row, vars(right_programs)), (prove.SIZES, prove.SINGLE), program(*row, large, large["shardops"])
        )
        for row in (*table(right_programs.ACCEPTED), *linear)
    ]
    return [*(Written(function, (SIZES,), small[function.__name__]) for function in right_programs.RIGHT), *rows]


WRITTEN = written()


@pytest.mark.parametrize("program", WRITTEN, ids=str)
def test_right_programs_are_accepted(program):
    """Each program by hand is accepted; tests/test_verdict.py has the other meshes."""
    assert prove.prove(program.function, sizes=program.sizes[0]) > 0


@pytest.mark.parametrize("meshes", [[(4, 2)], *small.slow(MESHES)], ids=len)
def test_right_programs_are_right(meshes):
    """Each gives on every mesh what it means on whole arrays."""
    assert [(str(program), wrong) for program, wrong in zip(WRITTEN, faults(WRITTEN, meshes)) if any(wrong)] == []


@each_row(table(right_programs.OF_DEVICES))
def test_right_programs_of_devices_are_accepted(row):
    """So is what means something else on other devices: by its type, by random numbers, by what is printed. (The last
    waits forever in XLA:CPU, in one program with many collectives.)"""
    assert prove.prove(program(*row)) > 0
