"""The table of hardware: known devices have the vendor's figures, unknown ones have none."""

from pathlib import Path

import jax
import pytest
import yaml

from ledger.machines.hardware import HARDWARE, NAMES, UNITS, peak_flops_per_s

FILE = Path(__file__).resolve().parents[3] / "ledger" / "machines" / "hardware.yaml"


@pytest.mark.parametrize(
    "device_kind, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA B200", 2250e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),  # half a chip: JAX has two devices on each
    ],
)
def test_peak_is_the_dense_bfloat16_rate_of_one_device(device_kind, peak):
    """The names that drivers and libtpu give, against the data sheets' dense figures."""
    assert peak_flops_per_s(device_kind) == peak


@pytest.mark.parametrize(
    "device_kind", ["", "cpu", "NVIDIA GeForce RTX 4090", "NVIDIA H200 prototype", "TPU v9", "nvidia h200"]
)
def test_unknown_hardware_has_no_peak(device_kind):
    """No figure is guessed, from a similar name neither."""
    assert peak_flops_per_s(device_kind) is None


def test_simulated_devices_have_no_peak():
    """A CPU's MFU is n/a."""
    assert peak_flops_per_s(jax.devices()[0].device_kind) is None


def test_figures_are_of_a_plausible_size():
    """A slip of a unit (GB for GiB is no slip of one, TB for GB is) would leave these ranges."""
    for device_kind, hardware in HARDWARE.items():
        assert 1e14 < hardware.peak_flops_per_s < 1e16, device_kind
        assert 10e9 < hardware.hbm_bytes < 300e9, device_kind
        assert 5e11 < hardware.hbm_bytes_per_s < 2e13, device_kind


def test_every_figure_has_its_source():
    """In the file each is a pair of a number and a text that names a document; a page prints the texts."""
    entries = yaml.safe_load(FILE.read_text())
    assert NAMES.keys() < entries.keys()
    for name, entry in entries.items():
        figures = [entry[key] for key in UNITS if key in entry]
        assert len(figures) >= 3, name
        for number, source in figures:
            assert number > 0 and len(source) > 20, name
            assert source in HARDWARE[entry["device_kinds"][0]].source
        assert entry.keys() <= {"device_kinds", "torus_dims", "capability", "xla", *UNITS}, name
