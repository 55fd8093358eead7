"""The compiled step as text and as a picture: `step.hlo.txt` and `step.svg` in the run folder.

The text is the optimized HLO, what the devices really run. The picture shows what in it takes time: collectives, matrix
products, fusions (one node each), custom calls; loops are frames. What costs nothing is left out, and its users are
connected to what stands behind it: parameters, tuples, constants, bitcasts. Left out without a trace are loop counters
and offsets, and what a loop carries from one turn to the next.

All of it happens in a thread of its own: neither the first step nor any other waits.
"""

import atexit
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from ledger.compiled.hlo_text import Computation, Instruction, Module, parse
from runtime.terminal import print_line
from runtime.tracking.files import write_whole

if TYPE_CHECKING:
    import graphviz  # imported where it is used, since a run can do without

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
PRODUCTS = frozenset({"dot", "convolution"})  # a TPU's matrix products are convolutions
COLORS = {
    "collective": "#f4a582",
    "matrix product": "#92c5de",
    "custom call": "#c2a5cf",
    "fusion": "#e8e8e8",
    "other": "#ffffff",
}
UNSEEN = frozenset("parameter tuple get-tuple-element constant bitcast opt-barrier after-all add-dependency".split())
PLAIN = frozenset("broadcast iota reshape copy convert transpose".split())  # named only in a fusion of nothing else
FRAMES = frozenset({"while", "conditional", "call"})
# Without these, 2000 nodes take half a minute; with them, 3 s (two shared cores).
DOT_FLAGS = ["-Kdot", "-Gnslimit=1", "-Gnslimit1=1", "-Gmclimit=0.1"]


def graph_of(module: Module) -> "graphviz.Digraph":
    """The picture of a module, to be drawn by `dot`.

    graph_of(parse(compiled.as_text())).source
    """
    return _Graph(module).dot


class _Graph:
    def __init__(self, module: Module):
        import graphviz

        self.module = module
        self.dot = graphviz.Digraph(
            graph_attr={"label": f"{module.name}: optimized HLO of one device", "labelloc": "t", "fontsize": "18"},
            node_attr={
                "shape": "box",
                "style": "filled,rounded",
                "fontsize": "11",
                "margin": "0.12,0.06",
                "height": "0.3",
            },
            edge_attr={"color": "#707070", "arrowsize": "0.6"},
        )
        self.dot.attr(fontname="Helvetica", ranksep="0.3", nodesep="0.25")
        self.dot.attr("node", fontname="Helvetica")
        # A framed computation -> where it is run, by what, and which operand is its parameter (None: that of its
        # number).
        self.runners: dict[str, tuple[Computation, Instruction, int | None]] = {}
        self.known: dict[tuple[str, str, int | None], frozenset[str]] = {}
        with self.dot.subgraph(name="cluster_legend", graph_attr={"label": "", "color": "#ffffff"}) as legend:
            for kind, color in COLORS.items():
                legend.node(f"legend {kind}", kind, fillcolor=color)
        self._add(module.computations[module.entry], self.dot)
        self._connect()

    def _add(self, computation: Computation, graph: "graphviz.Digraph") -> None:
        for instruction in computation.instructions.values():
            if instruction.opcode in FRAMES:
                for number, (callee, operand) in enumerate(self._framed(instruction)):
                    if callee.name in self.runners:
                        continue  # drawn where it is run first
                    self.runners[callee.name] = (computation, instruction, operand)
                    if instruction.opcode == "call":
                        self._add(callee, graph)
                        continue
                    if not any(each.opcode in FRAMES or not _is_unseen(each) for each in callee.instructions.values()):
                        continue  # a condition that only counts
                    label = self._frame_label(instruction, number)
                    with graph.subgraph(name=f"cluster_{callee.name}") as frame:
                        frame.attr(label=label, color="#404040", style="rounded", penwidth="1.5", fontsize="13")
                        self._add(callee, frame)
            elif not _is_unseen(instruction):
                kind, label = self._describe(instruction)
                tooltip = f"{instruction.name} {self.module.metadata(instruction)[1]}".strip()
                graph.node(_node(computation, instruction), label, fillcolor=COLORS[kind], tooltip=tooltip)

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
        elif number == 1:
            title = "condition of the loop"
        else:
            count = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            title = f"loop, {count[1]} time{'' if count[1] == '1' else 's'}" if count else "loop"
        return f"{title}, {self._place(instruction)}".removesuffix(", ")

    def _describe(self, instruction: Instruction) -> tuple[str, str]:
        """Its kind and the lines of its node: opcode, shape, source line."""
        inner = self.module.inner(instruction)
        opcodes = dict.fromkeys(each.opcode for each in inner if inner == [instruction] or not _is_unseen(each))
        title = instruction.opcode
        if inner != [instruction]:
            named = [code for code in opcodes if code not in PLAIN] or list(opcodes)
            named.sort(key=lambda code: code not in COLLECTIVES | PRODUCTS | {"reduce"})
            title += f": {', '.join(named[:3])}{', ...' if len(named) > 3 else ''}"
        if target := re.search(r'custom_call_target="([^"]*)"', instruction.attributes):
            title += f": {target[1]}"
        if COLLECTIVES & opcodes.keys():
            kind = "collective"
        elif PRODUCTS & opcodes.keys() or re.search("matmul|gemm", title):
            kind = "matrix product"
        else:
            kind = {"custom-call": "custom call", "fusion": "fusion"}.get(instruction.opcode, "other")
        shape = instruction.shape if len(instruction.shape) <= 50 else instruction.shape[:47] + "..."
        return kind, r"\n".join(filter(None, [title, shape, self._place(instruction)]))

    def _place(self, instruction: Instruction) -> str:
        """Its source line, and which pass of the step it belongs to by the name stack that JAX writes."""
        source, op_name = self.module.metadata(instruction)
        if "rematted_computation" in op_name:
            return f"{source} recomputed"
        return f"{source} backward" if "transpose(" in op_name else source

    def _connect(self) -> None:
        for name in (self.module.entry, *self.runners):
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                if instruction.opcode not in FRAMES and not _is_unseen(instruction):
                    for maker in sorted(self._makers_of_all(computation, instruction.operands)):
                        self.dot.edge(maker, _node(computation, instruction))

    def _makers_of_all(self, computation: Computation, names: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*(self._makers(computation, name, None) for name in names))

    def _makers(self, computation: Computation, name: str, index: int | None) -> frozenset[str]:
        """The nodes that make a value (of a tuple: item `index`, or all), through what is not drawn."""
        key = (computation.name, name, index)
        if key not in self.known:
            self.known[key] = self._find_makers(computation, computation.instructions[name], index)
        return self.known[key]

    def _find_makers(self, computation: Computation, instruction: Instruction, index: int | None) -> frozenset[str]:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in FRAMES:
            framed = self._framed(instruction)[: 1 if opcode == "while" else None]  # a loop's result is its body's
            return frozenset().union(*(self._makers(callee, callee.root, index) for callee, _ in framed))
        if opcode == "parameter":
            if computation.name not in self.runners:
                return frozenset()  # an input of the step
            place, runner, operand = self.runners[computation.name]
            return self._makers(place, runner.operands[int(operands[0]) if operand is None else operand], index)
        if opcode == "get-tuple-element":
            return self._makers(computation, operands[0], int(re.search(r"index=(\d+)", instruction.attributes)[1]))
        if opcode == "tuple" and index is not None:
            return self._makers(computation, operands[index], None)
        if opcode == "opt-barrier":
            return self._makers(computation, operands[0], index)
        if instruction.is_done or opcode in UNSEEN:
            return self._makers_of_all(computation, operands)
        if instruction.is_counter:
            return frozenset()
        return frozenset([_node(computation, instruction)])


