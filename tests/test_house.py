"""The rules of the house: the size of train.py, who may import whom, and that train.py's transfers are all in strings."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
TREE = ast.parse((ROOT / "train.py").read_text())
MAY_IMPORT = {
    "jax_extra.py": set(),
    "shardlib": set(),
    "kernels": {"shardlib"},
    "ledger": {"shardlib"},
    # A run writes its ledger, holds it against the compiled step, and logs MFU by it.
    "runtime": {"shardlib", "ledger"},
}
ROOMS = {"train", "jax_extra", "shardlib", "kernels", "ledger", "runtime", "tools", "tests"}


def test_train_py_is_minimal():
    """train.py has at most 500 lines, and main at most 60."""
    lines = (ROOT / "train.py").read_text().count("\n")
    main = next(node for node in TREE.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert lines <= 500 and main.end_lineno - main.lineno + 1 <= 60


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_may(room):
    """shardlib knows nothing of language models, runtime nothing of the model; nothing but tools and tests imports train.py."""
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    for path in files:
        foreign = set(imports_of(path)) & ROOMS - {room.removesuffix(".py")} - MAY_IMPORT[room]
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_transfers_and_reductions_of_train_py_are_operations_with_a_string():
    """No lax collective, no axis_index, and no jnp reduction is called in train.py: what may be split is reduced by shardops."""
    collectives = {
        "psum",
        "pmax",
        "pmin",
        "pmean",
        "psum_scatter",
        "all_gather",
        "all_to_all",
        "ppermute",
        "pshuffle",
        "axis_index",
        "pcast",
        "pbroadcast",
    }
    reductions = {
        "sum",
        "mean",
        "max",
        "min",
        "prod",
        "var",
        "std",
        "einsum",
        "dot",
        "matmul",
        "tensordot",
        "vdot",
        "inner",
        "argmax",
        "argmin",
        "logsumexp",
        "softmax",
        "take",
        "take_along_axis",
    }
    for node in ast.walk(TREE):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, (ast.Name, ast.Attribute))
        ):
            module = ast.unparse(node.func.value)
            if module in ("lax", "jax.lax"):
                assert node.func.attr not in collectives | {"dot_general", "reduce"}, (
                    f"line {node.lineno}: lax.{node.func.attr}"
                )
            if module in ("jnp", "jax.numpy", "jax.nn", "jnp.linalg"):
                assert node.func.attr not in reductions | {"norm"}, f"line {node.lineno}: {module}.{node.func.attr}"
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), f"line {node.lineno}: @"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in reductions | {"dot"}
        ):
            assert ast.unparse(node.func.value) not in ("x", "logits", "value"), (
                f"line {node.lineno}: .{node.func.attr}()"
            )


def test_every_operation_in_train_py_has_its_string_on_the_line():
    """Each call of shardops with a string has a literal one, first."""
    no_string = {"value_and_grad", "grad", "sum_over_chunks", "axis_size"}
    for node in ast.walk(TREE):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "shardops"
        ):
            if node.func.attr not in no_string:
                assert isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str), (
                    f"line {node.lineno}"
                )


def test_no_private_jax_names_and_no_broad_excepts():
    """Only public JAX names are used, and no `except Exception` hides an error."""
    for path in [*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))]:
        text = path.read_text()
        if path.name != "test_house.py":
            assert not re.search(r"jax\._src|except( Exception| BaseException)?:", text), path


def test_every_saved_activation_says_why():
    """Each save_for_backward in train.py has a comment on its line."""
    for number, line in enumerate((ROOT / "train.py").read_text().splitlines(), 1):
        if "save_for_backward(" in line:
            assert "#" in line, f"train.py:{number}"


def test_the_excerpt_in_the_readme_is_in_train_py():
    """What the README shows of train.py stands there, word for word."""
    (excerpt,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert excerpt in (ROOT / "train.py").read_text()
