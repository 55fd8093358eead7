"""The compiled step as text and as a graph."""

import html
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from pages import ROOT

from ledger.compiled import hlo_text
from ledger.compiled.hlo_text import parse
from runtime.tracking import hlo_graph
from runtime.tracking.hlo_graph import draw, find_dot, graph_of

SMALL = Path(__file__).with_name("small_step.hlo.txt").read_text().replace("SHARDLIB", str(ROOT / "shardlib"))


def nodes_of(source: str) -> dict[str, tuple[str, str]]:
    """Node -> label, kind; without the legend."""
    kinds = {color: kind for kind, color in hlo_graph.COLORS.items()}
    found = re.findall(r'^\s*"?([\w .$\-]+)"? \[label="?(.*?)"? fillcolor="(#\w+)"', source, re.MULTILINE)
    return {name: (label, kinds[color]) for name, label, color in found if not name.startswith("legend")}


def edges_of(source: str) -> set[tuple[str, str]]:
    return set(re.findall(r'^\s*"([^"]+)" -> "([^"]+)"', source, re.MULTILINE))


def test_nodes_are_what_multiplies_and_what_is_sent():
    """Nodes are products and collectives, with the shape without layout and the model's own line, not shardlib's; a
    fusion shows its product. Edges go through bitcasts, tuples, elementwise operations and asynchronous halves, into a
    loop and out of it, item by item, and not beside a longer way. A loop is a frame with its number of turns; its
    condition has no frame."""
    source = graph_of(parse(SMALL)).source
    nodes = nodes_of(source)
    assert set(nodes.values()) == {
        (r"dot\nf32[8,8]\ntrain.py:10 backward", "matrix product"),
        (r"all-gather\nf32[8,16]\ntrain.py:20 recomputed", "collective"),
        (r"__cublas$gemm\nf32[8,8]\nstyle.py:7", "matrix product"),
        (r"all-reduce\nf32[8,8]\ntrain.py:20", "collective"),
    }
    labels = {name: label.split(r"\n")[0] for name, (label, _) in nodes.items()}
    assert {(labels[a], labels[b]) for a, b in edges_of(source)} == {
        ("dot", "__cublas$gemm"),  # bitcast, tuple, the loop's parameter
        ("all-gather", "__cublas$gemm"),  # all-gather-done
        ("__cublas$gemm", "all-reduce"),  # the loop's result
    }
    frame = source[source.index("cluster_body") : source.index("\t}", source.index("cluster_body"))]
    assert 'label="loop, 3 times, train.py:20"' in frame
    assert "__cublas$gemm" in frame and "all-gather" in frame and "all-reduce" not in frame
    assert "cluster_condition" not in source


def test_what_repeats_is_one_node():
    """A hundred chained products of one line and pass are one node, which says how many, without an edge to itself;
    another line's product is another node."""
    lines = ["  %x0 = f32[8,8] parameter(0)"]
    for i in range(100):
        place = f'metadata={{op_name="f" source_file="/a/train.py" source_line={3 if i < 99 else 4}}}'
        lines.append(f"  %y{i} = f32[8,8] dot(%x{i}, %x{i}), {place}")
        lines.append(f"  {'ROOT ' if i == 99 else ''}%x{i + 1} = f32[8,8] add(%y{i}, %y{i})")
    source = graph_of(parse("\n".join(["ENTRY %main (x0: f32[8,8]) -> f32[8,8] {", *lines, "}"]))).source
    nodes = nodes_of(source)
    assert [label for label, _ in nodes.values()] == [r"dot ×99\nf32[8,8]\ntrain.py:3", r"dot\nf32[8,8]\ntrain.py:4"]
    assert edges_of(source) == {tuple(nodes)}


def test_branches_and_calls():
    """A conditional's branches are frames, a call's body stands as if written in place; the results of all branches
    count."""
    text = """HloModule m

%double (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  ROOT %twice = f32[2] custom-call(%p), custom_call_target="twice"
}

%keep (p.1: f32[2]) -> f32[2] {
  %p.1 = f32[2] parameter(0)
  ROOT %kept = f32[2] custom-call(%p.1), custom_call_target="kept"
}

%called (a: f32[2], b: f32[2]) -> f32[2] {
  %a = f32[2] parameter(0)
  %b = f32[2] parameter(1)
  ROOT %sum = f32[2] custom-call(%a, %b), custom_call_target="sum"
}

ENTRY %main (x: f32[2], which: pred[]) -> f32[2] {
  %x = f32[2] parameter(0)
  %which = pred[] parameter(1)
  %exp = f32[2] custom-call(%x), custom_call_target="exp"
  %log = f32[2] custom-call(%x), custom_call_target="log"
  %chosen = f32[2] conditional(%which, %exp, %log), true_computation=%double, false_computation=%keep
  ROOT %result = f32[2] call(%chosen, %exp), to_apply=%called
}
"""
    source = graph_of(parse(text)).source
    assert {tuple(name.split()[3] for name in edge) for edge in edges_of(source)} == {
        ("exp", "twice"), ("log", "kept"), ("twice", "sum"), ("kept", "sum"),
    }  # fmt: skip
    assert 'label="branch 0"' in source and 'label="branch 1"' in source and "cluster_called" not in source


