"""The step of decoding for tools.plan: the next token of each row, counted without a device."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax

from ledger.count.step import Ledger, of_step
from ledger.units import gigabytes
from models import decoding
from models.layers import learned_positions
from models.mesh import Mesh as FamilyMesh
from runtime.config.keys import Count
from runtime.config.rebuild import COMMAND_LINE, Origins
from runtime.terminal import RunError
from shardlib.shardtypes import mesh_text
from tools.plan_step import Machine, abstract_mesh
from tools.ready import Mesh, opened, require_writer

FIXES = ("change the mesh, lower rows or length, or set weights to int8 or split",)  # if it does not fit


@dataclass(frozen=True, kw_only=True)
class PlanGenerate(Machine):
    origins: ClassVar = Origins(COMMAND_LINE)

    program: Literal["generate"]  # plans decoding; without it, a step of training
    model: str  # a run, a checkpoint, or a published folder
    allow_program_change: bool = False  # as in generate
    rows: Count = 8  # texts that are written at the same time
    length: Count = 2048  # tokens of a prompt and its text
    compute_dtype: Literal["bfloat16", "float32"] | None = None  # null: the model's
    weights: Literal["int8", "split"] | None = None  # as in generate
    mesh: Mesh = field(default_factory=Mesh)


def title_of(config: PlanGenerate, ledger: Ledger, cache_bytes: int) -> str:
    """The plan's first line: the model, the machine, the mesh, rows and cache."""
    return (
        f"{config.model} on {ledger.devices:,} × {config.hardware or 'n/a'}: {mesh_text(vars(config.mesh))}; "
        f"{config.rows:,} rows of up to {config.length:,} tokens; cache {gigabytes(cache_bytes)} a device."
    )


def ledger_of(config: PlanGenerate) -> tuple[Ledger, int]:
    """A step's ledger, and a device's bytes of cache. Raises RunError where the mesh cannot split rows, the model has
    fewer positions, and as `opened`."""
    mesh = vars(FamilyMesh(**vars(config.mesh)))
    (axis, devices), *_ = vars(config.mesh).items()
    if config.rows % devices:
        raise RunError(f"rows = {config.rows} cannot be divided among mesh.{axis} = {devices} devices")
    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh)), ThreadPoolExecutor() as pool:
        source, weights = opened(config, mesh, config.compute_dtype, pool)
        require_writer(source)
        known = learned_positions(source.model)
        if known is not None and config.length > known:
            raise RunError(f"length = {config.length}: the model has {known} positions: lower length")
        family: Any = source.family
        # As tools.serve has rows of this length, with room for a token more.
        _, sizes = decoding.cache_sizes(config.length, config.length + 1, has_encoder=family.KIND == "both")
        decoding.is_planned = True
        try:
            programs = decoding.Programs(family, source.model, weights, config.weights)
            traced = decoding.traced_step(programs, weights, config.rows, sizes)
        finally:
            decoding.is_planned = False
    ledger = of_step(traced, mesh, source=family.__file__, tokens=config.rows)
    cache: Any = traced.args_info[0][1]
    held = sum(math.prod(array.shape) * array.dtype.itemsize for array in (cache.k, cache.v, cache.memory) if array)
    return ledger, held // ledger.devices
