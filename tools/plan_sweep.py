"""The best meshes for a number of devices: `python -m tools.plan sweep=true`.

Meshes, what is kept for the backward pass, and the microbatches that it takes to fit. Where these are many, an estimate
says which are worth a ledger (plan_estimate.py), but not of a pipeline; every figure that is printed is a ledger's.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ledger.count.program import PHASES
from ledger.count.step import Ledger
from ledger.machines import hardware, roofline
from ledger.pages.render import render
from ledger.units import gigabytes, percent, seconds
from runtime import program
from runtime.terminal import RunError
from shardlib.arrays import mesh_text
from tools.plan_estimate import ROOM, Estimate, deals_heads, repeating
from tools.plan_step import ledger_of, shaped

COUNTED = 24  # so many ways get a ledger


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a step."""

    mesh: dict[str, int]
    keys: dict[str, Any]  # of training: microbatches, save_for_backward
    ledger: Ledger
    fits: bool
    estimate: roofline.Roofline

    @property
    def memory_bytes(self) -> int:
        return self.ledger.memory.bytes

    @property
    def held(self) -> dict[str, int]:
        """Of a device at the peak, by the classes of page.css."""
        return {kind.replace(" ", "-"): held for kind, held in self.ledger.memory.by_kind().items()}

    @property
    def overlapped(self) -> dict[str, float]:
        """Seconds of a step by phase, with all overlap."""
        return {phase.name: phase.overlapped_s or 0 for phase in self.estimate.phases}

    @property
    def alone(self) -> dict[str, float]:
        """The same, with none."""
        return {phase.name: phase.alone_s or 0 for phase in self.estimate.phases}

    @property
    def order(self) -> tuple[bool, float]:
        """What fits first, the fastest first: a program is between all overlap and none."""
        return not self.fits, (self.estimate.step_s or 0) + (self.estimate.step_alone_s or 0)


