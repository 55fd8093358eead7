"""Says what a step costs on a machine you do not have: FLOPs, memory, bytes sent, and the least time it takes.

    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4
    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 folder=runs/plan         # and ledger.html
    python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 sweep=true                # the best meshes
    python -m tools.plan --config-name=c4_a100x8_1b hardware=tpu_v5p hosts=2 compile=true
    python -m tools.plan program=generate model=weights/llama hardware=h200 mesh.t=8 rows=64                # decoding

It plans any config of training on any mesh, or a model that decodes. Nothing runs, no tensor is read, and without
`compile` nothing is compiled. Expect an answer within seconds; docs/settings.md says how long a sweep takes.
`compile` takes minutes and requirements-plan.txt: it prints XLA's memory beside the forecast, every difference between
what is written and what is sent, and what runs while each collective is under way.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ledger.compiled import agreement, overlap
from ledger.count.step import Ledger
from ledger.machines import absent, hardware, roofline
from ledger.pages import contents, files
from ledger.units import gigabytes, number, percent
from runtime import program
from runtime.cluster.tuning import options
from runtime.config import command_line
from runtime.files import write_all
from runtime.run import with_shardings
from runtime.terminal import RunError, print_line, wrapped
from shardlib.mesh import make_mesh
from shardlib.shardtypes import mesh_text
from tools.plan_step import ledger_of, machine_of, on_mesh, plan_class, trace, with_kernel
from tools.plan_sweep import sweep

AGAIN = "CLEARSHARD_PLANS"  # in the environment of the process that start_again makes


def config_class(arguments: Sequence[str]) -> type:
    """The class of a plan's config, by the program that a command line names: a trainer, or what decodes."""
    if "program=generate" in arguments:
        from tools.plan_generate import PlanGenerate  # imports all models, which take time to start

        return PlanGenerate
    return plan_class(program.of_command_line(arguments))


def main(config: Any) -> None:
    """Prints what a step costs. Raises RunError where nothing can be planned, or compiled."""
    machine = machine_of(config)
    if config.program == "generate":
        from tools import plan_generate  # as config_class

        ledger, cache_bytes = plan_generate.ledger_of(config)
        title = plan_generate.title_of(config, ledger, cache_bytes)
        return show(config, ledger, machine, title, plan_generate.FIXES)
    trainer: Any = program.load(config.program)
    config = with_kernel(program.resolved(config, trainer), machine)
    if config.sweep:
        return sweep(config, machine, lambda best: of_the_run(config, best.estimate, best.ledger))
    config = on_mesh(config)
    try:
        if config.compile:
            start_again(config)
        ledger = ledger_of(config)
        show(config, ledger, machine, title_of(config, ledger))
        if config.compile:
            compile_absent(config, ledger)
    except absent.CannotCompile as error:
        raise RunError(str(error)) from None


def title_of(config: Any, ledger: Ledger) -> str:
    """The plan's first line: the model, the machine, the mesh and the batch."""
    tokens, parts = config.training.tokens, config.training.microbatches
    kernel = getattr(config.model, "attention", None)
    return (
        f"{config.paths.model_name} on {ledger.devices:,} × {config.hardware or 'n/a'}: "
        f"{config.hosts} host{'s' * (config.hosts > 1)} of {config.per_host}, {mesh_text(ledger.mesh)}; "
        f"{tokens.batch:,} × {tokens.len:,} tokens a step in {parts} microbatch{'es' * (parts > 1)}"
        + (f"; attention by {kernel}." if kernel else ".")
    )


def show(config: Any, ledger: Ledger, machine: hardware.Hardware, title: str, fixes: Sequence[str] = ()) -> None:
    """Prints a plan, and writes the ledger's pages where the config names a folder."""
    estimate = roofline.roofline(ledger, machine, config.per_host)
    print_line("\n".join(map(wrapped, [title, *lines_of(config, ledger, estimate, fixes)])))
    if config.folder is not None:
        write_all(config.folder, files.pages(ledger, estimate))
        print_line(f"{config.folder}: ledger.txt, ledger.json, ledger.html")


def lines_of(config: Any, ledger: Ledger, estimate: roofline.Roofline, fixes: Sequence[str] = ()) -> list[str]:
    """The summary, memory by kind, times, and what they assume. fixes: see `contents.summary`."""
    machine, sendings = estimate.hardware, contents.sendings(estimate)
    return [
        *contents.summary(ledger, machine.hbm_bytes, fixes),
        *of_the_run(config, estimate, ledger),
        "",
        *contents.memory(ledger, machine.hbm_bytes).text(),
        "",
        *contents.times(estimate).text(),
        f"MFU: at most {percent(estimate.mfu)}, if within each phase everything overlaps; "
        f"{percent(estimate.mfu_alone)} if nothing does.",
        "",
        *(sendings.text() if sendings.rows else ["Nothing is sent."]),
        "",
        "Assumed:",
        *(f"- {line}" for line in roofline.ASSUMPTIONS),
        f"Figures of one device: {machine.source}." if machine.source else "No hardware is given: no times.",
    ]


