"""What README.md and docs/ show of code, tried: Python, configs, the notation's operations, changes of train.py."""

import inspect
import re
import shlex
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import prove
import pytest
import yaml
import zarr
from jax.sharding import PartitionSpec as P
from ledgers import ledger_of
from mutation import mutants
from pages import (
    PAGES,
    ROOT,
    blocks,
    changed,
    copy_of_the_repository,
    executed,
    module_of,
    of_language,
    run_in,
    section,
    text_of,
    train_py,
    without_folders,
)

import train
from ledger.count.costs import count
from ledger.count.program import read
from runtime.config import command_line
from runtime.config.command_line import load
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.spec import ShardingError, Spec, parse
from tools import plan_step


# == Python ============================================================================================================
def test_blocks_of_code_are_all_known():
    """A block that is new has a test; those of docs/recipes/family.md are a file, which test_recipes.py makes."""
    for language, known in {
        "python": {"README.md": 1, "notation.md": 2, "formats.md": 1, "family.md": 4},
        "yaml": {"data.md": 1, "ledger.md": 1},
    }.items():
        found = {path.name: len(of_language(language, path)) for path in PAGES}
        assert {page: count for page, count in found.items() if count} == known


def test_the_excerpt_of_the_readme_is_train_py():
    """What README.md shows stands in train.py."""
    (code,) = of_language("python", "README.md")
    assert code in train_py()


