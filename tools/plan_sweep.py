"""Every mesh for a number of devices, and MFU against the number of devices: `python -m tools.plan sweep=true`."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Template
from tqdm import tqdm

from ledger.machines import hardware, roofline
from ledger.units import gigabytes, percent, seconds
from runtime.terminal import RunError
from shardlib.arrays import mesh_text
from tools.plan_step import PlanKeys, changed, ledger_of

LEFT, TOP, WIDTH, HEIGHT = 76, 50, 644, 300  # of the plot in the picture
CURVES = {"mfu": ("everything overlaps", "#1f6feb"), "mfu_alone": ("nothing overlaps", "#b35900")}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a step."""

    mesh: dict[str, int]
    microbatches: int
    batch: int
    memory_bytes: int
    fits: bool
    estimate: roofline.Roofline


def sweep(config: PlanKeys, machine: hardware.Hardware) -> None:
    """Prints a table for each number of devices, and draws the picture. Raises RunError where there is no mesh."""
    if None in (machine.peak_flops_per_s, machine.hbm_bytes, machine.hbm_bytes_per_s):
        raise RunError("a sweep is sorted by time: give hardware=, with peak_flops_per_s, hbm_bytes, hbm_bytes_per_s")
    own = math.prod(vars(config.mesh).values())
    first = own if config.hosts is None else config.hosts * config.devices_per_host
    if config.up_to_devices is not None and config.up_to_devices < first:
        raise RunError(f"up_to_devices = {config.up_to_devices}: expected {first}, with which it begins, or more")
    best: list[Choice] = []
    for devices in counts(first, config.up_to_devices):
        batch = config.training.tokens.batch
        if config.up_to_devices is not None and config.batch_grows:
            batch = max(batch * devices // own, 1)
        found, refusal = choices(config, machine, devices, batch)
        print("\n".join(table(config, devices, batch, found, refusal)), end="\n\n", flush=True)
        best += [choice for choice in found if choice.fits][:1]
    rows = "the batch grows with the devices" if config.batch_grows else "the batch is the same for all"
    print("Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS), sep="\n")
    print("- A mesh that fits is not tried with more microbatches: they gather weights again and save no time.")
    if config.picture is not None:
        if config.up_to_devices is None:
            raise RunError("picture shows MFU against devices: set up_to_devices")
        Path(config.picture).write_text(picture(config, best, rows), encoding="utf-8")
        print(f"{config.picture}: predicted MFU for {first} to {config.up_to_devices} devices; {rows}")


def counts(first: int, last: int | None) -> list[int]:
    """first, twice as many, and so on up to last.

    >>> counts(8, 40)
    [8, 16, 32]
    """
    return [first * 2**power for power in range(int(math.log2((last or first) / first)) + 1)]


def choices(config: PlanKeys, machine: hardware.Hardware, devices: int, batch: int) -> tuple[list[Choice], str]:
    """All meshes of so many devices, those that fit first, the fastest first; and why a mesh is refused."""
    found, refusal = [], ""
    meshes = [dict(zip(vars(config.mesh), sizes)) for sizes in products(devices, len(vars(config.mesh)))]
    for mesh in tqdm(meshes, desc=f"{devices} devices", leave=False):
        for microbatches in powers(batch):
            try:
                choice = choose(of_shape(config, mesh, batch, microbatches), machine)
            except RunError as error:
                if microbatches == 1:
                    refusal = refusal or f"{mesh_text(mesh)}: {error}".partition("\n")[0]
                break
            found.append(choice)
            if choice.fits:
                break
    return sorted(found, key=lambda each: (not each.fits, each.estimate.step_s, each.estimate.step_alone_s)), refusal


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


def powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`; 1 at least."""
    yield from (2**power for power in range(max(most, 1).bit_length()))


def of_shape(config: PlanKeys, mesh: dict[str, int], batch: int, microbatches: int) -> PlanKeys:
    tokens = dataclasses.replace(config.training.tokens, batch=batch)
    training = dataclasses.replace(config.training, tokens=tokens, microbatches=microbatches)
    devices = math.prod(mesh.values())
    per_host = min(config.devices_per_host, devices)
    mesh = dataclasses.replace(config.mesh, **mesh)
    return changed(config, mesh=mesh, training=training, hosts=max(devices // per_host, 1), devices_per_host=per_host)


def choose(config: PlanKeys, machine: hardware.Hardware) -> Choice:
    ledger = ledger_of(config)
    return Choice(
        mesh=ledger.mesh,
        microbatches=config.training.microbatches,
        batch=config.training.tokens.batch,
        memory_bytes=ledger.memory.bytes,
        fits=ledger.memory.bytes <= machine.hbm_bytes,
        estimate=roofline.roofline(ledger, machine, config.devices_per_host),
    )


def table(config: PlanKeys, devices: int, batch: int, found: list[Choice], refusal: str) -> list[str]:
    """One row for each choice."""
    tokens = f"{batch:,} × {config.training.tokens.len:,} tokens a step"
    rows = [(*vars(config.mesh), "microbatches", "memory", "overlapped", "MFU", "alone", "MFU", "bound by")]
    for each in found:
        estimate = each.estimate
        rows.append(
            (
                *map(str, each.mesh.values()),
                str(each.microbatches),
                gigabytes(each.memory_bytes),
                seconds(estimate.step_s),
                percent(estimate.mfu),
                seconds(estimate.step_alone_s),
                percent(estimate.mfu_alone),
                (estimate.bound or "n/a") + ", does not fit" * (not each.fits),
            )
        )
    widths = [5] * len(vars(config.mesh)) + [14, 12, 13, 8, 13, 8]
    lines = [f"{config.paths.model_name} on {devices:,} × {config.hardware}, {tokens}"]
    lines += [f" {''.join(map(str.rjust, row, widths))}  {row[-1]}" for row in rows]
    return [*lines, f"Other meshes cannot be, such as {refusal}"] if refusal else lines


def picture(config: PlanKeys, best: list[Choice], rows: str) -> str:
    """An SVG of the MFU of the fastest mesh that fits, against the number of devices, with what it assumes."""
    sizes = [math.log2(math.prod(each.mesh.values())) for each in best] or [0]
    span, texts = max(sizes[-1] - sizes[0], 1), ("Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS))
    points = [
        {
            "x": LEFT + (size - sizes[0]) / span * WIDTH,
            "devices": f"{math.prod(each.mesh.values()):,}",
            "mesh": " × ".join(map(str, each.mesh.values())),
            "microbatches": each.microbatches,
            "bound": each.estimate.bound,
            "mfu": {
                key: (y_of(getattr(each.estimate, key) or 0), percent(getattr(each.estimate, key))) for key in CURVES
            },
        }
        for size, each in zip(sizes, best)
    ]
    return Template(Path(__file__).with_name("plan.svg.jinja").read_text(encoding="utf-8"), autoescape=True).render(
        title=f"{config.paths.model_name} on {config.hardware}: predicted MFU of the fastest mesh; {rows}",
        grid=[(f"{10 * tenth} %", y_of(tenth / 10)) for tenth in range(0, 11, 2)],
        axes=" × ".join(vars(config.mesh)),
        points=points,
        curves=CURVES,
        assumed=[line for text in texts for line in textwrap.wrap(text, 125)],
    )


def y_of(mfu: float) -> float:
    return TOP + (1 - mfu) * HEIGHT
