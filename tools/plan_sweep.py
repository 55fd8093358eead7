"""Every mesh for a number of devices, and MFU against the number of devices: `python -m tools.plan sweep=true`."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tqdm import tqdm

from ledger.machines import hardware, roofline
from ledger.units import gigabytes, percent, seconds
from runtime.terminal import RunError
from shardlib.arrays import mesh_text
from tools.plan_step import PlanKeys, changed, ledger_of


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
    """All meshes of so many devices, those that fit first, the fastest first; and why a mesh that can't be is refused."""
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
    lines = [
        f"{config.paths.model_name} on {devices:,} × {config.hardware}, {batch:,} × {config.training.tokens.len:,} "
        "tokens a step",
        f" {''.join(f'{axis:>5}' for axis in vars(config.mesh))}{'microbatches':>14}{'memory':>12}{'overlapped':>13}{'MFU':>8}{'alone':>13}{'MFU':>8}  "
        "bound by",
    ]
    for each in found:
        estimate = each.estimate
        lines.append(
            f" {''.join(f'{size:>5}' for size in each.mesh.values())}{each.microbatches:>14}{gigabytes(each.memory_bytes):>12}"
            f"{seconds(estimate.step_s):>13}{percent(estimate.mfu):>8}"
            f"{seconds(estimate.step_alone_s):>13}{percent(estimate.mfu_alone):>8}  {estimate.bound or 'n/a'}"
            f"{'' if each.fits else ', does not fit'}"
        )
    if refusal:
        lines.append(f"Other meshes cannot be, such as {refusal}")
    return lines


# -- The picture -------------------------------------------------------------------------------------------------------
WIDTH, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 760, 76, 50, 644, 300
CURVES = (("mfu", "everything overlaps", "#1f6feb"), ("mfu_alone", "nothing overlaps", "#b35900"))


def picture(config: PlanKeys, best: list[Choice], rows: str) -> str:
    """An SVG of the MFU of the fastest mesh that fits, against the number of devices, with what it assumes."""
    sizes = [math.log2(math.prod(each.mesh.values())) for each in best] or [0]
    span = max(sizes[-1] - sizes[0], 1)

    def place(index: int, mfu: float) -> tuple[float, float]:
        return LEFT + (sizes[index] - sizes[0]) / span * PLOT_WIDTH, TOP + (1 - mfu) * PLOT_HEIGHT

    def devices(choice: Choice) -> str:
        return f"{math.prod(choice.mesh.values()):,}"

    title = f"{config.paths.model_name} on {config.hardware}: predicted MFU of the fastest mesh; {rows}"
    parts = [f'<text x="{LEFT}" y="26" font-size="15">{escape(title)}</text>']
    for tenth in range(0, 11, 2):
        y = TOP + (1 - tenth / 10) * PLOT_HEIGHT
        parts.append(f'<path d="M{LEFT} {y:.1f}h{PLOT_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    for index, each in enumerate(best):
        x, _ = place(index, 0)
        for line, label in enumerate((devices(each), " × ".join(map(str, each.mesh.values())), f"{each.microbatches}")):
            parts.append(
                f'<text x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 18 + 15 * line}" text-anchor="middle">{label}</text>'
            )
    for line, label in enumerate(("devices", " × ".join(vars(config.mesh)), "parts")):  # microbatches
        y = TOP + PLOT_HEIGHT + 18 + 15 * line
        parts.append(f'<text x="4" y="{y}" fill="#555">{label}</text>')
    for number, (key, label, colour) in enumerate(CURVES):
        points = [(*place(index, getattr(each.estimate, key) or 0), each) for index, each in enumerate(best)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{devices(each)} devices: '
            f"{percent(getattr(each.estimate, key))}, bound by {each.estimate.bound}</title></circle>"
            for x, y, each in points
        ]
        parts.append(
            f'<text x="{LEFT + 10 + 170 * number}" y="{TOP + PLOT_HEIGHT - 10}" fill="{colour}">● {label}</text>'
        )
    texts = "Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS)
    assumed = [line for text in texts for line in textwrap.wrap(text, 125)]
    for line, text in enumerate(assumed):
        y = TOP + PLOT_HEIGHT + 76 + 13 * line
        parts.append(f'<text x="{LEFT}" y="{y}" font-size="10.5" fill="#555">{escape(text)}</text>')
    height = TOP + PLOT_HEIGHT + 84 + 13 * len(assumed)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
