"""Writes the generated blocks of README.md and docs/: the figures that a ledger, a plan or a config gives.

    python -m docs.generate                  # all, three minutes on a core: `make docs`
    python -m docs.generate plans notebook   # those of these names
    python -m docs.generate released         # runtime/released.json: which models are this project's own

A block stands between `<!-- generated: NAME arguments -->` and `<!-- end -->`. Its function below gets the text that is
there and the arguments, and returns what should be there. To add a row to a table of plans, write its first cell, and
generate. tests/docs/test_generated.py holds that generating changes nothing but line numbers.
`notebook` executes docs/learn_sharding.ipynb.
"""

import contextlib
import functools
import importlib
import io
import json
import os
import pathlib
import re
import shlex
import sys
import textwrap

import train
import train_any
from ledger.machines.roofline import roofline
from ledger.pages.text import text as text_of_ledger
from models import huggingface
from runtime import program
from runtime.config.command_line import load
from runtime.config.help import help_of_keys
from runtime.terminal import RunError, wrapped
from tools import plan, plan_step

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = ROOT / "docs/learn_sharding.ipynb"
BLOCK = re.compile(r"(?<=<!-- generated: )(\w+)(.*?)( -->\n)(.*?)(?=<!-- end -->)", re.S)
load_plan = functools.partial(load, plan_step.plan_class(train))


# == What the blocks are made of =======================================================================================
def fenced(lines):
    return "```\n" + "\n".join(lines) + "\n```\n"


def table(old, row):
    """Rebuilds a table: `row` makes each row from its present cells; the first two lines stay."""
    head, rule, *rows = old.strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return "\n".join([head, rule, *("| " + " | ".join(row(*row_cells)) + " |" for row_cells in cells)]) + "\n"


@functools.cache
def planned(*overrides):
    """The lines that `tools.plan` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        plan.main(load_plan(overrides[0].removeprefix("--config-name="), list(overrides[1:])))
    return text.getvalue()


@functools.cache
def ledger_1b(attention):
    return plan_step.ledger_of(load_plan("c4_a100x8_1b", [f"model.attention={attention}"]))


# == The blocks ========================================================================================================
# Of docs/at_scale.md: what is tried with each family, and the keys.
CAPABILITIES = {
    "`r` and `d`": ["mesh={r: 2, d: 2}"],
    "`e` and `t`": ["mesh={d: 1, e: 2, t: 2}"],
    "`c`": ["mesh={d: 1, c: 2, t: 2}"],
    "`c` beyond the heads": ["mesh={d: 1, c: 8}"],
    "`context=ring`": ["mesh={d: 1, c: 2}", "context=ring"],
    "`p`": ["mesh={d: 1, p: 2}", "training.pieces=2", "model.layers=4", "training.microbatches=2"],
    "dropout": ["training.dropout=0.1"],
    "`fp8=true`": ["fp8=true"],
    "optimizers": ["training.optimizer=muon", "training.ema_decay=0.9", "training.z_loss=1e-4"],
}


def families(old):
    """docs/at_scale.md: what families of configs/family/ refuse, and why."""
    refused = {}
    for name in sorted(path.stem for path in (ROOT / "configs/family").glob("*.yaml")):
        keys = [f"family={name}", *(["training.tokens.read_len=64"] if name == "t5" else [])]
        for what, others in CAPABILITIES.items():
            config = load(train_any.Config, "any_synthetic", [*keys, *others])
            try:
                config = train_any.resolved(config)
                train_any.shapes(config)
            except RunError as error:
                said = str(error).partition(": ")
                reason = re.sub(r"model.n_kv = \d+", "model.n_kv", " ".join(said[2].split()))
                names, whats = refused.setdefault(reason, ({}, {}))
                names[f"`{name}`"] = whats[what] = None  # a set in the order of insertion
    lines = (f"- {', '.join(names)}, {', '.join(whats)}: {reason}" for reason, (names, whats) in refused.items())
    return "".join(textwrap.fill(line, 120, subsequent_indent="  ") + "\n" for line in lines)


def keys(old, *names):
    """docs/optimizers.md: keys of train_any's section `training`, as --help says them."""
    text = "\n".join(help_of_keys(train_any.Config))
    rows = ["| key | type and default | what it does |", "|---|---|---|"]
    for name in names:
        kind, explained = re.search(rf"^  training\.{name}: (.*)\n((?: {{6}}.*\n?)+)", text, re.M).groups()
        rows.append(f"| `training.{name}` | {kind} | {' '.join(explained.split())} |")
    return "\n".join(rows) + "\n"


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
        keyed = ["program=train_any", f"size={size.strip('`')}", *machine, *keys.strip("`").split()]
        keyed = dict(key.split("=") for key in (f"training.tokens.batch={512 if count <= 512 else 2048}", *keyed))
        config = load(plan_step.plan_class(train_any), "scale", [f"{key}={value}" for key, value in keyed.items()])
        figures = plan_step.machine_of(config)
        config = plan_step.with_kernel(plan_step.on_mesh(program.resolved(config, train_any)), figures)
        ledger = plan_step.ledger_of(config, check=False)
        bound = roofline(ledger, figures, config.per_host)
        if ledger.devices != count:
            raise ValueError(f"{keys} are {ledger.devices} devices, not {devices}")
        shares = [f"{share:.0%}" for share in (bound.mfu, bound.mfu_alone)]
        return size, devices, keys, f"{ledger.memory.bytes / 1e9:.1f} GB", *shares

    return table(old, row)


def refusal(old, *overrides):
    """docs/it_does_not_fit.md: how the plan says it."""
    text = " ".join(planned(*overrides).split())
    return fenced([wrapped(re.search(r"It will not fit: .*? To need less:", text)[0] + " ...")])


# == Pages =============================================================================================================
MADE = families, keys, ledger, plans, settings, refusal
FUNCTIONS = {function.__name__: function for function in MADE}


def blocks():
    """(page, name, arguments, text) of each block."""
    return [(page, match[1], match[2], match[4]) for page in PAGES for match in BLOCK.finditer(page.read_text())]


def made(name, arguments, old):
    """The text that a block should have."""
    return FUNCTIONS[name](old, *shlex.split(arguments))


def executed_notebook():
    """docs/learn_sharding.ipynb with what its cells print, by Jupyter."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    return nbformat.writes(nbclient.NotebookClient(notebook, resources=where, record_timing=False).execute())


def released():
    """runtime/released.json: what the two trainers' models are made of, and hashes of all files that compute one."""
    trainers = {name: program.parts_of((ROOT / f"{name}.py").read_text()) for name in ("train", "train_any")}
    families = [importlib.import_module(name) for name in huggingface.families().values()]
    files = program.of_model(program.files_of("train_any", *families), "train_any")
    return json.dumps({**trainers, "files": files}, indent=0, sort_keys=True) + "\n"


def main(names):
    if "released" in names:
        program.RELEASED.write_text(released())
    if "notebook" in names:
        NOTEBOOK.write_text(executed_notebook() + "\n")
    for page in PAGES:
        text = page.read_text()

        def anew(match):
            name, arguments, close, old = match.groups()
            return f"{name}{arguments}{close}{made(name, arguments, old) if name in names else old}"

        page.write_text(BLOCK.sub(anew, text))


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"  # what a terminal has
    main(sys.argv[1:] or [*FUNCTIONS, "notebook", "released"])
