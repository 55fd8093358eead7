"""The rules of the house: sizes, logs, who may import whom, and that all transfers of train.py are in strings."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
TREE = ast.parse((ROOT / "train.py").read_text())
# Who may import whom, by the longest name that fits: a room may always import itself. Whoever is not named imports
# anything. docs/changing.md says what each room is for.
ARROWS = {
    "jax_extra": "",
    "shardlib": "",
    "kernels": "shardlib",
    "ledger.units": "",
    "ledger.count": "ledger.units shardlib kernels",
    "ledger.compiled": "ledger.count ledger.units shardlib kernels",
    "ledger.machines": "ledger.compiled ledger.count ledger.units shardlib kernels",
    "ledger.pages": "ledger.machines ledger.compiled ledger.count ledger.units shardlib kernels",
    "runtime.files": "",
    "runtime.beside": "",
    "runtime.retries": "",
    "runtime.unpacking": "",
    "runtime.terminal": "shardlib ledger",
    # Five folders that do not know each other; run.py knows all.
    **dict.fromkeys(
        ("runtime.config", "runtime.data", "runtime.checkpoints", "runtime.tracking", "runtime.cluster"),
        "runtime.beside runtime.files runtime.retries runtime.terminal runtime.unpacking shardlib ledger",
    ),
    "runtime.program": "runtime.files runtime.terminal",
    "runtime.check": "runtime.config.help runtime.config.sizes runtime.files runtime.terminal shardlib",
    "runtime.run": "runtime shardlib ledger",
    "train": "runtime ledger kernels shardlib jax_extra",
    "optimizers": "train models.dropout runtime.config.keys shardlib",
    "pipeline": "train models.mesh shardlib jax_extra",
    "models": "train runtime.config.keys runtime.terminal shardlib kernels jax_extra",
    "models.foreign": "models.huggingface models.layers models.safetensors runtime.files runtime.terminal",
    "models.safetensors": "runtime.files runtime.terminal",
    # A checkpoint in or out.
    "models.adapters": "models.safetensors runtime.checkpoints runtime.terminal shardlib",
    "models.huggingface": "models.adapters models.config models.safetensors runtime.checkpoints runtime.config.rebuild "
    "runtime.program runtime.terminal",
}
FOLDERS = ("shardlib", "kernels", "ledger", "runtime", "models", "tools")
ROOMS = (*FOLDERS, "tests")


def test_train_py_is_minimal():
    """train.py has at most 500 lines, and its main 60."""
    lines = (ROOT / "train.py").read_text().count("\n")
    main = next(node for node in TREE.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert lines <= 500 and main.end_lineno - main.lineno + 1 <= 60


LONG = {"pipeline.pipelined"}  # one schedule, with the closures of its ticks


def test_functions_are_short():
    """No function of the product has more than 72 lines, but for LONG."""
    long = {
        f"{name}.{node.name}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 72
    }
    assert long == LONG


def test_lines_have_120_columns():
    """No line has more, also in files that ruff does not see."""
    kinds = "Makefile pyproject.toml requirements-*.txt launch/* configs/**/*.yaml".split()
    kinds += [f"{room}/**/*{kind}" for room in FOLDERS for kind in (".css", ".html", ".js", ".yaml")]
    files = [path for kind in kinds for path in ROOT.glob(kind)]
    wide = [
        f"{path}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not wide


def test_the_docs_are_short():
    """README.md and the pages of docs/ have at most 125,000 bytes together."""
    assert sum(page.stat().st_size for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]) <= 125_000


def test_every_log_has_one_dated_table():
    """Each page of log/ has one table, and a date in its name that stands in its first paragraph too."""
    logs = sorted((ROOT / "log").glob("*.md"))
    assert logs
    for path in logs:
        date, text = path.name.partition("_")[0], path.read_text()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and date in text.split("\n\n")[1], f"{path.name}: its date"
        tables = re.findall(r"^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$", text, re.M)  # the line under the heads
        assert len(tables) == 1, f"{path.name}: {len(tables)} tables"


def modules():
    """All modules of the product by name, with their files."""
    files = [
        *(ROOT / f"{name}.py" for name in ("train", "train_any", "pipeline", "optimizers", "jax_extra")),
        *(p for room in FOLDERS for p in (ROOT / room).rglob("*.py")),
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imports_of(source, known):
    """The modules of the product that a file imports, those inside functions too, but not those of the program that it
    is where it is started: `__main__` is another module."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if __name__ == '__main__':")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & known.keys() or {node.module}


def within(module, rooms):
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


