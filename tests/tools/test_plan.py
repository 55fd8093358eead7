"""`python -m tools.plan`: machines and meshes, sweeps, the picture, and programs compiled for what is not there."""

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import time
import types
from unittest import mock

import jax
import pytest
from pages import ROOT, run_in
from parts import assert_refuses

import train
import train_any
from ledger.compiled.collectives import compiled
from ledger.compiled.overlap import overlaps
from ledger.machines import absent
from ledger.machines.absent import CannotCompile, slice_of, target_config
from runtime import program
from runtime.config.command_line import load
from runtime.terminal import RunError
from tools import plan, plan_step, plan_sweep

SMALL = (
    "model.d_model=64", "model.n_kv=4", "model.d_head=8", "model.d_ff=64", "model.layers=2", "model.vocab=128",
    "training.tokens.batch=16", "training.tokens.len=32",
)  # fmt: skip


def config_of(name, *overrides):
    return load(plan_step.plan_class(train), name, overrides)


def planned(capsys, name, *overrides):
    """What the tool prints."""
    with mock.patch.dict(os.environ, COLUMNS="500"):
        plan.main(config_of(name, *overrides))
    return capsys.readouterr().out


def test_a_plan(capsys):
    """Four hosts of eight H200s plan the 1b model: the mesh's d takes them, and the text has the ledger's figures."""
    text = planned(capsys, "c4_a100x8_1b", "hardware=h200", "hosts=4", "devices_per_host=8")
    lines = text.splitlines()
    assert lines[0] == (
        "c4_a100x8_1b on 32 × h200: 4 hosts of 8, mesh d=32 × t=1; 64 × 1,024 tokens a step in 1 microbatch; "
        "attention by cudnn_masked."
    )
    assert lines[1].startswith("A step: 4.024e+14 model FLOPs, 4.035e+14 with what is recomputed; each device sends ")
    assert "of 151.40 GB (forecast)" in lines[1]
    assert re.search(r"\n  weights +0\.13 GB +< 0\.1%\n", text)
    assert re.search(r"\n  all .* communication\nMFU: at most \d\d\.\d%, if within each phase ", text)
    assert "- Collectives go around a ring at the links' full speed, one after another, without latency; " in text
    assert "Figures of one device: NVIDIA H200 data sheet" in text


def test_a_plan_of_4096_devices(capsys):
    """The 2b model on 512 × 8 takes less than 20 s of CPU time."""
    began = time.process_time()
    keys = ["mesh.d=512", "mesh.t=8", "training.tokens.batch=4096", "hardware=h200", "hosts=512"]
    text = planned(capsys, "c4_a100x8_2b", *keys)
    assert time.process_time() - began < 20
    assert text.startswith("c4_a100x8_2b on 4,096 × h200: 512 hosts of 8, mesh d=512 × t=8; 4,096 × 1,024 tokens")


def test_how_long_and_at_which_price(capsys):
    """Days are tokens over tokens a second, for total_tokens or the config's steps; the price is device-hours times
    price."""
    keys = ["hardware=h200", "hosts=4", "training.tokens.batch=256"]
    text = planned(capsys, "c4_a100x8_1b", *keys, "total_tokens=1.0e+12", "price=2.5")
    low, high, first, last, *hours = [
        float(figure.replace(",", "").replace("M", "e6"))
        for figure in re.search(
            r"Tokens a second: (\S+) to (\S+)\. 1\.00T tokens: (\S+) to (\S+) days, (\S+) to (\S+) device-hours, "
            r"at 2\.5 an hour: (\S+) to (\S+)\.\n", text
        ).groups()
    ]  # fmt: skip
    assert first == pytest.approx(1e12 / high / 86400, rel=0.01) and last == pytest.approx(1e12 / low / 86400, rel=0.01)
    assert hours[0] == pytest.approx(32 * 24 * first, rel=0.01) and hours[2] == pytest.approx(2.5 * hours[0], rel=0.001)
    assert re.search(r"\. \S+ tokens: ", planned(capsys, "c4_a100x8_1b", *keys))
    too_large = planned(capsys, "c4_a100x8_1b", "hardware=h200", "hosts=1", "training.tokens.batch=8192")
    assert "It will not fit" in too_large and "\nIf it did fit, tokens a second: " in too_large


