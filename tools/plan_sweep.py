"""The best meshes for a number of devices: `python -m tools.plan sweep=true`.

It searches over meshes, over what is kept for the backward pass, and over the microbatches that it takes to fit. Each
candidate gets a ledger, so its figures are those that its plan prints.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

from ledger.count.memory import GROUPS
from ledger.count.program import PHASES
from ledger.count.step import Ledger
from ledger.machines import hardware, roofline
from ledger.pages import contents
from ledger.pages.render import render
from ledger.pages.table import Bar, Table
from runtime import program
from runtime.files import write_all
from runtime.terminal import RunError, print_line, progress, wrapped
from shardlib.shardtypes import mesh_text
from tools.plan_step import ledger_of, shaped

COUNTED = 40  # so many ways get a ledger
ROOM = 0.9  # usable share of a device's memory: docs/it_does_not_fit.md says what the forecast does not know

HEADINGS = {"microbatches": "parts", "save_for_backward": "keeps"}  # of keys of training
COLUMNS = {"memory": "GB", "overlapped": "s", "MFU": "percent", "alone": "s", "MFU alone": "percent", "bound by": ""}
NOTES = (
    "A way that fits leaves a tenth of the memory free, with the fewest microbatches (parts) that do.",
    "A pipeline has as many microbatches as it can have. Nothing is kept on the host.",
)

Mesh = dict[str, int]  # devices along each axis
Keys = dict[str, Any]  # keys of training: microbatches, save_for_backward
Order = tuple[bool, float]  # what fits first, the fastest first; of the others the smallest and fastest


@dataclasses.dataclass(frozen=True)
class Choice:
    mesh: Mesh
    keys: Keys
    ledger: Ledger
    fits: bool
    estimate: roofline.Roofline

    @property
    def memory_bytes(self) -> int:
        return self.ledger.memory.bytes

    @property
    def order(self) -> Order:
        """Sorts by the mean of the times with all overlap and with none; what does not fit comes last."""
        seconds = (self.estimate.step_s or 0) + (self.estimate.step_alone_s or 0)
        return not self.fits, seconds if self.fits else seconds * self.memory_bytes


def sweep(config: Any, machine: hardware.Hardware, of_the_run: Callable[[Choice], list[str]]) -> None:
    """Prints a table of the best meshes, what a run on the first takes, and what is assumed; draws them into the
    folder."""
    if None in (machine.peak_flops_per_s, machine.hbm_bytes, machine.hbm_bytes_per_s):
        raise RunError("a sweep is sorted by time: give hardware=, with peak_flops_per_s, hbm_bytes, hbm_bytes_per_s")
    devices = math.prod(vars(config.mesh).values())
    if config.hosts is not None:
        devices = config.hosts * config.per_host
    candidates, refusal = choices(config, machine, devices)
    if not candidates:
        raise RunError(f"no mesh of {devices} devices can be: {refusal}")
    best, notes = table(config, devices, candidates), [*roofline.ASSUMPTIONS, *NOTES]
    texts = [*(f"The first: {text}" for text in of_the_run(candidates[0])), *[f"Refused: {refusal}."] * bool(refusal)]
    assumed = (wrapped(f"- {note}") for note in notes)
    print_line("\n".join([*best.text(), *map(wrapped, texts), "", "Assumed:", *assumed]))
    if config.folder is not None:
        page = render(
            "sweep.html", title=f"The best ways on {devices:,} × {config.hardware}", best=best, phases=PHASES,
            kinds={kind.replace(" ", "-"): kind for kind in GROUPS}, assumptions=notes,
        )  # fmt: skip
        write_all(config.folder, {"sweep.html": page})
        print_line(f"{config.folder}: sweep.html")


def table(config: Any, devices: int, ranked: list[Choice]) -> Table:
    """A row for each choice, in order; memory and times have their parts."""
    tokens, axes = config.training.tokens, [axis for axis in ranked[0].mesh if any(x.mesh[axis] > 1 for x in ranked)]
    longest = max(choice.estimate.step_alone_s or 0 for choice in ranked)
    most = max(ranked[0].estimate.hardware.hbm_bytes or 0, *(choice.memory_bytes for choice in ranked))
    columns = dict.fromkeys(axes, "count") | {HEADINGS.get(key, key): "" for key in ranked[0].keys} | COLUMNS
    rows = []
    for choice in ranked:
        estimate = choice.estimate
        overlapped = {phase.name: phase.overlapped_s or 0 for phase in estimate.phases}
        alone = {phase.name: phase.alone_s or 0 for phase in estimate.phases}
        rows.append((
            *(choice.mesh[axis] for axis in axes), *map(str, choice.keys.values()), contents.held(choice.ledger, most),
            Bar(estimate.step_s, overlapped, longest), estimate.mfu,
            Bar(estimate.step_alone_s, alone, longest), estimate.mfu_alone,
            (estimate.bound or "n/a") + ", does not fit" * (not choice.fits),
        ))  # fmt: skip
    run = f"{config.paths.model_name} on {devices:,} × {config.hardware}, {tokens.batch:,} × {tokens.len:,} tokens"
    return Table(f"{run}; the best first, by the mean of both times", columns, rows)


def choices(config: Any, machine: hardware.Hardware, devices: int) -> tuple[list[Choice], str]:
    """The best ways that a search finds to run a step on so many devices, the best first; and why a mesh is refused.

    Each way that it looks at gets a ledger. It begins with as many devices as there can be along each axis, and then
    looks at the neighbours of the best way so far, until COUNTED ways have a ledger.
    """
    start, options, refusal = vars(config.mesh), kept(config), ""
    axes = searched(config)
    others = {axis: math.prod(start.values()) // start[axis] for axis in axes}
    meshes = [start | {axis: devices // others[axis]} for axis in axes if devices % others[axis] == 0]
    starts = (filled(config, axes[index:] + axes[:index], devices) for index in range(len(axes)))
    meshes += [mesh for mesh in starts if math.prod(mesh.values()) == devices]
    # For each way: the order of the way whose neighbour it is, the way, and the first number of microbatches.
    waiting: list[tuple[Order, Mesh, Keys, int]] = [
        ((False, 0.0), mesh, keys, 1) for mesh in meshes for keys in options
    ]
    counted: list[Choice] = []
    seen = set()
    with progress(desc=f"{devices} devices: ", total=COUNTED, unit=" plans", leave=False) as bar:
        while waiting and len(counted) < COUNTED:
            waiting.sort(key=lambda entry: entry[0])
            _, mesh, keys, count = waiting.pop(0)
            if (way := (*mesh.values(), *keys.values())) in seen:
                continue
            seen.add(way)
            bar.update()
            try:
                choice = choose(config, machine, mesh, keys, count)
            except RunError as error:
                refusal = refusal or f"{mesh_text(mesh)}: {error}".partition("\n")[0]
                continue
            counted.append(choice)
            count = choice.keys["microbatches"]
            waiting += [(choice.order, mesh, other, count) for other in options]
            waiting += [(choice.order, other, keys, count) for other in neighbours(mesh, axes)]
    return sorted(counted, key=lambda choice: choice.order), refusal


def searched(config: Any) -> list[str]:
    """The axes that devices may be along. Without experts e only repeats d; p where the mesh has it."""
    mesh = vars(config.mesh)
    left_out = {"e"} if not getattr(config.model, "experts", 0) else set()
    left_out |= {"p"} if mesh.get("p") == 1 else set()
    return [axis for axis in mesh if axis not in left_out]


def filled(config: Any, axes: list[str], devices: int) -> Mesh:
    """The mesh with as many devices as there can be along the first axis, then along the second, and so on."""
    mesh = dict.fromkeys(vars(config.mesh), 1)
    for axis in axes:
        rest = devices // math.prod(mesh.values())
        sizes = [size for size in range(rest, 1, -1) if rest % size == 0]
        mesh[axis] = next((size for size in sizes if is_possible(config, mesh | {axis: size}, 1)), 1)
    return mesh


def neighbours(mesh: Mesh, axes: list[str]) -> Iterator[Mesh]:
    """The meshes in which the smallest prime factor of an axis has gone to another.

    >>> list(neighbours({"d": 6, "t": 1}, ["d", "t"]))
    [{'d': 3, 't': 2}]
    """
    for one, other in itertools.permutations(axes, 2):
        if (size := mesh[one]) > 1:
            factor = next(factor for factor in range(2, size + 1) if size % factor == 0)
            yield mesh | {one: size // factor, other: mesh[other] * factor}


def kept(config: Any) -> list[dict[str, str]]:
    """The values of save_for_backward to try, where the trainer has that key and the command line does not set it. Not
    on_host: no forecast has the time that copying takes, so it would always be the best."""
    type_ = typing.get_type_hints(type(config.training)).get("save_for_backward")
    if config.origins.of("training.save_for_backward") == "command line":
        return [{}]
    return [{"save_for_backward": value} for value in typing.get_args(type_) if value != "on_host"] or [{}]


def choose(config: Any, machine: hardware.Hardware, mesh: Mesh, keys: Keys, count: int) -> Choice:
    """A mesh with the fewest microbatches that fit, looked for from `count` on; the most where none do. A pipeline has
    as many as there can be, since fewer of its ticks are idle then. A number on the command line is the only one.
    Raises RunError where the mesh cannot be."""
    with_count = lambda count: counted(config, machine, mesh, {**keys, "microbatches": count})  # noqa: E731
    possible, batch = functools.partial(is_possible, config, mesh), config.training.tokens.batch
    counts = [n for n in range(1, batch + 1) if batch % n == 0]
    if config.origins.of("training.microbatches") == "command line":
        return with_count(config.training.microbatches)
    if mesh.get("p", 1) > 1:
        return with_count(next(filter(possible, reversed(counts)), 1))
    fewer, more = [n for n in reversed(counts) if n <= count], [n for n in counts if n > count]
    best = with_count(next(filter(possible, fewer), 1))
    if not best.fits:
        for number in filter(possible, more):
            if (best := with_count(number)).fits:
                break
        return best
    for number in filter(possible, [n for n in fewer if n < best.keys["microbatches"]]):
        if not (choice := with_count(number)).fits:
            break
        best = choice
    return best


def is_possible(config: Any, mesh: Mesh, count: int) -> bool:
    """Whether the sizes of the state and of a batch can be split so; no ledger is made for this."""
    try:
        config = shaped(config, mesh, microbatches=count)
        program.load(config.program).shapes(config)
    except RunError:
        return False
    return True


def counted(config: Any, machine: hardware.Hardware, mesh: Mesh, keys: Keys) -> Choice:
    config = shaped(config, mesh, **keys)
    ledger = ledger_of(config, check=False)
    fits = ledger.memory.bytes <= ROOM * (machine.hbm_bytes or 0)
    return Choice(mesh, keys, ledger, fits, roofline.roofline(ledger, machine, config.per_host))
