"""Writes the generated blocks of README.md and docs/: the figures that a ledger, a plan or a config gives.

    python -m docs.generate               # all, three minutes on a core: `make docs`
    python -m docs.generate plans letters   # those of these names

A block stands between `<!-- generated: NAME arguments -->` and `<!-- end -->`. Its function below gets the text that is
there and the arguments, and returns what should be there. To add a row to a table of plans, write its first cell, and
generate. tests/docs/test_generated.py holds that generating changes nothing but line numbers.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import re
import shlex
import sys
import types

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import train
import train_any
from ledger.count.step import of_step
from ledger.machines.hardware import named
from ledger.machines.roofline import roofline
from ledger.pages.text import text as text_of_ledger
from runtime import program
from runtime.cluster import processes as cluster
from runtime.config.command_line import load
from runtime.terminal import RunError, wrapped
from shardlib.mesh import make_mesh
from tools import plan, plan_step

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?<=<!-- generated: )(\w+)(.*?)( -->\n)(.*?)(?=<!-- end -->)", re.S)
load_plan = functools.partial(load, plan_step.plan_class(train))


# == What the blocks are made of =======================================================================================
def fenced(lines):
    return "```\n" + "\n".join(lines) + "\n```\n"


def table(old, row):
    """The table again, each row made anew from the cells that are there; the first two lines stay."""
    head, rule, *rows = old.strip().splitlines()
    cells = [[cell.strip() for cell in each.strip("|").split("|")] for each in rows]
    return "\n".join([head, rule, *("| " + " | ".join(row(*each)) + " |" for each in cells)]) + "\n"


@functools.cache
def planned(*overrides):
    """What `tools.plan` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        plan.main(load_plan(overrides[0].removeprefix("--config-name="), list(overrides[1:])))
    return text.getvalue()


@functools.cache
def ledger_1b(attention):
    return plan_step.ledger_of(load_plan("c4_a100x8_1b", [f"model.attention={attention}"]))


@functools.cache
def ledger_on_cpu(name="local_test_synthetic", *overrides):
    """The ledger of a step as a run on simulated devices has it."""
    config = load_plan(name, list(overrides))
    mesh = make_mesh(vars(config.mesh), devices=jax.devices()[: config.mesh.d * config.mesh.t])
    with jax.set_mesh(mesh):
        traced = plan_step.trace(config, mesh, train.shapes(config))
    tokens = config.training.tokens.batch * config.training.tokens.len
    return of_step(traced, dict(mesh.shape), source=train.__file__, tokens=tokens, platform="cpu")


def sizes():
    """Of each letter in the small job, and its mesh."""
    config = load(train.Config, "local_test_synthetic")
    model, tokens = config.model, config.training.tokens
    letters = dict(B=tokens.batch, L=tokens.len, S=tokens.len, M=model.d_model, K=model.n_kv, Q=model.n_q_per_kv)
    return letters | dict(D=model.d_head, F=model.d_ff, V=model.vocab, layers=model.layers), vars(config.mesh)


