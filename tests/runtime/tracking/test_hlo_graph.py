"""The compiled step as text and as a graph."""

import html
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ledger.compiled import hlo_text
from ledger.compiled.hlo_text import parse
from runtime.tracking import hlo_graph
from runtime.tracking.hlo_graph import StepGraph, find_dot, graph_of

REPOSITORY = Path(__file__).resolve().parents[3]

SMALL = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/someone/model/train.py"
2 "SHARDLIB/shardops.py"

FunctionNames
1 "step"
2 "all_gather"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_plus_b = f32[] add(%a, %b)
}

%fused (p: f32[8,4], q: f32[4,8]) -> f32[8,8] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[4,8]{1,0} parameter(1)
  %product = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=1}
  ROOT %minus = f32[8,8]{1,0} negate(%product)
}

%body (carry: (s32[], f32[8,8], f32[8,4])) -> (s32[], f32[8,8], f32[8,4]) {
  %carry = (s32[], f32[8,8]{1,0}, /*index=2*/f32[8,4]{1,0:T(8,128)S(1)}) parameter(0)
  %one = s32[] constant(1)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%carry), index=1
  %w = f32[8,4]{1,0} get-tuple-element(%carry), index=2
  %next = s32[] add(%i, %one)
  %start = ((f32[8,4]{1,0}), f32[8,16]{1,0}) all-gather-start(%w), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}, metadata={op_name="jit(step)/rematted_computation/all_gather" stack_frame_id=3}
  %done = f32[8,16]{1,0} all-gather-done(%start)
  %y = f32[8,8]{1,0} custom-call(%x, %done), custom_call_target="__cublas$gemm", metadata={op_name="y" source_file="/old/style.py" source_line=7}
  ROOT %out = (s32[], f32[8,8]{1,0}, f32[8,4]{1,0}) tuple(%next, %y, %w)
}