@pytest.mark.slow
def test_own_hardware(capsys):
    """A config may describe a device; what it leaves out is n/a, and so is all that needs it."""
    mine = "own_hardware=[{name: mine, peak_flops_per_s: 1.0e+15, hbm_bytes: 100000000000, hbm_bytes_per_s: 3.0e+12}]"
    text = planned(capsys, "local_test_synthetic", "hardware=mine", mine, *SMALL)
    assert "of 100.00 GB" in text and "Figures of one device: own_hardware mine." in text
    assert re.search(r"\n  update +0 s +under 1 µs +n/a +n/a +n/a  n/a\n", text)
    assert "MFU: at most n/a, if within" in text
    whole = mine.replace("}]", ", link_bytes_per_s: 1.0e+11}]")
    assert "MFU: at most n/a" not in planned(capsys, "local_test_synthetic", "hardware=mine", whole, *SMALL)
    text = planned(capsys, "local_test_synthetic", *SMALL)
    assert "No hardware is given: no times." in text and "MFU: at most n/a" in text


@pytest.mark.parametrize("hardware, kernel, per_host", [
    ("h200", "cudnn_masked", 8), ("a100_80gb", "cudnn_masked", 8), ("NVIDIA B200", "cudnn_masked", 8),
    ("tpu_v5e", "splash", 4), ("tpu_v7x", "splash", 8), ("null", "blockwise", 8),
])  # fmt: skip
def test_what_the_planned_device_says(hardware, kernel, per_host):
    """The kernel is that of the planned device, not of the machine that plans, and a host has so many of it; what the
    config names stays."""
    for keys, expected in (
        (["model.attention=auto"], (kernel, per_host)),
        (["model.attention=einsum", "devices_per_host=2"], ("einsum", 2)),
    ):
        config = config_of("c4_a100x8_1b", f"hardware={hardware}", *keys)
        found = plan_step.with_kernel(config, plan_step.machine_of(config))
        assert (found.model.attention, config.per_host) == expected


def test_a_folder(capsys, tmp_path):
    """The ledger of the planned machine as text, JSON and page, which has the machine's roofline."""
    folder = tmp_path / "planned"
    text = planned(capsys, "local_test_synthetic", "hardware=h200", "mesh.d=8", "mesh.t=2", f"folder={folder}", *SMALL)
    assert text.endswith(f"\n{folder}: ledger.txt, ledger.json, ledger.html\n")
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.html", "ledger.json", "ledger.txt"]
    assert json.loads((folder / "ledger.json").read_text())["mesh"] == {"d": 8, "t": 2}
    page = (folder / "ledger.html").read_text()
    assert '<svg class="roofline"' in page and "On NVIDIA H200 a step takes at least" in page
    assert "the mesh d=8 × t=2" in (folder / "ledger.txt").read_text()


