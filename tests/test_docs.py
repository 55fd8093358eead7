"""What README.md and docs/ say to do, done: commands, code, changed copies of train.py, forecasts, shapes, links."""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import zarr
from prove import prove, refusal

import runtime.config
import train
from runtime.config import load
from runtime.errors import RunError
from shardlib.shardtypes import typed_shard_map
from tools import plan

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# == Commands ==========================================================================================================
# Each command of the pages is executed by a test of this file, or is here: how it begins, and why it is not executed
# as it stands. Of all of them that start a program of this repository, keys, configs, arguments and files are checked.
NOT_EXECUTED = {
    # minutes, a network, or what another test executes
    r"make train$": "a new environment and minutes: CI does it; the same job: test_main",
    r"make shakespeare$": "network and minutes; its parts: test_sample, test_tokenize_text",
    r"make test(-slow)?$|make lint$|make format$": "what runs this test",
    r"make golden$": "writes what test_golden compares with",
    r"(python -m )?pip install": "network; the files that it names are there",
    r"python3 -m venv \.venv$|\. \.venv/bin/activate$": "a new environment: `make train` makes one",
    r"(XLA_FLAGS=\S+ )?python -m train( --config-name=local_test_synthetic \+paths.model_name=synthetic_000)?$":
        "two minutes: test_main::test_the_small_job_goes_on_bit_for_bit (slow) runs it",
    r"python -m train --help$": "test_config_help",
    r"python -m train check_only=true$": "test_main::test_check_only_says_what_was_proved",
    r"python -m tools.write_synthetic_dataset path=copies": "a minute: test_synthetic_dataset writes a small one",
    r"python -m train flat_tokens.filespec=copies": "four minutes; its figures are in the README",
    r"python -m tools.plan( --config-name=c4_a100x8_1b hardware=h200 hosts=4 devices_per_host=8)?$": "test_plan::test_a_plan",
    r"python -m tools.plan .*compile=true": "minutes: test_plan (slow)",
    r"python -m tools.plan .*up_to_devices": "three minutes: test_plan::test_a_sweep",
    r"python -m tools.plan .*sweep=true": "test_plan::test_a_sweep",
    r"for model in|python -m (tools.plan|train) --config-name=c4_a100x8_\$model": "eight GPUs",
    r"python -m tools.torture": "minutes: test_torture (slow)",
    r"python -m tools.benchmark_(checkpoint|loader)": "minutes: test_checkpoint_tools::test_the_benchmark, test_benchmark_loader",
    r"python -m tools.benchmark ": "minutes, or a GPU: test_benchmark",
    r"python -m tools.doctor": "test_doctor",
    r"python -m tools.(verify|inspect)_checkpoint": "test_checkpoint_tools",
    r"python -m tools.ledger_diff before": "test_run_ledger and test_docs, with other folders",
    r"python -m tools.inspect_dataset my.zarr --": "test_inspect_dataset",
    r"python -m tools.tokenize_text input=\.\.\.": "not a command but its form: test_tokenize_text",
    r"python -m train flat_tokens.filespec=null hf_dataset.path=my_texts": "test_hf_stream",
    r"python -m train .*hf_dataset.path=allenai/c4": "network: test_hf_stream reads a folder",
    r"until python -m train": "does not end by itself: test_survival has each status",
    r"python -m tools.sample runs/local_shakespeare": "needs that run: test_sample",
    r"python -m tools.report": "needs that run: test_report",
    r"python -m tools.compare": "needs two runs: test_report",
    r"python -m train -m |python -m train --multirun ": "minutes: test_config_sweep",
    r"python -m train tracking.": "test_trackers",
    # clone_to_cluster.md, on machines that are not here
    r"python -m tools.benchmark configs=\[c4_a100x8_1b\]|python -m train --config-name=c4_a100x8_1b ": "eight GPUs",
    # several hosts
    r"mpirun |python -m train num_hosts=2 ": "test_cluster",
    r"sbatch |srun ": "test_slurm, test_launch",
    r"docker |kubectl |sky |launch/tpu.sh": "a cluster: test_launch holds the files against the configs",
    # others' programs
    r"apt-get ": "network",
    r"tensorboard |wandb |TRACKIO_DIR=|perf ": "another program, of the user",
}  # fmt: skip
EXECUTED = {
    r"python -m train check_only=true mesh.d=512": "test_the_check_of_the_readme",
    r"python -m docs.tutorial$": "test_the_tutorial",
    r"python -m tools.plan --config-name=c4_h200x1_1b ": "test_forecasts",
    r"sed -i ": "test_changes_of_another_axis",
    r"python -m tools.(plan --config-name=local_test_synthetic folder=runs/(before|after)|ledger_diff runs/before)":
        "test_what_a_change_costs",
    r"python -m tools.(tokenize_text input=my.txt|inspect_dataset my.zarr$|sample runs/my )|"
    r"python -m train --config-name=local_shakespeare flat_tokens.filespec=my.zarr": "test_your_own_text_in_five_commands",
    r"python -m tools.(tokenize_text input='/shared|inspect_dataset /shared)|python -m train flat_tokens.filespec=/shared":
        "test_the_data_on_the_way_to_a_cluster",
    r"python -m tools.plan --config-name=c4_a100x8x4_1b hardware=h200$|"
    r"python -m train --config-name=c4_a100x8x4_1b check_only=true": "test_the_plan_on_the_way_to_a_cluster",
}  # fmt: skip
STARTS = (
    r"(?:[A-Z_]+=\S+ )*(?:python3?|make|pip|\.|mpirun|sbatch|srun|docker|kubectl|sky|sed|apt-get|tensorboard|wandb|trackio|perf"
    r"|launch/tpu\.sh|until|for \w+ in) "
)


