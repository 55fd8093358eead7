"""How long a step would take on a machine, at most as fast as its data sheet: multiplying, moving bytes to and from
memory, and sending them, by phase; with these three at the same time, and one after another.

    estimate = roofline(ledger, hardware.named("h200"), devices_per_host=8)
    estimate.step_s, estimate.mfu                      # everything overlaps: no program can be faster
    estimate.step_alone_s, estimate.mfu_alone          # nothing does
    for phase in estimate.phases:
        print(phase.name, phase.compute_s, phase.hbm_s, phase.sent_s, phase.bound)

What is assumed (ASSUMPTIONS says it to a reader): bounds of a data sheet, not a simulation. A figure that the hardware
lacks makes all that needs it None, printed n/a.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from ledger.count.program import PHASES
from ledger.count.step import Ledger
from ledger.machines.hardware import Hardware

ASSUMPTIONS = (
    "Every matrix product runs at the peak bfloat16 rate, whatever its shape and type; of 8-bit floats, on NVIDIA's "
    "Hopper and Blackwell, at twice that.",
    "Memory: products, collectives, reductions and scatters read their operands and write their results once; what is "
    "computed element by element before them reads and writes once more; the update reads and writes weights and "
    "optimizer state once. Nothing stays in a cache.",
    "Collectives go around a ring at the links' full speed, one after another, without latency; the parts of an "
    "all-to-all go straight to their devices.",
    "Devices of a host are neighbours in the mesh, its last axis first. Between hosts, all devices of a host share its "
    "network adapters evenly.",
    "On a torus the largest mesh axis has all dims but one for each other axis, and a collective uses the links of its "
    "axes' dims.",
    "Overlapped: within a phase compute, memory and communication take as long as the longest of them. Alone: as long "
    "as all of them. Reading data, checkpoints and the host take no time.",
)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Seconds of one device and step; None where the hardware's figure is not known."""

    name: str  # one of PHASES
    flops: int
    hbm_bytes: int  # read and written
    sent_bytes: float
    compute_s: float | None
    hbm_s: float | None
    sent_s: float | None

    @property
    def times(self) -> dict[str, float | None]:
        return {"compute": self.compute_s, "memory": self.hbm_s, "communication": self.sent_s}

    @property
    def overlapped_s(self) -> float | None:
        return max(known) if (known := _known(self.times.values())) else None

    @property
    def alone_s(self) -> float | None:
        return _sum(self.times.values())

    @property
    def bound(self) -> str | None:
        """The slowest part of the phase: 'compute', 'memory' or 'communication'."""
        return _longest(self.times)


