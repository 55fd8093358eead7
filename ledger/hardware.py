"""What the machines can do at most, by the name that JAX gives a device; for MFU and forecasts.

A figure is per `jax.Device`, dense (no structured sparsity) and as the vendor publishes it. A device that is not in the
table has no figure: it is printed `n/a` and is null in JSON, never guessed from a similar name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Peak bfloat16 rate of matrix products (FLOP/s, dense), high-bandwidth memory (bytes) and its speed (bytes/s), per device."""

    peak_flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float


# Memory sizes are in GiB. NVIDIA's "GB" of memory are GiB too: an H200, "141 GB", shows as 143771 MiB in nvidia-smi.
GIB = 2**30

# NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4): BF16 312 TFLOPS (624 with sparsity) for all forms;
# 1,935 GB/s (80 GB PCIe), 2,039 GB/s (80 GB SXM). The 40 GB models, 1,555 GB/s: first edition of the same data sheet.
A100_40GB = Hardware(312e12, 40 * GIB, 1555e9)
A100_80GB_PCIE = Hardware(312e12, 80 * GIB, 1935e9)
A100_80GB_SXM = Hardware(312e12, 80 * GIB, 2039e9)

# NVIDIA H100 data sheet, BF16 with sparsity, halved for dense: SXM 1,979 TFLOPS, 80 GB, 3.35 TB/s; NVL 1,671 TFLOPS, 94 GB,
# 3.9 TB/s. First edition for PCIe: 1,513 TFLOPS, 80 GB, 2 TB/s.
H100_SXM = Hardware(1979e12 / 2, 80 * GIB, 3.35e12)
H100_NVL = Hardware(1671e12 / 2, 94 * GIB, 3.9e12)
H100_PCIE = Hardware(1513e12 / 2, 80 * GIB, 2e12)

# NVIDIA H200 data sheet, BF16 with sparsity, halved for dense: SXM 1,979 TFLOPS, NVL 1,671 TFLOPS; both 141 GB, 4.8 TB/s.
H200_SXM = Hardware(1979e12 / 2, 141 * GIB, 4.8e12)
H200_NVL = Hardware(1671e12 / 2, 141 * GIB, 4.8e12)

# NVIDIA HGX B200 (8 GPUs): FP16/BF16 36 PFLOPS with sparsity, so 4.5 a GPU and 2.25 dense; DGX B200 data sheet:
# 1,440 GB and 64 TB/s for 8.
B200 = Hardware(2250e12, 180 * GIB, 8e12)

# Google Cloud TPU documentation, "System architecture" of each version (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x).
# v4 and v5p: both cores of a chip are one device ("megacore"). 7x: a chip of 2,307 TFLOPS, 192 GiB and 7,380 GB/s is two devices.
TPU_V4 = Hardware(275e12, 32 * GIB, 1200e9)
TPU_V5E = Hardware(197e12, 16 * GIB, 819e9)
TPU_V5P = Hardware(459e12, 95 * GIB, 2765e9)
TPU_V6E = Hardware(918e12, 32 * GIB, 1638e9)
TPU_7X = Hardware(2307e12 / 2, 192 * GIB // 2, 7380e9 / 2)

# Keys are `jax.Device.device_kind`: for GPUs the driver's name of the model, for TPUs libtpu's (0.0.42 calls the v5p
# 'TPU v5', the v5e 'TPU v5 lite' and the v6e 'TPU v6 lite'; JAX itself also accepts the names with a letter).
HARDWARE: dict[str, Hardware] = {
    "NVIDIA A100-PCIE-40GB": A100_40GB,
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA A100 80GB PCIe": A100_80GB_PCIE,
    "NVIDIA A100-SXM4-80GB": A100_80GB_SXM,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H200": H200_SXM,
    "NVIDIA H200 NVL": H200_NVL,
    "NVIDIA B200": B200,
    "TPU v4": TPU_V4,
    "TPU v5 lite": TPU_V5E,
    "TPU v5e": TPU_V5E,
    "TPU v5": TPU_V5P,
    "TPU v5p": TPU_V5P,
    "TPU v6 lite": TPU_V6E,
    "TPU v6e": TPU_V6E,
    "TPU7x": TPU_7X,
}


def peak_flops_per_s(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of one device, or None where it is not known.

    >>> peak_flops_per_s("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    >>> peak_flops_per_s("cpu")  # None: MFU is n/a
    """
    hardware = HARDWARE.get(device_kind)
    return None if hardware is None else hardware.peak_flops_per_s
