"""The table of hardware: known devices have the vendor's figures, unknown ones have none."""

import jax
import pytest

from ledger.machines.hardware import HARDWARE, peak_flops_per_s


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