# == The blocks ========================================================================================================
@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device of JAX, as far as a mesh and the table of hosts look at it."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def hosts(old):
    """docs/hosts.md: the table of two hosts, and what the small job sends between them."""
    gpus = [Gpu(each, each // 4, each // 4) for each in range(8)]
    mesh = cluster.lay_out(gpus, {"d": 4, "t": 2})
    table = cluster.table(mesh, ["gpu-01", "gpu-02"])
    return fenced([*table, "...", *cluster.sent_over_network(ledger_on_cpu(), mesh)])


# Of docs/training.md: what is asked for, and the keys.
CAPABILITIES = {
    "`r` `d`": ["mesh={r: 2, d: 2}"],
    "`e` `t`": ["mesh={d: 1, e: 2, t: 2}"],
    "`c`": ["mesh={d: 1, c: 2, t: 2}"],
    "`c` = 8": ["mesh={d: 1, c: 8}"],
    "ring": ["mesh={d: 1, c: 2}", "context=ring"],
    "`p`": ["mesh={d: 1, p: 2}", "training.pieces=2", "model.layers=4", "training.microbatches=2"],
    "dropout": ["training.dropout=0.1"],
    "8 bits": ["fp8=true"],
    "optimizers": ["training.optimizer=muon", "training.ema_decay=0.9", "training.z_loss=1e-4"],
}


def families(old):
    """docs/training.md: a row for each of configs/family/, and why something is refused."""
    reasons, rows = {}, []
    for name in sorted(path.stem for path in (ROOT / "configs/family").glob("*.yaml")):
        keys = [f"family={name}", *(["training.tokens.read_len=64"] if name == "t5" else [])]
        cells = [f"`{name}`"]
        for others in CAPABILITIES.values():
            config = load(train_any.Config, "any_synthetic", [*keys, *others])
            try:
                config = train_any.resolved(config)
                train_any.shapes(config)
                cells.append("✓")
            except RunError as refused:
                said = str(refused).partition(": ")
                reason = re.sub(r"model.n_kv = \d+", "model.n_kv", " ".join(said[2].split()))
                cells.append(reasons.setdefault(reason, chr(ord("a") + len(reasons))))
        rows.append(cells)
    head = ["`family=`", *CAPABILITIES]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", *(f"- {letter}: {reason}" for reason, letter in reasons.items())]) + "\n"


def ledger(old, attention, *starts):
    """docs/ledger.md: rows of the 1b model's ledger.txt, those that have one of these texts in them, in their order."""
    lines = text_of_ledger(ledger_1b(attention)).splitlines()
    rows = [next(line for line in lines if start in line) for start in starts]
    return fenced([line for line in lines if line in rows])


def plans(old, *base):
    """docs/it_does_not_fit.md: memory, and the least time, of the 1b model with the keys of each row."""

    def row(keys, memory, *others):
        every = {key.split("=")[0]: key for key in (*base, *keys.strip("`").split())}
        text = planned("--config-name=c4_h200x1_1b", *every.values())
        memory, size = re.search(r"forecast of the peak ([\d.]+ GB) of ([\d.]+) GB", text).groups()
        fits = float(memory.split()[0]) < 0.9 * float(size)
        overlapped = re.search(r"^  all +(?:[\d.]+ \S+ +){3}([\d.]+ \S+)", text, re.M)[1]
        return keys, memory, overlapped, "yes" if fits else "no"

    return table(old, row)


def settings(old, *machine):
    """docs/settings.md: the plan of a size of configs/scale.yaml on so many devices, with the keys of each row."""

    def row(size, devices, keys, *others):
        count = int(devices.replace(",", ""))
        given = ["program=train_any", f"size={size.strip('`')}", *machine, *keys.strip("`").split()]
        given = dict(key.split("=") for key in (f"training.tokens.batch={512 if count <= 512 else 2048}", *given))
        config = load(plan_step.plan_class(train_any), "scale", [f"{key}={value}" for key, value in given.items()])
        figures = plan_step.machine_of(config)
        config = plan_step.with_kernel(plan_step.on_mesh(program.resolved(config, train_any)), figures)
        ledger = plan_step.ledger_of(config, check=False)
        bound = roofline(ledger, figures, config.devices_per_host)
        if ledger.devices != count:
            raise ValueError(f"{keys} are {ledger.devices} devices, not {devices}")
        (update,) = (phase for phase in bound.phases if phase.name == "update")
        shares = [f"{each:.0%}" for each in (bound.mfu, bound.mfu_alone, update.sent_s / bound.step_s)]
        return size, devices, keys, f"{ledger.memory.bytes / 1e9:.1f} GB", *shares

    return table(old, row)


def refusal(old, *overrides):
    """docs/it_does_not_fit.md: how the plan says it."""
    text = " ".join(planned(*overrides).split())
    return fenced([wrapped(re.search(r"It will not fit: .*? To need less:", text)[0] + " ...")])


def floors_on_h200(old):
    """docs/performance.md: the plan's times in ms, and MFU; third: products at 790 TFLOP/s, memory beside them."""

    def row(name, *others):
        config, machine = re.fullmatch(r"`(\w+)` on (.*) H200", name).groups()
        *hosts, joined = re.findall(r"\d", machine)  # '8 ×' or '4 × 8'
        overrides = f"hardware=h200 hosts={hosts[0] if hosts else 1} devices_per_host={joined}"
        ledger = plan_step.ledger_of(
            plan_step.with_kernel(plan_step.on_mesh(load_plan(config, overrides.split())), named("h200"))
        )
        bound = roofline(ledger, named("h200"), int(joined))
        compute, memory, sending = bound.totals.values()
        third = ledger.model_flops / ledger.devices / (compute * 989 / 790 + memory) / 989e12
        times = [f"{1e3 * each:.1f}" for each in (compute, memory, sending, bound.step_s, bound.step_alone_s)]
        shares = [f"{bound.mfu:.1%}", f"{bound.mfu_alone:.1%}", f"{third:.0%}", f"{ledger.memory.bytes / 1e9:.2f} GB"]
        return name, *times, *shares

    return table(old, row)


def letters(old):
    """docs/reading.md: the small job's size of each letter."""
    return table(old, lambda letter, what, size: (letter, what, str(sizes()[0][letter.strip("`").split(",")[0]])))


def shapes(old):
    """docs/reading.md: each type's shape, whole and on a device."""
    (lengths, axes), code = sizes(), (ROOT / "train.py").read_text()

    def row(name, type_, *others):
        if (bare := type_.strip("`")) not in code:
            raise ValueError(f"{name} is of no type that train.py has: {bare}")
        whole, device = [], []
        for dim, *over in (each.split("/") for each in bare.split() if each[0] != "+"):
            size = lengths[dim] if dim in lengths else int(dim)
            whole.append(size)
            device.append(functools.reduce(lambda left, axis: left // axes[axis], over, size))
        return name, type_, *(" × ".join(map(str, each)) for each in (whole, device))

    return table(old, row)


def small_job(old):
    """docs/reading.md: parameters of the small job, and a step's totals on devices that compute in bfloat16."""
    state, _ = train.shapes(load(train.Config, "local_test_synthetic"))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
    kernel = types.SimpleNamespace(torus_dims=0, capability=0)
    ledger = plan_step.ledger_of(plan_step.with_kernel(load_plan("local_test_synthetic"), kernel))
    return (
        f"| parameters | {count:,} |\n|---|---|\n| weights and moments on a device, 12 bytes each over all devices "
        f"| {12 * count / 8 / 1e6:.2f} MB |\n| a step computes | {ledger.hardware_flops / 1e9:.1f} GFLOP |\n"
        f"| each device sends | {ledger.sent_bytes() / 1e6:.2f} MB |\n"
        f"| each device needs | {ledger.memory.bytes / 1e6:.1f} MB |\n"
    )


# == Pages =============================================================================================================
MADE = families, hosts, ledger, plans, settings, refusal, floors_on_h200, letters, shapes, small_job
FUNCTIONS = {each.__name__: each for each in MADE}


def blocks():
    """(page, name, arguments, text) of each block."""
    return [(page, found[1], found[2], found[4]) for page in PAGES for found in BLOCK.finditer(page.read_text())]


def made(name, arguments, old):
    """What a block should say."""
    return FUNCTIONS[name](old, *shlex.split(arguments))


def main(names):
    for page in PAGES:
        text = page.read_text()

        def anew(found):
            name, arguments, close, old = found.groups()
            return f"{name}{arguments}{close}{made(name, arguments, old) if name in names else old}"

        page.write_text(BLOCK.sub(anew, text))


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"  # what a terminal has
    main(sys.argv[1:] or FUNCTIONS)
