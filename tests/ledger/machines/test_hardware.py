"""The table of hardware: known devices have the vendor's figures, unknown ones have none."""

from pathlib import Path

import jax
import yaml

from ledger.machines.hardware import HARDWARE, NAMES, UNITS, of_device_kind

FILE = Path(__file__).resolve().parents[3] / "ledger" / "machines" / "hardware.yaml"


# Dense bfloat16 TFLOP/s of one device, by the names that drivers and libtpu give.
PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H200": 989.5,
    "NVIDIA B200": 2250,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "TPU7x": 1153.5,  # half a chip: JAX has two devices on each
}
UNKNOWN = ["", "cpu", "NVIDIA GeForce RTX 4090", "NVIDIA H200 prototype", "TPU v9", "nvidia h200"]


def test_peaks():
    """Known devices have the data sheets' dense figures; none is guessed for an unknown device or a CPU from a similar
    name."""
    for kind, peak in PEAKS.items():
        assert of_device_kind(kind).peak_flops_per_s == peak * 1e12, kind
    assert not any(of_device_kind(kind) for kind in (*UNKNOWN, jax.devices()[0].device_kind))


def test_figures_are_of_a_plausible_size():
    """A slip of a unit (TB for GB; GB for GiB is none) would leave these ranges. What a plan can be made for has links
    within its host; only the network of the TPU v4 is not published."""
    for device_kind, hardware in HARDWARE.items():
        assert 1e14 < hardware.peak_flops_per_s < 1e16, device_kind
        assert 10e9 < hardware.hbm_bytes < 300e9, device_kind
        assert 5e11 < hardware.hbm_bytes_per_s < 2e13, device_kind
    for name, hardware in NAMES.items():
        assert hardware in HARDWARE.values() and 1e11 < hardware.link_bytes_per_s < 1e12
        assert hardware.network_bytes_per_s is None if name == "tpu_v4" else 1e9 < hardware.network_bytes_per_s < 1e11


def test_every_figure_has_its_source():
    """Each figure of the file is a number and a text that names a document; a page prints the texts."""
    entries = yaml.safe_load(FILE.read_text())
    assert NAMES.keys() < entries.keys()
    for name, entry in entries.items():
        figures = [entry[key] for key in UNITS if key in entry]
        assert len(figures) >= 3, name
        for number, source in figures:
            assert number > 0 and len(source) > 20, name
            assert source in HARDWARE[entry["device_kinds"][0]].source
        assert entry.keys() <= {"device_kinds", "torus_dims", "capability", "xla", *UNITS}, name
