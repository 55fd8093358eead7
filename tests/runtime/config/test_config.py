"""Configs: composed by hydra, rebuilt strictly, refused with one clear message each. Texts are asserted."""

import dataclasses
import functools
import json
import os

import pytest
import yaml
from pages import ROOT
from parts import assert_refuses, says

import train
from runtime.cluster import processes
from runtime.config import checks as config_checks
from runtime.config import command_line
from runtime.config.command_line import load, to_yaml
from runtime.config.keys import DROPPED_KEYS, Paths, Tokens
from runtime.config.rebuild import as_tree
from runtime.config.resume import config_of
from runtime.files import flat
from runtime.terminal import RunError

CONFIGS = sorted(file.stem for file in (ROOT / "configs").glob("[cl]*_*.yaml"))
FILE = "configs/local_test_synthetic.yaml"
COUNT = "expected … from 1 to 2147483647"
POSITIVE = "expected … above 0 that float32 holds"


@pytest.fixture
def config_folder(tmp_path, monkeypatch):
    """A folder of configs of the test's own, in it a copy of the first one as `one`."""
    (tmp_path / "one.yaml").write_text((ROOT / FILE).read_text())
    monkeypatch.setattr(command_line, "CONFIG_FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


loaded = functools.cache(functools.partial(load, train.Config))


def message(*overrides, name="local_test_synthetic"):
    with pytest.raises(RunError) as caught:
        load(train.Config, name, overrides)
    return str(caught.value)


# ---- what the published configs hold


def test_the_synthetic_config_is_the_published_one():
    """Every value of the main job, typed, with the defaults that no file sets; frozen."""
    config = load(train.Config)
    sizes = {"d_model": 256, "n_q_per_kv": 2, "n_kv": 2, "d_head": 32, "layers": 2, "vocab": 1280, "d_ff": 1024}
    assert config.model == train.Model(**sizes, rope_max_timescale=256) and config.mesh == train.Mesh(d=4, t=2)
    training = config.training
    assert (training.tokens, training.steps, training.steps_for_lr) == (Tokens(batch=64, len=64), 50, 50)
    assert config.paths == Paths(root_working_dir="runs", model_name="local_test_synthetic")
    assert config.flat_tokens.filespec == "synthetic_dataset.zarr" and config.flat_tokens.sequence_packing is True
    assert (config.num_hosts, config.io.max_io_threads, config.check_only) == (1, 64, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_hosts = 2


@pytest.mark.parametrize("name", CONFIGS)
def test_a_header_tells_the_truth(name):
    """The file starts with what it trains and its command; its numbers of parameters, steps and tokens are right."""
    config = loaded(name)
    model, tokens = config.model, config.training.tokens.batch * config.training.tokens.len
    attention = 2 * model.d_model * model.n_kv * (model.n_q_per_kv + 1) * model.d_head
    layer = attention + 3 * model.d_model * model.d_ff + 2 * model.d_model
    count = 2 * model.vocab * model.d_model + model.layers * layer + model.d_model
    header = (ROOT / f"configs/{name}.yaml").read_text().partition("\ndefaults:")[0]
    assert all(line.startswith("#") for line in header.strip().splitlines())
    assert f"python -m train --config-name={name}" in header
    assert (f"{count / 1e6:.1f}M parameters" if count < 1e7 else f"{count / 1e6:,.0f}M parameters") in header
    if name.startswith("c4"):
        assert f"take {12 * count / config.mesh.d / config.mesh.t / 2**30:.2f} GiB on each device" in header
        assert f"Expect {config.training.steps:,} steps of {tokens:,} tokens" in header
        size, layers = (ROOT / f"configs/size/{name.split('_')[-1]}.yaml").read_text(), model.layers * layer
        assert f": {count:,}, of them {layers + model.d_model:,} in the" in size or name == "c4_a100x8x4_540m"


# d_model, heads, layers, d_ff, steps and learning rate of the published files before they were composed from groups.
FAMILY = {
    "a100x8_84m": (512, 8, 8, 4096, 20000, 1e-3),
    "a100x8_270m": (1024, 16, 8, 8192, 82000, 6e-4),
    "a100x8_540m": (2048, 16, 8, 8192, 164000, 4e-4),
    "a100x8_1b": (2048, 16, 8, 16384, 287000, 3e-4),
    "a100x8_2b": (4096, 16, 8, 16384, 573000, 2e-4),
    "a100x8x4_540m": (2048, 16, 16, 8192, 82000, 4e-4),
    "a100x8x4_1b": (2048, 16, 8, 16384, 72000, 3e-4),
    "a100x8x4_2b": (4096, 16, 8, 16384, 143000, 2e-4),
}
FAMILY |= {name.replace("a100x8_", "h200x1_"): FAMILY[name] for name in FAMILY if "x8_" in name}
MACHINES = {"a100x8": (8, 1, 64, False), "a100x8x4": (32, 4, 256, False), "h200x1": (1, 1, 64, True)}


def test_the_published_family_is_complete():
    """The thirteen compose from a size and a machine to what they were: every key, against this table and the
    defaults."""
    assert {f"c4_{name}" for name in FAMILY} == {name for name in CONFIGS if name.startswith("c4_")}
    for name, (d_model, heads, layers, d_ff, steps, rate) in FAMILY.items():
        d, hosts, batch, is_unrolled = MACHINES[name.rpartition("_")[0]]
        sizes = {"d_model": d_model, "n_q_per_kv": 1, "n_kv": heads, "d_head": 128, "layers": layers, "d_ff": d_ff}
        steps = {"steps": steps, "steps_for_lr": steps, "warmup_steps": 1000, "learning_rate": rate}
        how = {"unroll_layers": is_unrolled, "microbatches": 2 if name == "h200x1_2b" else 1}
        assert loaded(f"c4_{name}") == train.Config(
            paths=Paths(model_name=f"c4_{name}"),
            mesh=train.Mesh(d=d, t=1),
            num_hosts=hosts,
            flat_tokens=dataclasses.replace(load(train.Config).flat_tokens, filespec="c4.zarr"),
            model=train.Model(**sizes, vocab=32768, rope_max_timescale=10000),
            training=train.Training(**steps, **how, tokens=Tokens(batch=batch, len=1024)),
        )
    chosen = load(train.Config, "c4", ["size=2b", "machine=a100x8"])
    assert dataclasses.replace(chosen, paths=Paths(model_name="c4_a100x8_2b")) == loaded("c4_a100x8_2b")


def test_a_run_has_at_most_62_keys():
    """The leaves of a config. Whoever adds one takes one away."""
    assert len(flat(as_tree(load(train.Config)))) <= 62


OLD = """
training:
  {seed: 0, steps: 50, warmup_steps: 10, steps_for_lr: 50, learning_rate: 1e-2, adam_b1: 0.9, adam_b2: 0.95,
   cosine_learning_rate_final_fraction: 0.1, adam_eps: 1e-8, adam_eps_root: 0, weight_decay: 0.1,
   tokens: {batch: 64, len: 64}}
model: {d_model: 256, n_q_per_kv: 2, n_kv: 2, d_head: 32, layers: 2, vocab: 1280, d_ff: 1024, rope_max_timescale: 256}
paths: {root_working_dir: '~/runs'}
mesh: {d: 4, t: 2}
num_hosts: 1
checkpoint_interval: 10
eval_interval: 10
log_interval: 1
io: {max_io_threads: 16}
flat_tokens:
  {filespec: '~/synthetic_dataset.zarr', read_blocks_per_shuffle_buffer: 8, sequences_per_read_block: 16, seed: 0,
   sequence_packing: true}
"""


def test_published_keys_load_from_one_file_without_base(config_folder):
    """A config that sets every published key, and no other, is complete; `~` is expanded."""
    (config_folder / "old.yaml").write_text(OLD)
    config = load(train.Config, "old", ["+paths.model_name=synthetic_000", "training.microbatches=2"])
    assert (config.paths.model_name, config.training.microbatches) == ("synthetic_000", 2)
    assert config.training.learning_rate == 0.01 and config.io.max_io_threads == 16
    assert config.paths.root_working_dir == os.path.expanduser("~/runs")
    assert config.flat_tokens.filespec == os.path.expanduser("~/synthetic_dataset.zarr")


def dropped(tree, values):
    """The tree with these values by dotted key."""
    tree = json.loads(json.dumps(tree))
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = value
    return tree


def test_the_config_of_an_older_run_is_read(config_folder):
    """Keys that are gone, with the value that now always holds, are ignored in a run folder's config.yaml; another
    value is refused with what to do; in a checkpoint's attributes, which cannot be mended, all are ignored."""
    config = load(train.Config, "one")
    old = dropped(as_tree(config), {key: value for key, (value, _) in DROPPED_KEYS.items()})
    (config_folder / "old.yaml").write_text(yaml.safe_dump(old))
    assert load(train.Config, "old") == config
    other = dropped(as_tree(config), dict.fromkeys(DROPPED_KEYS, 3))
    (config_folder / "other.yaml").write_text(yaml.safe_dump(other))
    refused = message(name="other").splitlines()[1:]
    assert refused == [f"  other.yaml: {key} is refused: {why}" for key, (_, why) in DROPPED_KEYS.items()]
    assert config_of(train.Config, {"config": other}) == config


# ---- what is refused

ONE = "flat_tokens.filespec=null mixture=[{filespec:a,weight:1}]"
STREAM = "hf_dataset={path:x,tokenizer:bytes_utf8} validation_batches=1"
WRONG = f"""
+paths.mistyped=x | paths.mistyped is not a key … root_working_dir, model_name
paths.model_nme=x | paths.model_nme is not a key: the nearest is paths.model_name
d_head=64 | d_head is not a key: the nearest is model.d_head
nothing.like.it=64 | nothing.like.it is not a key: --help
model._target_=os.system | model._target_ is not a key … of model are d_model, n_q_per_kv, n_kv, d_head,
hf_dataset.num_workers=4 | hf_dataset.num_workers is refused: half of the cores … delete the key
~training.steps | {FILE}: training.steps is missing: {COUNT}; add training.steps=...
training.learning_rate=??? | {FILE}: training.learning_rate is missing: {POSITIVE}; add training.learning_rate=...
~flat_tokens | {FILE}: flat_tokens.filespec is missing: expected the data set
mixture=[{{filespec:a,weight:1}}] | mixture is set, and so is flat_tokens.filespec ({FILE}): expected one
mixture=3 | mixture = 3: expected a list, [{{filespec: …, weight: …}}, …]
mixture=[a.zarr] | mixture[0] = "a.zarr": expected a section … filespec, weight
mixture=[{{filespec:a}}] | mixture[0].weight is missing: {POSITIVE}; add mixture[0].weight=...
mixture=[{{filespec:a,weight:1,wieght:1}}] | mixture[0].wieght is not a key: the nearest is mixture[0].weight
mixture=[{{filespec:a,weight:0}}] | mixture[0].weight = 0: {POSITIVE}
{ONE[:-1]},{{filespec:a,weight:2}}] | mixture[1].filespec = "a": … already: add up the weights
{ONE} flat_tokens.epochs=2 | flat_tokens.epochs = 2: only flat_tokens.filespec ends
{ONE} {STREAM} | hf_dataset.path is set, and so is mixture (command line): expected one … by mixture=[]
{ONE.replace(":a", ":x")} {STREAM} flat_tokens.epochs=2 | flat_tokens.epochs = 2: only flat_tokens.
tracking.to=wandb | tracking.to = "wandb": expected a list of tensorboard … trackio, [a, b, …]
tracking.to=[wandb,tb] | tracking.to[1] = "tb": expected tensorboard or wandb or
training.steps=2.9 | training.steps = 2.9: {COUNT}
training.steps=true | training.steps = true: {COUNT}
model.d_model=null | model.d_model = null: {COUNT}
flat_tokens.sequence_packing=no | flat_tokens.sequence_packing = "no": expected true or false
training.learning_rate=nan | training.learning_rate = NaN: {POSITIVE}
paths.model_name=2026 | paths.model_name = 2026: expected a name, in quotes
mesh=big | mesh = "big": expected a section … keys d, t
training.steps=0 | training.steps = 0: {COUNT}
training.steps_for_lr=2147483648 | training.steps_for_lr = 2147483648: {COUNT}
training.warmup_steps=-1 | training.warmup_steps = -1: expected … from 0 to 2147483647
training.weight_decay=-0.1 | training.weight_decay = -0.1: expected a number, 0 or more
training.adam_b1=1 | training.adam_b1 = 1: expected … from 0 to below 1
training.adam_b2=0.9999999999 | training.adam_b2 = 0.9999999999: expected … below 1 that float32 holds
training.adam_eps=1e-300 | training.adam_eps = 1e-300: {POSITIVE}
training.cosine_learning_rate_final_fraction=1.5 | training.cosine_learning_rate_final_fraction = 1.5: expected a
training.seed=4294967296 | training.seed = 4294967296: expected … from 0 to 4294967295
model.compute_dtype=float16 | model.compute_dtype = "float16": expected bfloat16 or float32
paths.model_name=../x | paths.model_name = "../x": expected a folder's name
paths.model_name=. | paths.model_name = ".": expected … under paths.root_working_dir
model.d_head=33 | model.d_head = 33: expected an even … from 2 to 2147483646
num_hosts=3 | num_hosts = 3: … 8 devices (mesh.d × mesh.t = 4 × 2) … 3 hosts: set
training.warmup_steps=60 | {FILE}: training.steps_for_lr = 50: … training.warmup_steps = 60
checkpoint.keep_every=2 | checkpoint.keep_every = 2: checkpoint.keep_last is null
training.steps=[1 | no viable alternative at input '[1'
training.steps | Error parsing override 'training.steps'
training.steps=5,10 | Ambiguous value for argument 'training.steps=5,10'
~nothing | Could not delete from config. 'nothing'
training.steps=${{training.stps}} | Interpolation key 'training.stps' not found
training.steps={"9" * 5000} | the configuration cannot be read: Exceeds the limit
training.steps={"9" * 500} | training.steps = {"9" * 100}… (500 characters): {COUNT}
"""
CASES = [case.split(" | ") for case in WRONG.strip().split("\n")]
OF_HYDRA = ("no viable", "Error parsing", "Ambiguous", "Could not", "Interpolation", "the configuration", FILE)


@pytest.mark.parametrize("overrides, text", CASES, ids=[overrides[:60] for overrides, _ in CASES])
def test_what_is_wrong_on_the_command_line_is_refused(overrides, text):
    """One line says where it is, the key, its value, what is expected, and the fix."""
    place = "" if text.startswith(OF_HYDRA) else "command line: "
    assert says(f"{place}{text}", found := message(*overrides.split())), found


@pytest.mark.parametrize("replaced, by, text", [
    ("steps: 50", "steps: 2.9", f"two.yaml: training.steps = 2.9: {COUNT}"),
    ("steps: 50", "stebs: 50", "two.yaml: training.stebs is not a key … training.steps"),
    ("batch: 64", "batch:", f"two.yaml: training.tokens.batch = null: {COUNT}"),
    ("mesh: {d: 4, t: 2}", "mesh:", "two.yaml: mesh = null: expected a section … d, t"),
    ("mesh: {d: 4, t: 2}", "mesh: {d: 4}", f"two.yaml: mesh.t is missing: {COUNT}"),
    ("filespec:", "sequence_packing: 'no'\n  filespec:", 'two.yaml: flat_tokens.sequence_packing = "no"'),
    ("d_head: 32", "d_head: 33", "two.yaml: model.d_head = 33: expected an even number"),
    ("n_kv: 2", "n_kv: 2\n  n_kv: 2", "found duplicate key n_kv"),
    ("mesh: {d: 4, t: 2}", "mesh: {d: 4, t", "while parsing a flow mapping"),
    ("[base, _self_]", "[bsae, _self_]", "In 'two': there is no config bsae in "),
    ("mesh: {d: 4, t: 2}", "mash: {d: 4, t: 2}", "two.yaml: mash.d is not a key … mesh.d"),
    ("[base, _self_]", "[one, _self_, size: big]", "size/big.yaml: model.d_ff = 1.5: expected a whole number"),
])  # fmt: skip
def test_a_wrong_file_is_named(config_folder, replaced, by, text):
    """A value in a yaml is blamed on that yaml, also on one that a defaults list names, and YAML's own typing
    counts."""
    (config_folder / "size").mkdir()
    (config_folder / "size/big.yaml").write_text("# @package _global_\nmodel: {d_ff: 1.5}\n")
    good = (ROOT / FILE).read_text()
    assert replaced in good
    (config_folder / "two.yaml").write_text(good.replace(replaced, by, 1))
    assert says(text, message(name="two"))


def test_all_problems_come_at_once():
    """Mistakes are lines under one heading, so that they are mended in one go."""
    text = message("training.steps=2.9", "+paths.mistyped=x", "model.d_model=null", "+training.adam_eps_root=2")
    heading, *lines = text.splitlines()
    assert heading == "4 problems in the configuration"
    keys = ["model.d_model", "paths.mistyped", "training.adam_eps_root", "training.steps"]
    assert sorted(line.split()[2] for line in lines) == sorted(keys)
    assert message("num_hosts=3", "paths.model_name=..").startswith("2 problems in the configuration\n")


# ---- what is taken


@pytest.mark.parametrize(
    "form", ["paths.model_name=x", "+paths.model_name=x", "++paths.model_name=x", "paths={model_name:x}"]
)
def test_a_key_in_every_form(form):
    """`+key=x` and `key=x` both work, in configs that mention the key or not."""
    for name in ("local_test_synthetic", "c4_a100x8_1b"):
        assert load(train.Config, name, [form]).paths.model_name == "x"


def test_what_is_written_loads_again(config_folder):
    """The run folder's config.yaml is itself a config, equal to the one that it was written from, lists included. `~`,
    which hydra's grammar refuses in a value, is expanded, so that no run lands in a folder called `~`."""
    data = ["flat_tokens.filespec=null", "mixture=[{filespec:'~/a',weight:0.7},{filespec:s3://b/c,weight:3}]"]
    others = ["training.learning_rate=3", "tracking.to=[wandb]", "paths.root_working_dir=~/runs"]
    config = load(train.Config, "one", [*data, *others])
    assert [(one.filespec, one.weight) for one in config.mixture] == [
        (os.path.expanduser("~/a"), 0.7),
        ("s3://b/c", 3.0),
    ]
    assert type(config.training.learning_rate) is float
    (config_folder / "two.yaml").write_text(to_yaml(config))
    assert load(train.Config, "two") == config
    assert config.paths == Paths(root_working_dir=os.path.expanduser("~/runs"), model_name="one")


def test_the_mesh_against_the_machine():
    """Too few devices is refused, with the simulation's flag on a CPU; fewer than there are is fine on one host
    only."""
    one, two = load(train.Config), load(train.Config, overrides=["num_hosts=2"])
    for config, count, platform in ((one, 8, "cpu"), (one, 9, "gpu"), (two, 8, "gpu")):
        processes.check_mesh(config, count, platform)
    for config, count, platform, text in [
        (one, 1, "cpu", f"{FILE}: mesh.d × mesh.t = 4 × 2: expected 1 devices or fewer … has 1 (cpu), not 8 … product "
         "is 1, or simulate 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8"),
        (one, 4, "gpu", "(gpu), not 8: set mesh.d and mesh.t … product is 4 … check_only=true"),
        (two, 16, "gpu", "expected 16 devices … has 16 (gpu), not 8"),
        (two, 2, "cpu", "simulate 4 devices … XLA_FLAGS=--xla_force_host_platform_device_count=4"),
    ]:  # fmt: skip
        assert_refuses(text, processes.check_mesh, config, count, platform)


def test_dataset_against_the_config():
    """A vocabulary too small and more steps than the epochs hold name the value that would do."""
    config = load(train.Config)
    config_checks.check_dataset(config, max_token_id=1279, steps_available=50, epochs_needed=1)
    data = "synthetic_dataset.zarr"
    for arguments, text in [
        ((1280, 50, 1), f"{FILE}: model.vocab = 1280: … {data} … up to 1280: set model.vocab to 1281"),
        ((1016, 50, 1, 2000), "has the bos_id 2000: set model.vocab to 2001"),
        ((1279, 20, 3), f"{FILE}: training.steps = 50: … {data} holds 20 steps … epochs=3, or training.steps=20"),
        ((1280, 20, 3), "2 problems in the configuration"),
    ]:
        assert_refuses(text, config_checks.check_dataset, config, *arguments)
