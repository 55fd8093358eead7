"""What a step costs on many meshes, estimated: a ledger of each would take half a second.

    estimate = Estimate(config, machine)                     # a handful of ledgers
    estimate.of({"r": 8, "d": 8, "t": 2})                    # the fewest microbatches that fit, bytes held, seconds

Of each row of a ledger a part is split over an axis, and the rest is whole; a part comes with each microbatch, and the
rest once. Ledgers of a base, with two of each, and with one of them at one, say how large these parts are. Of the axes
that a collective itself goes over it follows from what it is: the operand of an all-gather is split, that of a
reduction is whole. What is best by the estimate is counted afterwards, by a ledger of its own.

A base speaks for the meshes that run its program. With more devices along c than heads, keys are gathered: that is
another program, with a base of its own. A pipeline has no estimate, since idle ticks are no part of a row.
"""

import collections
import contextlib
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ledger.count.costs import turns
from ledger.count.program import PHASES
from ledger.count.step import Ledger
from ledger.machines import hardware, roofline
from runtime import program
from runtime.terminal import RunError
from shardlib.arrays import indivisible
from shardlib.shardtypes import narrowed
from tools.plan_step import ledger_of, shaped

ROOM = 0.9  # of a device's memory: docs/it_does_not_fit.md says what the forecast does not know
# Whose operand is split over the axes that they go over.
SPLIT = "all-gather", "all-to-all", "collective-permute"


@dataclasses.dataclass(frozen=True)
class Estimated:
    """One way to run a step."""

    microbatches: int
    memory_bytes: float
    fits: bool
    middle_s: float  # of a step: between all overlap and none


def rows(ledger: Ledger) -> dict[tuple, float]:
    """What is computed, sent (of operands), moved and held, by what scales alike."""
    found: collections.Counter[tuple] = collections.Counter()
    for product, times in ledger.costs.products.items():
        found["flops", product.phase, product.line] += product.flops * times
    for row, times in ledger.costs.collectives.items():
        found["sent", row.phase, row.line, row.kind, row.axes] += row.bytes * times
    for (line, phase), moved in ledger.memory.moved.items():
        found["moved", phase, line] += moved
    for kind, held in ledger.memory.by_kind().items():
        found["held", kind] += held
    return {key: value for key, value in found.items() if value}


def deals_heads(config: Any, mesh: dict[str, int]) -> bool:
    """Whether the program of this mesh is that of few devices along c, or of a trainer that has but one."""
    deals = getattr(program.load(config.program), "deals_heads", None)
    return deals is None or deals(dataclasses.replace(config.mesh, **mesh), config.model)


def repeating(config: Any) -> set[str]:
    """The axes that only repeat what another one does: without experts e is one more d, and in a pipeline r too."""
    axes = {"r", "e"} if "p" in vars(config.mesh) else {"e"}
    return set() if getattr(config.model, "experts", 0) else axes & {*vars(config.mesh)}


def least(config: Any, dealt: bool) -> dict[str, int] | None:
    """The smallest mesh that deals out its heads, or that does not; None where there is none."""
    mesh = dict.fromkeys(vars(config.mesh), 1)
    while deals_heads(config, mesh) != dealt:
        if "c" not in mesh or mesh["c"] > config.training.tokens.len:
            return None
        mesh["c"] *= 2
    return mesh