def compiled_step() -> jax.stages.Compiled:
    """A training step with a scan, rematerialization and collectives over both axes of a 4 x 2 mesh."""
    mesh = jax.make_mesh((4, 2), ("d", "t"))

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(lax.psum(x @ lax.all_gather(w, "d", axis=0, tiled=True), "t")), None

        x, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return lax.psum(jnp.sum(x * x), ("d", "t"))

    def step(weights, x):
        return weights - 0.1 * jax.grad(loss)(weights, x)

    specs = {"in_specs": (P(None, "d"), P("d")), "out_specs": P(None, "d")}
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip([(3, 64, 64), (32, 64)], specs["in_specs"])
    ]
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs)).lower(*arguments).compile()


def without_dot(folder, monkeypatch):
    """Nothing on the PATH and no wheel beside the interpreter."""
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(hlo_graph.sys, "executable", str(folder / "python"))


def fake_dot(script):
    """A `dot` that does something else, first on the PATH."""

    def put(folder, monkeypatch):
        (folder / "bin").mkdir()
        (folder / "bin" / "dot").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / "dot").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return put


@pytest.mark.parametrize("text, trouble, message", [
    (SMALL, without_dot, "`dot` is missing: pip install graphviz-pure"),
    (SMALL, lambda _, patch: patch.setitem(sys.modules, "graphviz", None), "import of graphviz halted"),
    ("no HLO", None, "ValueError: HLO text without an ENTRY computation"),
    (SMALL, fake_dot("echo 'syntax error in line 1' >&2; exit 3"), "exit status 3.: syntax error in line 1"),
    (SMALL, fake_dot("exec sleep 60"), "timed out after 0.2 seconds"),
])  # fmt: skip
def test_what_keeps_it_from_being_drawn_is_one_line(tmp_path, monkeypatch, capsys, text, trouble, message):
    """The line on stderr says what to do; no half picture is left, and another start tries again."""
    (tmp_path / "step.hlo.txt").write_text(text)
    monkeypatch.setattr(hlo_graph, "LIMIT_S", 0.2 if "timed out" in message else 60)
    if trouble:
        trouble(tmp_path, monkeypatch)
    draw(tmp_path)
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path}/step.svg is not drawn: ") and message in said and said.count("\n") == 1
    assert not list(tmp_path.glob("step.svg*"))


@pytest.mark.skipif(find_dot() is None, reason="the program `dot` is missing: pip install graphviz-pure")
def test_a_compiled_step_is_drawn_to_be_read(tmp_path, capsys):
    """Its collectives, its loops with their turns, and this file's lines, on a picture of the size of a few pages; it
    is not drawn again."""
    text = compiled_step().as_text()
    (tmp_path / "step.hlo.txt").write_text(text)
    draw(tmp_path)
    assert capsys.readouterr() == ("", "")
    nodes = nodes_of(graph_of(parse(text)).source)
    kinds = [kind for _, kind in nodes.values()]
    assert kinds.count("collective") > 3 and kinds.count("matrix product") >= 3
    assert all("test_hlo_graph.py:" in label for label, kind in nodes.values() if kind == "collective")
    svg = html.unescape((tmp_path / "step.svg").read_text())
    assert svg.count("loop, 3 times, test_hlo_graph.py:") == 2  # forward and backward
    assert svg.rstrip().endswith("</svg>") and "all-gather" in svg
    assert max(map(float, re.search(r'width="(\d+)pt" height="(\d+)pt"', svg).groups())) < 3000
    (tmp_path / "step.svg").write_text("mine")
    draw(tmp_path)
    assert (tmp_path / "step.svg").read_text() == "mine"


def test_the_source_is_the_outermost_frame_where_all_are_inner(monkeypatch):
    """A program that is written in shardlib alone still shows a line."""
    monkeypatch.setattr(hlo_text, "is_place", lambda file_name: False)
    labels = [label for label, _ in nodes_of(graph_of(parse(SMALL)).source).values()]
    assert r"all-gather\nf32[8,16]\nshardops.py:99 recomputed" in labels
