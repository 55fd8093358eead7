"""What README.md and docs/ say to do and to see, done: commands, what they print, forecasts, links."""

import collections
import contextlib
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import runpy
import shlex
import types

import jax
import numpy as np
import pytest
from pages import PAGES, ROOT, blocks, copy_of_the_repository, executed, of_language, run_in, section, text_of

import train
from kernels.attention import chosen
from ledger.compiled import check
from ledger.compiled.collectives import widened
from ledger.count.step import of_step
from ledger.pages.text import summary
from ledger.pages.text import text as text_of_ledger
from runtime.cluster import processes as cluster
from runtime.config.command_line import load
from runtime.data.sources import open_data
from runtime.terminal import RunError, wrapped
from shardlib.mesh import make_mesh
from shardlib.shardtypes import make_shardings
from tests.runtime.cluster.test_cluster import gpus
from tools import plan, plan_step
from train import TokenBatch

# == Commands ==========================================================================================================
# Each command of the pages is executed by a test of this file, or is here: how it begins, and why it is not executed
# as it stands. Of all of them that start a program of this repository, keys, configs, arguments and files are checked.
NOT_EXECUTED = {
    # minutes, a network, or what another test executes
    r"make train( PYTHON=python3.11)?$": "a new environment and minutes: CI does it; the same job: test_main",
    r"make shakespeare$": "network and minutes; its parts: test_make_dataset, test_tokenize_text, test_sample",
    r"make test(-slow)?$|make lint$|make format$": "what runs this test",
    r"make golden(-oracle)?$": "writes what test_golden and test_golden_models compare with",
    r"(python -m )?pip install": "network; the files that it names are there",
    r"python3 -m venv \.venv$|\. \.venv/bin/activate$": "a new environment: `make train` makes one",
    r"(XLA_FLAGS=\S+ )?python -m train( --config-name=local_test_synthetic \+paths.model_name=synthetic_000)?$":
        "two minutes: test_main::test_the_small_job_goes_on_bit_for_bit (slow) runs it",
    r"python -m train --help$": "test_config_help",
    r"python -m train check_only=true$": "test_main::test_check_only_says_what_was_proved",
    r"python -m tools.plan( --config-name=c4_a100x8_1b hardware=h200 hosts=4 devices_per_host=8)?$": "test_plan::test_a_plan",
    r"python -m tools.plan .*compile=true": "minutes: test_plan (slow)",
    r"python -m tools.plan .*sweep=true": "test_plan::test_a_sweep",
    r"python -m tests.torture": "minutes: test_torture (slow)",
    r"python -m tests.benchmark_attention": "a GPU: test_attention",
    r"python -m tests.benchmark_(checkpoint|loader)":
        "minutes: test_checkpoint_tools::test_the_benchmark, test_benchmark_loader",
    r"python -m tools.benchmark ": "minutes, or a GPU: test_benchmark",
    r"python -m tools.doctor": "test_doctor",
    r"python -m tools.checkpoint ": "test_checkpoint_tools",
    r"python -m tools.convert ": "test_convert, with other folders",
    r"python -m train initial_weights=": "needs another run: test_initial_weights",
    r"make smollm2$": "network and minutes",
    r"python -m tools.ledger_diff before": "test_run_ledger and test_docs, with other folders",
    r"python -m tools.inspect_dataset path=my.zarr (samples|verify)": "test_inspect_dataset",
    r"python -m tools.tokenize_text input=\.\.\.": "not a command but its form: test_tokenize_text",
    r"python -m train flat_tokens.filespec=null hf_dataset.path=my_texts": "test_hf_stream",
    r"python -m train .*hf_dataset.path=allenai/c4": "network: test_hf_stream reads a folder",
    r"until python -m train": "does not end by itself: test_survival has each status",
    r"python -m tools.sample runs/local_shakespeare": "needs that run: test_sample",
    r"python -m tools.compare": "needs two runs: test_report",
    r"python -m train -m |python -m train --multirun ": "minutes: test_command_line",
    r"WANDB_MODE=offline python -m train tracking.": "test_trackers",
    r"python -m runtime.tracking.follow": "test_trackers",
    # clone_to_cluster.md, on machines that are not here
    r"python -m tools.benchmark 'configs=\[c4_a100x8_1b\]'|python -m train --config-name=c4_a100x8_1b ": "eight GPUs",
    # several hosts
    r"mpirun |python -m train num_hosts=2 ": "test_cluster",
    r"sbatch |srun |scancel ": "test_slurm, test_launch",
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
    r"python -m tools.(tokenize_text input=my.txt|inspect_dataset path=my.zarr$|sample runs/my )|"
    r"python -m train --config-name=local_shakespeare flat_tokens.filespec=my.zarr": "test_your_own_text_in_five_commands",
    r"python -m tools.(tokenize_text input='/shared|inspect_dataset path=/shared)|python -m train flat_tokens.filespec=/shared":
        "test_the_data_on_the_way_to_a_cluster",
    r"python -m tools.plan --config-name=c4_a100x8x4_1b hardware=h200$|"
    r"python -m train --config-name=c4_a100x8x4_1b check_only=true": "test_the_plan_on_the_way_to_a_cluster",
}  # fmt: skip
# How a command begins where text stands beside commands; in a block that says `sh`, each line is one.
STARTS = (
    r"(?:[A-Z_]+=\S+ )*(?:sudo )?(?:python3?|make|pip|uv|conda|pytest|ruff|\.|source|export|cd|cp|mv|rm|mkdir|ls|cat|tail|head|grep|kill"
    r"|git|ssh|scp|rsync|curl|wget|tar|sed|apt-get|mpirun|sbatch|srun|salloc|squeue|scancel|scontrol|docker|kubectl|helm|sky"
    r"|gcloud|gsutil|aws|nvidia-smi|nsys|numactl|launch/tpu\.sh|tensorboard|wandb|trackio|perf|until|while|for \w+ in) "
)


