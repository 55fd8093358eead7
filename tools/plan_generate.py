"""What decoding costs on a machine that is not here: memory, and tokens a second at the most.

    python -m tools.plan program=generate model=weights/llama hardware=h200 mesh.t=8 rows=64 length=8192

Nothing runs. The model's tensors are not read, only their names and sizes.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import jax

from ledger.count.step import Ledger, of_step
from ledger.machines import hardware, roofline
from ledger.pages import files
from ledger.units import gigabytes
from models import decoding
from models.mesh import Mesh as FamilyMesh
from runtime.config.keys import Count
from runtime.config.rebuild import Origins
from runtime.terminal import RunError
from shardlib.shardtypes import mesh_text
from tools.plan_step import machine_of
from tools.ready import Mesh, opened, require_writer


@dataclass(frozen=True, kw_only=True)
class PlanGenerate:
    WORDS: ClassVar = ()

    program: Literal["generate"]  # that this is planned; without it a step of training is
    model: str  # a run, a checkpoint, or a published folder
    hardware: str | None = None  # h200, tpu_v5p, ...: a name of ledger/machines/hardware.yaml; null: no times
    devices_per_host: Count = 8  # neighbours in the mesh's order
    rows: Count = 8  # texts that are written at the same time
    length: Count = 2048  # tokens of a prompt and its text
    compute_dtype: Literal["bfloat16", "float32"] | None = None  # null: the model's
    weights: Literal["int8", "split"] | None = None  # as of generate
    folder: str | None = None  # ledger.txt, ledger.json and ledger.html of a token of each row are written there
    mesh: Mesh = field(default_factory=Mesh)


def main(config: PlanGenerate) -> None:
    """Prints what the next token of each row costs. Raises RunError where the mesh cannot split model or rows."""
    machine = machine_of(SimpleNamespace(hardware=config.hardware, own_hardware=(), origins=Origins()))
    ledger, cache_bytes = ledger_of(config)
    estimate = roofline.roofline(ledger, machine, config.devices_per_host)
    print("\n".join(report(config, ledger, cache_bytes, machine, estimate)))
    if config.folder is not None:
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        files.write(ledger, config.folder, estimate)
        print(f"{config.folder}: ledger.txt, ledger.json, ledger.html")


def ledger_of(config: PlanGenerate) -> tuple[Ledger, int]:
    """The ledger of a step, and the bytes of the cache on one device."""
    mesh = vars(FamilyMesh(**vars(config.mesh)))
    (axis, devices), *_ = vars(config.mesh).items()
    if config.rows % devices:
        raise RunError(f"rows = {config.rows} cannot be divided among mesh.{axis} = {devices} devices")
    automatic = (jax.sharding.AxisType.Auto,) * len(mesh)
    abstract = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=automatic)
    with jax.sharding.use_abstract_mesh(abstract), ThreadPoolExecutor() as pool:
        source, model, weights = opened(config.model, mesh, config.compute_dtype, pool)
        require_writer(source)
        slots = -(-config.length // decoding.SLOTS) * decoding.SLOTS
        decoding.is_planned = True
        try:
            programs = decoding.Programs(source.family, model, weights, config.weights)
            traced = decoding.traced_step(programs, weights, config.rows, slots)
        finally:
            decoding.is_planned = False
    family: Any = source.family
    ledger = of_step(traced, mesh, source=family.__file__, tokens=config.rows)
    cache: Any = traced.args_info[0][1]
    held = sum(math.prod(each.shape) * each.dtype.itemsize for each in (cache.k, cache.v, cache.memory) if each)
    return ledger, held // ledger.devices


def report(
    config: PlanGenerate, ledger: Ledger, cache_bytes: int, machine: hardware.Hardware, estimate: roofline.Roofline
) -> list[str]:
    """What to print."""
    weights, peak, most = ledger.memory.by_kind()["weights"], ledger.memory.bytes, machine.hbm_bytes
    lines = [
        f"{config.model} on {ledger.devices:,} × {config.hardware or 'n/a'}: {mesh_text(vars(config.mesh))}; "
        f"{config.rows:,} rows of up to {config.length:,} tokens.",
        f"Memory of one device: weights {gigabytes(weights)}; cache "
        f"{gigabytes(cache_bytes)}; forecast of the peak {gigabytes(peak)}"
        + (f" of {gigabytes(most)}." if most else "."),
    ]
    if most and peak > most:
        lines.append("It will not fit: change the mesh, lower rows or length, or set weights to int8 or split.")
    lines += ["", *roofline.text(estimate)]
    if estimate.step_s and estimate.step_alone_s:
        lines.append(
            f"At most {config.rows / estimate.step_s:,.0f} tokens a second of all rows, if compute, memory and sending "
            f"overlap; {config.rows / estimate.step_alone_s:,.0f} if they do not."
        )
    return [*lines, "", "Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS)]