def sweep(config: Any, machine: hardware.Hardware) -> None:
    """Prints a table of the best meshes, and draws them into the folder."""
    if None in (machine.peak_flops_per_s, machine.hbm_bytes, machine.hbm_bytes_per_s):
        raise RunError("a sweep is sorted by time: give hardware=, with peak_flops_per_s, hbm_bytes, hbm_bytes_per_s")
    devices = math.prod(vars(config.mesh).values())
    if config.hosts is not None:
        devices = config.hosts * config.devices_per_host
    found, refusal = choices(config, machine, devices)
    print("\n".join(table(config, devices, found, refusal)), end="\n\n", flush=True)
    print("Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS), sep="\n")
    print("- A way that fits leaves a tenth of the memory free, with the fewest microbatches that do.")
    print("- A pipeline has as many microbatches as it can have. Nothing is kept on the host.")
    if config.folder is not None:
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        (Path(config.folder) / "sweep.html").write_text(page(config, devices, found), encoding="utf-8")
        print(f"{config.folder}: sweep.html")


def choices(config: Any, machine: hardware.Hardware, devices: int) -> tuple[list[Choice], str]:
    """The best ways to run a step on so many devices, the best first; and why a mesh is refused."""
    axes, refusal = vars(config.mesh), ""
    meshes = [dict(zip(axes, sizes)) for sizes in products(devices, len(axes))]
    meshes = [mesh for mesh in meshes if all(mesh[axis] == 1 for axis in repeating(config))]
    if "p" in axes:
        ways = piped(config, meshes)
    elif len(ways := [(mesh, {**keys, "microbatches": 1}) for keys in kept(config) for mesh in meshes]) > COUNTED:
        ways = estimated(config, machine, meshes)
    found: list[Choice] = []
    for mesh, keys in tqdm(ways, desc=f"{devices} devices", leave=False):
        try:
            found.append(choose(config, machine, mesh, keys))
        except RunError as error:
            refusal = refusal or f"{mesh_text(mesh)}: {error}".partition("\n")[0]
    return sorted(found, key=lambda each: each.order), refusal


def kept(config: Any) -> list[dict[str, str]]:
    """What may be kept for the backward pass, where the trainer has that key and the command line does not set it. Not
    on the host: how long the way there takes is in no forecast, so that it would always be the best."""
    type_ = typing.get_type_hints(type(config.training)).get("save_for_backward")
    if config.origins.of("training.save_for_backward") == "command line":
        return [{}]
    return [{"save_for_backward": each} for each in typing.get_args(type_) if each != "on_host"] or [{}]


def estimated(config: Any, machine: hardware.Hardware, meshes: list[dict[str, int]]) -> list[tuple[dict, dict]]:
    """The ways that are best by the estimate; within a hundredth of a step's time those with the fewest axes first."""
    found = []
    for dealt, keys in itertools.product((True, False), kept(config)):
        if not (same := [mesh for mesh in meshes if deals_heads(config, mesh) == dealt]):
            continue
        try:
            estimate = Estimate(shaped(config, vars(config.mesh), **keys), machine, dealt)
        except RunError:
            if dealt:
                raise
            continue  # the rows are too short to be gathered
        for mesh in same:
            if (each := estimate.of(mesh)) is not None:
                wide = sum(size > 1 for size in mesh.values())
                order = not each.fits, round(100 * math.log(each.middle_s)), wide, each.middle_s
                found.append((order, (mesh, {**keys, "microbatches": each.microbatches})))
    return [way for _, way in sorted(found, key=lambda each: each[0])[:COUNTED]]


def piped(config: Any, meshes: list[dict[str, int]]) -> list[tuple[dict, dict]]:
    """A pipeline's ways, of whole rows, for a ledger each: with as many microbatches as there can be, since fewer ticks
    are idle then."""
    trainer: Any = program.load(config.program)
    rows, ways = trainer.TokenBatch.__annotations__["targets"].spec.dims[0], []
    for keys, mesh in itertools.product(kept(config), meshes):
        counts, rest = divmod(config.training.tokens.batch, math.prod(mesh[axis] for axis in rows.axes) // mesh["p"])
        if mesh["c"] == 1 and not rest and not counts % mesh["p"] and not config.model.layers % mesh["p"]:
            ways.append((mesh, {**keys, "microbatches": counts}))
    return ways


def choose(config: Any, machine: hardware.Hardware, mesh: dict[str, int], keys: dict[str, Any]) -> Choice:
    """A mesh with as many microbatches as it takes to fit. Raises RunError where it cannot be."""
    best = counted(config, machine, mesh, keys)
    while not best.fits:
        try:
            best = counted(config, machine, mesh, keys := {**keys, "microbatches": 2 * keys["microbatches"]})
        except RunError:  # a device has one row
            break
    return best


def counted(config: Any, machine: hardware.Hardware, mesh: dict[str, int], keys: dict[str, Any]) -> Choice:
    """By its ledger."""
    config = shaped(config, mesh, **keys)
    ledger = ledger_of(config, check=False)
    return Choice(
        mesh=mesh,
        keys=keys,
        ledger=ledger,
        fits=ledger.memory.bytes <= ROOM * (machine.hbm_bytes or 0),
        estimate=roofline.roofline(ledger, machine, config.devices_per_host),
    )


def products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a product, the first factor falling.

    >>> list(products(4, 2))
    [(4, 1), (2, 2), (1, 4)]
    """
    if factors == 1:
        yield (number,)
        return
    for first in (each for each in range(number, 0, -1) if number % each == 0):
        yield from ((first, *rest) for rest in products(number // first, factors - 1))


def table(config: Any, devices: int, found: list[Choice], refusal: str) -> list[str]:
    """One row for each choice."""
    tokens = f"{config.training.tokens.batch:,} × {config.training.tokens.len:,} tokens a step"
    keys = list(found[0].keys) if found else []
    rows = [(*vars(config.mesh), *keys, "memory", "overlapped", "MFU", "alone", "MFU", "bound by")]
    for each in found:
        estimate = each.estimate
        rows.append(
            (
                *map(str, each.mesh.values()),
                *map(str, each.keys.values()),
                gigabytes(each.memory_bytes),
                seconds(estimate.step_s),
                percent(estimate.mfu),
                seconds(estimate.step_alone_s),
                percent(estimate.mfu_alone),
                (estimate.bound or "n/a") + ", does not fit" * (not each.fits),
            )
        )
    widths = [5] * len(vars(config.mesh)) + [len(key) + 2 for key in keys] + [12, 13, 8, 13, 8]
    lines = [f"{config.paths.model_name} on {devices:,} × {config.hardware}, {tokens}"]
    lines += [f" {''.join(map(str.rjust, row, widths))}  {row[-1]}" for row in rows]
    return [*lines, f"Other meshes cannot be, such as {refusal}"] if refusal else lines


def page(config: Any, devices: int, found: list[Choice]) -> str:
    """The same as bars, for a browser."""
    tokens = config.training.tokens
    best = found[0]
    return render(
        "sweep.html",
        title=f"{config.paths.model_name} on {devices:,} × {config.hardware}",
        what=f"{tokens.batch:,} × {tokens.len:,} tokens",
        axes=list(best.mesh),
        keys=list(best.keys),
        choices=found,
        phases=PHASES,
        kinds={kind: kind.replace("-", " ") for kind in best.held},
        longest=max(each.estimate.step_alone_s or 0 for each in found),
        most=max(best.estimate.hardware.hbm_bytes or 0, *(each.memory_bytes for each in found)),
        hbm_bytes=best.estimate.hardware.hbm_bytes,
        assumptions=roofline.ASSUMPTIONS,
    )