def of_the_run(config: Any, estimate: roofline.Roofline, ledger: Ledger) -> list[str]:
    """Tokens a second, and how long the tokens of a run take and what they cost, from all overlap to none; nothing
    where a step's time is not known."""
    if not estimate.step_s or not estimate.step_alone_s:
        return []
    bounds = estimate.step_s, estimate.step_alone_s
    is_too_large = ledger.memory.bytes > (estimate.hardware.hbm_bytes or ledger.memory.bytes)
    what = "If it did fit, tokens" if is_too_large else "Tokens"
    lines = [f"{what} a second: {' to '.join(number(ledger.tokens / s) for s in reversed(bounds))}."]
    training = getattr(config, "training", None)
    total = config.total_tokens or (training and training.steps * ledger.tokens)
    if total:
        times = [s * total / ledger.tokens for s in bounds]
        scales = {86400: "days", 3600: "hours", 60: "minutes", 1: "seconds"}
        scale = next((scale for scale in scales if times[1] > 2 * scale), 1)
        spent = [ledger.devices * s / 3600 for s in times]
        price = ""
        if config.price is not None:
            price = f", at {config.price:g} an hour: {_range(x * config.price for x in spent)}"
        takes = " to ".join(f"{s / scale:,.3g}" for s in times)
        lines.append(f"{number(total)} tokens: {takes} {scales[scale]}, {_range(spent)} device-hours{price}.")
    return [" ".join(lines)]


def _range(values: Iterable[float]) -> str:
    return " to ".join(f"{value:,.0f}" if value > 10 else f"{value:.2g}" for value in values)


# -- Compiled ----------------------------------------------------------------------------------------------------------
def start_again(config: Any) -> None:
    """Turns this process into one that JAX finds the absent machine in, unless it is that already: the environment that
    says so is read when JAX starts. Raises RunError if nothing can be compiled for it, or a package is missing."""
    variables = absent.environment(config.hardware or "no hardware")
    if all(os.environ.get(name) == value for name, value in variables.items()):
        return
    if AGAIN in os.environ:
        raise RunError("one command compiles for GPUs or for TPUs: start another one for the others")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables, AGAIN: "1"})


def compile_absent(config: Any, ledger: Ledger) -> None:
    """Compiles the step for its absent machine, and prints what XLA makes of it."""
    try:
        devices = absent.devices(config.hardware, config.hosts, config.per_host)
        trainer: Any = program.load(config.program)
        type_ = getattr(trainer, "state_type", lambda _: trainer.State)(config)
        mesh = make_mesh(dict(vars(config.mesh)), devices=devices)
        with jax.set_mesh(mesh):
            state, batch = trainer.shapes(config)
            shapes = with_shardings(state, type_), with_shardings(batch, type(batch))
            traced, began = trace(config, mesh, shapes), time.perf_counter()
            compiled = absent.compile(traced, options(devices[0]))
    except absent.TooLarge as error:
        raise RunError(f"XLA says that it does not fit (forecast {gigabytes(ledger.memory.bytes)}): {error}") from None
    analysis: Any = compiled.memory_analysis()
    took, text = time.perf_counter() - began, compiled.as_text() or ""
    print_line(f"\nCompiled for {len(devices)} × {devices[0].device_kind} that are not here, in {took:.0f} s.")
    peak = agreement.peak_bytes(compiled)
    forecast = f"forecast {gigabytes(ledger.memory.bytes)}, ratio {ledger.memory.bytes / peak:.2f}"
    print_line(f"XLA's memory of one device: {gigabytes(peak)}; {forecast}")
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    parts = analysis.argument_size_in_bytes, results, analysis.temp_size_in_bytes
    for name, part in zip(("arguments", "results in no argument's place", "temporary"), parts):
        print_line(f"  {name:<32}{gigabytes(part):>12}")
    rows = agreement.differences(ledger, text)
    print_line(
        f"\n{len(rows)} differences between what is written and what the compiled step sends{':' if rows else '.'}"
    )
    print_line("".join(f"  {row}\n" for row in rows))
    sent = overlap.overlaps(text)
    total = sum(row.bytes * row.times for row in sent)
    alone = sum(row.bytes * row.times for row in sent if row.stands_alone) / max(total, 1)
    share = f"{alone:.0%} of the operands' bytes are sent while nothing runs"
    print_line("\n".join([f"What runs while it sends, by the schedule ({share}):", *(f"  {row}" for row in sent)]))


if __name__ == "__main__":
    command_line.run(main, config_class(sys.argv[1:]))
