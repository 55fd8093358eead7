"""Compiles a step for machines that are not there: TPU slices with libtpu, NVIDIA GPUs with a description of the model.

    os.environ.update(environment("h200"))                    # before JAX starts: best in a process of its own
    mesh = make_mesh({"d": 8, "t": 4}, devices=devices("h200", hosts=4, devices_per_host=8))
    with jax.set_mesh(mesh):
        compiled = compile(jax.jit(step).trace(*shapes_with_shardings))

The packages are those of requirements-plan.txt. XLA's flags hold as on a real machine: XLA_FLAGS, and LIBTPU_INIT_ARGS
for a TPU's. Nothing can be tried out without a device, so that XLA chooses kernels
by rules instead of by timing them: schedule and memory are close to the real ones, not the same.
"""

import importlib.util
import math
import re
from collections.abc import Mapping

import jax
from jax.experimental import topologies

from ledger.machines.hardware import NAMES

INSTALL = "pip install --no-deps -r requirements-plan.txt"


class CannotCompile(Exception):
    """A program for an absent machine that cannot be: the message says why."""


class TooLarge(CannotCompile):
    """XLA says that the program does not fit into a device's memory; the message has the bytes."""


def environment(name: str) -> dict[str, str]:
    """Environment variables under which JAX compiles for this machine. Raises `CannotCompile` if nothing can."""
    if name not in NAMES:
        raise CannotCompile(f"for {name} nothing can be compiled; there are {', '.join(NAMES)}")
    if "tpu" in NAMES[name].xla:
        wanted, variables = ["libtpu"], {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        # libtpu asks for the hosts of its slice; told "localhost", it asks nobody.
        variables |= {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_STDERR_LOG_LEVEL": "3"}
    else:
        wanted, variables = ["jax_cuda13_plugin", "jax_plugins.xla_cuda13"], {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        variables |= {"JAX_PLATFORMS": "", "CUDA_VISIBLE_DEVICES": ""}  # a GPU that is there is left alone
    missing = [package for package in wanted if not _is_there(package)]
    if missing:
        raise CannotCompile(f"compiling for {name} needs {', '.join(missing)}, which is not installed: {INSTALL}")
    return {**variables, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def devices(name: str, hosts: int, devices_per_host: int) -> list[jax.Device]:
    """The devices of an absent machine. Raises `CannotCompile` if there is none of this size."""
    machine = NAMES[name]
    if kind := machine.xla.get("tpu"):
        chips = slice_of(hosts * devices_per_host // machine.xla["devices_per_chip"], machine.torus_dims)
        topology = {"platform": "tpu", "topology_name": f"{kind}:{'x'.join(map(str, chips))}"}
        if name == "tpu_v4":  # both cores of a chip as one device, which later chips are by themselves
            topology["chip_config_name"] = "megacore"
    else:
        config = target_config(name)
        topology = {"platform": "cuda", "target_config": config, "topology": f"1x{hosts}x{devices_per_host}"}
    try:
        described = topologies.get_topology_desc(**topology).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise CannotCompile(f"{name}: {str(error).strip().splitlines()[0]}") from error
    if len(described) != hosts * devices_per_host:
        raise CannotCompile(f"{name}: {topology} has {len(described)} devices, not {hosts * devices_per_host}")
    return list(described)


def slice_of(chips: int, dims: int) -> tuple[int, ...]:
    """The shape of a TPU slice, as near to a cube as it can be; its smallest is 2 × 2 (× 1).

    >>> slice_of(32, 3)
    (2, 4, 4)
    """
    shape = [2, 2, 1][:dims]
    while 2 * math.prod(shape) <= chips:
        smallest = min(range(dims), key=lambda dim: (shape[dim], -dim))
        shape[smallest] *= 2
    if math.prod(shape) != chips:
        raise CannotCompile(f"there is no slice of {chips} chips: expected 4, 8, 16, 32, ...")
    return tuple(shape)


def target_config(name: str) -> str:
    """The text of XLA's GpuTargetConfigProto for a GPU of hardware.yaml, with what all of them have in common."""
    figures = "\n".join(f"  {key}: {value}" for key, value in NAMES[name].xla.items())
    return f"""
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
gpu_device_info {{
{figures}
  shared_memory_per_block: 49152 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}}"""


def compile(traced: jax.stages.Traced, options: Mapping[str, str | bool]) -> jax.stages.Compiled:
    """Compiles a step traced on a mesh of absent devices, with XLA's options. Raises `TooLarge` if it does not fit."""
    try:
        return traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TooLarge(_bytes_line(str(error))) from error


def _bytes_line(text: str) -> str:
    """The sentence with the bytes, out of XLA's pages about a program that is too large."""
    match = re.search(r"[^.\n]*(?:[Uu]sed|[Nn]eeds?|allocat)\w*[^\n]*?\d[\d.]*\s*[KMG]?i?B?\b[^\n]*", text)
    return (match[0] if match else text.splitlines()[0]).strip().removeprefix("RESOURCE_EXHAUSTED: ")