@pytest.mark.parametrize("overrides, message", [
    (["hosts=4", "mesh.d=8"], "mesh.d × mesh.t = 8 × 1 … hosts × devices_per_host = 4 × 8 = 32: set mesh.d"),
    (["hosts=0"], "hosts = 0: expected … from 1 to 2147483647"),
    (["mesh.d=16", "devices_per_host=6"], "16 devices … of devices_per_host = 6"),
    (["sweep=true"], "a sweep is sorted by time: give hardware="),
    (["compile=true"], "for no hardware … there are a100_40gb"),
    (["hardware=h300"], "command line: hardware = h300: expected a100_40gb, "),
    (["hosts=16"], "training.tokens.batch = 64: dim B … d=128 cannot divide"),
    (["mesh.d=1", "mesh.t=32"], "model.n_kv = 16: dim K … t=32 cannot divide: set it to 32, or mesh.t to 16"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(overrides, message):
    """One sentence has the fix."""
    assert_refuses(message, lambda: plan.main(config_of("c4_a100x8_1b", *overrides)))


def tiny(hbm_bytes):
    """A device with so little memory."""
    figures = f"peak_flops_per_s: 1.0e+12, hbm_bytes: {hbm_bytes}, hbm_bytes_per_s: 1.0e+11, link_bytes_per_s: 1.0e+10"
    return [f"own_hardware=[{{name: tiny, {figures}, network_bytes_per_s: 1.0e+9}}]", "hardware=tiny"]


@pytest.mark.slow
def test_a_sweep(capsys, tmp_path):
    """The sweep has all meshes of 4 devices, with microbatches until they fit, the fastest first, and why there are no
    others, in text and on a page. Memory and times are those of a plan of that mesh."""
    keys = [*SMALL, *tiny(520_000), "model.n_kv=2", "training.tokens.batch=8", "training.save_for_backward=everything"]
    folder = tmp_path / "swept"
    text = planned(capsys, "local_test_synthetic", *keys, "mesh.d=2", "mesh.t=2", "sweep=true", f"folder={folder}")
    assert text.startswith("local_test_synthetic on 4 × tiny, 8 × 32 tokens; the best first, ")
    assert "\nThe first: Tokens a second: " in text.partition("\n\nAssumed:\n")[0]
    rows = [line.split() for line in text.partition("\nThe first: ")[0].splitlines()[2:] if line[0] == " "]
    assert {tuple(row[:3]) for row in rows} == {("4", "1", "2"), ("2", "2", "2")}
    both = [float(row[5]) + float(row[8]) for row in rows]
    assert [row[6] for row in rows] == ["µs"] * 2 and both == sorted(both)
    refused = "model.n_kv = 2: dim K has size 2, which axis t=4 cannot divide"
    assert "Refused: mesh d=1 × t=4: " in text and refused in text

    first, second, microbatches, *figures = rows[0]
    keys += [f"mesh.d={first}", f"mesh.t={second}", f"training.microbatches={microbatches}"]
    alone = planned(capsys, "local_test_synthetic", *keys)
    assert f"forecast of the peak {' '.join(figures[:2])} of" in alone
    times = r"\n  all " + r" +[\d.]+ \S+" * 3 + f" +{' '.join(figures[2:4])} +{' '.join(figures[5:7])} "
    assert re.search(times, alone)
    page = (folder / "sweep.html").read_text()
    assert page.count("<tr>") == 1 + len(rows) and f">{figures[4]}</td>" in page
    assert page.count('class="bar"') == 3 * len(rows)


@pytest.mark.slow
def test_a_sweep_of_a_pipeline(capsys):
    """The sweep goes over stages and all other axes, with all microbatches that there are; the best comes first."""
    keys = ["program=train_any", "model.layers=4", "training.tokens.batch=32", "hosts=1", "sweep=true"]
    keys += [*tiny(10**9), "training.save_for_backward=everything"]
    plan.main(load(plan_step.plan_class(train_any), "any_pipeline", keys))
    said, refused = capsys.readouterr().out.partition("\n\n")[0].split("\nRefused: ")
    table, first = said.split("\nThe first: ")
    assert first.startswith("Tokens a second: ")
    rows = [line.split() for line in table.splitlines()[2:]]
    rows = [row for row in rows if row[0] != row[1] == row[3] == "1"]  # p r d c t, for no way of 8 has an e
    assert {(row[0], row[2], row[4], row[5]) for row in rows} == {
        ("2", "4", "1", "8"), ("2", "2", "2", "16"), ("2", "1", "4", "32"),
        ("4", "2", "1", "16"), ("4", "1", "2", "32"),
    }  # fmt: skip
    assert refused.startswith("mesh p=")


def scaled(*keys):
    """A plan of configs/scale.yaml."""
    return program.resolved(load(plan_step.plan_class(train_any), "scale", ["program=train_any", *keys]), train_any)


def test_what_the_sweep_leaves_out():
    """It leaves out the host's memory, whose time is in no forecast; what the command line sets; a dense model's axis
    of experts; and stages, where the mesh has none."""
    scale, mixture = scaled(), scaled("size=8x7b")
    assert plan_sweep.kept(scale) == [{"save_for_backward": policy} for policy in ("everything", "inputs")]
    assert plan_sweep.kept(scaled("training.save_for_backward=inputs")) == [{}]
    assert ["".join(plan_sweep.searched(config)) for config in (scale, mixture)] == ["rdct", "rdcet"]


def test_neighbours():
    """A neighbour moves one prime factor of the devices to another axis; every mesh can be reached from any other."""
    assert list(plan_sweep.neighbours({"d": 6, "t": 1}, ["d", "t"])) == [{"d": 3, "t": 2}]
    reached, new = set(), [{"r": 12, "d": 1, "t": 1}]
    while new:
        mesh = new.pop()
        if tuple(mesh.values()) not in reached:
            reached.add(tuple(mesh.values()))
            new += plan_sweep.neighbours(mesh, list(mesh))
    every = {(r, d, 12 // r // d) for r in range(1, 13) for d in range(1, 13) if 12 % (r * d) == 0}
    assert reached == every


def test_the_search_finds_the_best(monkeypatch):
    """The search ends at the best mesh and policy after a few ways when the time falls towards them; what does not fit
    comes last, and microbatches are the fewest that fit. It begins with as many devices along an axis as can be."""
    config = scaled("hardware=h200", "hosts=64", "size=70b", "training.tokens.batch=512")
    assert plan_sweep.filled(config, ["t", "d"], 512) == {**dict.fromkeys("prce", 1), "t": 8, "d": 64}
    best = {"p": 1, "r": 2, "d": 32, "c": 4, "e": 1, "t": 2}

    def counted(config, machine, mesh, keys):
        if mesh["t"] > 8:
            raise RunError("eight heads")
        away = sum(abs(math.log2(mesh[axis] / size)) for axis, size in best.items())
        seconds = 1 + away + (keys["save_for_backward"] == "everything") + keys["microbatches"] / 100
        memory = mesh["r"] / keys["microbatches"]
        return plan_sweep.Choice(
            mesh=mesh, keys=keys, fits=memory <= 0.5,
            ledger=types.SimpleNamespace(memory=types.SimpleNamespace(bytes=memory)),
            estimate=types.SimpleNamespace(step_s=seconds, step_alone_s=seconds),
        )  # fmt: skip

    monkeypatch.setattr(plan_sweep, "counted", counted)
    found, refusal = plan_sweep.choices(config, None, 512)
    assert len(found) == plan_sweep.COUNTED and refusal.endswith(": eight heads")
    assert found[0].mesh == best and found[0].keys == {"save_for_backward": "inputs", "microbatches": 4}
    assert [choice.order for choice in found] == sorted(choice.order for choice in found)
    assert all(choice.keys["microbatches"] == max(1, 2 * choice.mesh["r"]) for choice in found if choice.fits)


@pytest.mark.parametrize(
    "mesh, begun, count, given",
    [({"d": 32}, 1, 3, []), ({"d": 32}, 96, 3, []), ({"p": 2, "d": 2}, 1, 48, []),
     ({"d": 32}, 1, 1, ["training.microbatches=1"]), ({"p": 2}, 1, 6, ["training.microbatches=6"])],
)  # fmt: skip
def test_microbatches_are_any_part_of_the_batch(monkeypatch, mesh, begun, count, given):
    """Of 96 rows on 32 devices, 3 microbatches are the fewest that fit where one does not, and on two stages 48 the
    most; a number on the command line is the only one."""
    config = scaled("hardware=h200", "training.tokens.batch=96", *given)

    def counted(config, machine, mesh, keys):
        return types.SimpleNamespace(keys=keys, fits=keys["microbatches"] > 1)

    monkeypatch.setattr(plan_sweep, "counted", counted)
    mesh = dict.fromkeys("prdcet", 1) | mesh
    assert plan_sweep.choose(config, None, mesh, {}, begun).keys == {"microbatches": count}


@pytest.mark.slow
def test_the_best_of_many_meshes(monkeypatch):
    """The best of the ledgers that the search makes, on 16 devices and all axes but p, is within a hundredth of the
    best of all."""
    config = scaled("hardware=h200", "hosts=2", "size=8b", "training.tokens.batch=128")
    machine = plan_step.machine_of(config)
    config = plan_step.with_kernel(config, machine)
    found, _ = plan_sweep.choices(config, machine, 16)
    assert len(found) == plan_sweep.COUNTED and found[0].fits
    monkeypatch.setattr(plan_sweep, "COUNTED", 10**6)
    every, _ = plan_sweep.choices(config, machine, 16)
    assert len(every) > 60 and found[0].order <= (False, 1.01 * every[0].order[1])


# -- Machines that are not there ---------------------------------------------------------------------------------------
def test_slices_and_targets():
    """A slice is as near to a cube as powers of two allow; a GPU's description has its figures."""
    shapes = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 128: (4, 4, 8), 4096: (16, 16, 16)}
    assert {chips: slice_of(chips, 3) for chips in shapes} == shapes
    assert slice_of(8, 2) == (2, 4) and slice_of(256, 2) == (16, 16)
    assert_refuses("no slice of 12 chips: expected 4, 8, 16", slice_of, 12, 3, error=CannotCompile)
    assert "core_count: 132" in target_config("h200") and "ACCELERATED_FEATURES" in target_config("h200")
    message = "for gtx nothing can be compiled; there are a100_40gb"
    assert_refuses(message, absent.environment, "gtx", error=CannotCompile)


def test_missing_packages_are_one_line(monkeypatch):
    """What is missing, and the command."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parts = "tpu_v5p needs libtpu … pip install --no-deps -r requirements-plan.txt"
    assert_refuses(parts, absent.environment, "tpu_v5p", error=CannotCompile)
    config = config_of("c4_a100x8_1b", "hardware=h200", "compile=true")
    assert_refuses("jax_cuda13_plugin", plan.main, config)


@pytest.mark.slow
def test_compiling(capsys, monkeypatch):
    """Simulated devices stand in for absent ones: XLA's memory stands beside the forecast, with differences and
    overlap."""
    monkeypatch.setattr(absent, "environment", lambda _: {})
    monkeypatch.setattr(absent, "devices", lambda *_: jax.devices()[:4])
    text = planned(capsys, "local_test_synthetic", *SMALL, "mesh.d=2", "mesh.t=2", "hardware=h200", "compile=true",
                   "model.attention=einsum")  # fmt: skip
    assert re.search(r"\n\nCompiled for 4 × cpu that are not here, in \d+ s\.\n", text)
    assert re.search(r"\nXLA's memory of one device: [\d.]+ [MG]B; forecast [\d.]+ [MG]B, ratio \d\.\d\d\n  arg", text)
    assert re.search(r"\n\n\d+ differences between what is written and what the compiled step sends[:.]\n", text)
    assert re.search(r"\nWhat runs while it sends, by the schedule \(.*\):\n  [\w-]+ of train\.py:\d+ ", text)


def test_the_process_that_compiles(monkeypatch):
    """JAX reads at its start what it compiles for, so the same command starts again with that; but only once."""
    started, config = [], types.SimpleNamespace(hardware="tpu_v5e")
    monkeypatch.setattr(absent, "environment", lambda _: {"ABSENT": "1"})
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    plan.start_again(config)
    ((program, command, environment),) = started
    assert (program, command[1:]) == (sys.executable, sys.orig_argv[1:]) and environment["ABSENT"] == "1"
    monkeypatch.setattr(os, "environ", {**environment, "ABSENT": "0"})
    assert_refuses("one command compiles for GPUs or for TPUs", plan.start_again, config)
    monkeypatch.setattr(os, "environ", environment)
    plan.start_again(config)
    assert len(started) == 1


SCHEDULE = """HloModule step, is_scheduled=true, num_partitions=2

%wrapped (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, BACKWARD 30
}

%body (c: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %c = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%c), index=1
  %start = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}, FORWARD 10
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, FORWARD 11
  %z = f32[8,8]{1,0} negate(%y)
  %done = f32[8,8]{1,0} all-gather-done(%start)
  %alone = f32[8,8]{1,0} all-reduce(%done), replica_groups={{0,1}}, FORWARD 12
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%i, %alone)
}

ENTRY %main (a: (s32[], f32[8,8]), b: f32[8]) -> f32[4] {
  %a = (s32[], f32[8,8]{1,0}) parameter(0)
  %b = f32[8]{0} parameter(1)
  %loop = (s32[], f32[8,8]{1,0}) while(%a), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %rs.start = ((f32[8]{0}), f32[4]{0}) async-start(%b), calls=%wrapped
  %n = f32[8]{0} negate(%b)
  ROOT %rs.done = f32[4]{0} async-done(%rs.start)
}
"""
for word, name in (("FORWARD", "jvp()"), ("BACKWARD", "transpose(jvp())")):
    metadata = rf'metadata={{op_name="{name}" source_file="train.py" source_line=\1}}'
    SCHEDULE = re.sub(rf"{word} (\d+)", metadata, SCHEDULE)


def test_what_runs_while_it_sends():
    """The schedule has a gather beside a product, an all-reduce alone, and a wrapped reduce-scatter beside another
    operation."""
    assert [str(collective) for collective in overlaps(SCHEDULE)] == [
        "all-gather of train.py:10 (forward), 0.00 MB, ×5: while train.py:11 multiplies",
        "all-reduce of train.py:12 (forward), 0.00 MB, ×5: alone",
        "reduce-scatter of train.py:30 (backward), 0.00 MB, ×1: beside 1 operation, no matrix product",
    ]
    assert [collective.bytes for collective in overlaps(SCHEDULE)] == [256, 256, 32]


def test_what_a_tpus_sparse_core_sends():
    """A call on another thread, with what prepares it, is the same reduce-scatter beside the same one operation."""
    prepares = '%prepares = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"\n  '
    text = SCHEDULE.replace("async-start(%b), calls=", 'call-start(%b), async_execution_thread="sparsecore", to_apply=')
    text = text.replace("async-done", "call-done").replace("%n = f32", prepares + "%n = f32")
    assert "async-" not in text and text.count("call-") == 2
    assert overlaps(text) == overlaps(SCHEDULE)
    assert compiled(text, {"d": 2}) == compiled(SCHEDULE, {"d": 2})


def compiled_plan(name, *keys, status=0):
    """What `tools.plan ... compile=true` prints, in a process of its own; a skipped test where that needs packages."""
    with contextlib.suppress(CannotCompile):
        absent.environment(re.search(r"hardware=(\w+)", " ".join(keys))[1])
        return run_in(ROOT, ["python", "-m", "tools.plan", f"--config-name={name}", *keys, "compile=true"], status)
    pytest.skip("needs requirements-plan.txt")


KINDS = {
    "h200": "(NVIDIA H200|h200)", "tpu_v4": "TPU v4", "tpu_v5e": "TPU v5 lite", "tpu_v5p": "TPU v5",
    "tpu_v6e": "TPU v6 lite", "tpu_v7x": "TPU7x",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_very_step_compiled_for_what_is_not_there(name):
    """The small model is compiled for eight H200s and eight TPUs of each kind: memory, differences and the schedule are
    printed."""
    text = compiled_plan("local_test_synthetic", *SMALL, f"hardware={name}", "hosts=1", "devices_per_host=8")
    assert re.search(rf"\nCompiled for 8 × {KINDS[name]} that are not here, in \d+ s\.", text)
    assert re.search(r"\nXLA's memory of one device: [\d.]+ MB; forecast [\d.]+ MB, ratio \d\.\d\d\n", text)
    assert " differences between what is written and what the compiled step sends" in text
    assert "all-gather of train.py:" in text


@pytest.mark.slow
@pytest.mark.parametrize("name, machine", [
    ("c4_a100x8_1b", "hardware=h200 hosts=1"),
    ("c4_a100x8x4_2b", "hardware=h200 hosts=4"),
    ("c4_a100x8_2b", "hardware=tpu_v5p hosts=1"),
    ("c4_a100x8x4_1b", "hardware=tpu_v5p hosts=16 devices_per_host=4 mesh.d=64 training.tokens.batch=512"),
])  # fmt: skip
def test_nothing_stands_alone_in_the_loop_over_layers(name, machine):
    """Something runs beside each transfer of a layer of the published models, without tensor parallelism; XLA's memory
    is at most 1.1 times the forecast."""
    text = compiled_plan(name, *machine.split())
    rows = re.findall(r"^  (?:all-gather|reduce-scatter) of .*, ×[78]: .*$", text, re.M)
    assert len(rows) > 10 and not [row for row in rows if row.endswith(": alone")]
    assert float(re.search(r"ratio (\d\.\d\d)\n", text)[1]) > 1 / 1.1


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    "mesh.r=4 mesh.d=4 mesh.c=2 mesh.t=2 training.microbatches=8",
    "mesh.r=2 mesh.d=2 mesh.c=8 mesh.t=2 training.microbatches=8",
    "mesh.r=8 mesh.d=1 mesh.e=8 size=30b_a3b training.microbatches=8",
])  # fmt: skip
def test_many_axes_compiled_for_what_is_not_there(keys):
    """The forecast of 8b with dealt heads or gathered keys, and of a mixture, on 64 H200s is within a tenth of XLA's
    memory, and what is sent is what is written."""
    text = compiled_plan("scale", "program=train_any", "hardware=h200", *keys.split())
    assert 1 / 1.1 < float(re.search(r"ratio (\d\.\d\d)\n", text)[1]) < 1.1
    assert re.search(r"\n[45] differences between what is written", text)
    assert text.count(" times a step: joined end to end with others: as many bytes in all") in (4, 5)


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_the_bytes():
    """XLA refuses a step of 16 times the batch on a TPU v5e: one error, no traceback."""
    keys = "training.tokens.batch=4096", "hardware=tpu_v5e", "hosts=1"
    error = compiled_plan("c4_a100x8_84m", *keys, status=1)
    assert re.search(r"error: XLA says that it does not fit \(forecast [\d.]+ GB\): .*\d[KMG]", error)
    assert "Traceback" not in error
