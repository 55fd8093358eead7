"""Annotations that nobody reads: a program that has some is refused."""

import ast
import functools
import linecache

from shardlib.spec import ShardingError


def refuse_unread(functions: set[tuple[str, int]], read: set[tuple[str, int]]):
    """Raises `ShardingError` for a function of the program whose annotations say how arrays lie, and that is not under
    `typed`: what it says would not be checked. `functions` are (file, first line), `read` (file, line of `def`)."""
    for file, line in sorted(functions):
        node = _definitions(file).get(line)
        if node is None or (file, node.lineno) in read:
            continue
        if any(_says_sharding(annotation) for annotation in _annotations(node)):
            what, fix = f"nobody reads the annotations of {node.name}", f"@typed above `def {node.name}`"
            raise ShardingError(f"{what}\n  fix: {fix}\n  at {file}:{node.lineno}")


@functools.cache
def _definitions(file: str) -> dict[int, ast.FunctionDef]:
    """The functions that a file defines, by the line of `def` and by that of the first decorator."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # no Python: a notebook's cell, a template
        return {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {line: node for node in nodes for line in (node.lineno, *(item.lineno for item in node.decorator_list))}


def _annotations(node: ast.FunctionDef):
    arguments = node.args
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from filter(None, (arguments.vararg, arguments.kwarg, node.returns))
    inside = list(node.body)
    while inside:
        statement = inside.pop()
        if isinstance(statement, ast.AnnAssign):
            yield statement.annotation
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            inside += ast.iter_child_nodes(statement)


def _says_sharding(annotation: ast.AST) -> bool:
    """Whether an annotation has something like f32['B/d'] in it."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, (ast.Name, ast.Attribute))
        and ast.unparse(node.value).rpartition(".")[2] != "Literal"
        and any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node.slice))
        for node in ast.walk(annotation)
    )