def test_imports_are_found_wherever_they_stand():
    """A module, names from one and a module from a package are found, at the top and inside a function."""
    known = dict.fromkeys(("tools", "tools.plan", "runtime.run", "train"))
    source = "import tools.plan\nimport jax\ndef f():\n    import train\n    from runtime.run import Run\n"
    assert sorted(imports_of(source, known)) == ["runtime.run", "tools.plan", "train"]
    assert list(imports_of("from tools import plan", known)) == ["tools.plan"]


def test_rooms_import_only_what_they_may():
    """Imports go one way: shardlib knows no language model, the ledger and runtime no trainer, the folders of runtime
    not each other, and nothing but train_any.py, pipeline.py, models/, tools and tests imports train.py."""
    known = modules()
    foreign = []
    for name, path in known.items():
        room = max((room for room in ARROWS if within(name, [room])), key=len, default=None)
        if room is not None:
            allowed = [room, *ARROWS[room].split()]
            foreign += [
                f"{name}: {module}" for module in imports_of(path.read_text(), known) if not within(module, allowed)
            ]
    assert not foreign


def test_no_module_imports_itself_by_way_of_others():
    """There are no circles, imports inside functions included."""
    known = modules()
    imports = {name: set(imports_of(path.read_text(), known)) - {name} for name, path in known.items()}
    while free := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in free:
            del imports[name]
    assert not imports, f"in a circle, or importing one: {sorted(imports)}"


def test_transfers_and_reductions_of_train_py_are_operations_with_a_string():
    """No lax collective, no axis_index, and no jnp reduction is called in train.py: what may be split is reduced by
    shardops."""
    collectives = (
        "psum pmax pmin pmean psum_scatter all_gather all_to_all ppermute pshuffle axis_index pcast pbroadcast"
    )
    reductions = "sum mean max min prod var std einsum dot matmul tensordot vdot inner argmax argmin logsumexp softmax"
    reductions += " take take_along_axis"
    forbidden = dict.fromkeys(("lax", "jax.lax"), f"{collectives} dot_general reduce")
    forbidden |= dict.fromkeys(("jnp", "jax.numpy", "jax.nn", "jnp.linalg"), f"{reductions} norm")
    forbidden |= dict.fromkeys(("x", "logits", "value"), reductions)
    for node in ast.walk(TREE):
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), f"line {node.lineno}: @"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = forbidden.get(ast.unparse(node.func.value), "").split()
            assert node.func.attr not in names, f"line {node.lineno}: {ast.unparse(node.func)}"


def test_every_operation_in_train_py_has_its_string_on_the_line():
    """Each call of shardops with a string has a literal one, first."""
    no_string = {"value_and_grad", "grad", "sum_over_chunks", "axis_size"}
    calls = [node for node in ast.walk(TREE) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in calls:
        if ast.unparse(call.func.value) == "shardops" and call.func.attr not in no_string:
            assert isinstance(getattr(call.args[0], "value", None), str), f"line {call.lineno}"


def strings_of(tree):
    """The texts in a program, docstrings and what an error says left out."""
    silent = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for part in ast.walk(node)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent
    ]


def test_no_room_knows_the_axes():
    """The names of train.py's axes stand in the trainers and in models/, which are written for its mesh: not as a
    string, in a type or an operation, nor as mesh.d. In shardlib's messages they stand in examples."""
    mesh = next(node for node in TREE.body if isinstance(node, ast.ClassDef) and node.name == "Mesh")
    axes = [node.target.id for node in mesh.body if isinstance(node, ast.AnnAssign)]
    knows = re.compile(rf"({'|'.join(axes)})|.*mesh\.({'|'.join(axes)})\b.*", re.DOTALL)
    in_types = re.compile(rf"(\w/|\+)({'|'.join(axes)})\b")
    known = set()
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        texts = strings_of(tree) + [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        found = [text for text in texts if knows.fullmatch(text)]
        if not name.startswith("shardlib"):
            found += filter(in_types.search, texts)
        known |= {
            (name, text)
            for text in found
            if name not in ("train", "train_any", "pipeline") and not within(name, ["models"])
        }
    assert axes == ["d", "t"] and known == {  # the top, as graphviz and plotly say it
        ("runtime.tracking.hlo_graph", "t"),
        ("runtime.tracking.curves", "t"),
    }


def test_no_private_jax_names():
    """Only public JAX names are used."""
    for path in [*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))]:
        assert path.name == "test_house.py" or "jax._src" not in path.read_text(), path


def test_every_saved_activation_says_why():
    """Each save_for_backward in the trainers has a comment on its line."""
    for name in ("train.py", "models/layers.py", "models/context.py", "models/experts.py"):
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if "save_for_backward(" in line:
                assert "#" in line, f"{name}:{number}"
