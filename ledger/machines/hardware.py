"""What the machines can do at most, for MFU, the roofline and plans: by the name that JAX gives a device, or a short
one.

    of_device_kind("NVIDIA H200")            # the name of a jax.Device; None where it is not known
    named("h200"), named("tpu_v5p")          # the names of a plan's `hardware=`

A figure is per `jax.Device`, dense (no structured sparsity) and as the vendor publishes it. A device that is not in the
table has no figure: it is printed `n/a` and is null in JSON, never guessed from a similar name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device: bfloat16 matrix products (FLOP/s, dense), high-bandwidth memory (bytes, and bytes/s), and links.

    Links are in bytes/s that leave a device, while as many enter it: `link` to the devices of its host or slice,
    `network` its share of the host's adapters to other hosts or slices. None where the vendor publishes none.
    """

    peak_flops_per_s: float | None
    hbm_bytes: int | None
    hbm_bytes_per_s: float | None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    slice_devices: int | None = None  # that `link` joins at most, over many hosts; None: the devices of one host
    torus_dims: int = 0  # dims of the torus that the links form, each with two links; 0: all through switches
    capability: float = 0  # an NVIDIA GPU's compute capability, by which kernels are chosen; 0 of all others
    source: str = ""


# Memory sizes are in GiB. NVIDIA's "GB" of memory are GiB too: an H200, "141 GB", shows as 143771 MiB in nvidia-smi.
GIB = 2**30
# Data sheets give a network's speed in Gb/s.
GBIT = 1e9 / 8

# PCIe models have no switch between GPUs, and no network of their own: n/a.
_A100_SHEET = "NVIDIA A100 data sheet, r4: BF16 312 TFLOPS (624 with sparsity); "
_A100_LINKS = "NVLink 600 GB/s both directions together; DGX A100 data sheet: 8 ConnectX-6 of 200 Gb/s for 8 GPUs"
A100_40GB_PCIE = Hardware(
    312e12, 40 * GIB, 1555e9, capability=8.0, source=_A100_SHEET + "40 GB, 1,555 GB/s (first edition)"
)
A100_40GB_SXM = Hardware(
    312e12,
    40 * GIB,
    1555e9,
    300e9,
    200 * GBIT,
    capability=8.0,
    source=_A100_SHEET + "40 GB, 1,555 GB/s (first edition); " + _A100_LINKS,
)
A100_80GB_PCIE = Hardware(312e12, 80 * GIB, 1935e9, capability=8.0, source=_A100_SHEET + "80 GB PCIe, 1,935 GB/s")
A100_80GB_SXM = Hardware(
    312e12,
    80 * GIB,
    2039e9,
    300e9,
    200 * GBIT,
    capability=8.0,
    source=_A100_SHEET + "80 GB SXM, 2,039 GB/s; " + _A100_LINKS,
)

# BF16 with sparsity, halved for dense.
_HOPPER_LINKS = "NVLink 900 GB/s both directions together; DGX BasePOD reference: 8 ConnectX-7 of 400 Gb/s for 8 GPUs"
H100_SXM = Hardware(
    1979e12 / 2, 80 * GIB, 3.35e12, 450e9, 400 * GBIT,
    capability=9.0, source="NVIDIA H100 data sheet, SXM: BF16 1,979 TFLOPS with sparsity, 80 GB, 3.35 TB/s; " + _HOPPER_LINKS,
)  # fmt: skip
H100_NVL = Hardware(
    1671e12 / 2,
    94 * GIB,
    3.9e12,
    capability=9.0,
    source="NVIDIA H100 data sheet, NVL: BF16 1,671 TFLOPS with sparsity, 94 GB, 3.9 TB/s",
)
H100_PCIE = Hardware(
    1513e12 / 2, 80 * GIB, 2e12,
    capability=9.0, source="NVIDIA H100 data sheet, first edition, PCIe: BF16 1,513 TFLOPS with sparsity, 80 GB, 2 TB/s",
)  # fmt: skip
H200_SXM = Hardware(
    1979e12 / 2, 141 * GIB, 4.8e12, 450e9, 400 * GBIT,
    capability=9.0, source="NVIDIA H200 data sheet, SXM: BF16 1,979 TFLOPS with sparsity, 141 GB, 4.8 TB/s; " + _HOPPER_LINKS,
)  # fmt: skip
H200_NVL = Hardware(
    1671e12 / 2, 141 * GIB, 4.8e12,
    capability=9.0, source="NVIDIA H200 data sheet, NVL: BF16 1,671 TFLOPS with sparsity, 141 GB, 4.8 TB/s",
)  # fmt: skip
B200 = Hardware(
    2250e12, 180 * GIB, 8e12, 900e9, 400 * GBIT,
    capability=10.0, source="NVIDIA HGX B200 (8 GPUs): FP16/BF16 36 PFLOPS with sparsity, NVLink 1.8 TB/s a GPU both directions together; "
    "DGX B200 data sheet: 1,440 GB and 64 TB/s for 8; DGX BasePOD reference: 8 ConnectX-7 of 400 Gb/s for 8 GPUs",
)  # fmt: skip

