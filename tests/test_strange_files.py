"""What is no plain file of a bounded size, wherever a program asks for one: refused in words, nothing awaited."""

import os

import pytest
from pages import ROOT

import train
from models import adapters
from runtime import program
from runtime.config import command_line
from runtime.config.command_line import load
from runtime.terminal import RunError
from tools import compare, convert, generate, score, tasks, tokenize_text

LLAMA = ROOT / "tests/models/golden/llama"
MAKE = {
    "folder": os.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**33)),
}


def tokenize(path, **keys):
    overrides = {"input": path.parent / "text.txt", "output": path.parent / "out.zarr", **keys}
    tokenize_text.main(load(tokenize_text.TokenizeText, None, [f"{key}={value}" for key, value in overrides.items()]))


def scored_to(path):
    score.main(score.Score(model="nowhere", tasks=(str(path.parent / "text.txt"),), to=str(path)))


def published(path, name):
    folder = path.parent / "published"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        os.symlink(LLAMA / file, folder / file)
    (folder / name).unlink(missing_ok=True)
    path.rename(folder / name)
    convert.main(load(convert.Convert, None, [str(folder), str(path.parent / "out")]))


# A reader's name ends with the suffix that its file needs.
READERS = {
    "prompts .txt": lambda path: generate.prompts_of(generate.Generate(model="m", input=str(path))),
    "prompts .jsonl": lambda path: generate.prompts_of(generate.Generate(model="m", input=str(path))),
    "answers .jsonl": lambda path: generate.finished(path),
    "task .txt": lambda path: tasks.read_task(str(path), None),
    "task .jsonl": lambda path: tasks.read_task(str(path), None),
    "scores .jsonl": scored_to,
    "text .txt": lambda path: tokenize(path, input=path),
    "text .jsonl": lambda path: tokenize(path, input=path),
    "text .jsonl.gz": lambda path: tokenize(path, input=path),
    "tokenizer .json": lambda path: tokenize(path, tokenizer=path),
    "template .jinja": lambda path: tokenize(path, chat_template=path),
    "metrics .jsonl": lambda path: compare.main(load(compare.Compare, None, [str(path), str(path)])),
    "ledger .json": lambda path: compare.main(load(compare.Compare, None, [str(path), str(path)])),
    "trainer .py": lambda path: program.load(str(path)),
    "weights .gguf": lambda path: convert.main(load(convert.Convert, None, [str(path), str(path.parent / "out")])),
    "adapter .json": lambda path: adapters.read_peft(
        path.rename(path.parent / "adapter_config.json").parent, [], 2, 4.0
    ),
    "words .json": lambda path: published(path, "tokenizer_config.json"),
    "config .json": lambda path: published(path, "config.json"),
    "weights .safetensors": lambda path: published(path, "model.safetensors"),
    "index .json": lambda path: published(path, "model.safetensors.index.json"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("reader", READERS)
def test_refused(reader, kind, tmp_path, capsys):
    """It is refused within the test's time, with nothing written beside, in one line or more without a traceback."""
    (tmp_path / "text.txt").write_text("a text\n" * 100)
    path = tmp_path / f"strange{reader.partition(' ')[2]}"
    MAKE[kind](path)
    if (reader, kind) == ("scores .jsonl", "sparse"):
        return  # a plain file, which is written over
    with pytest.raises(RunError) as refused:
        READERS[reader](path)
    assert str(refused.value).strip() and "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


REFERENCES = "defaults: [base, _self_]\nk0: xxxxxxxxxx\n" + "".join(
    f"k{n}: '{f'${{k{n - 1}}}' * 2}'\n" for n in range(1, 40)
)


@pytest.mark.parametrize(
    "text, message",
    [
        (REFERENCES, "refer to one another"),
        ("defaults: [base, _self_]\npaths: {model_name: '${paths.model_name}'}", "Recursive interpolation"),
        ("a: " + "[" * 10**4, "recursion"),
        ("- a", "holds list, expected keys"),
        ("defaults: [strange, base]\n", "nested too deeply"),
        (None, "it has 8,589,934,592 bytes"),
    ],
)
def test_configs(text, message, tmp_path, monkeypatch):
    """References that multiply or go round, depth, a list, a config that names itself, an enormous file: refused before
    composing."""
    monkeypatch.setattr(command_line, "CONFIG_FOLDER", tmp_path)
    file = tmp_path / "strange.yaml"
    MAKE["sparse"](file) if text is None else file.write_text(text)
    with pytest.raises(RunError, match=message):
        load(train.Config, "strange")


def test_overrides():
    """Depth of what stands on the command line."""
    with pytest.raises(RunError, match="nested too deeply"):
        load(train.Config, None, ["a=" + "[" * 900 + "]" * 900])
