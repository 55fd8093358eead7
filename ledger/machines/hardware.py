"""The peak rates of the machines in hardware.yaml, for MFU, the roofline and plans.

    of_device_kind("NVIDIA H200")            # the name of a jax.Device; None where it is not known
    named("h200"), named("tpu_v5p")          # the names of a plan's `hardware=`

A device that is not in the file has no figures: reports print `n/a`, JSON has null. Nothing is guessed from a similar
name.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

UNITS = {
    "peak_tflops": ("peak_flops_per_s", 1e12),
    "hbm_gib": ("hbm_bytes", 2**30),
    "hbm_gb_per_s": ("hbm_bytes_per_s", 1e9),
    "link_gb_per_s": ("link_bytes_per_s", 1e9),
    "network_gbit_per_s": ("network_bytes_per_s", 1e9 / 8),
    "slice_devices": ("slice_devices", 1),
}


@dataclass(frozen=True)
class Hardware:
    """One device; hardware.yaml says what each figure is. None where the vendor publishes none."""

    peak_flops_per_s: float | None
    hbm_bytes: int | None
    hbm_bytes_per_s: float | None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    slice_devices: int | None = None
    torus_dims: int = 0
    capability: float = 0
    name: str = "this hardware"
    source: str = ""
    xla: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def float8_spares(self) -> float:
        """The part of a bfloat16 product's time that one of 8-bit floats spares: half, where NVIDIA's data sheets of
        H100, H200 and B200 give FP8 twice the rate; nothing where they are not known to be faster."""
        return 0.5 if self.capability >= 9 else 0.0


def _read() -> dict[str, tuple[list[str], Hardware]]:
    """The machines of hardware.yaml by their short names, each with its device kinds."""
    by_name = {}
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        kinds, figures = entry.pop("device_kinds"), {}
        sources: dict[str, None] = {}
        for key, (figure, unit) in UNITS.items():
            if key in entry:
                value, source = entry.pop(key)
                figures[figure] = value * unit
                sources[source] = None
        by_name[name] = kinds, Hardware(**figures, **entry, name=kinds[0], source="; ".join(sources))
    return by_name


_MACHINES = _read()
HARDWARE = {kind: hardware for kinds, hardware in _MACHINES.values() for kind in kinds}
# Names for a command line: what a step can be compiled for. GPUs are the SXM models, which a host of eight has.
NAMES = {name: hardware for name, (_, hardware) in _MACHINES.items() if hardware.xla}


def of_device_kind(device_kind: str) -> Hardware | None:
    """The figures of a `jax.Device`, by its `device_kind`; None where they are not known."""
    return HARDWARE.get(device_kind)


def named(name: str) -> Hardware | None:
    """The figures by a short name of NAMES, or by a `device_kind`; None where they are not known."""
    return NAMES.get(name) or HARDWARE.get(name)
