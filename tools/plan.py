"""What a step costs on a machine that is not here: FLOPs, memory, bytes sent, and how long it takes at the least.

    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 devices_per_host=8
    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 folder=runs/plan         # and ledger.html
    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 sweep=true                # every mesh
    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=1 sweep=true up_to_devices=256 picture=mfu.svg
    python -m tools.plan --config-name=c4_a100x8_1b hardware=tpu_v5p hosts=2 devices_per_host=4 compile=true

Any config of training, on any mesh; nothing runs, and without `compile` nothing is compiled.
"""

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ledger.count.memory import GROUPS
from ledger.count.step import Ledger
from ledger.machines import absent, hardware, roofline
from ledger.pages import files
from ledger.pages.text import summary
from ledger.units import gigabytes
from runtime import program
from runtime.config import command_line
from runtime.terminal import RunError
from shardlib.arrays import mesh_text
from tools.plan_step import PlanKeys, ledger_of, machine_of, on_mesh, plan_class, with_kernel
from tools.plan_sweep import sweep


def main(config: PlanKeys) -> None:
    """What a step costs on a machine that is not here: FLOPs, memory, bytes sent, and how long it takes at the least."""
    machine = machine_of(config)
    config = with_kernel(config, machine)
    if config.sweep:
        if config.folder is not None:
            raise RunError("folder is for the ledger of one mesh: leave it or sweep=true out")
        return sweep(config, machine)
    if config.up_to_devices or config.picture:
        raise RunError("up_to_devices and picture belong to a sweep: add sweep=true")
    config = on_mesh(config)
    variables = environment(config) if config.compile else {}
    ledger = ledger_of(config)
    print("\n".join(report(config, ledger, machine)), flush=True)
    if config.folder is not None:
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        files.write(ledger, config.folder, roofline.roofline(ledger, machine, config.devices_per_host))
        print(f"{config.folder}: ledger.txt, ledger.json, ledger.html")
    if config.compile:
        compile_absent(config, variables)


def report(config: PlanKeys, ledger: Ledger, machine: hardware.Hardware) -> list[str]:
    """What to print: the summary, memory by kind, times, and what they assume."""
    tokens, kernel = config.training.tokens, getattr(config.model, "attention", None)
    lines = [
        f"{config.paths.model_name} on {math.prod(ledger.mesh.values()):,} × {config.hardware or 'n/a'}: {config.hosts} "
        f"host{'s' * (config.hosts > 1)} of "
        f"{config.devices_per_host}, {mesh_text(ledger.mesh)}; {tokens.batch:,} × {tokens.len:,} tokens a step in "
        f"{config.training.microbatches} microbatch{'es' * (config.training.microbatches > 1)}"
        + (f"; attention by {kernel}." if kernel else "."),
        *summary(ledger, machine.hbm_bytes),
        "",
        f"Memory of one device: forecast of the peak {gigabytes(ledger.memory.bytes)} of "
        f"{'n/a' if machine.hbm_bytes is None else gigabytes(machine.hbm_bytes)}",
    ]
    most = max(machine.hbm_bytes or 0, ledger.memory.bytes)
    for kind in GROUPS:
        part = ledger.memory.by_kind()[kind]
        lines.append(f"  {kind:<18}{gigabytes(part):>12}{part / most:>6.0%}  {'█' * round(60 * part / most)}".rstrip())
    estimate = roofline.roofline(ledger, machine, config.devices_per_host)
    lines += ["", *roofline.text(estimate), "", "Assumed:", *(f"- {each}" for each in roofline.ASSUMPTIONS)]
    return [
        *lines,
        f"Figures of one device: {machine.source}." if machine.source else "No hardware is given: no times.",
    ]


def environment(config: PlanKeys) -> dict[str, str]:
    """Of the process that compiles. Raises RunError if nothing can, or a package is missing."""
    try:
        return absent.environment(config.hardware or "no hardware")
    except absent.CannotCompile as error:
        raise RunError(str(error)) from None


def compile_absent(config: PlanKeys, variables: dict[str, str]) -> None:
    """Compiles the step in a process of its own, whose environment says for what. Raises RunError if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "planned.yaml").write_text(command_line.to_yaml(config))
        command = [sys.executable, "-m", "tools.plan_compile", f"--config-dir={folder}", "--config-name=planned"]
        root = Path(__file__).resolve().parents[1]
        if subprocess.run(command, cwd=root, env={**os.environ, **variables}, check=False).returncode:
            raise RunError("the step was not compiled, for the reason above")


if __name__ == "__main__":
    command_line.run(main, plan_class(program.of_command_line(sys.argv[1:])), "plan")
