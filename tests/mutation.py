"""Wrong communication programs, made of a right one by small changes of its source."""

import ast
import itertools
import re
from pathlib import Path

import pytest
from pages import ROOT

from shardlib.spec import ShardingError

SLOW = pytest.mark.slow
COLLECTIVES = {"all_gather", "gather", "psum_scatter", "psum", "pmax", "all_to_all", "ppermute"}
WEIGHTS = {"matrix", "bias", "exact"}  # lines of a table of weights (models/weights.py)
# An error in a weight's line, or in a shared function of models/, is found where that is used.
PLACE = r"(weights|layers|context|experts|llama|mixtral|gemma|gpt2|gptj|bert|t5|published)\.py"


def mutants(source, axes=("d", "t")):
    """(name, line, source) of every mutant; no line moves. `axes` are the mesh's, in its order.

    Each collective is removed, doubled, has two axes exchanged or leaves one of several as it was; in a weight's line
    two axes are exchanged, and each '/axis' is dropped; and in each string each '+axis' is dropped.
    """
    tree, made = ast.parse(source), []
    parts_of_strings = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}

    def make(name, node, text):
        made.append((name, node.lineno, edited(source, node, text)))

    def text_of(node):
        return ast.get_source_segment(source, node)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1 and is_string(node.args[0]):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in COLLECTIVES:
                spec = text_of(node.args[0])
                make(f"{name} {spec} removed", node, text_of(node.args[1]))
                make(f"{name} {spec} twice", node.args[1], text_of(node))
                for other in [*exchanged(spec, axes), *one_axis_fewer(spec, axes)]:
                    make(f"{name} {spec} as {other}", node.args[0], other)
            if name in WEIGHTS:
                spec = text_of(node.args[0])
                for other in [*exchanged(spec, axes), *without_an_axis(spec, axes)]:
                    make(f"{name} {spec} as {other}", node.args[0], other)
        if is_string(node) and id(node) not in parts_of_strings:
            spec = text_of(node)
            if re.fullmatch(r"f?['\"][\w/+\[\]{}, .>-]*['\"]", spec):
                for match in re.finditer(rf" ?\+({'|'.join(axes)})\b", spec):
                    dropped = spec[: match.start()] + spec[match.end() :]
                    make(f"{spec} without{match[0]} at {match.start()}", node, dropped)
    return made


def refuse_all(made, check, folder, file="train.py", place=None):
    """Asserts that the check of each mutant of a file is a refusal with a line of it, or of `place`, a regular
    expression; returns how many there were."""
    accepted, unlocated = [], []
    for index, (name, line, source) in enumerate(made):
        (folder / f"mutant_{index}").mkdir(parents=True)
        try:
            check(folder / f"mutant_{index}" / file, source)
        except ShardingError as error:
            if not re.search(rf"{place or file}:\d+", str(error)):
                unlocated.append((name, line, str(error)))
        else:
            accepted.append((name, line))
    assert not accepted and not unlocated, (accepted, unlocated)
    return len(made)


GROUPS = ("b", "w", "c", "t")  # as the programs on models/ name them


def refuse_all_of(file, check, folder, record_property, place=None, axes=("d", "t")):
    """Asserts the same of all mutants of a file of the repository; reports and returns how many there were."""
    count = refuse_all(mutants((ROOT / file).read_text(), axes), check, folder, Path(file).name, place)
    record_property("summary", f"{count} mutants of {file}: none accepted")
    return count


def proofs(programs, quick=(), axes=GROUPS, place=PLACE):
    """Two tests of the files of `programs`, {file: (check, how many claims at least, how many mutants at least)}.

    Args:
      quick: the files whose acceptance is not slow.
    """

    @pytest.mark.parametrize("file", [file if file in quick else pytest.param(file, marks=SLOW) for file in programs])
    def accepted(file, tmp_path):
        """The check accepts the program as it is, so its mutants are refused for their mutation."""
        check, claims, _ = programs[file]
        assert check(tmp_path / Path(file).name, (ROOT / file).read_text()) > claims

    @SLOW
    @pytest.mark.parametrize("file", programs)
    def refused(file, tmp_path, record_property):
        """The check refuses every mutant: each collective removed, doubled, with two axes exchanged or one too few,
        and each '+axis' dropped."""
        check, _, count = programs[file]
        assert refuse_all_of(file, check, tmp_path, record_property, place, axes) > count

    return accepted, refused


def is_string(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def edited(source, node, text):
    """The source with the text of a node replaced."""
    lines = source.splitlines(keepends=True)
    offset = [0, *itertools.accumulate(map(len, lines))]

    def place(line, column):  # ast counts columns in bytes
        return offset[line - 1] + len(lines[line - 1].encode()[:column].decode())

    start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
    return source[:start] + text + "\n" * (source[start:end].count("\n") - text.count("\n")) + source[end:]


def exchanged(spec, axes):
    """The string with two axes exchanged, for each two, in the order of the mesh's axes."""
    for pair in itertools.combinations(axes, 2):
        swap = dict(zip(pair, reversed(pair)))
        there = re.sub(r"(?<=[/+])\w+", lambda axis, swap=swap: swap.get(axis[0], axis[0]), spec)
        for mark in ("/", " ?[+]"):
            there = re.sub(rf"({mark}({'|'.join(axes)})\b){{2,}}", lambda run: in_order(run[0], axes), there)
        if there != spec:
            yield there


def without_an_axis(spec, axes):
    """The string without one '/axis', of each."""
    for match in re.finditer(rf"/({'|'.join(axes)})\b", spec):
        yield spec[: match.start()] + spec[match.end() :]


def in_order(run, axes):
    """'/t/d' as '/d/t', ' +t +d' as ' +d +t'."""
    names = iter(sorted(re.findall(r"\w+", run), key=axes.index))
    return re.sub(r"\w+", lambda _: next(names), run)


def one_axis_fewer(spec, axes):
    """The string with one of several axes left where it was."""
    start, left, right, end = re.fullmatch(r"(f?['\"])(.*?) *-> *(.*?)(['\"])", spec).groups()
    any_axis = rf"[/+]({'|'.join(axes)})\b"
    moved = [axis for axis in re.findall(any_axis, left) if axis not in re.findall(any_axis, right)]
    if len(moved) < 2:
        return
    for axis in moved:
        if f"+{axis}" in left:
            kept = f"{right} +{axis}".strip()
        else:
            dim = re.search(rf"(\w+)[/\w]*/{axis}\b", left)[1]
            kept = re.sub(rf"\b{dim}(?![/\w])", f"{dim}/{axis}", right)
        if kept != right:  # a maximum's dim is gone, and all of its axes
            yield f"{start}{left} -> {kept}{end}"
