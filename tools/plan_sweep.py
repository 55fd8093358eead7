"""Every mesh for a number of devices: `python -m tools.plan sweep=true`."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from ledger.machines import hardware, roofline
from ledger.units import gigabytes, percent, seconds
from runtime.terminal import RunError
from shardlib.arrays import mesh_text
from tools.plan_step import changed, ledger_of


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a step."""

    mesh: dict[str, int]
    microbatches: int
    memory_bytes: int
    fits: bool
    estimate: roofline.Roofline


def sweep(config: Any, machine: hardware.Hardware) -> None:
    """Prints a table of all meshes, those that fit first, the fastest first."""
    if None in (machine.peak_flops_per_s, machine.hbm_bytes, machine.hbm_bytes_per_s):
        raise RunError("a sweep is sorted by time: give hardware=, with peak_flops_per_s, hbm_bytes, hbm_bytes_per_s")
    devices = math.prod(vars(config.mesh).values())
    if config.hosts is not None:
        devices = config.hosts * config.devices_per_host
    found, refusal = choices(config, machine, devices)
    print("\n".join(table(config, devices, found, refusal)), end="\n\n", flush=True)
    print("Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS), sep="\n")
    print("- A mesh that fits is not tried with more microbatches: they gather weights again and save no time.")


def choices(config: Any, machine: hardware.Hardware, devices: int) -> tuple[list[Choice], str]:
    """All meshes of so many devices, those that fit first, the fastest first; and why a mesh is refused."""
    found, refusal = [], ""
    meshes = [dict(zip(vars(config.mesh), sizes)) for sizes in products(devices, len(vars(config.mesh)))]
    for mesh in tqdm(meshes, desc=f"{devices} devices", leave=False):
        for power in range(config.training.tokens.batch.bit_length()):
            try:
                choice = choose(of_shape(config, mesh, 2**power), machine)
            except RunError as error:
                if power == 0:
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


def of_shape(config: Any, mesh: dict[str, int], microbatches: int) -> Any:
    training = dataclasses.replace(config.training, microbatches=microbatches)
    devices = math.prod(mesh.values())
    per_host = min(config.devices_per_host, devices)
    sizes = dataclasses.replace(config.mesh, **mesh)
    return changed(config, mesh=sizes, training=training, hosts=max(devices // per_host, 1), devices_per_host=per_host)


def choose(config: Any, machine: hardware.Hardware) -> Choice:
    ledger = ledger_of(config)
    return Choice(
        mesh=ledger.mesh,
        microbatches=config.training.microbatches,
        memory_bytes=ledger.memory.bytes,
        fits=ledger.memory.bytes <= (machine.hbm_bytes or 0),
        estimate=roofline.roofline(ledger, machine, config.devices_per_host),
    )


def table(config: Any, devices: int, found: list[Choice], refusal: str) -> list[str]:
    """One row for each choice."""
    tokens = f"{config.training.tokens.batch:,} × {config.training.tokens.len:,} tokens a step"
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
