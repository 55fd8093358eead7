"""Every key explains itself in --help, from the comments beside the fields."""

import subprocess
import sys
from dataclasses import dataclass, field, is_dataclass

import pytest
import small
from pages import ROOT
from parts import assert_refuses

import train
import train_any
from runtime.config.command_line import load
from runtime.config.help import configs_of, explanations, help_of_keys
from runtime.config.rebuild import all_keys
from tests import benchmark_attention, benchmark_loader, torture
from tools import (
    benchmark,
    checkpoint,
    compare,
    generate,
    inspect_dataset,
    make_dataset,
    plan_step,
    score,
    serve,
    tokenize_text,
)


@dataclass(frozen=True)
class Section:
    """What belongs together."""

    size: int  # bytes of it
    # Lines above, where
    # there is none beside.
    name: str = "x"


@dataclass(frozen=True)
class Some:
    section: Section = field(default_factory=Section)
    items: tuple[Section, ...] = ()  # several
    bare: int = 1


def test_where_explanations_are_found():
    """They stand beside the field, above it, or in the class's docstring; --help adds type and default."""
    assert explanations(Some) == {
        "section": "What belongs together.", "section.size": "bytes of it",
        "section.name": "Lines above, where there is none beside.", "items": "several", "items[].size": "bytes of it",
        "items[].name": "Lines above, where there is none beside.", "bare": "",
    }  # fmt: skip
    lines = help_of_keys(Some)
    assert lines[:4] == ["", "  section: What belongs together.", "  section.size: int", "      bytes of it"]
    assert '  section.name: str = "x"' in lines and "  items: list = []" in lines and "  items[].size: int" in lines


# Tools, with the key that each of them needs.
TOOLS = dict.fromkeys([generate.Generate, serve.Serve, score.Score], "model") | {
    tokenize_text.TokenizeText: "output", inspect_dataset.InspectDataset: "path", benchmark.Benchmark: None,
    benchmark_attention.Benchmark: None, benchmark_loader.Benchmark: None, torture.Torture: None,
    make_dataset.MakeDataset: None,
}  # fmt: skip
SEVERAL_NEEDED = [compare.Compare, checkpoint.LookAt]
FAMILIES = [train_any.explained({"family": file.removeprefix("models.")}) for file in train_any.TRAINED]


@pytest.mark.parametrize(
    "config_class", [train.Config, plan_step.plan_class(train), *FAMILIES, *TOOLS, *SEVERAL_NEEDED]
)
def test_no_key_is_without_explanation(config_class):
    """Each key of a run and of a tool says what it is."""
    explained = explanations(config_class)
    keys = [key for key, (kind, _) in all_keys(config_class).items() if not is_dataclass(kind)]
    assert [key for key in keys if not explained[key]] == []
    assert max(len(line) for text in help_of_keys(config_class) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("config_class", [train.Config, train_any.Config, *small.slow(plan_step.plan_class(train))])
def test_each_program_takes_the_configs_that_it_lists(config_class):
    """Each config that it lists loads."""
    names = configs_of(ROOT / "configs", config_class.CONFIG)
    assert config_class.CONFIG in names and all(about.endswith(".") for about in names.values())
    for name in names:
        assert isinstance(load(config_class, name), config_class)


@pytest.mark.parametrize("config_class, needed", TOOLS.items())
def test_a_tool_has_the_defaults_of_its_dataclass(config_class, needed):
    """A tool needs no yaml; a key is given as in a run, an unknown key is refused, and one without a default is asked
    for."""
    keys = {needed: "x"} if needed else {}
    given = [f"{key}=x" for key in keys]
    assert load(config_class, overrides=given) == config_class(**keys)
    assert_refuses("command line: not_there is not a key: the ", load, config_class, None, [*given, "not_there=1"])
    for key in keys:
        assert_refuses(f"command line: {key} is missing: expected text; add {key}=...", load, config_class)


def test_help_of_a_run(called):
    """It lists every config with its first line, every group that the program takes, every key with type and default,
    as its source has it."""
    _, text, _ = called(train.main, train.Config, "--help")
    assert "usage: " in text and "[--config-name=NAME] [key=value ...]\n" in text
    assert "\n    python -m train --config-name=c4_a100x8_1b               # configs/ has one file for " in text
    assert "  c4_h200x1_84m            101M parameters on C4, for one H200.\n" in text
    assert "\n  machine=a100x8|a100x8x4|h200x1\n" in text and "\n  family=" not in text
    assert "  training.tokens.batch: int\n" in text and "  io.max_io_threads: int = 64\n" in text
    assert '  model.compute_dtype: bfloat16 or float32 = "bfloat16"\n' in text
    assert "      HOST:PORT, where process 0 listens and all others reach it; null: found\n" in text


def test_help_of_a_family(called):
    """train_any explains the keys of the chosen family's Model too."""
    keys = [], ["family=olmoe"], ["--config-name=finetune_smollm2"]
    text, of_experts, of_file = (called(train_any.main, train_any.Config, *more, "--help")[1] for more in keys)
    assert "\n  family=" in text and "  model.tied: bool = false\n" in text and "model.experts" not in text
    assert "  model.experts_per_token: int\n" in of_experts and "  model: dict = {}\n" in of_file


def test_help_of_a_tool(called):
    """It lists commands, keys, the words that need none, and no configs, since it has none."""
    assert " WHAT PATH [OTHER] [key=value ...]" in called(checkpoint.main, checkpoint.LookAt, "--help")[1]
    _, text, _ = called(benchmark.main, benchmark.Benchmark, "--help")
    assert "\n    python -m tools.benchmark device=cpu  " in text
    assert " [key=value ...]\n" in text and "  steps: int = 20\n      timed, after those that warm up\n" in text
    assert "--config-name" not in text and "\nconfigs:\n" not in text


def test_help_imports_nothing_that_is_slow():
    """--help imports JAX, but no package that writes pages, reads text, tracks or serves."""
    help = [sys.executable, "-X", "importtime", "-m", "train", "--help"]
    done = subprocess.run(help, capture_output=True, text=True, cwd=ROOT, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    slow = {"plotly", "graphviz", "datasets", "tokenizers", "transformers", "pandas", "pyarrow", "s3fs", "tensorboardX"}
    assert imported >= {"jax", "omegaconf"} and not imported & {*slow, "wandb", "lm_eval", "starlette", "uvicorn"}
