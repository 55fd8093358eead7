"""Compiles a plan's step for its absent machine, and says what XLA makes of it: `python -m tools.plan compile=true`
starts this in a process whose environment says for what.

Prints XLA's memory beside the forecast, every difference between what is written and what is sent, and what runs while
each collective is under way.
"""

import sys
import time

import jax

from ledger.compiled import check, overlap
from ledger.machines import absent
from ledger.units import gigabytes
from runtime import program
from runtime.cluster.tuning import options
from runtime.config import command_line
from runtime.run import with_shardings
from runtime.terminal import RunError
from shardlib.mesh import make_mesh
from tools.plan_step import PlanKeys, ledger_of, plan_class, trace


def main(config: PlanKeys) -> None:
    """Compiles a plan's step for its absent machine; `python -m tools.plan compile=true` starts it."""
    ledger = ledger_of(config)
    try:
        devices = absent.devices(config.hardware, config.hosts, config.devices_per_host)
        trainer, mesh = program.load(config.program), make_mesh(vars(config.mesh), devices=devices)
        with jax.set_mesh(mesh):
            shapes = with_shardings(trainer.shapes(config), tuple[trainer.State, trainer.TokenBatch])
            traced = trace(config, mesh, shapes)
            began = time.perf_counter()
            compiled = absent.compile(traced, options(devices[0]))
    except absent.TooLarge as error:
        raise RunError(f"XLA says that it does not fit (forecast {gigabytes(ledger.memory.bytes)}): {error}") from None
    except absent.CannotCompile as error:
        raise RunError(str(error)) from None
    seconds = time.perf_counter() - began
    print(f"\nCompiled for {len(devices)} × {devices[0].device_kind} that are not here, in {seconds:.0f} s.")
    print("\n".join(memory(ledger, compiled)))
    rows = check.differences(ledger, compiled.as_text())
    print(f"\n{len(rows)} differences between what is written and what the compiled step sends{':' if rows else '.'}")
    for row in rows:
        print(f"  {row}")
    sent = overlap.overlaps(compiled.as_text())
    alone = sum(row.bytes * row.times for row in sent if row.stands_alone) / max(
        sum(row.bytes * row.times for row in sent), 1
    )
    print(
        f"\nWhat runs while it sends, by the schedule ({alone:.0%} of the operands' bytes are sent while nothing runs):"
    )
    for row in sent:
        print(f"  {row}")


def memory(ledger, compiled: jax.stages.Compiled) -> list[str]:
    """XLA's memory of a device beside the forecast's."""
    analysis, peak = compiled.memory_analysis(), check.peak_bytes(compiled)
    parts = {
        "arguments": analysis.argument_size_in_bytes,
        "results in no argument's place": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
    }
    return [
        f"XLA's memory of one device: {gigabytes(peak)}; forecast {gigabytes(ledger.memory.bytes)}, ratio "
        f"{ledger.memory.bytes / peak:.2f}",
        *(f"  {name:<32}{gigabytes(part):>12}" for name, part in parts.items()),
    ]


if __name__ == "__main__":
    command_line.run(main, plan_class(program.of_command_line(sys.argv[1:])), "plan")
