"""The ledger of a training step: what each line of its source costs on one device, known before anything is compiled.

    step = jax.jit(typed_shard_map(training_step), donate_argnums=0)
    with jax.sharding.use_abstract_mesh(AbstractMesh((512, 8), ("d", "t"))):      # any mesh, no device
        ledger = of_step(step.trace(*shapes), {"d": 512, "t": 8}, source=__file__, tokens=4096 * 1024)
    ledger.memory.bytes, ledger.model_flops, ledger.costs.collectives
    ledger.pages.files.pages(ledger)                                # ledger.txt, ledger.json and ledger.html

docs/ledger.md explains a page and the keys of the JSON.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from ledger.count.costs import Costs, Saved, count, saved
from ledger.count.memory import BATCH, OPTIMIZER, WEIGHTS, Memory, forecast
from ledger.count.program import PHASES, read

FORMAT = 2  # version of the JSON; raised when a key changes its meaning or goes


@dataclasses.dataclass
class Ledger:
    source: str  # the program's file
    texts: dict[str, list[str]]  # the lines of all annotated files by their names, the program's first
    mesh: dict[str, int]
    tokens: int  # in a step, over all devices
    parameters: int  # in the whole model, without frozen ones
    costs: Costs  # on one device
    saved: list[Saved]
    memory: Memory

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def model_flops(self) -> float:
        """FLOPs of a step on all devices, nothing recomputed, causal products as half, what devices repeat once.
        MFU counts these."""
        return self.costs.model_flops() * self.devices

    @property
    def hardware_flops(self) -> int:
        """FLOPs of a step on all devices: every product that runs, recomputed and masked too. HFU counts these."""
        return self.costs.flops() * self.devices

    @property
    def flops_6nd(self) -> int:
        """6 × all trained parameters × tokens, which many published tables count."""
        return 6 * self.parameters * self.tokens

    def sent_bytes(self, *phases: str) -> float:
        """The bytes that leave one device in a step, in these phases or in all."""
        rows = self.costs.collectives.items()
        return sum(row.sent_bytes(self.mesh) * times for row, times in rows if not phases or row.phase in phases)

    def to_json(self) -> dict[str, Any]:
        """The ledger as plain dicts and lists; see docs/ledger.md."""

        def rows(counter):
            return [{**dataclasses.asdict(row), "times": times} for row, times in sorted(counter.items())]

        collectives = [
            {**dataclasses.asdict(row), "sent_bytes": row.sent_bytes(self.mesh), "times": times}
            for row, times in sorted(self.costs.collectives.items())
        ]
        return {
            "format": FORMAT,
            "source": self.source,
            "mesh": self.mesh,
            "tokens": self.tokens,
            "parameters": self.parameters,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "flops_6nd": self.flops_6nd,
            "flops_per_device": {phase: self.costs.flops(phase) for phase in PHASES},
            "sent_bytes_per_device": {phase: self.sent_bytes(phase) for phase in PHASES},
            "products": rows(self.costs.products),
            "collectives": collectives,
            "saved": [dataclasses.asdict(row) for row in sorted(self.saved)],
            "loops": rows(self.costs.loops),
            "host_copies": rows(self.costs.host_copies),
            "uncounted_kernels": [
                {"line": line, "kernel": name, "times": times} for (line, name), times in self.costs.kernels.items()
            ],
            "memory": {
                "bytes": self.memory.bytes,
                "by_kind": self.memory.by_kind(),
                "at": {"line": self.memory.line, "phase": self.memory.phase},
                "held": [dataclasses.asdict(array) for array in self.memory.held],
                "largest": [dataclasses.asdict(array) for array in self.memory.largest[:24]],
                "moved": [
                    {"line": line, "phase": phase, "bytes": moved}
                    for (line, phase), moved in sorted(self.memory.moved.items())
                    if moved
                ],
            },
            "texts": self.texts,
        }


def of_step(
    traced: jax.stages.Traced, mesh_axes: dict[str, int], *, source: str | Path, tokens: int, platform: str = "",
    has_bfloat16: bool = True,
) -> Ledger:  # fmt: skip
    """The ledger of a traced step, in less than a second for a transformer.

    Args:
      traced: `jax.jit(typed_shard_map(step), ...).trace(...)`, under a mesh that may be abstract. Arrays in a field
        named `weights` are weights, those in its field `frozen` frozen ones; the rest of that argument is optimizer
        state, and other arguments are the batch.
      mesh_axes: name and size of each mesh axis, in the mesh's order.
      source: the program's file. It is annotated, and so is each other file that has a line which costs anything.
      tokens: of a step, over all devices.
      platform: JAX's word for what it will be compiled for. XLA:CPU ('cpu') computes bfloat16 as float32, but for
        products, and in another order, so the memory forecast counts it so; FLOPs, bytes sent and bytes kept are what
        the source says, as everywhere else.
      has_bfloat16: whether a CPU's cores have instructions for bfloat16; without them products read float32 too.
    Raises:
      ValueError: where a count is not known before the step runs; see `ledger.count.costs.count`.
    """
    block = read(traced.jaxpr)
    on_cpu = platform == "cpu"
    in_memory = read(traced.jaxpr, widened=True, has_bfloat16=has_bfloat16) if on_cpu else block
    paths, infos = zip(*jax.tree_util.tree_flatten_with_path(traced.args_info)[0], strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator="/").split("/") for path in paths]
    with_weights = {tuple(name[:2]) for name in names if "weights" in name[2:]}  # args or kwargs, position
    groups = [
        WEIGHTS if "weights" in name[2:] else OPTIMIZER if tuple(name[:2]) in with_weights else BATCH for name in names
    ]
    costs, kept = count(block, mesh_axes), saved(block)
    places = [row.line for rows in (costs.products, costs.collectives, kept) for row in rows]
    costly = {place.rpartition(":")[0] for place in places}
    # JAX may have cached a trace of another file with this name.
    others = {name: file for name, file in block.files.items() if name in costly - {Path(source).name}}
    files = {Path(source).name: Path(source), **others}
    return Ledger(
        source=Path(source).name,
        texts={name: file.read_text(encoding="utf-8").splitlines() for name, file in files.items() if file.exists()},
        mesh=dict(mesh_axes),
        tokens=tokens,
        parameters=sum(
            math.prod(info.shape)
            for info, group, name in zip(infos, groups, names, strict=True)
            if group == WEIGHTS and "frozen" not in name
        ),
        costs=costs,
        saved=kept,
        memory=forecast(in_memory, groups, [info.donated for info in infos], on_cpu=on_cpu),
    )
