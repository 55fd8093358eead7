"""What README.md and docs/ say to do, done: commands, their keys and files; links."""

import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest
from pages import PAGES, ROOT, blocks, copy_of_the_repository, of_language, run_in, section
from several_hosts import logged, records

import train
from docs.generate import BLOCK
from runtime.config.command_line import load
from runtime.terminal import RunError
from tools import convert, plan

# == Commands ==========================================================================================================
# How many blocks of commands each page has that say `sh`: tests execute these, line by line.
EXECUTED = {
    "changing.md": 2,  # test_changes_of_another_axis, test_what_a_change_costs
    "data.md": 1,  # test_your_own_text_in_five_commands
    "finetuning.md": 3,  # test_from_conversations_to_a_model, test_pairs_for_t5
    "layer_norm.md": 1,  # tests/test_recipes.py
    "models.md": 5,  # tests/tools/test_convert.py, test_initial_weights.py, test_reading.py, with other folders
}
# How a command begins, in blocks that say nothing and in sentences.
STARTS = (
    r"(?:[A-Z_]+=\S+ )*(?:python3?|make|pip|\.|sed|apt-get|mpirun|sbatch|srun|scancel|docker|kubectl|sky|launch/tpu\.sh"
    r"|tensorboard|wandb|trackio|until) "
)