def blocks(text):
    """(language, lines) of each fenced block."""
    return [(name, body) for name, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)]


def text_of(page):
    return (ROOT / "docs" / page).read_text()


def commands(path):
    """Every command of a page, in blocks and in sentences, in one line and without comment."""
    text = path.read_text().replace("\\\n", " ")
    found = []
    for language, body in blocks(text):
        if language in ("", "sh", "bash"):
            found += [line.strip().removeprefix("$ ") for line in body.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    found += re.findall(r"`([^`\n]+)`", prose)
    found = [re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", each)).strip() for each in found]
    return [each for each in found if re.match(STARTS, each)]


EVERY = [(path.name, command) for path in PAGES for command in commands(path)]


@pytest.mark.parametrize("page", sorted({page for page, _ in EVERY}))
def test_every_command_is_executed_or_says_why_not(page):
    """A command that is new in a page is executed by a test, or has its reason in the table."""
    unknown = [
        command
        for name, command in EVERY
        if name == page and not any(re.match(each, command) for each in (*EXECUTED, *NOT_EXECUTED))
    ]
    assert not unknown, f"{page}: neither executed by a test nor in NOT_EXECUTED: {unknown}"


def test_the_tables_have_no_more_than_the_pages():
    """What is in the tables is in the pages, but for what CONTRIBUTING.md has; tests that they name are there."""
    everything = [command for _, command in EVERY] + commands(ROOT / "CONTRIBUTING.md")
    optional = ("doctor", "train -m ", "make test")  # named as soon as a page has them
    for pattern in (*EXECUTED, *NOT_EXECUTED):
        if not any(word in pattern for word in optional):
            assert any(re.match(pattern, command) for command in everything), f"in no page: {pattern}"
    for reason in NOT_EXECUTED.values():
        for file, function in re.findall(r"\b(test_\w+)(?:::(test_\w+))?", reason):
            assert f"def {function}" in (ROOT / "tests" / f"{file}.py").read_text(), reason
    assert all(function in globals() for function in EXECUTED.values())


def in_words(command):
    """A shell's words, with `|`, `;` and `>` as words of their own."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|;>&")
    words.whitespace_split = True
    return words


def check_arguments(module, arguments):
    """The program takes these: keys and configs by loading them, flags by its source."""
    source = pathlib.Path(importlib.util.find_spec(module).origin)
    if configured := re.search(r"(?:\.config\.)?\brun\(main, ([\w.]+)(?:, \"(\w+)\")?\)", source.read_text()):
        program = importlib.import_module(module)
        class_ = train.Config if configured[1] == "train.Config" else getattr(program, configured[1])
        name = configured[2] or runtime.config.DEFAULT_CONFIG
        overrides = []
        for each in arguments:
            if each.startswith("--config-name="):
                name = each.removeprefix("--config-name=")
            elif each not in ("--help", "-m", "--multirun"):
                sweeps = "-m" in arguments or "--multirun" in arguments
                overrides.append(each.split(",")[0] if sweeps else each)  # a sweep: its first job
        if name != "my_config":  # the reader's own
            load(class_, name, overrides)
    else:
        for flag in (each for each in arguments if each.startswith("--")):
            assert f'"{flag}"' in source.read_text(), f"{module} has no {flag}"


@pytest.mark.parametrize("page", sorted({page for page, _ in EVERY}))
def test_keys_configs_flags_and_files_of_commands_are_there(page):
    """Of each command that starts a program of this repository: what it names exists and has values that are allowed."""
    for name, command in EVERY:
        if name != page or "$model" in command or "..." in command:
            continue
        command = re.sub(r"\S+<[^>]*>", "", command)  # what the reader fills in
        words = list(itertools.takewhile(lambda word: word not in ("|", ";", ">", "&&"), in_words(command)))
        if "-m" in words and words[words.index("-m") - 1] == "python" and words[words.index("-m") + 1] != "pip":
            _, module, *arguments = words[words.index("-m") :]
            if module != "docs.tutorial":
                try:
                    check_arguments(module, arguments)
                except RunError as error:
                    pytest.fail(f"{page}: {command}\n{error}")
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        for file in re.findall(r"\b(?:requirements|launch/)[\w./-]+", command):
            assert (ROOT / file).exists() or file == "launch/", f"{page}: {command}: no {file}"


def test_the_check_of_the_readme(capsys):
    """The check on 512 × 2 devices that are not there."""
    (command,) = [command for _, command in EVERY if command.startswith("python -m train check_only=true mesh.d=512")]
    train.main(load(train.Config, "local_test_synthetic", shlex.split(command)[3:]))
    assert "training_step on the mesh d=512 × t=2: " in capsys.readouterr().out


def test_the_tutorial(capsys):
    """It runs, each part agrees with numpy, and its program sends what the comments say; the mistake is refused."""
    runpy.run_module("docs.tutorial")
    text = capsys.readouterr().out
    parts = dict(re.findall(r"^(FSDP|Tensor parallelism|Both), mesh [^\n]*\n(.*?numpy's)$", text, re.M | re.S))
    sent = {name: re.findall(r"1 × ([\w-]+) over ([\w ]+), ([\d,]+) bytes, \w+", part) for name, part in parts.items()}
    gathers, scatters = [("all-gather", "d", "1,024")] * 2, [("reduce-scatter", "d", "8,192")] * 2
    assert sent["FSDP"] == [*gathers, ("all-reduce", "d", "4"), *scatters]
    terms = [("all-gather", "t", "256"), ("all-reduce", "t", "4"), ("reduce-scatter", "t", "2,048")]
    assert sent["Tensor parallelism"] == terms
    assert [row[:2] for row in sent["Both"]] == [
        *[("all-gather", "d")] * 2, ("all-gather", "t"), ("all-reduce", "d and t"), *[("reduce-scatter", "d")] * 2,
        ("reduce-scatter", "t"),
    ]  # fmt: skip
    assert text.count("loss and new weights are numpy's") == 3
    assert "A forgotten sum:\nthe result is 'B/d M +t', not 'B/d M': the contraction leaves a sum over t" in text


def random_lines(count, words):
    """Lines of words, out of 3,000."""
    rng = np.random.default_rng(0)
    known = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(2, 8))) for _ in range(3000)]
    return [" ".join(rng.choice(known, words)) for _ in range(count)]


@pytest.mark.slow
def test_your_own_text_in_five_commands(tmp_path):
    """The five commands of docs/data.md, but for the first, in a folder of their own, with 10 steps; then its Python."""
    copy_of_the_repository(tmp_path)
    (tmp_path / "my.txt").write_text("".join(f"{line}.\n" for line in random_lines(20000, words=12)))
    page = text_of("data.md")
    lines = next(body for language, body in blocks(page) if language == "sh").splitlines()
    assert len(lines) == 5 and lines[0].startswith("pip install ")
    for line in lines[1:]:
        fewer = ["training.steps=10", "checkpoint_interval=10", "eval_interval=10", "validation_batches=1"]
        fewer = fewer if "-m train " in line else ["--tokens", "20"] if "tools.sample" in line else []
        run_in(tmp_path, [*shlex.split(line), *fewer])
    (code,) = [body for language, body in blocks(page) if language == "python"]
    with contextlib.chdir(tmp_path):
        assert isinstance(eval(code.strip().splitlines()[-1], executed(code)), str)


@pytest.mark.slow
def test_the_data_on_the_way_to_a_cluster(tmp_path):
    """The page's commands for the data, with 2 steps: the loss begins at what the page says."""
    copy_of_the_repository(tmp_path)
    (tmp_path / "text").mkdir()
    documents = random_lines(5000, words=200)
    (tmp_path / "text" / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    ((_, body),) = section("docs/clone_to_cluster.md", r"3\. Your data")
    install, *lines = body.replace("/shared", str(tmp_path)).splitlines()
    assert install.startswith("pip install ") and len(lines) == 3
    for line in lines:
        fewer = ["training.steps=2", "training.warmup_steps=1", "log_interval=1", "validation_batches=1"]
        run_in(tmp_path, [*shlex.split(line), *(fewer if "-m train " in line else [])])
    first = json.loads((tmp_path / "runs" / "rehearsal" / "metrics.jsonl").read_text().splitlines()[0])
    assert "falls from about 10.9, " in text_of("clone_to_cluster.md") and abs(first["loss"] - 10.9) < 0.1


def test_the_plan_on_the_way_to_a_cluster(capsys):
    """The page's commands for machines that are not here: the forecast is what the page says, the sharding is proved."""
    ((_, body),) = section("docs/clone_to_cluster.md", r"4\. It will fit, and what it will cost")
    planned, checked = (shlex.split(line)[3:] for line in body.splitlines())
    plan.main(load(plan.Plan, planned[0].removeprefix("--config-name="), planned[1:]))
    assert re.search(r"`(forecast of the peak .*)`", text_of("clone_to_cluster.md"))[1] in capsys.readouterr().out
    train.main(load(train.Config, checked[0].removeprefix("--config-name="), checked[1:]))
    assert "training_step on the mesh d=32 × t=1: " in capsys.readouterr().out


def copy_of_the_repository(folder):
    """Links to its rooms, and a copy of train.py to be changed."""
    for name in ("shardlib", "ledger", "kernels", "tools", "configs", "runtime", "jax_extra.py"):
        os.symlink(ROOT / name, folder / name)
    shutil.copy(ROOT / "train.py", folder)


def run_in(folder, command):
    """Runs a command there; `python` is this one. Returns what it prints."""
    command = [sys.executable if word == "python" else word for word in command]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 or "ledger_diff" in " ".join(command), result.stderr[-3000:]
    return result.stdout


# == Python ============================================================================================================
# Blocks of Python that are not executed here, by how they begin.
CODE_NOT_EXECUTED = {
    "with declared.kernel_flops(": "a form, with gaps; test_ledger_kernels executes both scopes",
    "lines, agrees = ledger.check.report(": "test_run_ledger: of every run",
    "load_dataset_tokenizer": "test_your_own_text_in_five_commands",
}


def executed(code, **names):
    exec(code, names)
    return names


def module_of(path, text):
    """The module that a text is, from a file, since `@typed` reads its source."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train_py():
    return (ROOT / "train.py").read_text()


def python_of(page):
    return [body for language, body in blocks((ROOT / page).read_text()) if language == "python"]


def test_python_blocks_are_all_known():
    """A block that is new is executed by a test or in the table."""
    found = {path.name: len(python_of(path)) for path in PAGES}
    tested = {"README.md": 1, "notation.md": 2, "formats.md": 1, "ledger.md": 3, "data.md": 1}
    assert {page: count for page, count in found.items() if count} == tested
    every = "\n".join(block for path in PAGES for block in python_of(path))
    assert all(start in every for start in CODE_NOT_EXECUTED)


def test_the_excerpt_of_the_readme_is_train_py():
    """What README.md shows stands in train.py."""
    (code,) = python_of("README.md")
    assert code in train_py()


IMPORTS = """import jax
from shardlib import shardops
from shardlib.shardtypes import Array, f32, make_shardings, pytree_dataclass, typed_shard_map, u32
from shardlib.typed import typed

"""


def test_the_replicated_weight_of_the_notation(tmp_path):
    """The gradient of a replicated weight is accepted with its psum, and refused without it."""
    code, _ = python_of("docs/notation.md")
    code = code.replace(
        ": ...", ": return shardops.sum_unreduced('M/d/t -> +d +t', shardops.slice('M -> M/d/t', w * w))"
    )

    def step(code, name):
        body = "".join(f"    {line}\n" for line in (*code.splitlines(), "return gradient"))
        return module_of(tmp_path / f"{name}.py", f"{IMPORTS}@typed\ndef step(w: f32['M']) -> f32['M']:\n{body}").step

    assert prove(step(code, "with_it")) > 0
    without = re.sub(r"gradient = shardops.psum.*", "", code)
    assert "the value is still a sum over d that nobody has taken" in refusal(step(without, "without_it"))


def small_array(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def test_the_functions_of_the_notation(tmp_path):
    """The dataclass and the mapped function are accepted as they stand, with a body for the function's gap."""
    _, code = python_of("docs/notation.md")
    before = "@pytree_dataclass\nclass Layer:\n    w: f32['M/d F/t']\n\n\n"
    body = "return shardops.psum('+d +t -> ', shardops.sum_unreduced('... -> +d +t', weights.embed))"
    module = module_of(
        tmp_path / "functions.py", IMPORTS + before + code.replace("-> f32['']: ...", f"-> f32['']: {body}")
    )
    weights = module.Weights(embed=small_array(16, 16), layers=module.Layer(w=small_array(3, 16, 16)))
    mesh = jax.sharding.AbstractMesh((4, 2), ("d", "t"))
    tokens = jax.ShapeDtypeStruct((16, 32), np.uint32)
    assert typed_shard_map(module.step).check(mesh, weights, tokens) > 0


@pytest.mark.slow
def test_the_ledger_of_the_page(tmp_path):
    """The ledger's example: the 2b model on 512 × 8 devices that are not there, written to a folder."""
    config = load(train.Config, "c4_a100x8_2b", ["mesh.d=512", "mesh.t=8", "training.tokens.batch=4096"])
    state, batch = train.shapes(config)
    zero = np.uint32(0)
    names = executed(
        "import jax\nfrom jax.sharding import AbstractMesh\nfrom ledger.step import of_step\n"
        "from shardlib.shardtypes import typed_shard_map\n" + python_of("docs/ledger.md")[0],
        training_step=functools.partial(train.training_step, config.model, config.training, 0),
        state=state, skipped_steps=zero, number=zero, batch=batch, run_folder=tmp_path,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.html", "ledger.json", "ledger.txt"]
    assert names["ledger"].mesh == {"d": 512, "t": 8}


def test_the_checkpoint_of_the_formats(tmp_path, monkeypatch):
    """A leaf opens as an array under its path."""
    monkeypatch.chdir(tmp_path)
    group = zarr.open_group("runs/local_test_synthetic/checkpoints/0000000050", mode="w")
    group.create_array("weights/transformer/w_q", data=np.arange(6.0))
    (code,) = python_of("docs/formats.md")
    assert executed(code)["w_q"].tolist() == [0, 1, 2, 3, 4, 5]


# == Changed copies of train.py: docs/changing.md ======================================================================
def section(page, title):
    """The blocks of a section of a page."""
    return blocks(re.search(rf"^## {title}$(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.M | re.S)[1])


def changed(text, diff):
    """A text with a diff applied, whose place is known by its lines."""
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    assert text.count(old) == 1, f"{text.count(old)} places for\n{diff}"
    return text.replace(old, new)


def said(path, text):
    """What `python -m train check_only=true` says to a changed train.py; '' if it is accepted."""
    try:
        module = module_of(path, text)
        module.main(load(module.Config, "local_test_synthetic", ["check_only=true"]))
    except (RunError, TypeError) as error:
        return str(error)
    return ""


def without_places(message):
    """A message without folders and line numbers, which drift."""
    return re.sub(r"at \S*?((?:kernels/)?\w+\.py):\d+", r"at \1", message).strip()


@pytest.mark.parametrize("title", ["A new weight", "Another attention"])
def test_changes_are_accepted_and_what_is_forgotten_is_said(title, tmp_path, capsys):
    """The diffs of a section, one after another, are accepted; with those marked `forgotten` the check says what stands below them."""
    text = forgotten = train_py()
    count = 0
    folder = tmp_path / "train"
    folder.mkdir()
    accepted = False
    for language, body in section("docs/changing.md", title):
        if language == "diff":
            text = forgotten = changed(text, body)
        elif language == "diff forgotten":
            accepted = accepted or said(folder / "train.py", text) == ""
            forgotten = changed(forgotten, body)
        else:
            assert without_places(said(folder / "train.py", forgotten)) == without_places(body)
            forgotten, count = text, count + 1
    assert accepted and count == {"A new weight": 2, "Another attention": 3}[title]
    if title == "A new weight":
        proved = re.search(r"training_step on the mesh d=4 × t=2: (\d+) claims", capsys.readouterr().out)[1]
        assert f"{proved} claims of the training step are proved" in text_of("changing.md")


CHECK_WITH_REPLICAS = """
import jax, numpy as np
import train
from runtime.config import load
from shardlib.shardtypes import ShardingError
config = load(train.Config, "local_test_synthetic")
(state, batch), zero = train.shapes(config), np.uint32(0)
step, validate = train.mapped_steps(config, 0)
mesh = jax.sharding.AbstractMesh((2, 4, 2), ("r", "d", "t"))
try:
    step.check(mesh, state, zero, zero, batch)
    validate.check(mesh, state.weights, np.float32(0), np.float32(0), batch)
except ShardingError as error:
    print(error)
"""


@pytest.mark.slow
def test_changes_of_another_axis(tmp_path):
    """The commands and diffs of the section, in a copy: refused as it says, then proved on a mesh of 2 × 4 × 2."""
    copy_of_the_repository(tmp_path)
    (tmp_path / "runtime").unlink()
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime")
    file = tmp_path / "train.py"
    count, messages = 0, 0
    for language, body in section("docs/changing.md", "Another axis of the mesh"):
        if language == "sh":
            subprocess.run(body, shell=True, cwd=tmp_path, check=True)
        elif language == "diff":
            file.write_text(changed(file.read_text(), body))
            count += 1
            if count == 2:
                assert run_in(tmp_path, ["python", "-c", CHECK_WITH_REPLICAS]) == ""
        elif language == "diff forgotten":
            file.write_text(changed(file.read_text(), body))
        else:
            assert without_places(run_in(tmp_path, ["python", "-c", CHECK_WITH_REPLICAS])) == without_places(body)
            messages += 1
    assert (count, messages) == (2, 2)


@pytest.mark.slow
def test_what_a_change_costs(tmp_path):
    """The commands of the section, with the change between them, print the ledger's difference as it stands there."""
    copy_of_the_repository(tmp_path)
    (_, diff), (_, commands), (_, expected) = section("docs/changing.md", "What is kept for the backward pass")
    before, after, difference = (shlex.split(re.sub(" # .*", "", line)) for line in commands.splitlines())
    run_in(tmp_path, before)
    (tmp_path / "train.py").write_text(changed(train_py(), diff))
    run_in(tmp_path, after)
    places = re.compile(r"train\.py:\d+( -> train\.py:\d+)?")
    assert places.sub("train.py", run_in(tmp_path, difference)) == places.sub("train.py", expected)


# == Forecasts: docs/it_does_not_fit.md ================================================================================
def forecasts():
    """(overrides, memory, time or '') of each row of the page's tables, after the command that stands before them."""
    rows, base = [], []
    for line in text_of("it_does_not_fit.md").splitlines():
        if line.startswith("python -m tools.plan "):
            base = [each for each in shlex.split(line)[3:] if each != "training.microbatches=1" or "h100" in line]
        elif found := re.match(r"\| `([^`]+)` \| ([\d.]+ GB) \|(?: ([\d.]+ m?s) \|)?", line):
            keys = {each.split("=")[0]: each for each in (*base, *found[1].split())}
            rows.append((tuple(keys.values()), found[2], found[3] or ""))
    return rows


def test_forecasts_are_found():
    """All rows of the tables, and the large vocabulary's two figures."""
    assert len(forecasts()) == 28 and sum(bool(time) for *_, time in forecasts()) == 13


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if index in (2, 17) else pytest.mark.slow) for index, row in enumerate(forecasts())],
    ids=lambda row: " ".join(row[0][1:]),
)
def test_forecasts(row, capsys):
    """The plan still forecasts the memory, and bounds the time, that the row has."""
    overrides, memory, time = row
    name = overrides[0].removeprefix("--config-name=")
    plan.main(load(plan.Plan, name, overrides[1:]))
    text = capsys.readouterr().out
    assert f"forecast of the peak {memory} of " in text
    assert time in re.search(r"^  all .*$", text, re.M)[0]


@pytest.mark.slow
@pytest.mark.parametrize("chunk, memory", [(256, "35.74 GB"), (1024, "54.23 GB")])
def test_forecasts_of_a_large_vocabulary(chunk, memory, monkeypatch, capsys):
    """The two figures of the loss's chunk."""
    monkeypatch.setattr(train, "LOSS_CHUNK", chunk)
    keys = "hardware=a100_40gb training.microbatches=2 training.save_for_backward=inputs model.vocab=131072"
    plan.main(load(plan.Plan, "c4_h200x1_1b", keys.split()))
    assert f"forecast of the peak {memory} of " in capsys.readouterr().out
    assert memory in text_of("it_does_not_fit.md")


# == Shapes: docs/reading.md ===========================================================================================
def test_shapes_of_the_reading_guide():
    """Each row's shapes follow from its type and the sizes of local_test_synthetic; its type stands in train.py; sections are in its order."""
    page, config = text_of("reading.md"), load(train.Config, "local_test_synthetic")
    model, tokens, axes = config.model, config.training.tokens, {"d": config.mesh.d, "t": config.mesh.t}
    sizes = dict(
        B=tokens.batch, L=tokens.len, M=model.d_model, K=model.n_kv, Q=model.n_q_per_kv, D=model.d_head, F=model.d_ff,
        V=model.vocab,
    )  # fmt: skip
    rows = re.findall(r"^\| (`[^|]*) \| `([^`|]+)` \| ([\d ×]+) \| ([\d ×]+) \|$", page, re.M)
    assert len(rows) == 17
    for name, type_, whole, device in rows:
        dims = [dim.split("/") for dim in type_.split() if dim[0] != "+"]
        lengths = [sizes.get(dim) or int(dim) for dim, *_ in dims]
        parts = [
            length // np.prod([axes[axis] for axis in over], dtype=int) for length, (_, *over) in zip(lengths, dims)
        ]
        assert (whole, device) == (" × ".join(map(str, lengths)), " × ".join(map(str, parts))), name
        assert type_ in train_py(), type_
    state, _ = train.shapes(config)
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(state.weights)):,} parameters" in page
    for letter, _, size in re.findall(r"^\| (\w(?:, \w)?) \| ([^|]*) \| (\d+) \|$", page, re.M):
        assert sizes[letter[0]] == int(size)
    sections = re.findall(r"^# == (.*?) =+$", train_py(), re.M)
    assert [each for each in re.findall(r"^## (.*)$", page, re.M) if each in sections] == sections
    ledger = plan.ledger_of(plan.with_kernel(load(plan.Plan, "local_test_synthetic"), types.SimpleNamespace(
        torus_dims=0, capability=0)))  # fmt: skip
    figures = ledger.hardware_flops / 1e9, ledger.sent_bytes() / 1e6, ledger.memory.bytes / 1e6
    assert "computes {:.1f} GFLOP, and each device sends {:.2f} MB and needs {:.1f} MB".format(*figures) in page


# == Links =============================================================================================================
def anchors(path):
    """The fragments that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted(ROOT.glob("docs/*/*.md")), ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(path):
    """Every link to a file of the repository finds it, and its heading; and so does every `docs/x.md` in the text."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{path.name}: {target}"
        assert not fragment or fragment in anchors(found), f"{path.name}: {target}"
    for file in re.findall(
        r"`((?:docs|configs|launch|tools|runtime|shardlib|ledger|kernels|tests)/[\w./]+\.\w+)`", text
    ):
        assert (ROOT / file).exists(), f"{path.name}: `{file}`"
