"""Every key explains itself: --help and --cfg job, from the comments in the source."""

import re
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path

import pytest
import yaml

import train
from runtime.config.command_line import load, run, to_yaml
from runtime.config.help import annotated, configs_of, explanations, help_of_keys
from runtime.config.rebuild import all_keys
from runtime.terminal import RunError
from tests import benchmark_checkpoint, torture
from tools import benchmark, benchmark_loader, plan, tokenize_text, write_synthetic_dataset

ROOT = Path(__file__).parents[3]
BASE = ROOT / "configs/base.yaml"


@dataclass(frozen=True)
class Section:
    """What belongs together."""

    size: int  # bytes of it
    # Lines above, where
    # there is none beside.
    name: str = "x"
    other: int = 3  # in the field's lines


@dataclass(frozen=True)
class Some:
    section: Section = field(default_factory=Section)
    items: tuple[Section, ...] = ()  # several
    bare: int = 1
    both: int = 2  # B


def small(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("# A file.\n\n# of the file\nbare: 1\nboth: ???  # longer\nsection:\n  size: 7  # more # yet\n")
    return file


def test_where_explanations_are_found(tmp_path):
    """Beside the field, in its lines, above it, in the class's docstring, and then in the yaml."""
    assert explanations(Some, small(tmp_path)) == {
        "section": "What belongs together.",
        "section.size": "bytes of it; more # yet",
        "section.name": "Lines above, where there is none beside.",
        "section.other": "in the field's lines",
        "items": "several",
        "items[].size": "bytes of it",
        "items[].name": "Lines above, where there is none beside.",
        "items[].other": "in the field's lines",
        "bare": "of the file",
        "both": "B; longer",
    }


def test_help_has_defaults_and_where_they_are_from(tmp_path):
    """The field's own default, or else the yaml's, which is named."""
    lines = help_of_keys(Some, small(tmp_path))
    assert lines[:4] == ["", "  section: What belongs together.", "  section.size: int = 7 in some.yaml", "      bytes of it; more # yet"]  # fmt: skip
    assert '  section.name: str = "x"' in lines and "  items: list = []" in lines and "  items[].size: int" in lines


TOOLS = [
    benchmark.Benchmark,
    benchmark_checkpoint.Benchmark,
    benchmark_loader.Benchmark,
    tokenize_text.TokenizeText,
    torture.Torture,
    write_synthetic_dataset.Synthetic,
]


@pytest.mark.parametrize(
    "config_class, file", [(train.Config, BASE), (plan.plan_class(train), BASE), *((tool, None) for tool in TOOLS)]
)
def test_no_key_is_without_explanation(config_class, file):
    """Each key of a run and of a tool says what it is; a tool's stand beside its fields alone."""
    explained = explanations(config_class, file)
    keys = [key for key, (kind, _) in all_keys(config_class).items() if not is_dataclass(kind)]
    assert [key for key in keys if not explained[key]] == []
    lines = help_of_keys(config_class, file)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("config_class, tools_own", [(train.Config, []), (plan.plan_class(train), ["plan"])])
def test_each_program_lists_its_own_configs(config_class, tools_own):
    """Those of runs for what takes a run's keys; so no listed one ends in `is not a key`."""
    listed = configs_of(config_class, ROOT / "configs")
    of_runs = [file.stem for start in ("c4", "local") for file in (ROOT / "configs").glob(f"{start}_*.yaml")]
    assert listed == sorted([*of_runs, *tools_own])
    for name in listed:
        assert isinstance(load(config_class, name), config_class)


@pytest.mark.parametrize("config_class", TOOLS)
def test_a_tool_has_the_defaults_of_its_dataclass(config_class):
    """Without any yaml; a key is given as in a run, an unknown one is refused, and one without a default is asked for."""
    needed = ["output=x"] if config_class is tokenize_text.TokenizeText else []
    config = load(config_class, overrides=needed)
    assert config == config_class(**({"output": "x"} if needed else {}))
    with pytest.raises(RunError, match=r"^command line: mistyped is not a key: the keys are "):
        load(config_class, overrides=[*needed, "mistyped=1"])
    if needed:
        with pytest.raises(RunError, match=r"^command line: output is missing: expected text; add output=\.\.\.$"):
            load(config_class)


def test_help_of_a_tool(monkeypatch, capsys):
    """It lists keys, and no configs, since it has none."""
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--help"])
    run(benchmark.main, benchmark.Benchmark)
    printed = capsys.readouterr().out
    assert "[key=value ...]" in printed and "  steps: int = 20\n      timed, after those that warm up\n" in printed
    assert "--config-name" not in printed and "\nconfigs:\n" not in printed


def test_help_of_a_key_of_the_cluster():
    """As the source has it, below the key."""
    lines = help_of_keys(train.Config, BASE)
    assert "      HOST:PORT, where process 0 listens and all others reach it; null: found" in lines


def test_cfg_job_is_the_whole_config_with_comments(monkeypatch):
    """What it prints loads as the config that it shows, and has each key with its explanation within 120 columns."""
    monkeypatch.chdir(ROOT)
    config = load(train.Config)
    composed = (ROOT / "configs/local_test_synthetic.yaml").read_text()
    text = annotated(train.Config, composed, BASE)
    assert max(map(len, text.splitlines())) <= 120
    shown, whole = yaml.safe_load(text), yaml.safe_load(to_yaml(config))
    for key in ("checkpoint", "cluster", "tracking", "io", "hf_dataset", "model", "mesh"):
        assert shown[key] == whole[key]
    for line in ("  layers: 2 +# how many, all alike", "  timeout_s: 600.0 +# a save that takes longer", "  t: 2 +# devices along axis t"):  # fmt: skip
        assert re.search(f"^{line}", text, re.MULTILINE)


def test_cfg_job_on_the_command_line(monkeypatch, capsys):
    """--cfg job explains, in both spellings; a part of the config, and what hydra prints of itself, stay as they are."""
    monkeypatch.chdir(ROOT)

    def printed(*arguments):
        monkeypatch.setattr("sys.argv", ["train.py", *arguments])
        run(None, train.Config)
        return capsys.readouterr().out

    explained = f"{'  d: 8':44}# devices along axis d: "
    assert explained in printed("--cfg", "job", "mesh.d=8") and explained in printed("--cfg=job", "mesh.d=8")
    assert printed("--cfg", "job", "--package", "mesh", "mesh.d=8") == "# @package mesh\nd: 8\nt: 2\n"


def test_cfg_job_shows_what_is_wrong_too():
    """A config that would be refused can be looked at: an unknown key, a section that is none, a value still to be given."""
    text = annotated(train.Config, "mesh: 3\ntraining: {stebs: 5}\nmodel: {d_model: \"???\"}\n", BASE)
    shown = yaml.safe_load(text)
    assert shown["mesh"] == 3 and shown["training"]["stebs"] == 5 and shown["model"]["d_model"] == "???"


def test_help_takes_little_more_than_importing_jax():
    """At most 2.5 times the processor time, 2 s where JAX takes 0.8: nothing else that is slow to import is imported."""

    def seconds(*arguments):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("-m", "train", "--help"), seconds("-c", "import jax")) for _ in range(3)]
    assert statistics.median(ours / jaxs for ours, jaxs in pairs) < 2.5, pairs