def test_the_files_that_the_readme_names_are_there():
    """Each file in the table of where things are is at the root or in one of its folders."""
    section = (ROOT / "README.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    names = re.findall(r"`([\w/]+\.(?:py|yaml|html))`", section)
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    there = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*.*"))]
    assert len(names) > 60
    assert not [name for name in names if not any(str(path).endswith(f"/{name}") for path in there)]


NOTATION = ("shardlib", "shardlib/proof")


def test_the_numbers_of_the_readme():
    """It says how many lines train.py and the notation have, how many mutations of train.py the tests try, and how many
    collectives the first job's step has."""
    readme = (ROOT / "README.md").read_text()
    lines = train_py().count("\n")
    assert f"(train.py) is {lines} lines" in " ".join(readme.split())
    notation, proof = (
        sum(file.read_text().count("\n") for file in (ROOT / folder).glob("*.py")) for folder in NOTATION
    )
    of_rooms = f"(`shardlib/`, {round(notation, -1):,}, its proof {round(proof, -1):,})"
    assert f"| lines to read | {lines}, on top of the notation {of_rooms} |" in readme
    assert f"get past the checker: 0 of {len(mutants(train_py()))} |" in readme
    collectives = sum(ledger_of("local_test_synthetic").costs.collectives.values())
    assert f"| collectives of the compiled step | {collectives}: " in readme


IMPORTS = """import jax
from shardlib import products, shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, bool_, f32, i32, make_shardings, pytree_dataclass, u32
from shardlib.typed import typed

"""


def test_the_replicated_weight_of_the_notation(tmp_path):
    """The gradient of a replicated weight is accepted with its psum, and refused without it."""
    code, _ = of_language("python", "docs/notation.md")
    code = code.replace(
        ": ...", ": return shardops.sum_unreduced('M/d/t -> +d +t', shardops.slice('M -> M/d/t', w * w))"
    )

    def step(code, name):
        body = "".join(f"    {line}\n" for line in (*code.splitlines(), "return gradient"))
        return module_of(tmp_path / f"{name}.py", f"{IMPORTS}@typed\ndef step(w: f32['M']) -> f32['M']:\n{body}").step

    assert prove.prove(step(code, "with_it")) > 0
    without = re.sub(r"gradient = shardops.psum.*", "", code)
    assert "still a sum over d" in prove.refusal(step(without, "without_it"))


def small_array(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def test_the_functions_of_the_notation(tmp_path):
    """The dataclass and the mapped function are accepted as they stand, with a body for the function's gap."""
    _, code = of_language("python", "docs/notation.md")
    before = "@pytree_dataclass\nclass Layer:\n    w: f32['M/d F/t']\n\n\n"
    body = "return shardops.psum('+d +t -> ', shardops.sum_unreduced('... -> +d +t', weights.embed))"
    module = module_of(
        tmp_path / "functions.py", IMPORTS + before + code.replace("-> f32['']: ...", f"-> f32['']: {body}")
    )
    weights = module.Weights(embed=small_array(16, 16), layers=module.Layer(w=small_array(3, 16, 16)))
    mesh = jax.sharding.AbstractMesh((4, 2), ("d", "t"))
    tokens = jax.ShapeDtypeStruct((16, 32), np.uint32)
    assert typed_shard_map(module.step).check(mesh, weights, tokens) > 0


def test_the_checkpoint_of_the_formats(tmp_path, monkeypatch):
    """A leaf opens as an array under its path."""
    monkeypatch.chdir(tmp_path)
    group = zarr.open_group("runs/local_test_synthetic/checkpoints/0000000050", mode="w")
    group.create_array("weights/transformer/w_q", data=np.arange(6.0))
    (code,) = of_language("python", "docs/formats.md")
    assert executed(code)["w_q"].tolist() == [0, 1, 2, 3, 4, 5]


# == Configs ===========================================================================================================
def configured(block, class_, tmp_path, monkeypatch):
    """The config that a reader has who writes the block into a file of his own beside the others."""
    folder = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.setattr(command_line, "CONFIG_FOLDER", folder)
    (folder / "my_config.yaml").write_text(f"defaults: [local_test_synthetic, _self_]\n\n{block}")
    return load(class_, "my_config")


def test_the_mixture_of_the_data(tmp_path, monkeypatch):
    """The block is a mixture of a config."""
    (block,) = of_language("yaml", "docs/data.md")
    config = configured(block, train.Config, tmp_path, monkeypatch)
    assert config.flat_tokens.filespec is None
    assert [vars(source) for source in config.mixture] == yaml.safe_load(block)["mixture"]


def test_the_own_hardware_of_the_plan(tmp_path, monkeypatch):
    """The plan has the figures of the block."""
    (block,) = of_language("yaml", "docs/ledger.md")
    machine = plan_step.machine_of(configured(block, plan_step.plan_class(train), tmp_path, monkeypatch))
    ((own,), name) = (yaml.safe_load(block)[key] for key in ("own_hardware", "hardware"))
    assert own.pop("name") == name and own == {key: getattr(machine, key) for key in own}


# == The table of operations: docs/notation.md =========================================================================
AXES = {"d": 2, "p": 2, "t": 2}
OF_FUNCTIONS = {"value_and_grad", "grad", "vjp", "sum_over_chunks", "each", "ring"}  # tests of their own


class Example:
    """A row's example: `arguments` are those that the page shows, `operands` and `result` the types of its string."""

    def __init__(self, name, arguments, change, forward, backward):
        self.name, self.change, self.sent = name, change, (forward, backward)
        self.home = "shardops." if hasattr(shardops, name) else "products."
        self.text = re.match(r"'(.*?)'", arguments)[1]
        left, self.arrow, right = self.text.replace("...", "B/d M/t").partition("->")
        self.operands = [parse(operand.strip()) for operand in left.split(",")]
        self.result = parse(right.strip()) if self.arrow else self.operands[0]
        self.dtype = {"argmax": "i32", "any": "bool_", "index": "i32"}.get(name, "f32")
        if name == "index":  # its string is an axis
            self.operands, self.result = [], parse(f"{left}/{left}")
        self.letters = ["x", "y"][: len(self.operands)]
        self.arguments = ", ".join([arguments, *self.letters]) if arguments == f"'{self.text}'" else arguments

    def __str__(self):
        return f"{self.name} {self.text}"

    def module(self, folder, claimed):
        """A program that claims the result to be of a type. A pending operand is made of one that is not."""
        given, lines = [], []
        for letter, spec in zip(self.letters, self.operands):
            before = re.sub(r"[][]", "", str(Spec(spec.dims)))
            dtype = "u32" if (self.name, letter) == ("index_unreduced", "y") else "f32"
            given.append(f"{letter}: {dtype}['{before}']")
            if spec.pending:
                lines.append(f"    {letter} = shardops.pending('{before} -> {spec}', {letter})\n")
        operands, made = ", ".join(self.letters), "".join(lines)
        return module_of(
            folder / "example.py",
            f"{IMPORTS}\ndef kernel(x):\n    return 2 * x\n\n"
            f"def operation({operands}):\n    return {self.home}{self.name}({self.arguments})\n\n"
            f"@typed\ndef program({', '.join(given)}) -> f32['']:\n{made}"
            f"    result: {self.dtype}['{claimed}'] = operation({operands})\n    return shardops.zeros('', f32)\n",
        )


def table_of_operations():
    return text_of("notation.md").partition("## The operations\n")[2].partition("\n## ")[0]


def examples():
    """The examples of each row of the table."""
    found = []
    for names, shown, *cells in re.findall(r"^\| (`.*?) \|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$", table_of_operations(), re.M):
        names, shown = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", shown)
        names = names * len(shown) if len(names) == 1 else names
        assert len(names) == len(shown) or not shown, f"{names} have {len(shown)} examples"
        found += [Example(name, arguments, *(cell.strip() for cell in cells)) for name, arguments in zip(names, shown)]
    return [example for example in found if example.name not in OF_FUNCTIONS]


def test_the_table_has_every_operation():
    """All of shardops are in it, and those of other files; those that take a string have an example."""
    own = {name for name, value in vars(shardops).items() if getattr(value, "__module__", "") == shardops.__name__}
    public = {name for name in own if name.islower() and name[0] != "_"} | {"product", "float8_scale", "ring"}
    public -= {"axis_size", "operate", "operation"}  # a number, of no type; what operations are made of
    public -= {name for name in public if name.startswith("require_")}
    assert (
        set(re.findall(r"`([a-z_0-9]+)`", "".join(re.findall(r"^\| (.*?) \|", table_of_operations(), re.M)))) == public
    )
    assert {example.name for example in examples()} == public - OF_FUNCTIONS


def word(axis, *specs):
    """How a value, or several that an operation takes, lie along an axis."""
    split, pending = (any(axis in getattr(spec, state) for spec in specs) for state in ("split", "pending"))
    return "split" if split else "pending" if pending else "same"


@pytest.mark.parametrize("example", examples(), ids=str)
def test_examples_of_the_notation(example, tmp_path, monkeypatch):
    """Each is accepted, its result is of the string's type and of no other, and its states change as the row says."""
    monkeypatch.setitem(prove.SIZES, "C", 160)
    assert prove.prove(example.module(tmp_path, example.result).program, AXES) > 0
    dims, pending, split = example.result.dims, example.result.pending, example.result.split
    other = Spec(dims) if pending else Spec(dims, (next(axis for axis in AXES if axis not in split),))
    prove.refusal(example.module(tmp_path, other).program, AXES)
    if example.arrow:
        changes = {(word(axis, *example.operands), word(axis, example.result)) for axis in AXES}
        changes = {f"{before} → {after}" for before, after in changes if before != after}
        in_words = {"split → pending"} if example.name.endswith("_unreduced") else set()
        assert changes == (set(re.findall(r"\w+ → \w+", example.change)) or in_words)


@pytest.mark.parametrize("example", [example for example in examples() if example.arrow], ids=str)
def test_what_the_examples_of_the_notation_send(example, tmp_path, monkeypatch):
    """Each example sends, forward and backward, the collectives of its row and no others."""
    monkeypatch.setitem(prove.SIZES, "C", 160)
    module = example.module(tmp_path, example.result)
    sizes = prove.SIZES | dict.fromkeys(AXES, 1)
    arrays = [
        prove.abstract(parameter.annotation, sizes)
        for parameter in inspect.signature(module.program).parameters.values()
    ]

    def transposed(x, *others):
        result, transpose = jax.vjp(lambda x: module.operation(x, *others), x)
        return transpose(jnp.ones_like(result))

    def sent(function):  # the letters' sizes serve as those of a device's parts
        mesh = jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return ", ".join(row.kind for row in count(read(jax.make_jaxpr(mapped)(*arrays)), AXES).collectives)

    forward, backward = example.sent
    assert sent(module.operation) == forward
    if backward == "no gradient":
        assert example.dtype != "f32"
    elif backward == "no gradient: stop it first":
        with pytest.raises(ShardingError, match=r"pass it lax\.stop_gradient"):
            sent(transposed)
    else:
        assert sent(transposed) == backward


# == Changed copies of train.py: docs/changing.md ======================================================================
FORGOTTEN = {  # what docs/notation.md says before a message: what is replaced in train.py, and by what
    "With `+t` left out of the feed-forward's last product:": ("B/d L M +t', hidden", "B/d L M', hidden"),
    "and with the `psum` of the softmax's denominator forgotten:": (
        "total = shardops.psum('B/d L +t -> B/d L', total)",
        "pass",
    ),
}


@pytest.mark.parametrize("sentence", FORGOTTEN)
def test_errors_of_the_notation(sentence, tmp_path):
    """The message below the sentence is what `python -m train check_only=true` says of train.py changed so."""
    old, new = FORGOTTEN[sentence]
    assert train_py().count(old) == 1
    _, found, after = text_of("notation.md").partition(sentence)
    (_, message), *_ = blocks(after)
    module = module_of(tmp_path / "train.py", train_py().replace(old, new))
    with pytest.raises(RunError) as refused:
        module.main(load(module.Config, "local_test_synthetic", ["check_only=true"]))
    message = f"training_step is refused on the mesh d=4 × t=2:\n{message}"
    assert found and without_folders(str(refused.value)) == without_folders(message)


@pytest.mark.slow
def test_changes_of_another_axis(tmp_path):
    """The section's commands and diffs, in a copy, are refused as it says, then proved on a mesh of 2 × 4 × 2 and run
    on 2 × 2 × 2."""
    copy_of_the_repository(tmp_path)
    file = tmp_path / "train.py"
    count, messages = 0, 0
    check = ["python", "-m", "train", "check_only=true", "mesh.r=2"]
    for language, body in section("docs/changing.md", "Another axis of the mesh"):
        if language == "sh":
            subprocess.run(body, shell=True, cwd=tmp_path, check=True)
        elif language == "diff":
            file.write_text(changed(file.read_text(), body))
            count += 1
            if count == 3:
                assert "training_step on the mesh r=2 × d=4 × t=2: " in run_in(tmp_path, check)
                data = f"flat_tokens.filespec={ROOT / 'synthetic_dataset.zarr'}"
                few = ["training.steps=2", "validation_batches=1", data, "mesh.r=2", "mesh.d=2", "mesh.t=2"]
                run_in(tmp_path, [*check[:3], *few])
                assert "step" in (tmp_path / "runs/local_test_synthetic/metrics.jsonl").read_text()
        elif language == "diff forgotten":
            file.write_text(changed(file.read_text(), body))
        else:
            assert without_folders(run_in(tmp_path, check, status=1).removeprefix('error: ')) == without_folders(body)
            messages += 1
    assert (count, messages) == (3, 1)


@pytest.mark.slow
def test_what_a_change_costs(tmp_path):
    """The commands of the section, with the change between them, print the ledger's difference as it stands there."""
    copy_of_the_repository(tmp_path)
    (_, diff), (_, commands), (_, expected) = section("docs/changing.md", "What is kept for the backward pass")
    before, after, difference = (shlex.split(re.sub(" # .*", "", line)) for line in commands.splitlines())
    run_in(tmp_path, before)
    (tmp_path / "train.py").write_text(changed(train_py(), diff))
    run_in(tmp_path, after)
    assert run_in(tmp_path, difference) == expected