@dataclasses.dataclass(frozen=True)
class Sending:
    """All collectives of one kind over the same axes in a phase."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    sent_bytes: float  # by one device in a step
    crosses_hosts: bool
    bytes_per_s: float | None  # at which a device can send them
    sent_s: float | None


@dataclasses.dataclass(frozen=True)
class Roofline:
    hardware: Hardware
    devices_per_host: int
    devices: int
    model_flops: float  # in a step, over all devices
    phases: tuple[Phase, ...]
    sendings: tuple[Sending, ...]

    @property
    def step_s(self) -> float | None:
        """Seconds of the step if each phase overlaps perfectly."""
        return _sum(phase.overlapped_s for phase in self.phases)

    @property
    def step_alone_s(self) -> float | None:
        """Seconds of the step without any overlap."""
        return _sum(phase.alone_s for phase in self.phases)

    @property
    def bound(self) -> str | None:
        """The slowest part of the whole step: 'compute', 'memory' or 'communication'."""
        return _longest(self.totals)

    @property
    def totals(self) -> dict[str, float | None]:
        """Seconds of compute, memory and communication over all phases."""
        return {
            kind: _sum(phase.times[kind] for phase in self.phases) for kind in ("compute", "memory", "communication")
        }

    @property
    def mfu(self) -> float | None:
        """MFU with perfect overlap: no program of these phases can have a higher one."""
        return self._mfu(self.step_s)

    @property
    def mfu_alone(self) -> float | None:
        return self._mfu(self.step_alone_s)

    def _mfu(self, seconds: float | None) -> float | None:
        if not seconds or self.hardware.peak_flops_per_s is None:
            return None
        return self.model_flops / self.devices / self.hardware.peak_flops_per_s / seconds


def _known(values: Iterable[float | None]) -> list[float] | None:
    """All of them, or None if one is not known."""
    known = list(values)
    numbers = [value for value in known if value is not None]
    return numbers if len(numbers) == len(known) else None


def _sum(values: Iterable[float | None]) -> float | None:
    return None if (known := _known(values)) is None else sum(known)


def _longest(times: dict[str, float | None]) -> str | None:
    known = _known(times.values())
    return list(times)[known.index(max(known))] if known else None


def _per(amount: float, rate: float | None) -> float | None:
    return 0.0 if not amount else None if rate is None else amount / rate


def roofline(ledger: Ledger, hardware: Hardware, devices_per_host: int) -> Roofline:
    """The bounds for a step.

    Args:
      devices_per_host: neighbours in the mesh's order whose links are `link_bytes_per_s`; the others are reached over
        the network, but for a TPU's, where a slice has all that fit into it.
    """
    slices = -(-ledger.devices // hardware.slice_devices) if hardware.slice_devices else ledger.devices
    joined = max(devices_per_host, -(-ledger.devices // slices))  # slices are of one size
    sums: dict[tuple, float] = {}
    for row, times in ledger.costs.collectives.items():
        key = PHASES.index(row.phase), row.kind, row.axes
        sums[key] = sums.get(key, 0) + row.sent_bytes(ledger.mesh) * times
    sendings = []
    for (phase, kind, axes), sent in sorted(sums.items()):
        crosses, rate = speed(kind, axes, ledger.mesh, hardware, joined)
        sendings.append(Sending(PHASES[phase], kind, axes, sent, crosses, rate, _per(sent, rate)))
    phases = []
    for name in PHASES:
        flops, moved = ledger.costs.flops(name), ledger.memory.moved_bytes(name)
        mine = [sending for sending in sendings if sending.phase == name]
        spared = ledger.costs.flops(name, dtype="float8") * hardware.float8_spares
        phases.append(
            Phase(
                name=name,
                flops=flops,
                hbm_bytes=moved,
                sent_bytes=sum(sending.sent_bytes for sending in mine),
                compute_s=_per(flops - spared, hardware.peak_flops_per_s),
                hbm_s=_per(moved, hardware.hbm_bytes_per_s),
                sent_s=_sum(sending.sent_s for sending in mine),
            )
        )
    return Roofline(hardware, devices_per_host, ledger.devices, ledger.model_flops, tuple(phases), tuple(sendings))


def speed(
    kind: str, axes: tuple[str, ...], mesh: dict[str, int], hardware: Hardware, joined: int
) -> tuple[bool, float | None]:
    """Whether a collective over these axes leaves a host or slice of `joined` devices, and how many bytes/s a device
    then sends. The group of devices that is in most hosts decides.

    If m of a group's n devices share a host, one of them sends to the next host, through the adapters of all m: m times
    one device's share of the network. In an all-to-all each of them has n - m of its n - 1 parts to send to other
    hosts, and on a torus a part passes a quarter of each dim's length on average.
    """
    places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    over = [place for place, axis in enumerate(mesh) if axis in axes]
    devices = math.prod(mesh[axis] for axis in axes)
    groups = np.moveaxis(places, over, range(len(over))).reshape(devices, -1) // joined  # each in a column
    hosts = 1 + int(np.count_nonzero(np.diff(np.sort(groups, axis=0), axis=0), axis=0).max())
    link = hardware.link_bytes_per_s
    if link is not None and hardware.torus_dims:
        dims = _dims(axes, mesh, hardware.torus_dims)
        link *= dims / hardware.torus_dims
        if kind == "all-to-all":
            link *= (devices - 1) / devices / (dims * devices ** (1 / dims) / 4)
    if hosts == 1:
        return False, link
    here, network = devices / hosts, hardware.network_bytes_per_s
    if network is not None:
        network *= (devices - 1) / (devices - here) if kind == "all-to-all" else here
    if here == 1:  # no two are in one host: nothing goes over its links
        return True, network
    both = _known((link, network))
    return True, min(both) if both else None


def _dims(axes: tuple[str, ...], mesh: dict[str, int], dims: int) -> int:
    """How many of a torus's dims a collective over these axes has."""
    wide = [axis for axis, size in mesh.items() if size > 1]
    largest = max(wide, key=lambda axis: mesh[axis])
    others = len([axis for axis in axes if axis != largest])
    return max(others + (dims - (len(wide) - 1) if largest in axes else 0), 1)