def lines_of(body):
    """The lines of a block of commands, without the prompt and what is only a comment."""
    lines = [line.strip().removeprefix("$ ") for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands(path):
    """Every command of a page, in blocks and in sentences, in one line and without comment."""
    text = path.read_text().replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    certain = [line for language, body in blocks(text) if language in ("sh", "bash") for line in lines_of(body)]
    likely = [line for language, body in blocks(text) if language == "" for line in lines_of(body)]
    likely += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    likely += re.findall(r"`([^`\n]+)`", prose)
    found = certain + [each for each in likely if re.match(STARTS, each)]
    return [re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", each)).strip() for each in found]


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
            assert f"def {function}" in next((ROOT / "tests").rglob(f"{file}.py")).read_text(), reason
    held = "".join(path.read_text() for path in ROOT.glob("tests/docs/test_docs*.py"))
    assert all(f"def {function}(" in held for function in EXECUTED.values())


def simple_commands(command):
    """The words of each command of a shell's line; those between `|`, `;`, `&&` and `>`."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|;>&")
    words.whitespace_split = True
    return [list(group) for ends, group in itertools.groupby(words, lambda word: word[0] in "|;>&") if not ends]


def started(words):
    """(module, arguments) of the program of this repository that a command starts, directly or by a script; else None."""
    for index, word in enumerate(words):
        if words[index : index + 2] == ["python", "-m"]:
            module, *arguments = words[index + 2 :]
            return None if module == "pip" else (module, arguments)
        if word == "launch/train.sbatch":
            return "train", words[index + 1 :]
        if words[index : index + 2] == ["launch/tpu.sh", "train"]:
            return "train", words[index + 2 :]
    return None


def test_what_a_command_starts():
    """Programs are found behind launchers and variables, in each part of a line, and in what scripts of launch/ are given."""
    line = "XLA_FLAGS=a=8 mpirun -np 2 python -m train x=1 && launch/tpu.sh train y=2 | tail; sbatch --nodes=2 launch/train.sbatch z=3"
    assert [started(words) for words in simple_commands(line)] == [
        ("train", ["x=1"]), ("train", ["y=2"]), None, ("train", ["z=3"]),
    ]  # fmt: skip


def check_arguments(module, arguments):
    """The program takes these keys, words and configs."""
    source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
    given = re.search(r"\brun\(main, ([\w.]+)(\(.*)?\)\n", source)
    if given is None:
        return  # docs/tutorial.py, and follow.py, which has two arguments
    program = importlib.import_module(module)
    class_ = (
        plan.plan_class(train) if given[2] else getattr(program, given[1])
    )  # of a trainer's keys; doctor's are fewer
    name, overrides = None, []
    for each in arguments:
        if each.startswith("--config-name="):
            name = each.removeprefix("--config-name=")
        elif each not in ("--help", "-m", "--multirun"):
            sweeps = "-m" in arguments or "--multirun" in arguments
            overrides.append(each.split(",")[0] if sweeps else each)  # a sweep: its first job
    if "--help" not in arguments:
        load(class_, None if name == "my_config" else name, overrides)  # my_config: the reader's


@pytest.mark.parametrize("page", sorted({page for page, _ in EVERY}))
def test_keys_configs_flags_and_files_of_commands_are_there(page):
    """Of each command that starts a program of this repository: what it names exists and has values that are allowed."""
    for name, command in EVERY:
        if name != page or "$model" in command or "..." in command:
            continue
        command = re.sub(r"\S+<[^>]*>", "", command)  # what the reader fills in
        for words in simple_commands(command):
            if program := started(words):
                try:
                    check_arguments(*program)
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
        fewer = fewer if "-m train " in line else ["tokens=20"] if "tools.sample" in line else []
        run_in(tmp_path, [*shlex.split(line), *fewer])
    (code,) = of_language("python", "docs/data.md")
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
        fewer = ["training.steps=2", "training.warmup_steps=1", "log_interval=1"]
        run_in(tmp_path, [*shlex.split(line), *(fewer if "-m train " in line else [])])
    first = json.loads((tmp_path / "runs" / "rehearsal" / "metrics.jsonl").read_text().splitlines()[0])
    assert "falls from about 10.9, " in text_of("clone_to_cluster.md") and abs(first["loss"] - 10.9) < 0.1


def test_the_plan_on_the_way_to_a_cluster(capsys):
    """The page's commands for machines that are not here: the forecast is what the page says, the sharding is proved."""
    ((_, body),) = section("docs/clone_to_cluster.md", r"4\. It will fit, and what it will cost")
    planned, checked = (shlex.split(line)[3:] for line in body.splitlines())
    plan.main(load(plan.plan_class(train), planned[0].removeprefix("--config-name="), planned[1:]))
    assert re.search(r"`(forecast of the peak .*)`", text_of("clone_to_cluster.md"))[1] in capsys.readouterr().out
    train.main(load(train.Config, checked[0].removeprefix("--config-name="), checked[1:]))
    assert "training_step on the mesh d=32 × t=1: " in capsys.readouterr().out


# == What is printed ===================================================================================================
# Each block that is no command, code or change, by how it begins: the test that holds it, or why none does.
PRINTED = {
    r"training data: ": "test_what_the_readme_prints; losses and times: two minutes, test_main (slow) runs it",
    r"2 hosts, 8 devices: ": "test_what_several_hosts_print",
    r"host gpu-02 \(process 1 of 2\): error: ": "an error among many: test_cluster has where it is printed",
    r"It will not fit: ": "test_what_does_not_fit",
    # docs/ledger.md
    r" +FLOPs +bytes sent|   ×8    275G|Kept for the backward|A step of one device|     268M  8 ×|Memory of one device":
        "test_the_excerpts_of_a_ledger",
    r"The compiled step sends what is written: 155": "of a smaller model: test_run_ledger has the sentences",
    r"\$ python -m tools.ledger_diff before": "test_what_a_change_costs, with other folders",
    r"c4_a100x8_1b on 32 × h200: ": "test_plan",
    r"python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 sweep=true": "test_the_sweep_of_the_page",
    r"reduce-scatter of train.py:": "minutes: test_plan (slow) compiles for machines that are not here",
    # what the check says, in docs/changing.md and docs/notation.md
    r"Layer.__init__\(\) missing|training_step is refused": "test_changes_are_accepted_and_what_is_forgotten_is_said",
    r"training_step is refused on the mesh r=2": "test_changes_of_another_axis",
    r"'B/d L M' says the same along t, but": "test_what_is_forgotten_is_said",
    r"train.py:\d+  gate = ": "test_what_a_change_costs",
    r"the result is 'B/d L M \+t', not|'log', which is not linear": "test_errors_of_the_notation",
}  # fmt: skip


def test_every_block_is_held_or_says_why_not():
    """A block with a language has tests of that language; one with other lines than commands is in the table, which has no more."""
    bodies = []
    for path in PAGES:
        for language, body in blocks(path.read_text().replace("\\\n", " ")):
            assert language in ("", "sh", "python", "yaml", "diff", "diff forgotten"), f"{path.name}: {language}"
            if language == "" and not all(re.match(STARTS, line) for line in lines_of(body)):
                assert any(re.match(each, body) for each in PRINTED), f"{path.name}: not in PRINTED:\n{body}"
                bodies.append(body)
    for pattern in PRINTED:
        for each in pattern.split("|"):
            assert any(re.match(each, body) for body in bodies), f"in no page: {each}"
    files = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in files}.union(*(re.findall(r"def (test_\w+)\(", path.read_text()) for path in files))
    assert set(re.findall(r"\btest_\w+", " ".join(PRINTED.values()))) <= known


def block_that_begins(page, start):
    (body,) = [body for _, body in blocks((ROOT / page).read_text()) if body.startswith(start)]
    return body


def small_job():
    """The ledger of the job to try first, as a run on simulated devices has it."""
    config, mesh = load(plan.plan_class(train), "local_test_synthetic"), make_mesh({"d": 4, "t": 2})
    with jax.set_mesh(mesh):
        traced = plan_step.trace(config, mesh, train.shapes(config))
    tokens = config.training.tokens.batch * config.training.tokens.len
    return of_step(traced, dict(mesh.shape), source=train.__file__, tokens=tokens, platform="cpu")


def test_what_the_readme_prints(monkeypatch):
    """Its lines up to the first step: data, kernel, costs, collectives, forecast. Nothing is compiled: that XLA sends what is
    written is test_compiled_collectives' claim, and the bytes that it needs are the page's."""
    monkeypatch.setenv("COLUMNS", "80")
    body = block_that_begins("README.md", "training data: ")
    before_steps = body.partition("step 1/50: ")[0]
    config, ledger = load(train.Config), small_job()
    said = []
    with jax.set_mesh(make_mesh({"d": 4, "t": 2})):
        for split, name in (("train", "training"), ("validation", "validation")):
            with open_data(config, split, make_shardings(TokenBatch)) as data:
                said.append(f"{name} data: {data.summary}".replace(str(ROOT), "…"))
    said.append(f"attention: {chosen(config.model.attention, train.act.dtype, config.model.d_head)}")
    said += summary(ledger)
    wide = collections.Counter({(row, 1): times for row, times in widened(ledger.costs.collectives).items()})
    monkeypatch.setattr(check, "compiled_sites", lambda text, mesh: wide)
    needed = float(re.search(r"XLA says ([\d.]+) MB", body)[1])
    monkeypatch.setattr(check, "peak_bytes", lambda compiled: needed * 1e6)
    said += check.report(ledger, types.SimpleNamespace(as_text=str))[0]
    assert before_steps.splitlines() == "\n".join(map(wrapped, said)).splitlines()


def test_what_several_hosts_print():
    """The table of two hosts, and what the job to try first sends between them."""
    mesh = cluster.lay_out(gpus(2, 4), {"d": 4, "t": 2})
    (between,) = cluster.sent_over_network(small_job(), mesh)
    *table, gap, last = block_that_begins("docs/hosts.md", "2 hosts, ").splitlines()
    assert (table, gap) == (cluster.table(mesh, ["gpu-01", "gpu-02"]), "...")
    assert last == between


def test_the_excerpts_of_a_ledger():
    """The rows that docs/ledger.md explains are those of the 1b model's ledger.txt, but for line numbers and spaces."""

    def bare(line):
        return " ".join(re.sub(r"train\.py:\d+|(?<=│) +\d+ ", "train.py ", line).split())

    rows = set()
    for attention in ("einsum", "blockwise"):
        ledger = plan.ledger_of(load(plan.plan_class(train), "c4_a100x8_1b", [f"model.attention={attention}"]))
        ours = {bare(line) for line in text_of_ledger(ledger).splitlines()}
        rows |= {line for line in ours if attention == "einsum" or "shardops.local(" in line}
    (pattern,) = [each for each, held in PRINTED.items() if held == "test_the_excerpts_of_a_ledger"]
    excerpts = [body for _, body in blocks(text_of("ledger.md")) if re.match(pattern, body)]
    assert len(excerpts) == 6
    assert [line for body in excerpts for line in body.splitlines() if bare(line) not in rows] == []


def planned(command):
    """Runs a command of `tools.plan` as the page shows it."""
    name, *overrides = shlex.split(command.removeprefix("$ "))[3:]
    plan.main(load(plan.plan_class(train), name.removeprefix("--config-name="), overrides))


def test_what_does_not_fit(capsys):
    """The sentence of docs/it_does_not_fit.md is what its command prints, up to the dots."""
    said = block_that_begins("docs/it_does_not_fit.md", "It will not fit: ")
    planned(
        block_that_begins("docs/it_does_not_fit.md", "python -m tools.plan --config-name=c4_h200x1_1b hardware=a100")
    )
    assert " ".join(said.split()).removesuffix(" ...") in capsys.readouterr().out


@pytest.mark.slow
def test_the_sweep_of_the_page(capsys):
    """The table of docs/ledger.md is what its command prints, up to the dots."""
    body = block_that_begins(
        "docs/ledger.md", "python -m tools.plan --config-name=c4_a100x8_1b hardware=h200 hosts=4 sweep=true"
    )
    command, *table, dots = body.splitlines()
    planned(command)
    assert dots == "..." and capsys.readouterr().out.startswith("\n".join(table) + "\n")


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
