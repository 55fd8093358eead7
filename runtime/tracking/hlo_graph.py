"""The compiled step as a picture: `step.svg` in the run folder, drawn from `step.hlo.txt`, which the run writes.

The text is the optimized HLO, which the devices run. The picture shows matrix products, collectives and custom calls;
loops and branches are frames. Those of one kind, source line and pass are one node. What is left out connects directly.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ledger.compiled.hlo_text import Computation, Instruction, Module, parse
from runtime.files import read_text
from runtime.terminal import print_error

if TYPE_CHECKING:
    import graphviz  # imported where it is used, since a run works without it

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
PRODUCTS = frozenset({"dot", "convolution"})  # a TPU's matrix products are convolutions
COLORS = {"collective": "#f4a582", "matrix product": "#92c5de", "custom call": "#c2a5cf"}
FRAMES = frozenset({"while", "conditional", "call"})
Value = tuple[Computation, str, int | None]  # an instruction by its name; for a tuple, one item or all
LIMIT_S = 120.0  # for the drawing


def graph_of(module: Module) -> "graphviz.Digraph":
    return _Graph(module).dot


class _Graph:
    def __init__(self, module: Module):
        import graphviz

        self.module = module
        self.dot = graphviz.Digraph(
            graph_attr={"label": f"{module.name}: optimized HLO of one device", "labelloc": "t", "fontsize": "18"},
            node_attr={"shape": "box", "style": "filled,rounded", "fontsize": "11", "margin": "0.12,0.06"},
            edge_attr={"color": "#707070", "arrowsize": "0.6"},
        )
        self.dot.attr(fontname="Helvetica", ranksep="0.3", nodesep="0.25", bgcolor="white")
        self.dot.attr("node", fontname="Helvetica", height="0.3")
        # A framed computation -> where it is run, by what, and which operand is its parameter (None: by its number).
        self.runners: dict[str, tuple[Computation, Instruction, int | None]] = {}
        self.nodes: dict[tuple[str, str], str] = {}  # computation and instruction -> the node that it belongs to
        with self.dot.subgraph(name="cluster_legend", graph_attr={"label": "", "color": "#ffffff"}) as legend:
            for kind, color in COLORS.items():
                legend.node(f"legend {kind}", kind, fillcolor=color)
        self._add(module.computations[module.entry], self.dot)
        for edge in sorted(_without_shortcuts(set(self._edges()))):
            self.dot.edge(*edge)

    def _add(self, computation: Computation, graph: "graphviz.Digraph") -> None:
        together: dict[str, list[tuple[Instruction, tuple[str, str, str]]]] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode in FRAMES:
                for number, (callee, operand) in enumerate(self._framed(instruction)):
                    if callee.name in self.runners:
                        continue  # drawn where it is run first
                    self.runners[callee.name] = (computation, instruction, operand)
                    if instruction.opcode == "call" or not self._has_nodes(callee):
                        self._add(callee, graph)
                        continue
                    with graph.subgraph(name=f"cluster_{callee.name}") as frame:
                        label = self._frame_label(instruction, number)
                        frame.attr(label=label, color="#404040", style="rounded", penwidth="1.5", fontsize="13")
                        self._add(callee, frame)
            elif described := self._described(instruction):
                node = " ".join((computation.name, *described)).replace(":", " ")
                self.nodes[computation.name, instruction.name] = node
                together.setdefault(node, []).append((instruction, described))
        for node, same in together.items():
            shapes = list(dict.fromkeys(op.shape if len(op.shape) <= 50 else op.shape[:47] + "..." for op, _ in same))
            shape = shapes[0] + (" and others" if len(shapes) > 1 else "")
            kind, title, place = same[0][1]
            times = f" ×{len(same)}" if len(same) > 1 else ""
            label = r"\n".join(filter(None, [title + times, shape, place]))
            graph.node(node, label, fillcolor=COLORS[kind], tooltip=", ".join(op.name for op, _ in same[:20]))

    def _has_nodes(self, computation: Computation) -> bool:
        return any(
            self._described(op) or any(self._has_nodes(callee) for callee, _ in self._framed(op))
            for op in computation.instructions.values()
        )

    def _framed(self, instruction: Instruction) -> list[tuple[Computation, int | None]]:
        """The computations that an instruction runs, each with the operand that is its parameter."""
        if instruction.opcode == "call":
            return [(callee, None) for callee in self.module.callees(instruction, "to_apply", "calls")]
        if instruction.opcode == "while":
            return [(callee, 0) for callee in self.module.callees(instruction, "body", "condition")]
        branches = self.module.callees(instruction, "branch_computations", "true_computation", "false_computation")
        return [(branch, number + 1) for number, branch in enumerate(branches)]

    def _frame_label(self, instruction: Instruction, number: int) -> str:
        if instruction.opcode == "conditional":
            title = f"branch {number}"
        else:
            count = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            title = f"loop, {count[1]} time{'' if count[1] == '1' else 's'}" if count else "loop"
        return f"{title}, {self._place(instruction)}".removesuffix(", ")

    def _described(self, instruction: Instruction) -> tuple[str, str, str] | None:
        """An instruction's kind, title and source line; None if it is not drawn."""
        if instruction.is_done or instruction.opcode in FRAMES:
            return None
        opcodes = {inner.opcode for inner in self.module.inner(instruction)}
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        named = sorted(opcodes & (COLLECTIVES | PRODUCTS))
        title = ", ".join(named) or (target[1] if target else "")
        if opcodes & COLLECTIVES:
            kind = "collective"
        elif opcodes & PRODUCTS or re.search("matmul|gemm", title):
            kind = "matrix product"
        elif target:
            kind = "custom call"
        else:
            return None
        return kind, title, self._place(instruction)

    def _place(self, instruction: Instruction) -> str:
        """An instruction's source line, and its pass of the step, by the name stack that JAX writes."""
        source, op_name = self.module.metadata(instruction)
        if "rematted_computation" in op_name:
            return f"{source} recomputed"
        return f"{source} backward" if "transpose(" in op_name else source

    def _edges(self) -> Iterator[tuple[str, str]]:
        for name in (self.module.entry, *self.runners):
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                if node := self.nodes.get((name, instruction.name)):
                    for maker in self._makers(computation, instruction) - {node}:
                        yield maker, node

    def _makers(self, computation: Computation, instruction: Instruction) -> set[str]:
        """The nodes that make an instruction's operands, through what is not drawn."""
        makers, seen = set(), set()
        waiting: list[Value] = [(computation, name, None) for name in instruction.operands]
        while waiting:
            place, name, index = waiting.pop()
            if (place.name, name, index) not in seen:
                seen.add((place.name, name, index))
                if node := self.nodes.get((place.name, name)):
                    makers.add(node)
                else:
                    waiting += self._behind(place, place.instructions[name], index)
        return makers

    def _behind(self, computation: Computation, instruction: Instruction, index: int | None) -> list[Value]:
        """The values that an instruction which is not drawn is made of (of a tuple: its item `index`, or all)."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in FRAMES:
            framed = self._framed(instruction)[: 1 if opcode == "while" else None]  # a loop's result is its body's
            return [(callee, callee.root, index) for callee, _ in framed]
        if opcode == "parameter":
            if computation.name not in self.runners:
                return []  # an input of the step
            place, runner, operand = self.runners[computation.name]
            return [(place, runner.operands[int(operands[0]) if operand is None else operand], index)]
        if opcode == "get-tuple-element":
            return [(computation, operands[0], int(instruction.attributes.partition("index=")[2].split(",")[0]))]
        if opcode == "tuple" and index is not None:
            return [(computation, operands[index], None)]
        if opcode == "opt-barrier":
            return [(computation, operands[0], index)]
        return [] if instruction.is_counter else [(computation, name, None) for name in operands]


def _without_shortcuts(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The edges without those beside which a longer way leads."""
    after: dict[str, set[str]] = {}
    for start, end in edges:
        after.setdefault(start, set()).add(end)
    for start, end in sorted(edges):
        seen, waiting = {start}, list(after[start] - {end})
        while waiting and end not in seen:
            if (place := waiting.pop()) not in seen:
                seen.add(place)
                waiting += after.get(place, ())
        if end in seen:
            after[start].discard(end)
    return {(start, end) for start, ends in after.items() for end in ends}


def draw(folder: Path) -> None:
    """Draws step.svg, if it is not drawn yet; one line on stderr says why it cannot."""
    text, svg, part = folder / "step.hlo.txt", folder / "step.svg", folder / "step.svg.part"
    if svg.exists() or not text.exists():
        return
    try:
        source = graph_of(parse(read_text(text))).source
        command = [find_dot() or "dot", "-Kdot", "-Tsvg", f"-o{part}"]
        subprocess.run(command, input=source.encode(), capture_output=True, timeout=LIMIT_S, check=True)
        return os.replace(part, svg)
    except FileNotFoundError:
        reason = "the program `dot` is missing: pip install graphviz-pure, or apt-get install graphviz"
    except subprocess.CalledProcessError as error:
        reason = f"{error}: {error.stderr.decode(errors='replace').strip()[-200:]}"
    except (ImportError, OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        reason = f"{type(error).__name__}: {error}"
    part.unlink(missing_ok=True)
    print_error(f"{svg} is not drawn: {reason}", "warning")


def find_dot() -> str | None:
    """The path of `dot`, of graphviz or of the wheel graphviz-pure, whose environment may not be activated."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    return shutil.which("dot", path=folders) or shutil.which("graphviz-pure", path=folders)