%condition (carry.1: (s32[], f32[8,8], f32[8,4])) -> pred[] {
  %carry.1 = (s32[], f32[8,8]{1,0}, f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (w.1: f32[8,4], v: f32[4,8]) -> (f32[8,8], f32[8,4]) {
  %w.1 = f32[8,4]{1,0} parameter(0), sharding={devices=[1,4]<=[4]}
  %v = f32[4,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %copied = f32[8,4]{1,0} copy(%w.1)
  %first = f32[8,8]{1,0} fusion(%copied, %v), kind=kOutput, calls=%fused
  %turned = f32[8,8]{1,0} bitcast(%first)
  %initial = (s32[], f32[8,8]{1,0}, f32[8,4]{1,0}) tuple(%zero, %turned, %copied)
  %loop = (s32[], f32[8,8]{1,0}, f32[8,4]{1,0}) while(%initial), condition=%condition, body=%body, metadata={op_name="jit(step)/while" stack_frame_id=2}, backend_config={"known_trip_count":{"n":"3"}}
  %result = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %carried = f32[8,4]{1,0} get-tuple-element(%loop), index=2
  %summed = f32[8,8]{1,0} all-reduce(%result), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%sum, metadata={op_name="jit(step)/psum" stack_frame_id=2}
  %small = f32[8,4]{1,0} exponential(%carried), metadata={op_name="jit(step)/exp" stack_frame_id=2}
  ROOT %results = (f32[8,8]{1,0}, f32[8,4]{1,0}) tuple(%summed, %small)
}
""".replace("SHARDLIB", str(REPOSITORY / "shardlib"))


class Compiled:
    """Stands in for jax.stages.Compiled."""

    def __init__(self, text: str):
        self.text = text

    def as_text(self) -> str:
        return self.text


def nodes_of(source: str) -> dict[str, tuple[str, str]]:
    """Node -> label, kind; without the legend."""
    kinds = {color: kind for kind, color in hlo_graph.COLORS.items()}
    found = re.findall(r'^\s*"?([\w .\-]+)"? \[label="?(.*?)"? fillcolor="(#\w+)"', source, re.MULTILINE)
    return {name: (label, kinds[color]) for name, label, color in found if not name.startswith("legend")}


def edges_of(source: str) -> set[tuple[str, str]]:
    return set(re.findall(r'^\s*"([^"]+)" -> "([^"]+)"', source, re.MULTILINE))


def fake_dot(folder: Path, monkeypatch, script: str) -> None:
    """A `dot` that does something else, first on the PATH."""
    folder.mkdir()
    (folder / "dot").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "dot").chmod((folder / "dot").stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder) + os.pathsep + os.environ["PATH"])


def test_nodes_are_what_takes_time_with_shape_and_source():
    """Opcode, shape without layout, and the model's own line: not shardlib's; a fusion shows its matrix product and that line."""
    assert nodes_of(graph_of(parse(SMALL)).source) == {
        "main copied": (r"copy\nf32[8,4]", "other"),
        "main first": (r"fusion: dot, negate\nf32[8,8]\ntrain.py:10 backward", "matrix product"),
        "body start": (r"all-gather\nf32[8,16]\ntrain.py:20 recomputed", "collective"),
        "body y": (r"custom-call: __cublas$gemm\nf32[8,8]\nstyle.py:7", "matrix product"),
        "main summed": (r"all-reduce\nf32[8,8]\ntrain.py:20", "collective"),
        "main small": (r"exponential\nf32[8,4]\ntrain.py:20", "other"),
    }


def test_edges_go_through_what_is_not_drawn():
    """Through bitcasts, tuples and asynchronous halves, into a loop and out of it, item by item."""
    assert edges_of(graph_of(parse(SMALL)).source) == {
        ("main copied", "main first"),
        ("main first", "body y"),  # bitcast, tuple, the loop's parameter
        ("main copied", "body start"),
        ("body start", "body y"),  # all-gather-done
        ("body y", "main summed"),  # the loop's result
        ("main copied", "main small"),  # a weight that the loop hands on untouched
    }


def test_a_loop_is_a_frame():
    """With the number of turns and its line; its nodes stand inside; a condition that only counts has no frame."""
    source = graph_of(parse(SMALL)).source
    frame = source[source.index("cluster_body") : source.index("\t}", source.index("cluster_body"))]
    assert 'label="loop, 3 times, train.py:20"' in frame
    assert "body y" in frame and "body start" in frame and "main summed" not in frame
    assert "cluster_condition" not in source


def test_branches_and_calls():
    """A conditional's branches are frames, a call's body stands as if written in place; the results of all branches count."""
    text = """HloModule m

%double (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  ROOT %twice = f32[2] add(%p, %p)
}

%keep (p.1: f32[2]) -> f32[2] {
  %p.1 = f32[2] parameter(0)
  ROOT %kept = f32[2] negate(%p.1)
}

%called (a: f32[2], b: f32[2]) -> f32[2] {
  %a = f32[2] parameter(0)
  %b = f32[2] parameter(1)
  ROOT %sum = f32[2] add(%a, %b)
}

ENTRY %main (x: f32[2], which: pred[]) -> f32[2] {
  %x = f32[2] parameter(0)
  %which = pred[] parameter(1)
  %exp = f32[2] exponential(%x)
  %log = f32[2] log(%x)
  %chosen = f32[2] conditional(%which, %exp, %log), true_computation=%double, false_computation=%keep
  ROOT %result = f32[2] call(%chosen, %exp), to_apply=%called
}
"""
    source = graph_of(parse(text)).source
    assert edges_of(source) == {
        ("main exp", "double twice"),
        ("main log", "keep kept"),
        ("double twice", "called sum"),
        ("keep kept", "called sum"),
        ("main exp", "called sum"),
    }
    assert 'label="branch 0"' in source and 'label="branch 1"' in source and "cluster_called" not in source


@pytest.mark.parametrize(
    "text, message",
    [
        ("HloModule m\n", "HLO text without an ENTRY computation"),
        (
            "ENTRY %main () -> f32[] {\n  what is this\n}\n",
            "HLO text, line 2: expected an instruction, got 'what is this'",
        ),
    ],
)
def test_text_that_is_no_hlo_is_refused(text, message):
    """With the line."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(text)


def compiled_step() -> jax.stages.Compiled:
    """A training step with a scan, rematerialization and collectives over both axes of a 4 x 2 mesh."""
    mesh = jax.make_mesh((4, 2), ("d", "t"))

    def loss(weights, x):
        def layer(x, w):
            gathered = lax.all_gather(w, "d", axis=0, tiled=True)
            return jnp.tanh(lax.psum(x @ gathered, "t")), None

        x, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return lax.psum(jnp.sum(x * x), ("d", "t"))

    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return value, weights - 0.1 * gradient

    specs = {"in_specs": (P(None, "d"), P("d")), "out_specs": (P(), P(None, "d"))}
    sharded = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip([(3, 64, 64), (32, 64)], specs["in_specs"])
    ]
    return jax.jit(sharded).lower(*arguments).compile()


@pytest.mark.skipif(find_dot() is None, reason="the program `dot` is missing: pip install graphviz-pure")
def test_a_compiled_step_is_written_and_drawn(tmp_path, capsys):
    """The text is XLA's own; the picture has every collective of it, the loops with their turns, and this file's lines."""
    compiled = compiled_step()
    StepGraph(compiled, tmp_path, exit_wait_s=60).close()
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.hlo.txt", "step.svg"]
    text = (tmp_path / "step.hlo.txt").read_text()
    assert text == compiled.as_text()
    nodes = nodes_of(graph_of(parse(text)).source)
    kinds = [kind for _, kind in nodes.values()]
    assert kinds.count("collective") == len(re.findall(r" (?:all-gather|all-reduce|reduce-scatter)\(", text)) > 3
    assert kinds.count("matrix product") >= 3
    assert all("test_hlo_graph.py:" in label for label, kind in nodes.values() if kind == "collective")
    svg = html.unescape((tmp_path / "step.svg").read_text())
    assert svg.count("loop, 3 times, test_hlo_graph.py:") == 2  # forward and backward
    assert svg.rstrip().endswith("</svg>") and "all-gather" in svg


def test_without_dot_one_line_says_so(tmp_path, monkeypatch, capsys):
    """With nothing on the PATH and no wheel beside the interpreter: the text is written, and the line says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hlo_graph.sys, "executable", str(tmp_path / "python"))
    StepGraph(Compiled(SMALL), tmp_path).close()
    assert capsys.readouterr().out == (
        f"{tmp_path / 'step.svg'} is not drawn: the program `dot` is missing. "
        "Install it with `pip install graphviz-pure` or `apt-get install graphviz`. Training goes on.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step.hlo.txt"]


def test_without_the_python_package_one_line_says_so(tmp_path, monkeypatch, capsys):
    """The same for python-graphviz."""
    fake_dot(tmp_path / "bin", monkeypatch, "exit 0")
    monkeypatch.setitem(sys.modules, "graphviz", None)
    StepGraph(Compiled(SMALL), tmp_path).close()
    output = capsys.readouterr().out
    assert output.startswith(f"{tmp_path / 'step.svg'} is not drawn: import of graphviz halted")
    assert output.endswith("Install it with `pip install graphviz`. Training goes on.\n")


@pytest.mark.parametrize(
    "text, folder, message",
    [
        ("no HLO", "", "is not drawn: ValueError: HLO text without an ENTRY computation Training goes on."),
        (SMALL, "missing", "is not drawn: FileNotFoundError: [Errno 2] No such file or directory"),
    ],
)
def test_errors_in_the_thread_are_one_line(tmp_path, capsys, text, folder, message):
    """Whatever goes wrong there is said, and training goes on."""
    StepGraph(Compiled(text), tmp_path / folder).close()
    output = capsys.readouterr().out
    assert message in output and output.count("\n") == 1


def test_an_error_of_dot_is_one_line(tmp_path, monkeypatch, capsys):
    """With its command and its own words."""
    fake_dot(tmp_path / "bin", monkeypatch, "echo 'syntax error in line 1' >&2; exit 3")
    StepGraph(Compiled(SMALL), tmp_path).close()
    output = capsys.readouterr().out
    assert f"-o{tmp_path / 'step.svg.part'} {tmp_path / 'step.gv'}` failed: syntax error in line 1. Training" in output


def test_a_graph_that_takes_dot_too_long_is_given_up(tmp_path, monkeypatch, capsys):
    """After `limit_s`, with the command that draws it without a limit; its input is kept for that."""
    fake_dot(tmp_path / "bin", monkeypatch, "exec sleep 60")
    StepGraph(Compiled(SMALL), tmp_path, limit_s=0.2).close()
    command = f"{tmp_path / 'bin' / 'dot'} -Kdot -Tsvg -O {tmp_path / 'step.gv'}"
    line = f"`dot` took more than 0.2 s. Without a limit: `{command}`. Training goes on.\n"
    assert capsys.readouterr().out == f"{tmp_path / 'step.svg'} is not drawn: {line}"
    assert (tmp_path / "step.gv").exists() and not (tmp_path / "step.svg").exists()


def test_a_large_graph_does_not_hold_up_training(tmp_path, monkeypatch, capsys):
    """10,000 instructions: the call returns at once, and the end of the run waits no longer than asked."""
    fake_dot(tmp_path / "bin", monkeypatch, "exec sleep 60")
    lines = [f"  %x{i + 1} = f32[8]{{0}} add(%x{i}, %x{i // 2})" for i in range(10_000)]
    text = "\n".join(["ENTRY %main (x0: f32[8]) -> f32[8] {", "  %x0 = f32[8]{0} parameter(0)", *lines, "}"])
    start = time.monotonic()
    graph = StepGraph(Compiled(text), tmp_path, exit_wait_s=0.3)
    assert time.monotonic() - start < 1  # of which the machine may take most, if others use it
    graph.close()
    assert time.monotonic() - start < 3
    line = f"{tmp_path / 'step.svg'} is not drawn: it was not ready 0.3 s after the last step.\n"
    assert capsys.readouterr().out == line
    graph._thread.join(
        30
    )  # it may still be reading the text; it must not start `dot` any more, or must have stopped it
    assert not graph._thread.is_alive()


def test_the_exit_of_the_program_waits_a_bounded_time(tmp_path, monkeypatch):
    """A program that forgets `close` ends in time, says so, and leaves no `dot` behind."""
    fake_dot(tmp_path / "bin", monkeypatch, f"echo $$ > {tmp_path / 'pid'}; exec sleep 60")
    program = f"""
import sys
from runtime.tracking.hlo_graph import StepGraph
from tests.runtime.tracking.test_hlo_graph import Compiled, SMALL
import pathlib, time
StepGraph(Compiled(SMALL), {str(tmp_path)!r}, exit_wait_s=0.5)
while not pathlib.Path({str(tmp_path / "pid")!r}).exists():
    time.sleep(0.01)
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 30
    assert (done.stdout, done.stderr) == (
        f"{tmp_path / 'step.svg'} is not drawn: it was not ready 0.5 s after the last step.\n",
        "",
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_source_is_the_outermost_frame_where_all_are_inner(monkeypatch):
    """A program that is written in shardlib alone still shows a line."""
    monkeypatch.setattr(hlo_text, "INNER_SOURCES", ("/",))
    labels = [label for label, _ in nodes_of(graph_of(parse(SMALL)).source).values()]
    assert r"all-gather\nf32[8,16]\nshardops.py:99 recomputed" in labels
