"""Configs: composed by hydra, rebuilt strictly, refused with one clear message each. Texts are asserted."""

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from runtime.cluster import processes
from runtime.config import checks as config_checks
from runtime.config import command_line as runtime_config
from runtime.config.arguments import FLAGS
from runtime.config.command_line import load, to_yaml
from runtime.config.keys import Paths, RunConfig, Tokens
from runtime.terminal import RunError
from shardlib.spec import ShardingError

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
IS_RUN = {name: "\ndefaults: [base" in (ROOT / f"configs/{name}.yaml").read_text() for name in CONFIGS}
RUN_CONFIGS = [name for name in CONFIGS if IS_RUN[name]]


# The same keys as train.py's, so that these tests say what runtime/ alone guarantees.
@dataclass(frozen=True)
class Model:
    d_model: int
    n_q_per_kv: int
    n_kv: int
    d_head: int
    layers: int
    vocab: int
    d_ff: int
    rope_max_timescale: int
    norm_eps: float = 1e-6
    compute_dtype: str = "bfloat16"
    attention: str = "auto"


@dataclass(frozen=True)
class Mesh:
    d: int
    t: int


@dataclass(frozen=True)
class Training:
    seed: int
    steps: int
    warmup_steps: int
    steps_for_lr: int
    learning_rate: float
    cosine_learning_rate_final_fraction: float
    adam_b1: float
    adam_b2: float
    adam_eps: float
    adam_eps_root: float
    weight_decay: float
    tokens: Tokens
    microbatches: int = 1
    unroll_layers: bool = False
    max_grad_norm: float = 1.0
    max_consecutive_bad_steps: int = 10
    save_for_backward: str = "everything"
    gradient_reduce_dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    mesh: Mesh
    model: Model
    training: Training


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config_folder(tmp_path, monkeypatch):
    """A folder of configs of the test's own, beside a copy of base.yaml."""
    (tmp_path / "base.yaml").write_text((ROOT / "configs/base.yaml").read_text())
    monkeypatch.setattr(runtime_config, "CONFIG_FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(*overrides, name="local_test_synthetic"):
    with pytest.raises(RunError) as caught:
        load(Config, name, overrides)
    return str(caught.value)


def run(monkeypatch, *arguments, main=lambda config: None):
    """Runs main as `python -m train ARGUMENTS` would; returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    try:
        runtime_config.run(main, Config)
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_the_synthetic_config_is_the_published_one():
    """Every value of the main job, typed, with the defaults that no file sets."""
    config = load(Config)
    assert config.model == Model(256, 2, 2, 32, 2, 1280, 1024, 256)
    assert (
        config.training.tokens == Tokens(batch=64, len=64)
        and config.training.steps == config.training.steps_for_lr == 50
    )
    assert (config.mesh.d, config.mesh.t) == (4, 2)
    assert config.paths == Paths(root_working_dir="runs", model_name="local_test_synthetic")
    assert config.flat_tokens.filespec == "synthetic_dataset.zarr" and config.flat_tokens.sequence_packing is True
    assert (config.num_hosts, config.io.max_io_threads, config.check_only) == (1, 64, False)
    assert hash(config) == hash(load(Config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_hosts = 2


@pytest.mark.parametrize("name", RUN_CONFIGS)
def test_every_config_loads_and_its_header_tells_the_truth(name):
    """The file starts with its command; the parameter count in its header is the one that its sizes give."""
    config = load(Config, name)
    model = config.model
    heads = model.n_kv * model.n_q_per_kv
    attention = 2 * model.d_model * heads * model.d_head + 2 * model.d_model * model.n_kv * model.d_head
    layer = attention + 3 * model.d_model * model.d_ff + 2 * model.d_model
    count = 2 * model.vocab * model.d_model + model.layers * layer + model.d_model
    header = (ROOT / f"configs/{name}.yaml").read_text().partition("\ndefaults:")[0]
    assert all(line.startswith("#") for line in header.strip().splitlines())
    assert f"python -m train --config-name={name}" in header
    rounded = f"{count / 1e6:.1f}M parameters" if count < 1e7 else f"{count / 1e6:,.0f}M parameters"
    assert rounded in header
    if name not in ("local_test_synthetic", "local_shakespeare"):  # whose headers say less
        assert f"Parameters: {count:,}," in header
        assert f"{12 * count / config.mesh.d / config.mesh.t / 2**30:.2f} GiB on each device" in header
        tokens = config.training.tokens.batch * config.training.tokens.len
        assert f"Expect {config.training.steps:,} steps of {tokens:,} tokens" in header


def test_the_published_family_is_complete():
    """Widths, depths and batches of the published configs, for one and for four hosts, and one-GPU ones."""
    widths = {"84m": (512, 4096), "270m": (1024, 8192), "540m": (2048, 8192), "1b": (2048, 16384), "2b": (4096, 16384)}
    for machine, sizes, hosts in (("a100x8", widths, 1), ("a100x8x4", ("540m", "1b", "2b"), 4)):
        for size in sizes:
            config = load(Config, f"c4_{machine}_{size}")
            model = config.model
            assert (model.d_model, model.d_ff) == widths[size]
            assert model.n_kv * model.n_q_per_kv == (8 if model.d_model == 512 else 16) and model.d_head == 128
            assert model.layers == (16 if (machine, size) == ("a100x8x4", "540m") else 8)
            assert (model.vocab, model.rope_max_timescale, config.training.tokens.len) == (32768, 10000, 1024)
            assert config.num_hosts == hosts and config.training.tokens.batch == 64 * hosts
            assert config.mesh.d * config.mesh.t == 8 * hosts
    for size in ("84m", "540m", "1b"):
        assert load(Config, f"c4_h200x1_{size}").mesh == Mesh(d=1, t=1)


@pytest.mark.parametrize(
    "overrides, name",
    [
        ([], "local_test_synthetic"),
        (["paths.model_name=x"], "x"),
        (["+paths.model_name=x"], "x"),
        (["++paths.model_name=x"], "x"),
        (["paths={model_name:x}"], "x"),
    ],
)
def test_model_name_in_every_form(overrides, name):
    """`+paths.model_name=x`, `paths.model_name=x` and nothing at all work, in configs that mention it or not."""
    assert load(Config, "local_test_synthetic", overrides).paths.model_name == name


def test_published_keys_load_from_one_file_without_base(config_folder):
    """A config that sets every published key that is still used, and no other, is complete."""
    (config_folder / "old.yaml").write_text("""
training:
  seed: 0
  steps: 50
  warmup_steps: 10
  steps_for_lr: 50
  learning_rate: 1e-2
  cosine_learning_rate_final_fraction: 0.1
  adam_b1: 0.9
  adam_b2: 0.95
  adam_eps: 1e-8
  adam_eps_root: 0
  weight_decay: 0.1
  tokens: {batch: 64, len: 64}
model: {d_model: 256, n_q_per_kv: 2, n_kv: 2, d_head: 32, layers: 2, vocab: 1280, d_ff: 1024, rope_max_timescale: 256}
paths: {root_working_dir: '~/runs'}
mesh: {d: 4, t: 2}
num_hosts: 1
checkpoint_interval: 10
eval_interval: 10
log_interval: 1
io: {max_io_threads: 16}
flat_tokens:
  filespec: '~/synthetic_dataset.zarr'
  read_blocks_per_shuffle_buffer: 8
  sequences_per_read_block: 16
  seed: 0
  sequence_packing: true
""")
    config = load(Config, "old", ["+paths.model_name=synthetic_000", "check_only=true", "training.microbatches=2"])
    assert (config.paths.model_name, config.check_only, config.training.microbatches) == ("synthetic_000", True, 2)
    assert config.training.learning_rate == 0.01 and type(config.training.adam_eps_root) is float
    assert config.paths.root_working_dir == os.path.expanduser("~/runs")
    assert config.flat_tokens.filespec == os.path.expanduser("~/synthetic_dataset.zarr")


def test_tilde_is_expanded_from_the_command_line():
    """hydra's grammar refuses `~` in a value; ours takes it, so that no run lands in a folder called `~`."""
    overrides = ["paths.root_working_dir=~/runs", "+flat_tokens.filespec=~/c4.zarr"]
    config = load(Config, "local_test_synthetic", overrides)
    assert config.paths.root_working_dir == os.path.expanduser("~/runs")
    assert config.flat_tokens.filespec == os.path.expanduser("~/c4.zarr")


@pytest.mark.parametrize(
    "override, value",
    [("training.learning_rate=1", 1.0), ("training.learning_rate='1e-3'", 1e-3), ("training.learning_rate=1e-3", 1e-3)],
)
def test_what_counts_as_a_number(override, value):
    """A whole number and text that reads as a number are numbers; they come out as float."""
    learning_rate = load(Config, "local_test_synthetic", [override]).training.learning_rate
    assert learning_rate == value and type(learning_rate) is float


FILE = "configs/local_test_synthetic.yaml"
BASE = "configs/base.yaml"

# override | message
WRONG = [
    # unknown keys
    ("+paths.mistyped=x", "command line: paths.mistyped is not a key: the keys of paths are root_working_dir, model_name; correct it or delete it"),
    ("paths.model_nme=x", "command line: paths.model_nme is not a key: the nearest is paths.model_name; correct it or delete it"),
    ("+training.step=5", "command line: training.step is not a key: the nearest is training.steps; correct it or delete it"),
    ("trainng.steps=5", "command line: trainng.steps is not a key: the nearest is training.steps; correct it or delete it"),
    ("d_head=64", "command line: d_head is not a key: the nearest is model.d_head; correct it or delete it"),
    ("+training.queue=ml", "command line: training.queue is not a key: the keys of training are seed, steps, "),
    ("+training.use_gpu=true", "command line: training.use_gpu is not a key: the keys of training are seed, "),
    ("+training.use_grad_clip=true", "command line: training.use_grad_clip is not a key"),
    ("+training.use_single_pod=true", "command line: training.use_single_pod is not a key"),
    # keys that were published and are not needed
    ("+training.interleave=2", "command line: training.interleave is refused: a layer computes all its rows at once: delete the key"),
    ("+flat_tokens.streams=2", "command line: flat_tokens.streams is refused: the order of the data is a computed permutation of all of it, so there are no independent streams to mix: delete the key"),
    ("+hf_dataset.sequences_packed_per_batch=120", "command line: hf_dataset.sequences_packed_per_batch is refused: documents are packed without gaps, and what a batch has no room for begins the next one, so that no number of sequences has to be guessed: delete the key"),
    # missing keys
    ("~training.steps", f"{FILE}: training.steps is missing: expected a whole number; add it there, or training.steps=... to the command line"),
    ("training.learning_rate=???", f"{FILE}: training.learning_rate is missing: expected a number; add it there, or"),
    ("~flat_tokens", f"{FILE}: flat_tokens.filespec is missing: expected the data set to train on; add it there, or flat_tokens.filespec=... to the command line (or `mixture`, or hf_dataset.path)"),
    # where the data come from
    ("mixture=[{filespec:a,weight:1}]", f"command line: mixture is set, and so is flat_tokens.filespec ({FILE}): expected one of them, since each says where the data come from; delete the other, on the command line by flat_tokens.filespec=null"),
    ("flat_tokens.filespec=null", f"{FILE}: flat_tokens.filespec is missing: expected the data set to train on"),
    ("mixture=3", "command line: mixture = 3: expected a list, [{filespec: …, weight: …}, …]"),
    ("mixture=[a.zarr]", 'command line: mixture[0] = "a.zarr": expected a section with the keys filespec, weight'),
    ("mixture=[{filespec:a}]", "command line: mixture[0].weight is missing: expected a number; add it there"),
    ("mixture=[{filespec:a,weight:1,wieght:1}]", "command line: mixture[0].wieght is not a key: the nearest is mixture[0].weight; correct it or delete it"),
    ("mixture=[{filespec:a,weight:yes}]", 'command line: mixture[0].weight = "yes": expected a number'),
    ("validation_batches=0", "command line: validation_batches = 0: expected 1 or more batches, or null for all"),
    ("flat_tokens.long_sequences=cut", 'command line: flat_tokens.long_sequences = "cut": expected split or truncate'),
    # wrong types
    ("training.steps=2.9", "command line: training.steps = 2.9: expected a whole number; write training.steps=2 or training.steps=3"),
    ("training.steps=1e3", "command line: training.steps = 1000.0: expected a whole number; write training.steps=1000"),
    ("training.steps='3'", 'command line: training.steps = "3": expected a whole number; write training.steps=3, without quotes'),
    ("training.steps=many", 'command line: training.steps = "many": expected a whole number'),
    ("training.steps=true", "command line: training.steps = true: expected a whole number"),
    ("training.steps.x=3", 'command line: training.steps = {"x": 3}: expected a whole number'),
    ("training.steps=", 'command line: training.steps = "": expected a whole number'),
    ("model.d_model=null", "command line: model.d_model = null: expected a whole number"),
    ("mesh.d=[4]", "command line: mesh.d = [4]: expected a whole number"),
    ("flat_tokens.sequence_packing=no", 'command line: flat_tokens.sequence_packing = "no": expected true or false; write flat_tokens.sequence_packing=false'),
    ("flat_tokens.sequence_packing=1", "command line: flat_tokens.sequence_packing = 1: expected true or false; write flat_tokens.sequence_packing=true"),
    ("check_only=maybe", 'command line: check_only = "maybe": expected true or false'),
    ("training.learning_rate=high", 'command line: training.learning_rate = "high": expected a number'),
    ("training.learning_rate=nan", "command line: training.learning_rate = NaN: expected a number"),
    ("training.learning_rate=inf", "command line: training.learning_rate = Infinity: expected a number"),
    ("training.learning_rate=false", "command line: training.learning_rate = false: expected a number"),
    ("paths.model_name=2026", "command line: paths.model_name = 2026: expected text; write it in quotes that the shell keeps: \"paths.model_name='2026'\""),
    ("paths.model_name=null", "command line: paths.model_name = null: expected text"),
    ("mesh=big", 'command line: mesh = "big": expected a section with the keys d, t'),
    ("paths=null", "command line: paths = null: expected a section with the keys root_working_dir, model_name"),
    ("training.tokens=4096", "command line: training.tokens = 4096: expected a section with the keys batch, len"),
    # values out of range
    ("training.steps=-5", "command line: training.steps = -5: expected 1 or more steps"),
    ("training.steps=0", "command line: training.steps = 0: expected 1 or more steps"),
    ("checkpoint_interval=0", "command line: checkpoint_interval = 0: expected 1 or more steps"),
    ("eval_interval=0", "command line: eval_interval = 0: expected 1 or more steps"),
    ("log_interval=-1", "command line: log_interval = -1: expected 1 or more steps"),
    ("mesh.t=0", "command line: mesh.t = 0: expected 1 or more devices"),
    ("training.tokens.batch=0", "command line: training.tokens.batch = 0: expected 1 or more rows"),
    ("training.microbatches=0", "command line: training.microbatches = 0: expected 1 or more microbatches"),
    ("flat_tokens.epochs=0", "command line: flat_tokens.epochs = 0: expected 1 or more passes over the training data"),
    ("io.max_io_threads=0", "command line: io.max_io_threads = 0: expected 1 or more threads"),
    ("num_hosts=0", "command line: num_hosts = 0: expected 1 or more processes"),
    ("model.layers=0", "command line: model.layers = 0: expected 1 or more layers"),
    ("training.warmup_steps=-1", "command line: training.warmup_steps = -1: expected 0 or more"),
    ("training.weight_decay=-0.1", "command line: training.weight_decay = -0.1: expected 0 or more"),
    ("training.learning_rate=0", "command line: training.learning_rate = 0.0: expected more than 0"),
    ("training.max_grad_norm=0", "training.max_grad_norm = 0.0: expected more than 0"),
    ("training.adam_b1=1", "command line: training.adam_b1 = 1.0: expected 0 or more and less than 1"),
    ("training.cosine_learning_rate_final_fraction=1.5", "= 1.5: expected a fraction, 0 to 1"),
    ("training.seed=-1", "command line: training.seed = -1: expected 0 to 4294967295 (32 bits)"),
    ("model.compute_dtype=float16", "command line: model.compute_dtype = \"float16\": expected bfloat16 or float32"),
    ("model.attention=flash", 'model.attention = "flash": expected auto or einsum or blockwise'),
    ("training.save_for_backward=all", 'training.save_for_backward = "all": expected everything or inputs'),
    ("training.gradient_reduce_dtype=bf16", "training.gradient_reduce_dtype = \"bf16\": expected float32 or bfloat16"),
    ("flat_tokens.filespec=''", "command line: flat_tokens.filespec = \"\": expected a name"),
    ("paths.model_name=../x", "command line: paths.model_name = \"../x\": expected a folder's name under paths.root_working_dir"),
    # combinations
    ("model.d_head=33", "command line: model.d_head = 33: rotary embeddings turn the two halves of a head, so it must be even: set it to 32 or 34"),
    ("num_hosts=3", "command line: num_hosts = 3: the mesh's 8 devices (mesh.d × mesh.t = 4 × 2) cannot be shared evenly by 3 hosts: set num_hosts to 2 or 4"),
    ("training.warmup_steps=60", f"{FILE}: training.steps_for_lr = 50: the learning rate's schedule ends before its warmup does (training.warmup_steps = 60): set training.steps_for_lr to at least 60, usually to training.steps = 50"),
    ("training.adam_eps=0", "command line: training.adam_eps = 0.0: with training.adam_eps_root = 0 too, Adam divides 0 by 0 where a gradient is 0: set it to 1e-8, say"),
    # hydra's and omegaconf's own
    ("training.steps=[1", "no viable alternative at input '[1'"),
    ("training.steps", "Error parsing override 'training.steps' missing EQUAL at '<EOF>'"),
    ("training.steps=5,10", "Ambiguous value for argument 'training.steps=5,10' 1. To use it as a list"),
    ("~nothing", "Could not delete from config. 'nothing' does not exist."),
    ("training.steps=${training.stps}", "Interpolation key 'training.stps' not found full_key: training.steps"),
]  # fmt: skip


@pytest.mark.parametrize("override, text", WRONG, ids=[override for override, _ in WRONG])
def test_a_wrong_override_is_refused(override, text):
    """One line: where, the key, what it was, what is expected, the fix."""
    found = message(override)
    assert text in found and "\n" not in found


MIXTURES = [
    (["mixture=[{filespec:a,weight:1},{filespec:a,weight:2}]"], 'command line: mixture[1].filespec = "a": it is in the mixture already: add up the weights'),
    (["mixture=[{filespec:a,weight:0}]"], "command line: mixture[0].weight = 0.0: expected more than 0; delete a source that is not to be read"),
    (["mixture=[{filespec:' ',weight:1}]"], 'command line: mixture[0].filespec = " ": expected a name'),
    (["mixture=[{filespec:a,weight:1}]", "flat_tokens.epochs=2"], "command line: flat_tokens.epochs = 2: a mixture has no end: a source that runs out starts its next epoch; delete the key"),
    (["mixture=[{filespec:a,weight:1}]", "hf_dataset={path:x,tokenizer:bytes_utf8}", "validation_batches=1"], "command line: hf_dataset.path is set, and so is mixture (command line): expected one of them, since each says where the data come from; delete the other, on the command line by mixture=[]"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, text", MIXTURES, ids=[" ".join(overrides) for overrides, _ in MIXTURES])
def test_a_wrong_mixture_is_refused(overrides, text):
    """One line for what is wrong with a mixture, in itself or beside other keys."""
    found = message("flat_tokens.filespec=null", *overrides)
    assert text in found and "\n" not in found


def test_a_mixture_comes_back(config_folder):
    """A mixture is a list of data sets with weights, from a file or the command line, and config.yaml says it again; `~` is expanded."""
    overrides = ["flat_tokens.filespec=null", "mixture=[{filespec:'~/a',weight:0.7},{filespec:s3://b/c,weight:3}]"]
    (config_folder / "one.yaml").write_text((ROOT / FILE).read_text())
    config = load(Config, "one", overrides)
    assert [(one.filespec, one.weight) for one in config.mixture] == [
        (os.path.expanduser("~/a"), 0.7),
        ("s3://b/c", 3.0),
    ]
    assert config.flat_tokens.filespec is None and config.validation_batches is None
    (config_folder / "again.yaml").write_text(to_yaml(config))
    assert load(Config, "again") == config


def test_a_wrong_file_is_named(config_folder):
    """A value in a yaml is blamed on that yaml, one from a default on the file that has it, and YAML's own typing counts."""
    good = (ROOT / FILE).read_text()
    for name, replaced, by, text in [
        ("a", "steps: 50", "steps: 2.9", "a.yaml: training.steps = 2.9: expected a whole number"),
        ("b", "steps: 50", "stebs: 50", "b.yaml: training.stebs is not a key: the nearest is training.steps"),
        ("c", "batch: 64", "batch:", "c.yaml: training.tokens.batch = null: expected a whole number"),
        ("d", "mesh: {d: 4, t: 2}", "mesh:", "d.yaml: mesh = null: expected a section with the keys d, t"),
        ("e", "mesh: {d: 4, t: 2}", "mesh: {d: 4}", "e.yaml: mesh.t is missing: expected a whole number"),
        ("f", "filespec:", "sequence_packing: 'no'\n  filespec:", 'f.yaml: flat_tokens.sequence_packing = "no"'),
        ("g", "d_head: 32", "d_head: 33", "g.yaml: model.d_head = 33: rotary embeddings turn the two halves"),
        ("h", "n_kv: 2", "n_kv: 2\n  n_kv: 2", "found duplicate key n_kv"),
        ("i", "mesh: {d: 4, t: 2}", "mesh: {d: 4, t", "while parsing a flow mapping"),
        ("j", "[base, _self_]", "[bsae, _self_]", "In 'j': Could not load 'bsae'."),
        ("k", "mesh: {d: 4, t: 2}", "mash: {d: 4, t: 2}", "k.yaml: mash.d is not a key: the nearest is mesh.d"),
    ]:
        assert replaced in good
        (config_folder / f"{name}.yaml").write_text(good.replace(replaced, by, 1))
        assert text in message(name=name)
    (config_folder / "base.yaml").write_text((config_folder / "base.yaml").read_text().replace("0.95", "95"))
    (config_folder / "l.yaml").write_text(good)
    assert message(name="l").startswith("base.yaml: training.adam_b2 = 95.0: expected 0 or more and less than 1")


def test_all_problems_come_at_once():
    """Three mistakes are three lines under one heading, so that they are mended in one go."""
    text = message("training.steps=2.9", "+paths.mistyped=x", "model.d_model=null")
    heading, *lines = text.splitlines()
    assert heading == "3 problems in the configuration"
    assert sorted(line.split()[2] for line in lines) == ["model.d_model", "paths.mistyped", "training.steps"]
    text = message("num_hosts=3", "training.adam_eps=0", "model.d_head=33")
    assert text.startswith("3 problems in the configuration\n  command line: num_hosts = 3: the mesh's 8 devices")


def test_an_unknown_config_is_refused():
    """The nearest name and all there are, instead of hydra's search path."""
    text = message(name="c4_h200_84m")
    assert text.startswith("there is no config c4_h200_84m in configs; the nearest is c4_h200x1_84m; there are ")
    assert "local_test_synthetic" in text and "base" not in text


def test_mesh_against_the_machine():
    """Too few devices is refused, with the simulation's flag on a CPU; fewer than there are is fine on one host only."""
    config = load(Config)
    processes.check_mesh(config, 8, "cpu")
    processes.check_mesh(config, 9, "gpu")
    for count, platform, text in [
        (1, "cpu", f"{FILE}: mesh.d × mesh.t = 4 × 2: expected 1 devices or fewer, since this job has 1 (cpu), not 8: set mesh.d and mesh.t so that their product is 1, or simulate 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8"),
        (4, "gpu", "since this job has 4 (gpu), not 8: set mesh.d and mesh.t so that their product is 4, or run on more devices; check_only=true checks the step without any"),
    ]:  # fmt: skip
        with pytest.raises(RunError, match=re.escape(text)):
            processes.check_mesh(config, count, platform)
    config = load(Config, overrides=["num_hosts=2"])
    processes.check_mesh(config, 8, "gpu")
    with pytest.raises(RunError, match=re.escape("expected 16 devices, since this job has 16 (gpu), not 8")):
        processes.check_mesh(config, 16, "gpu")
    with pytest.raises(RunError, match=r"simulate 4 devices in each process: .*count=4$"):
        processes.check_mesh(config, 2, "cpu")


def test_hosts_against_the_job():
    """num_hosts is what was started."""
    processes.check_num_hosts(load(Config), 1)
    text = f"{FILE}: num_hosts = 1: this job has 2 processes: start one alone, or set num_hosts=2"
    with pytest.raises(RunError, match=re.escape(text)):
        processes.check_num_hosts(load(Config), 2)
    text = "command line: num_hosts = 2: this job has 1 process: start one on each of 2 hosts, or set num_hosts=1"
    with pytest.raises(RunError, match=re.escape(text)):
        processes.check_num_hosts(load(Config, overrides=["num_hosts=2"]), 1)


def test_dataset_against_the_config():
    """A vocabulary too small and more steps than the epochs hold name the value that would do."""
    config = load(Config)
    config_checks.check_dataset(config, max_token_id=1279, steps_available=50)
    for arguments, text in [
        ((1280, 50), f"{FILE}: model.vocab = 1280: the data set synthetic_dataset.zarr has token ids up to 1280: set model.vocab to 1281 or more"),
        ((1016, 50, 2000), "has the bos_id 2000: set model.vocab to 2001 or more"),
        ((1279, 20), f"{FILE}: training.steps = 50: the data set synthetic_dataset.zarr holds 20 steps in flat_tokens.epochs = 1: set flat_tokens.epochs=3, or training.steps=20"),
        ((1279, 0), "is too small for one step of 64 × 64 tokens (batch × len) in flat_tokens.epochs = 1"),
        ((1280, 20), "2 problems in the configuration"),
    ]:  # fmt: skip
        with pytest.raises(RunError, match=re.escape(text)):
            config_checks.check_dataset(config, *arguments)


def test_nothing_left_to_train():
    """A run whose checkpoint has all the steps says so instead of doing nothing."""
    config = load(Config, overrides=["training.steps=20"])
    config_checks.check_resume(config, 19)
    text = "command line: training.steps = 20: nothing to train: the run in runs/local_test_synthetic has a checkpoint after 20 steps; raise training.steps, or give the new run its own paths.model_name"
    with pytest.raises(RunError, match=re.escape(text)):
        config_checks.check_resume(config, 20)


def test_resolved_yaml_loads_again(config_folder):
    """The run folder's config.yaml is itself a config, equal to the one that it was written from."""
    (config_folder / "one.yaml").write_text((ROOT / FILE).read_text())
    config = load(Config, "one", ["training.learning_rate=3e-3"])
    (config_folder / "two.yaml").write_text(to_yaml(config))
    assert load(Config, "two") == config
    assert yaml.safe_load(to_yaml(config))["paths"] == {"root_working_dir": "runs", "model_name": "one"}


def test_run_calls_main_with_the_config(monkeypatch, tmp_path, config_folder):
    """The published command's arguments, in any order; hydra leaves no folder, moves nowhere, restores argv."""
    (config_folder / "local_test_synthetic.yaml").write_text((ROOT / FILE).read_text())
    seen = []
    flags = ["--config-name=local_test_synthetic", "+paths.model_name=synthetic_000"]
    for arguments in (flags, flags[::-1], ["--config-name", "local_test_synthetic", flags[1]]):
        assert run(monkeypatch, *arguments, main=lambda config: seen.append((config, os.getcwd()))) == 0
        assert sys.argv[1:] == arguments
    assert [config.paths.model_name for config, _ in seen] == ["synthetic_000"] * 3
    assert {folder for _, folder in seen} == {str(config_folder)}
    assert sorted(file.name for file in config_folder.iterdir()) == ["base.yaml", "local_test_synthetic.yaml"]


def test_run_prints_errors_without_traceback(monkeypatch, capsys):
    """Status 1 and one line on stderr, for a bad config, a bad override, an unknown config and main's own RunError."""

    def main(config):
        raise RunError("the disk is full")

    for arguments, text in [
        (["+paths.mistyped=x"], "error: command line: paths.mistyped is not a key: the keys of paths are "),
        (["training.steps=[1"], "error: no viable alternative at input '[1'"),
        (["training.steps=5,10"], "error: Ambiguous value for argument 'training.steps=5,10'"),
        (["--config-name=nope"], "error: there is no config nope in configs; there are "),
        (["--cfg", "job", "--config-name=nope"], "error: there is no config nope in configs; there are "),
        (["--config-dir=/nowhere"], "error: Additional config directory '/nowhere' not found"),
        (["--confg-name=x"], "error: there is no flag --confg-name: the nearest is --config-name\n"),
        (
            ["--steps=3"],
            "error: there is no flag --steps: keys are given without dashes, steps=3; --help lists flags and keys\n",
        ),
        (
            ["--training.steps", "3"],
            "error: there is no flag --training.steps: keys are given without dashes, training.steps=...; --help ",
        ),
        ([], "error: the disk is full\n"),
    ]:
        assert run(monkeypatch, *arguments, main=main) == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith(text) and stderr.count("\n") == 1


def test_every_flag_of_hydra_is_known(monkeypatch, capsys):
    """None that hydra has is refused; as in argparse, one may be cut short."""
    assert run(monkeypatch, "--hydra-help") == 0
    flags = re.findall(r"^--([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(flags) == sorted(FLAGS)
    seen = []
    assert run(monkeypatch, "--multi", "training.steps=5,6", main=seen.append) == 0 and len(seen) == 2


def test_what_the_check_refuses_is_printed_alone(monkeypatch, capsys):
    """A refusal by shardlib is a message on stderr and status 1, like a RunError, in a run as in any tool."""

    def refused(config):
        raise ShardingError("'M/d' names mesh axis d\n  at model.py:7")

    assert run(monkeypatch, main=refused) == 1
    assert capsys.readouterr().err == "error: 'M/d' names mesh axis d\n  at model.py:7\n"


def test_run_lets_defects_and_interrupts_through(monkeypatch, capsys):
    """Nothing else is printed alone: a defect keeps its traceback, an interrupt is status 130."""

    def defect(config):
        raise KeyError("a defect")

    def interrupt(config):
        raise KeyboardInterrupt

    with pytest.raises(KeyError, match="a defect"):
        run(monkeypatch, main=defect)
    assert run(monkeypatch, main=interrupt) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_a_sweep_runs_every_job_in_its_own_folder(monkeypatch, capsys, config_folder):
    """Each job has a run folder of its own, a refused job does not end the others, nothing is left in the folder."""
    (config_folder / "local_test_synthetic.yaml").write_text((ROOT / FILE).read_text())
    seen = []
    main = lambda config: seen.append((config.paths.model_name, config.training.steps))  # noqa: E731
    assert run(monkeypatch, "-m", "training.steps=5,0,10", "+paths.model_name=x", main=main) == 1
    assert seen == [("x_training.steps=5", 5), ("x_training.steps=10", 10)]
    assert capsys.readouterr().err == "error: command line: training.steps = 0: expected 1 or more steps\n"
    seen.clear()
    assert run(monkeypatch, "--multirun", "paths.model_name=a,b", main=main) == 0
    assert seen == [("a", 50), ("b", 50)]
    assert sorted(file.name for file in config_folder.iterdir()) == ["base.yaml", "local_test_synthetic.yaml"]


def test_a_name_that_no_disk_takes_is_refused():
    """What counts is the bytes between two slashes."""
    fits = f"{'x' * 200}/{'x' * 255}"
    assert load(Config, overrides=[f"paths.model_name={fits}"]).paths.model_name == fits
    text = "x\": a folder's name has at most 255 bytes, and this has 256: shorten it; in a sweep, whose jobs' names say what differs, sweep fewer keys at once"
    assert message(f"paths.model_name=a/{'x' * 256}").endswith(text)
    assert "at most 255 bytes, and this has 256" in message(f"paths.model_name='{'é' * 128}'")


def test_a_job_of_a_sweep_is_named_by_what_differs(monkeypatch, capsys, config_folder):
    """Many keys that all jobs share are no part of it, however they are written; a name that no disk takes is refused."""
    (config_folder / "local_test_synthetic.yaml").write_text((ROOT / FILE).read_text())
    seen = []
    main = lambda config: seen.append(config.paths.model_name)  # noqa: E731
    constant = [f"{sign}{key}=1" for key in ("log_interval", "eval_interval", "mesh.t") for sign in ("", "+", "++")]
    constant += [
        "mixture=[ ]",
        "~training.seed",
        "training={seed: 3}",
        "paths.root_working_dir=~/runs",
        "model.norm_eps='1e-6'",
    ]
    swept = ["training.steps=5,10", "+model.d_ff=choice(64)"]
    assert run(monkeypatch, "-m", *constant, *swept, main=main) == 0
    name = "local_test_synthetic_training.steps={}_model.d_ff=64"
    assert seen == [name.format(5), name.format(10)]
    seen.clear()
    assert run(monkeypatch, "-m", "training.steps=5", main=main) == 0
    assert seen == ["local_test_synthetic"]
    seen.clear()
    capsys.readouterr()
    assert run(monkeypatch, "-m", f"flat_tokens.filespec=a,{'b' * 300}", main=main) == 1
    assert seen == ["local_test_synthetic_flat_tokens.filespec=a"]
    err = capsys.readouterr().err
    assert (
        "a folder's name has at most 255 bytes, and this has 342: shorten it; in a sweep" in err
        and err.count("\n") == 1
    )


def test_help_and_cfg(monkeypatch, capsys):
    """--help lists every config with its first line and every key with type and default; --cfg job prints the config."""
    assert run(monkeypatch, "--help", main=pytest.fail) == 0
    text = capsys.readouterr().out
    assert "usage: " in text and "[--config-name=NAME] [key=value ...]" in text
    assert "  c4_h200x1_84m            101M parameters on C4, for one H200.\n" in text
    assert "  training.tokens.batch: int\n" in text and "  io.max_io_threads: int = 64\n" in text
    assert '  model.compute_dtype: str = "bfloat16"\n' in text
    assert run(monkeypatch, "--cfg", "job", "training.steps=7", main=pytest.fail) == 0
    assert yaml.safe_load(capsys.readouterr().out)["training"]["steps"] == 7
    assert run(monkeypatch, "--info", main=pytest.fail) == 0


def without_a_reader(folder, flags, arguments=()):
    """Status and stderr of PROGRAM, whose output nobody reads; with Python's flag -u it is written at once."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            [sys.executable, *flags, program, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("--cfg", "job"), ("--cfg=all",)], ids=" ".join)
def test_what_is_printed_for_head_ends_silently(tmp_path, arguments):
    """`python -m train --help | head -3`: no traceback, whether the pipe breaks while it prints or at its end."""
    assert without_a_reader(tmp_path, [], arguments) == (141, "")


def test_configs_of_another_folder(monkeypatch, tmp_path):
    """--config-dir adds a folder whose configs may build on ours, and messages name its files."""
    (tmp_path / "mine.yaml").write_text("defaults: [local_test_synthetic, _self_]\ntraining: {steps: 60}\n")
    seen = []
    arguments = [f"--config-dir={tmp_path}", "--config-name=mine"]
    assert run(monkeypatch, *arguments, main=seen.append) == 0
    [config] = seen
    assert config.training.steps == 60 and config.paths.model_name == "mine"
    assert config.origins.of("training.steps") == str(tmp_path / "mine.yaml")
    assert config.origins.of("model.vocab") == FILE and config.origins.of("training.adam_b1") == BASE
    assert config.origins.of("num_hosts") == str(tmp_path / "mine.yaml")


PROGRAM = """
import sys
from runtime.config import command_line
assert "jax" not in sys.modules
from tests.runtime.config.test_config import Config
def main(config):
    from runtime.cluster import processes
    processes.prepare_devices(config)
    import jax
    print("devices", jax.device_count())
    processes.prepare_devices(config)  # JAX has started: nothing happens
if __name__ == "__main__":
    command_line.run(main, Config)
"""


@pytest.mark.parametrize(
    "environment, arguments, devices",
    [
        ({}, [], 8),
        ({}, ["num_hosts=2"], 4),
        ({}, ["check_only=true"], 1),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, [], 3),
        ({"JAX_NUM_CPU_DEVICES": "2"}, [], 2),
    ],
)
def test_devices_are_simulated_where_nothing_else_says_so(tmp_path, environment, arguments, devices):
    """In a fresh process: the mesh's devices without flags, and the person's own flags where they are given."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"devices {devices}\n", "")


def test_an_error_as_a_program(tmp_path):
    """The whole program: status 1, one line on stderr, no traceback, nothing on stdout."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, "training.steps=2.9"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    expected = "expected a whole number; write training.steps=2 or training.steps=3"
    assert done.stderr == f"error: command line: training.steps = 2.9: {expected}\n"


def test_output_that_nobody_reads_any_more(tmp_path):
    """`python -m tool | head`: status 141, as a shell's own programs have it, and one line on stderr, no traceback."""
    assert without_a_reader(tmp_path, ["-u"]) == (141, "what read the output has gone (broken pipe)\n")