class Estimate:
    """Of a config's step on the meshes of its trainer that deal out heads, or on those that gather keys.

    Raises RunError where there is no base: the step cannot be split over any axis, or not at all.
    """

    def __init__(self, config: Any, machine: hardware.Hardware, dealt: bool = True):
        self.machine, self.joined = machine, config.devices_per_host
        if (smallest := least(config, dealt)) is None:
            raise RunError(f"on no mesh {'heads are dealt out' if dealt else 'keys are gathered'}")
        self.least, self.names = smallest | {"microbatches": 1}, [*smallest, "microbatches"]
        base, self.all_rows = self.least, config.training.tokens.batch
        self.counts = [2**power for power in range(self.all_rows.bit_length()) if self.all_rows % 2**power == 0]
        trainer: Any = program.load(config.program)
        self.state, self.whole = trainer.shapes(shaped(config, smallest, microbatches=1))
        type_ = getattr(trainer, "state_type", lambda _: trainer.State)(config)
        self.state_type, self.batch_type = narrowed(type_, self.state), narrowed(trainer.TokenBatch, self.whole)

        def rows_of(sizes: dict[str, int]) -> dict[tuple, float]:
            mesh = {name: size for name, size in sizes.items() if name != "microbatches"}
            return rows(ledger_of(shaped(config, mesh, microbatches=sizes["microbatches"]), check=False))

        found = rows_of(base)
        for name in reversed(self.names):  # two of each, of as many of them as can be
            twice = base | {name: 2 * base[name]}
            if name in repeating(config) or deals_heads(config, {axis: twice[axis] for axis in smallest}) != dealt:
                continue
            with contextlib.suppress(RunError):
                found, base = rows_of(twice), twice
        self.keys, self.base = list(found), np.array(list(found.values()))
        self.is_held = [key[0] == "held" for key in found]
        self.sizes = np.array([base[name] for name in self.names])
        fewer = {name: rows_of(base | {name: one}) if base[name] > one else found for name, one in self.least.items()}
        # Of each row and name: what it is with one (the least) of it, over what it is on the base.
        self.ones = np.array([[self.one(found, fewer[name], key, name) for name in self.names] for key in found])
        grows = np.outer([not held for held in self.is_held], [name == "microbatches" for name in self.names])
        self.once = np.where(grows, self.ones, 1)  # what microbatches repeat is not split by them
        self.split = np.where(grows, 0, np.clip(self.ones - 1, 0, 1))
        self.order = np.argsort(-self.split, axis=1)

    def one(self, found: dict, fewer: dict, key: tuple, name: str) -> float:
        if key[0] == "sent" and name in key[-1] and self.least[name] == 1:  # of one device nothing is sent
            return 2.0 if key[-2] in SPLIT else 1.0
        return fewer.get(key, 0) / found[key]

    def rows(self, mesh: dict[str, int], count: int) -> np.ndarray:
        """The base's rows on a mesh, with so many microbatches.

        Parts are taken to lie within each other: what is split over the axis that splits less of a row is split over
        those that split more of it, too.
        """
        sizes = np.array([*mesh.values(), count])
        split = np.take_along_axis(self.split, self.order, axis=1)
        parts = -np.diff(np.pad(split, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))))
        factors = np.pad(np.cumprod((self.sizes / sizes)[self.order], axis=1), ((0, 0), (1, 0)), constant_values=1)
        repeated = 1 + (1 - self.once) * (sizes - 2)
        is_one = (sizes == 1) & (self.once == 1)  # of one device none is split
        of_one = np.where(is_one, self.ones / (1 + self.split), 1)
        return self.base * (parts * factors).sum(axis=1) * (repeated * of_one).prod(axis=1)

    def of(self, mesh: dict[str, int]) -> Estimated | None:
        """On a mesh, with the fewest microbatches that fit; if none do, with the most. None where it cannot be."""
        counts = [] if indivisible(self.state_type, self.state, mesh) else self.counts
        counts = [count for count in counts if not indivisible(self.batch_type, self.batch(count), mesh)]
        if not counts:
            return None
        values = np.array([self.rows(mesh, count) for count in counts])
        held, room = values[:, self.is_held].sum(axis=1), ROOM * (self.machine.hbm_bytes or 0)
        chosen = next((index for index, bytes in enumerate(held) if bytes <= room), len(held) - 1)
        middle = sum(self.times(mesh, values[chosen])) / 2
        return Estimated(counts[chosen], held[chosen], bool(held[chosen] <= room), middle)

    def batch(self, count: int) -> Any:
        """The global shapes of a microbatch."""
        rows = self.all_rows // count
        return jax.tree.map(lambda each: jax.ShapeDtypeStruct((rows, *each.shape[1:]), each.dtype), self.whole)

    def times(self, mesh: dict[str, int], values: np.ndarray) -> tuple[float, float]:
        """Seconds of a step with all overlap within each phase, and with none."""
        seconds = {phase: dict.fromkeys(("flops", "moved", "sent"), 0.0) for phase in PHASES}
        rates: dict[Any, float | None] = {
            "flops": self.machine.peak_flops_per_s,
            "moved": self.machine.hbm_bytes_per_s,
        }
        for (what, *key), value in zip(self.keys, values, strict=True):
            if what == "sent":
                *_, kind, axes = key
                over = tuple(axis for axis in axes if mesh[axis] > 1)
                if not over:
                    continue
                if over not in rates:
                    rates[over] = roofline.speed(over, mesh, self.machine, self.joined)[1]
                value = value * turns(kind, math.prod(mesh[axis] for axis in over))
            if what != "held":
                rate = rates[over if what == "sent" else what]
                seconds[key[0]][what] += value / rate if rate else 0
        each = [list(phase.values()) for phase in seconds.values()]
        return sum(map(max, each)), sum(map(sum, each))