def _is_unseen(instruction: Instruction) -> bool:
    return instruction.opcode in UNSEEN or instruction.is_done or instruction.is_counter


def _node(computation: Computation, instruction: Instruction) -> str:
    return f"{computation.name} {instruction.name}"


class StepGraph:
    """Writes `step.hlo.txt`, and draws `step.svg`, in a thread that starts at once.

        graph = StepGraph(training_step.lower(state, batch).compile(), run_folder)

    What goes wrong (no `dot` program, a graph that takes it too long, a full disk) is one line on the terminal;
    training goes on. `close` is called at the exit of the program, if not before.

    Args:
        compiled: the compiled step.
        run_folder: an existing folder.
        limit_s: how long `dot` may take.
        exit_wait_s: how long `close` waits.
    """

    def __init__(
        self, compiled: jax.stages.Compiled, run_folder: str | Path, *, limit_s: float = 120, exit_wait_s: float = 5
    ):
        self._compiled = compiled
        self._text_path = Path(run_folder) / "step.hlo.txt"
        self._svg_path = Path(run_folder) / "step.svg"
        self._limit_s = limit_s
        self._exit_wait_s = exit_wait_s
        self._process: subprocess.Popen | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="step graph", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Waits for the files, `exit_wait_s` at most; what is not drawn by then is given up."""
        atexit.unregister(self.close)
        self._thread.join(self._exit_wait_s)
        if self._thread.is_alive():
            self._is_given_up = True
            if self._process is not None:
                self._process.kill()
            self._thread.join(1)
            print_line(f"{self._svg_path} is not drawn: it was not ready {self._exit_wait_s:g} s after the last step.")

    def _run(self) -> None:
        try:
            text = self._compiled.as_text()
            self._compiled = None  # held for its text only
            write_whole(self._text_path, text)
            reason = self._draw(text)
        except ImportError as error:
            reason = f"{error}. Install it with `pip install graphviz`."
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason and not self._is_given_up:
            print_line(f"{self._svg_path} is not drawn: {reason} Training goes on.")

    def _draw(self, text: str) -> str | None:
        """Draws the graph, or returns why not."""
        program = find_dot()
        if program is None:
            return (
                "the program `dot` is missing. Install it with `pip install graphviz-pure` or `apt-get install "
                "graphviz`."
            )
        graph_path, part = self._svg_path.with_suffix(".gv"), self._svg_path.with_suffix(".svg.part")
        module = parse(text)
        if self._is_given_up:
            return None
        write_whole(graph_path, graph_of(module).source)
        if self._is_given_up:
            return None
        command = [program, *DOT_FLAGS, "-Tsvg", f"-o{part}", str(graph_path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)  # training first
        try:
            _, errors = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            part.unlink(missing_ok=True)
            return (
                f"`dot` took more than {self._limit_s:g} s. Without a limit: `{program} -Kdot -Tsvg -O {graph_path}`."
            )
        if self._process.returncode != 0:
            part.unlink(missing_ok=True)
            return f"`{' '.join(command)}` failed: {errors.decode(errors='replace').strip()[-200:]}."
        os.replace(part, self._svg_path)
        graph_path.unlink()
        return None


def find_dot() -> str | None:
    """The path of graphviz' `dot`, or of the same in the wheel graphviz-pure, also where its environment is not
    activated."""
    for name in ("dot", "graphviz-pure"):
        if program := shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)):
            return program
    return None