# Of a TPU's links (ICI), which the documentation counts in both directions together, half send. A chip is one device
# (v4 and v5p: both its cores, "megacore"), but a chip of 7x is two, which share its links and its network.
_DOCS = "Google Cloud TPU documentation, System architecture of "
TPU_V4 = Hardware(
    275e12, 32 * GIB, 1200e9, 300e9, None, 4096, 3,
    source=_DOCS + "v4: 275 TFLOPS, 32 GiB, 1200 GB/s, 4096 chips a pod; ICI 6 × 50 GB/s: Jouppi et al. 2023, table 4; "
    "the network's share of a chip is not published",
)  # fmt: skip
TPU_V5E = Hardware(
    197e12, 16 * GIB, 819e9, 200e9, 25 * GBIT, 256, 2,
    source=_DOCS + "v5e: 197 TFLOPS, 16 GB, 819 GB/s, ICI 400 GB/s bidirectional, 256 chips a pod; 2 × 100 Gb/s for the "
    "8 chips of a host",
)  # fmt: skip
TPU_V5P = Hardware(
    459e12, 95 * GIB, 2765e9, 600e9, 50 * GBIT, 8960, 3,
    source=_DOCS + "v5p: 459 TFLOPS, 95 GiB, 2765 GB/s, ICI 1200 GB/s bidirectional, DCN 50 Gb/s a chip, 8960 chips a pod",
)  # fmt: skip
TPU_V6E = Hardware(
    918e12, 32 * GIB, 1638e9, 400e9, 100 * GBIT, 256, 2,
    source=_DOCS + "v6e and tpu7x: 918 TFLOPS, 32 GB, 1638 GB/s, ICI 800 GB/s bidirectional, DCN 100 Gb/s a chip, 256 "
    "chips a pod",
)  # fmt: skip
TPU_7X = Hardware(
    2307e12 / 2, 192 * GIB // 2, 7380e9 / 2, 600e9 / 2, 100 * GBIT / 2, 2 * 9216, 3,
    source=_DOCS + "tpu7x, of a chip: 2307 TFLOPS, 192 GiB, 7380 GB/s, ICI 1200 GB/s bidirectional, DCN 100 Gb/s, 9216 "
    "chips a pod",
)  # fmt: skip

# Keys are `jax.Device.device_kind`: for GPUs the driver's name of the model, for TPUs libtpu's (0.0.42 calls the v5p
# 'TPU v5', the v5e 'TPU v5 lite' and the v6e 'TPU v6 lite'; JAX itself also accepts the names with a letter).
HARDWARE: dict[str, Hardware] = {
    "NVIDIA A100-PCIE-40GB": A100_40GB_PCIE,
    "NVIDIA A100-SXM4-40GB": A100_40GB_SXM,
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

# Names for a command line. GPUs are the SXM models, which is what a host of eight has.
NAMES: dict[str, Hardware] = {
    "a100_40gb": A100_40GB_SXM,
    "a100_80gb": A100_80GB_SXM,
    "h100": H100_SXM,
    "h200": H200_SXM,
    "b200": B200,
    "tpu_v4": TPU_V4,
    "tpu_v5e": TPU_V5E,
    "tpu_v5p": TPU_V5P,
    "tpu_v6e": TPU_V6E,
    "tpu_v7x": TPU_7X,
}


def of_device_kind(device_kind: str) -> Hardware | None:
    """The figures of a `jax.Device`, by its `device_kind`; None where they are not known."""
    return HARDWARE.get(device_kind)


def named(name: str) -> Hardware | None:
    """The figures by a short name of NAMES, or by a `device_kind`; None where they are not known."""
    return NAMES.get(name) or HARDWARE.get(name)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of one device, or None where it is not known.

    >>> peak_flops_per_s("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    >>> peak_flops_per_s("cpu")  # None: MFU is n/a
    """
    hardware = of_device_kind(device_kind)
    return None if hardware is None else hardware.peak_flops_per_s