def lines_of(body):
    """The lines of a block of commands, without what is only a comment; those that end in a backslash are joined."""
    lines = [line.strip() for line in body.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands(path):
    """Every command of a page, in blocks and in sentences, in one line and without comment."""
    text = path.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    certain = [line for language, body in blocks(text) if language == "sh" for line in lines_of(body)]
    likely = [line for language, body in blocks(text) if language == "" for line in lines_of(body)]
    likely += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    likely += re.findall(r"`([^`\n]+)`", prose)
    found = certain + [line for line in likely if re.match(STARTS, line)]
    return [re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", command)).strip() for command in found]


def test_every_block_is_of_a_known_kind():
    """A block that says `sh` is executed; one of output is generated, or of a page whose messages are tested."""
    found = {path.name: len([1 for name, _ in blocks(path.read_text()) if name == "sh"]) for path in PAGES}
    assert {page: count for page, count in found.items() if count} == EXECUTED
    messages = [ROOT / "docs" / name for name in ("changing.md", "notation.md")] + [*ROOT.glob("docs/recipes/*.md")]
    examples = ("host gpu-02 (process 1 of 2): error: ", "warning: the compiled step does not send")  # one among many
    for path in PAGES:
        for language, body in blocks(BLOCK.sub("", path.read_text())):
            assert language in ("", "sh", "python", "yaml", "diff", "diff forgotten"), f"{path.name}: {language}"
            if language == "" and path not in messages and not body.startswith(examples):
                assert all(re.match(STARTS, line) for line in lines_of(body)), f"{path.name}: not generated:\n{body}"


def simple_commands(command):
    """The words of each command of a shell's line; those between `|`, `;`, `&&` and `>`."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|;>&")
    words.whitespace_split = True
    return [list(group) for ends, group in itertools.groupby(words, lambda word: word[0] in "|;>&") if not ends]


def started(words):
    """(module, arguments) of the program of this repository that a command starts, by a script too; else None."""
    for index, word in enumerate(words):
        if words[index : index + 2] == ["python", "-m"]:
            module, *arguments = words[index + 2 :]
            return None if module in ("pip", "venv") else (module, arguments)
        if word == "launch/train.sbatch":
            return "train", words[index + 1 :]
        if words[index : index + 2] == ["launch/tpu.sh", "train"]:
            return "train", words[index + 2 :]
    return None


def test_what_a_command_starts():
    """Programs are found behind launchers and variables, in each part of a line, and in what scripts are given."""
    line = "A=a=8 mpirun -np 2 python -m train x=1 && launch/tpu.sh train y=2 | tail; sbatch launch/train.sbatch z=3"
    found = [("train", ["x=1"]), ("train", ["y=2"]), None, ("train", ["z=3"])]
    assert [started(words) for words in simple_commands(line)] == found


def check_arguments(module, arguments):
    """The program takes these keys, words and configs."""
    source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
    given = re.search(r"^    \S*\brun\(main, ([\w.]+)(\(.*)?\)\n", source, re.M)
    if given is None or "--help" in arguments:
        return  # follow.py, which has two arguments
    class_ = plan.config_class(arguments) if given[2] else getattr(importlib.import_module(module), given[1])
    name, overrides, sweeps = None, [], "-m" in arguments
    for argument in arguments:
        if argument.startswith("--config-name="):
            name = argument.removeprefix("--config-name=")
        elif argument != "-m":
            overrides.append(argument.split(",")[0] if sweeps else argument)  # a sweep: its first job
    load(class_, None if name == "my_config" else name, overrides)  # my_config: the reader's


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_keys_configs_flags_and_files_of_commands_are_there(path):
    """What a command of ours names exists and has values that are allowed."""
    for command in commands(path):
        if "..." in command:
            continue
        command = re.sub(r"\S+<\w[^>]*>", "", command)  # what the reader fills in
        for words in simple_commands(command):
            if program := started(words):
                try:
                    check_arguments(*program)
                except RunError as error:
                    pytest.fail(f"{path.name}: {command}\n{error}")
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        for file in re.findall(r"\b(?:requirements|launch/)[\w./-]+", command):
            assert (ROOT / file).exists() or file == "launch/", f"{path.name}: {command}: no {file}"


def test_the_check_of_the_readme(capsys):
    """It proves both steps on 512 × 2 devices that are not there, and says what it does not."""
    (command,) = [line for line in commands(ROOT / "README.md") if "check_only=true mesh.d=512" in line]
    train.main(load(train.Config, "local_test_synthetic", shlex.split(command)[3:]))
    printed = capsys.readouterr().out
    for step in ("training_step", "validation_step"):
        assert re.search(rf"{step} on the mesh d=512 × t=2: \d{{3}} claims proved in", printed)
    assert "Not proved" in printed


def random_lines(count, words):
    """Lines of words, out of 3,000."""
    rng = np.random.default_rng(0)
    known = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(2, 8))) for _ in range(3000)]
    return [" ".join(rng.choice(known, words)) for _ in range(count)]


@pytest.mark.slow
def test_your_own_text_in_five_commands(tmp_path):
    """The commands of docs/data.md, but for the first, run in a folder of their own, for 10 steps."""
    copy_of_the_repository(tmp_path)
    (tmp_path / "my.txt").write_text("".join(f"{line}.\n" for line in random_lines(20000, words=12)))
    install, *lines = of_language("sh", "docs/data.md")[0].splitlines()
    assert install.startswith("pip install ") and len(lines) == 4
    for line in lines:
        fewer = ["training.steps=10", "checkpoint_interval=10", "eval_interval=10", "validation_batches=1"]
        fewer = fewer if "-m train " in line else ["tokens=20"] if "generate" in line else []
        run_in(tmp_path, [*shlex.split(line, comments=True), *fewer])


@pytest.mark.slow
def test_from_conversations_to_a_model(tmp_path):
    """The commands of docs/finetuning.md, with a small model in SmolLM2's place and two steps, train all weights and
    adapters: both losses fall, and the first run answers."""
    copy_of_the_repository(tmp_path)
    shutil.copytree(ROOT / "docs/chats", tmp_path / "docs/chats")
    steps = "steps=2 steps_for_lr=2 warmup_steps=0 learning_rate=1e-3"
    steps = [*(f"training.{setting}" for setting in steps.split()), "eval_interval=1", "log_interval=1"]
    fewer = {"train_any": steps, "tools.generate": ["tokens=5"]}
    chats = "input=docs/chats/train.jsonl format=chat tokenizer=train_bpe bpe_vocab=400 validation_fraction=0.2"
    run_in(tmp_path, ["python", "-m", "tools.tokenize_text", *chats.split(), "output=own.zarr"])
    small = """
        model.d_model=32 model.n_q_per_kv=1 model.n_kv=2 model.d_head=16 model.layers=1 model.d_ff=64 model.vocab=400
        paths.root_working_dir=. paths.model_name=own flat_tokens.filespec=own.zarr mesh.d=1 mesh.t=1
        training.tokens.batch=4 training.tokens.len=32
    """
    run_in(tmp_path, ["python", "-m", "train", *small.split(), *steps])
    run_in(tmp_path, ["python", "-m", "tools.convert", "from=own", "to=smollm2"])
    make, *lines = "".join(of_language("sh", "docs/finetuning.md")[:2]).splitlines()
    assert make == "make smollm2" and len(lines) == 5
    for line in lines:
        words = shlex.split(line)
        run_in(tmp_path, [*words, *fewer.get(words[2], [])])
    for name in ("finetune_smollm2", "finetune_smollm2_lora"):
        before, after = logged(tmp_path / "runs" / name, "validation_loss").values()
        assert after < before


@pytest.mark.slow
def test_pairs_for_t5(tmp_path):
    """The commands of docs/finetuning.md on T5, with a small one, train all weights: the loss falls, and the run
    answers as the pairs do and ends there. With `lora.rank` adapters alone are trained, in encoder and decoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    copy_of_the_repository(tmp_path)
    shutil.copytree(ROOT / "tests/models/golden/t5", tmp_path / "t5")
    answers = {"morning": "sun rises", "evening": "sun sets"}
    words = ["<pad>", "</s>", *answers, "sun", "rises", "sets"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    tokenizer.add_special_tokens(words[:2])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    convert.write_tokenizer(tmp_path / "t5", tokenizer.to_str(), about)
    pairs = [(" ".join([word] * n), answer) for n in range(50, 200) for word, answer in answers.items()]
    lines = [json.dumps({"in_text": read, "out_text": written}) for read, written in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "two.jsonl").write_text("\n".join(lines[:2]))

    ((_, block),) = section("docs/finetuning.md", "T5")
    tokenize, learn = map(shlex.split, block.splitlines())
    run_in(tmp_path, tokenize)
    for name, keys in ("pairs", []), ("adapters", ["paths.model_name=adapters", "lora.rank=8"]):
        run_in(tmp_path, [*learn, "training.learning_rate=3e-2", *keys])
        steps = records(tmp_path / "runs" / name)
        losses = [step["validation_loss"] for step in steps if "validation_loss" in step]
        assert losses[-1] < losses[0] < steps[0]["loss"]
    trained = {key.removeprefix("grad_norm_of/") for key in steps[0] if key.startswith("grad_norm_of/")}
    matrices = {f"{prefix}_{x}" for prefix in ("encoder/w", "decoder/w", "decoder/cross") for x in "qkvo"}
    assert {f"{matrix}/{factor}" for matrix in matrices for factor in "ab"} < trained
    assert all(key.endswith(("/a", "/b")) for key in trained)
    ask = "python -m tools.generate runs/pairs input=two.jsonl prompt_field=in_text temperature=0 output=jsonl"
    found = [json.loads(line) for line in run_in(tmp_path, ask.split()).splitlines()]
    assert [(reply["text"], reply["ended"]) for reply in found] == [(answer, True) for answer in answers.values()]


# == Links =============================================================================================================
def anchors(path):
    """The fragments that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKED = [*PAGES, *sorted(ROOT.glob("log/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
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
    rooms = "docs|configs|launch|tools|runtime|shardlib|ledger|kernels|tests"
    for file in re.findall(rf"`((?:{rooms})/[\w./]+\.\w+)`", text):
        assert (ROOT / file).exists(), f"{path.name}: `{file}`"
