"""The figures of the pages that a ledger or a plan gives are still those that they give."""

import re
import shlex

import pytest
from ledgers import traced
from pages import text_of

import train
from ledger.count.step import of_step
from ledger.machines.hardware import named
from ledger.machines.roofline import roofline
from runtime.config.command_line import load
from tools import plan
from tools.benchmark import Benchmark, config_of, cpu_jobs


# == Forecasts: docs/it_does_not_fit.md ================================================================================
def forecasts():
    """(overrides, memory, time or '') of each row of the page's tables, after the command that stands before them."""
    rows, base = [], []
    for line in text_of("it_does_not_fit.md").splitlines():
        if line.startswith("python -m tools.plan "):
            base = [each for each in shlex.split(line)[3:] if each != "training.microbatches=1" or "h100" in line]
        elif found := re.match(r"\| `([^`]+)` \| ([\d.]+ GB) \|(?: ([\d.]+ m?s) \|)?", line):
            keys = {each.split("=")[0]: each for each in (*base, *found[1].split())}
            rows.append((tuple(keys.values()), found[2], found[3] or ""))
    return rows


def test_forecasts_are_found():
    """All rows of the tables, and the large vocabulary's two figures."""
    assert len(forecasts()) == 26 and sum(bool(time) for *_, time in forecasts()) == 12


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if index in (2, 17) else pytest.mark.slow) for index, row in enumerate(forecasts())],
    ids=lambda row: " ".join(row[0][1:]),
)
def test_forecasts(row, capsys):
    """The plan still forecasts the memory, and bounds the time, that the row has."""
    overrides, memory, time = row
    name = overrides[0].removeprefix("--config-name=")
    plan.main(load(plan.plan_class(train), name, overrides[1:]))
    text = capsys.readouterr().out
    assert f"forecast of the peak {memory} of " in text
    assert time in re.search(r"^  all .*$", text, re.M)[0]


@pytest.mark.slow
@pytest.mark.parametrize("chunk, memory", [(256, "35.61 GB"), (1024, "54.23 GB")])
def test_forecasts_of_a_large_vocabulary(chunk, memory, monkeypatch, capsys):
    """The two figures of the loss's chunk."""
    monkeypatch.setattr(train, "LOSS_CHUNK", chunk)
    keys = "hardware=a100_40gb training.microbatches=2 training.save_for_backward=inputs model.vocab=131072"
    plan.main(load(plan.plan_class(train), "c4_h200x1_1b", keys.split()))
    assert f"forecast of the peak {memory} of " in capsys.readouterr().out
    assert memory in text_of("it_does_not_fit.md")


# == Floors: docs/performance.md =======================================================================================
def table(first):
    """The cells of the page's table whose first cell is this, by row; each row's first cell is its key."""
    text = text_of("performance.md")
    text = text[text.index(f"| {first} |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def test_the_floors_of_the_cpu_jobs():
    """FLOPs, bytes sent, bytes to and from memory, and what these take at the rate that the row says."""
    rows = table("of a step, all devices")
    for column, job in enumerate(cpu_jobs(train)):
        config = config_of(Benchmark(), job)
        mesh = {"d": config.mesh.d, "t": config.mesh.t}
        tokens = config.training.tokens.batch * config.training.tokens.len
        ledger = of_step(traced(train, config), mesh, source=train.__file__, tokens=tokens, platform="cpu")
        moved = ledger.devices * ledger.memory.moved_bytes() / 1e9
        recomputed = ledger.devices * ledger.costs.flops("recomputed") / 1e9
        floors = [
            ("6 × parameters × tokens", f"{ledger.flops_6nd / 1e9:.1f}"),
            ("products that run", f"{ledger.hardware_flops / 1e9:.1f} ({recomputed:.1f})"),
            ("memory traffic by the ledger", f"{moved:.2f} GB"),
            ("it alone, at 39 GB/s", f"{moved / 39 * 1e3:.0f} ms,"),
            ("sent by a device", f"{ledger.sent_bytes() / 1e6:.0f}"),
        ]
        for name, figure in floors:
            (row,) = [cells for key, cells in rows.items() if key.startswith(name)]
            assert row[column].startswith(figure), (job, name, figure)


@pytest.mark.slow
def test_the_floors_on_h200s():
    """Each row of the table, from the plan's figures; the third case's MFU takes products at 790 TFLOP/s."""
    rows = table("config")
    assert len(rows) == 13
    for name, cells in rows.items():
        config, machine = re.fullmatch(r"`(\w+)` on (.*) H200", name).groups()
        *hosts, joined = re.findall(r"\d", machine)  # '8 ×' or '4 × 8'
        overrides = f"hardware=h200 hosts={hosts[0] if hosts else 1} devices_per_host={joined}"
        asked = plan.with_kernel(plan.on_mesh(load(plan.plan_class(train), config, overrides.split())), named("h200"))
        ledger = plan.ledger_of(asked)
        bound = roofline(ledger, named("h200"), int(joined))
        compute, memory, sending = bound.totals.values()
        third = ledger.model_flops / ledger.devices / (compute * 989 / 790 + memory) / 989e12
        times = [f"{1e3 * each:.1f}" for each in (compute, memory, sending, bound.step_s, bound.step_alone_s)]
        shares = [f"{bound.mfu:.1%}", f"{bound.mfu_alone:.1%}", f"{third:.0%}", f"{ledger.memory.bytes / 1e9:.2f} GB"]
        ours = [each.replace("%", " %") for each in (*times, *shares)]
        assert [each if each != "0.0" else "0" for each in ours] == cells, name


# == Kernels: docs/ledger.md ===========================================================================================
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["einsum", "blockwise", "cudnn_masked", "splash"])
def test_the_kernels_of_the_page(kernel):
    """FLOPs, and the forecast, of the 1b model with each."""
    (row,) = re.findall(rf"^\| {kernel} \| ([\d.e+]+) \| .* \| ([\d.]+ GB) \|$", text_of("ledger.md"), re.M)
    ledger = plan.ledger_of(load(plan.plan_class(train), "c4_a100x8_1b", [f"model.attention={kernel}"]))
    assert row == (f"{ledger.hardware_flops:.3e}", f"{ledger.memory.bytes / 1e9:.2f} GB")
