"""Published weights to a checkpoint and back, whatever files they come in, and what is refused."""

import contextlib
import dataclasses
import json
import resource
import shutil
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import small
import transformers
from pages import ROOT
from parts import says
from published import neighbours, small_gguf
from reference import random_weights
from safetensors.numpy import load_file, save_file

from models import foreign, huggingface, layers, llama, safetensors
from models.config import Fields
from runtime import program
from runtime.checkpoints.checkpoint import read_leaf
from runtime.checkpoints.directory import Checkpoints
from runtime.config.rebuild import as_tree
from runtime.data.sources import kept_tokenizer
from runtime.data.tokenizers import load_tokenizer
from runtime.terminal import RunError
from shardlib.mesh import make_mesh
from tools import convert, ready

GOLDEN = ROOT / "tests/models/golden"
OF_TRAIN_PY = {"module": "train", "source": (ROOT / "train.py").read_text(), "files": program.files_of("train")}


@pytest.fixture
def run(called):
    """What `python -m tools.convert <arguments>` prints, or says of an error."""

    def call(*arguments, status=0):
        found, *printed = called(convert.main, convert.Convert, *arguments)
        assert found == status, printed
        return "".join(printed)

    return call


def changed(tmp_path, name="llama", tensors=None, **config):
    """A copy of a golden folder with other tensors and fields; None removes one."""
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / name, folder)
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    if tensors:
        kept = load_file(folder / "model.safetensors") | tensors
        save_file({key: tensor for key, tensor in kept.items() if tensor is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["qwen2", "olmo2"])
def test_in_and_out_again(name, run, tmp_path):
    """A published folder becomes a checkpoint with the model's keys; what comes out has its tensors bit for bit, and
    its config.json. The new folder may be a link to an empty one."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("empty")
    run(GOLDEN / name, tmp_path / "in")
    assert (tmp_path / "in/config.yaml").read_text().startswith("family: llama\nmodel:\n  d_model: 16\n")
    run(f"from={tmp_path / 'in'}", f"to={tmp_path / 'out'}")
    before, after = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, tmp_path / "out"))
    assert before.keys() == after.keys() and all(before[key].tobytes() == after[key].tobytes() for key in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path / "out")]
    assert configs[0] == configs[1]
    said = run(tmp_path / "in", tmp_path / "no", "adapter=true", "dtype=bfloat16", status=1)
    assert "adapters are written in float32" in said


def test_the_end_of_a_turn_goes_with_the_weights(run, pool, tmp_path):
    """generation_config.json says where an answer ends; a run that began with the folder does not keep the file."""
    folder = changed(tmp_path, eos_token_id=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    run(folder, tmp_path / "in")
    (tmp_path / "in/generation_config.json").unlink()
    assert ready.ends_of(huggingface.open_weights(str(tmp_path / "in"), pool), None) == [2, 7]
    run(tmp_path / "in", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [2, 7]


def test_large_exports_are_several_files(run, tmp_path, monkeypatch):
    """An index names the file of each tensor; what was written is read again."""
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 9000)
    for source, to in ((GOLDEN / "llama", "in"), (tmp_path / "in", "out"), (tmp_path / "out", "again")):
        run(source, tmp_path / to)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files == sorted(file.name for file in tmp_path.glob("out/*.safetensors"))
    before = load_file(GOLDEN / "llama/model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    for key, file in index["weight_map"].items():
        assert load_file(tmp_path / "out" / file)[key].tobytes() == before[key].tobytes()


def save_run(folder, program, more_weights=(), **model):
    """A run of this program, with its weights and these leaves of it once more."""
    with jax.set_mesh(make_mesh({"d": 1, "t": 1}, devices=jax.devices()[:1])):
        state = small.state_of(random_weights(small.MODEL, 0))
        more = {name: getattr(state.weights, leaf) for name, leaf in dict(more_weights).items()}
        saved = {"weights": {**vars(state.weights), **more}} if more else state
        checkpoints = Checkpoints(folder / "checkpoints")
        config = {"model": as_tree(small.MODEL) | model, "training": {"tokens": {"len": 48}}}
        checkpoints.save(7, saved, {"config": config, "program": program})
        checkpoints.close()
    return state


def test_a_run_of_train_py_is_published(run, pool, tmp_path):
    """The export is a Llama whose logits have the factor 1/sqrt(D) that train.py has in w_q; read again it has the
    run's weights, to a rounding of w_q."""
    state = save_run(tmp_path / "run", OF_TRAIN_PY)
    shutil.copy(GOLDEN.parent / "tokenizer_record.json", tmp_path / "run")
    run(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "llama" and config["head_dim"] == 8
    assert config["max_position_embeddings"] == 48  # of the rows it was trained on, as tools say of the run
    assert (config["bos_token_id"], config["eos_token_id"], config["architectures"]) == (0, 0, ["LlamaForCausalLM"])
    source = huggingface.open_weights(tmp_path / "out", pool)
    for name, leaf in vars(state.weights.transformer).items():
        found = read_leaf(source.checkpoint, f"weights/transformer/{name}", pool)
        factor = np.float32(8**-0.5 if name == "w_q" else 1)
        np.testing.assert_allclose(found * factor, leaf, rtol=0 if factor == 1 else 2e-7)
    text, published = "Hello 2024!", load_tokenizer(str(tmp_path / "out"))
    found, expected = (made.encode_batch([text])[0].tolist() for made in (published, kept_tokenizer(tmp_path / "run")))
    assert found == expected
    # A text begins as the run's sequences do.
    assert published.backend.encode(text, add_special_tokens=True).ids == [0, *expected]


def test_where_a_t5_from_random_weights_begins_to_write(run, pool, tmp_path):
    """config.json says so: without it transformers takes no labels and generates nothing."""
    run(GOLDEN / "t5", tmp_path / "in")
    source = dataclasses.replace(huggingface.open_weights(tmp_path / "in", pool), config=None)
    config = source.family.config_of(source.model) | convert.fields_of(source)
    assert transformers.T5Config.from_dict(config).decoder_start_token_id == 0


@pytest.mark.parametrize("given, message", [
    ({"more_weights": {"q_norm": "final_layer_norm"}}, "models/ computes: it has weights/q_norm"),
    ({"vocab": small.MODEL.vocab // 2}, "another model than its config says: embed is ("),
], ids=["weights", "sizes"])  # fmt: skip
def test_a_run_with_other_weights_is_not_published(run, tmp_path, given, message):
    """One with more leaves, or whose init_state makes more rows than the config says, is refused even where the user
    says that it is the same model."""
    save_run(tmp_path / "run", OF_TRAIN_PY, **given)
    assert message in run(tmp_path / "run", tmp_path / "out", "allow_program_change=true", status=1)


def test_a_run_of_a_copy_of_train_py_is_published(run, tmp_path):
    """It is taken as a run of train.py, where its model is the same; another forward pass is named, another key is of
    no family."""
    source, files = OF_TRAIN_PY["source"].replace("def adamw_step", "def my_step"), OF_TRAIN_PY["files"]
    mine = {"module": "my_train", "source": source, "files": files | {"my_train": "0123456789abcdef"}}
    save_run(tmp_path / "same", mine)
    run(tmp_path / "same", tmp_path / "out")
    assert "llama" in (tmp_path / "out/config.json").read_text()
    save_run(tmp_path / "other", mine | {"source": source.replace("jax.nn.silu", "jax.nn.relu")})
    said = run(tmp_path / "other", tmp_path / "no", status=1)
    assert "differ (forward)" in said and "allow_program_change=true" in said
    run(tmp_path / "other", tmp_path / "allowed", "allow_program_change=true")
    for name in ("kernels.attention", "shardlib.shardops", "my_layers"):
        save_run(tmp_path / name, mine | {"files": mine["files"] | {name: "of another"}})
        assert f"differ ({name})" in run(tmp_path / name, tmp_path / "no", status=1)
    save_run(tmp_path / "keys", mine, new_key=1)
    assert "is of no family in models/" in run(tmp_path / "keys", tmp_path / "no", status=1)


def test_a_file_of_the_project_that_was_changed_in_place(run, pool, tmp_path, monkeypatch):
    """Its model is no published one, although the run's program is the one that is here."""
    changed = OF_TRAIN_PY["files"] | {"shardlib.shardops": "of another"}
    monkeypatch.setattr(program, "files_of", lambda *_: changed)
    save_run(tmp_path / "run", OF_TRAIN_PY | {"files": changed})
    assert "differ (shardlib.shardops)" in run(tmp_path / "run", tmp_path / "out", status=1)
    source = huggingface.open_weights(tmp_path / "run", pool)
    huggingface.require_same_program(source, None, "")  # which is to be read here
    changed["kernels.attention"] = "of another"  # but decoding has no kernels
    save_run(tmp_path / "kernel", OF_TRAIN_PY | {"files": changed})
    source = huggingface.open_weights(tmp_path / "kernel", pool)
    with pytest.raises(RunError, match=r"differ \(kernels\.attention\)"):
        huggingface.require_same_program(source, None, "")


def test_a_family_that_was_changed_in_place(monkeypatch):
    """Tools would compute a run of train.py by other lines than it was trained with, and have only a part of the layers
    that a run of train_any had. train.py takes weights of the first alone, as an export does."""
    of_family = program._of_family
    monkeypatch.setattr(program, "_of_family", lambda family: of_family(family) | {"models.layers": "of another"})
    source, files = (ROOT / "train_any.py").read_text(), program.files_of("train_any", llama)
    of_train_any = {"module": "train_any", "source": source, "files": files}
    here, differ = program.model_of({"program": OF_TRAIN_PY}), r"differ \(models\.layers\)"
    for attributes in ({"program": OF_TRAIN_PY}, {"program": of_train_any, "family": "llama"}):
        weights = huggingface.Source(types.SimpleNamespace(attributes=attributes, path="run"), llama, None, Path())
        with pytest.raises(RunError, match=differ):
            huggingface.require_same_program(weights, None, "")
        taken = [((weights, here, ""), {}), ((weights, None, ""), {"is_published": True})]
        for arguments, kept in taken:
            with pytest.raises(RunError, match=differ) if "family" in attributes else contextlib.nullcontext():
                huggingface.require_same_program(*arguments, **kept)


def test_a_capacity_is_not_published(run, tmp_path, monkeypatch):
    """A note says that the published model drops no tokens."""
    run(GOLDEN / "mixtral", tmp_path / "in")
    assert "model.capacity" not in run(tmp_path / "in", tmp_path / "out")

    def limited(path, pool):
        source = huggingface.open_weights(path, pool)
        return dataclasses.replace(source, model=dataclasses.replace(source.model, capacity=1.25))

    monkeypatch.setattr(convert, "open_weights", limited)
    assert "note: model.capacity = 1.25: this may drop tokens, the" in run(tmp_path / "in", tmp_path / "too")


NEW = np.zeros((3, 4), np.float32)
REFUSED = {
    "a tensor of no weight": ({"tensors": {"model.layers.0.surprise": NEW}},
     "model.layers.0.surprise: belongs to none"),
    "a missing tensor": ({"tensors": {"model.norm.weight": None}}, "model.norm.weight: missing, expected [16]"),
    "another shape": ({"intermediate_size": 32}, "mlp.down_proj.weight: is [16, 24], config.json says [16, 32]"),
    "quantized weights": ({"tensors": {"model.norm.weight": np.zeros(16, np.int8)}},
     "model.safetensors is I8: expected one of F32, F16, BF16, not quantized weights"),
    "a table that is not tied": ({"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens.weight"),
    "attention to what follows": ({"is_causal": False}, "is_causal = False is not what models/ computes"),
    "a field with a meaning": ({"surprise": 3}, "does not compute surprise = 3: delete"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not what models/ computes"),
    "another family": ({"model_type": "mamba"}, "model_type = 'mamba' is none of the families: "),
    "a missing field": ({"hidden_size": None}, "has no field hidden_size, which this family needs"),
    "another scaling": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "factor": 2.0}},
     "the kinds are linear, llama3, yarn"),
    "a scaling of longer rows": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
     "up to max_position_embeddings it changes nothing: delete"),
    "a part of a scaling": (
     {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0, "mscale": 1.0}},
     "mscale is not known"),
    "a scaling beside another": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "factor is not known"),
    "an old scaling beside another": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "type = 'yarn' is not what"),
    "bases of two kinds of layers": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
     "full_attention is not known"),
    "one base for two kinds of layers": ({"name": "gemma3", "rope_parameters": {"rope_theta": 1.0}},
     "a field is not what a gemma3_text has: 'full_attention'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what, run, tmp_path):
    """The message names it, and nothing is written."""
    change, text = REFUSED[what]
    assert text in run(changed(tmp_path, **change), tmp_path / "out", status=1)
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_are_named(run, tmp_path):
    """Messages name a file that is cut short, one of another kind, a name that the hub does not know here, and a folder
    that is not empty."""
    folder = changed(tmp_path)
    file = folder / "model.safetensors"
    for content in (file.read_bytes()[:-100], b"none"):
        file.write_bytes(content)
        assert says(f"{file} cannot be read (is it whole?)", run(folder, tmp_path / "out", status=1))
    for source, to, message in (
        ("nobody/nothing", tmp_path / "new", "no folder nobody/nothing … cannot be downloaded"),
        (GOLDEN / "llama", folder, "is not empty: give a new folder"),
        (GOLDEN.parent / "peft/llama", tmp_path / "new", "peft/llama holds adapters: a run takes them with initial_"),
    ):
        assert says(message, run(source, to, status=1))


def test_a_disk_that_is_full(run, tmp_path):
    """One line that names the folder and the cause, in and out; nothing is left of the folder."""
    run(GOLDEN / "llama", tmp_path / "in")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for source in (GOLDEN / "llama", tmp_path / "in"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            printed = run(source, tmp_path / "to", status=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert printed.count("\n") == 1 and says(f"{tmp_path}/to … File too large", printed)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("path", ["runs/frist", "runs/first/checkpoints/0000000010", "frist", "./no/where"])
def test_a_run_that_is_not_there(run, tmp_path, monkeypatch, path):
    """A path of a run is not looked for on the hub, whether its folder is there or not; the message has the nearest
    run's name."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    printed = run(path, "out", status=1)
    assert says(f"error: … no run, checkpoint or folder {path}", printed) and "nearest" not in printed
    Path("runs/first").mkdir(parents=True)
    Path("first").mkdir()
    nearest = f"{path}; the nearest is {path.replace('frist', 'first')}"
    assert (nearest in run(path, "out", status=1)) == ("frist" in path)


def test_old_fields_are_read(run, pool, tmp_path):
    """rope_theta and rope_scaling are read as before transformers 5; buffers of old files are passed over."""
    old = {"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    model = huggingface.open_weights(changed(tmp_path, tensors=buffer, **old), pool).model
    assert (model.rope_max_timescale, model.rope_scaling.kind, model.rope_scaling.factor) == (50.0, "linear", 2.0)


@pytest.mark.parametrize("kind", huggingface.families())
def test_a_field_that_is_absent_has_the_default_of_transformers(kind):
    """For each field of each kind's class, but for sizes, which the tensors have."""
    given = {"use_sliding_window": True, "sliding_window": 7} if kind.startswith("qwen") else {}
    config = transformers.AutoConfig.for_model(kind, **given).to_dict() | given | {"layer_types": None}
    family, compared = huggingface.family_of(kind, ""), 0

    def read(content):
        model = as_tree(family.model_of(Fields(content, "config.json")))
        return {key: value for key, value in model.items() if key not in ("n_kv", "n_q_per_kv", "d_ff")}

    for key in config.keys() - given.keys() - {"model_type"}:
        with contextlib.suppress(RunError):  # it must be there
            assert read({name: value for name, value in config.items() if name != key}) == read(config), key
            compared += 1
    assert compared > 10
    if kind == "qwen3_moe":  # which has no such field
        assert read(config | {"max_window_layers": 1}) == read(config)


# -- Files of others ---------------------------------------------------------------------------------------------------
def same_weights(one, other, pool, but=()):
    for name in one.checkpoint.arrays:
        if name not in but:
            first, second = (read_leaf(source.checkpoint, name, pool) for source in (one, other))
            assert first.tobytes() == second.tobytes(), name


class FakeTensor(np.ndarray):
    """The part of a torch.Tensor that is used; the tests go without torch."""

    def float(self):
        return self

    def numpy(self):
        return np.asarray(self)


@pytest.mark.parametrize("embedding_axis", [1, 0], ids=["llama2", "llama3"])
def test_meta_files_are_read(embedding_axis, pool, tmp_path, monkeypatch):
    """Two parts of a model, each with half of every matrix, are the published folder bit for bit."""
    published = huggingface.open_weights(GOLDEN / "llama", pool)
    names = {theirs: ours for ours, theirs in foreign.META.items()}
    parts = {"consolidated.00.pth": {}, "consolidated.01.pth": {}}
    for name, tensor in safetensors.read(GOLDEN / "llama").items():
        values, inner = tensor.read(slice(None)), name.removesuffix(".weight")
        layer = inner.startswith("model.layers.") and inner.split(".")[2]
        inner = names[inner.split(".", 3)[3] if layer else inner]
        if inner in ("attention.wq", "attention.wk"):
            values = neighbours(values, 4 if inner == "attention.wq" else 2)
        axis = 1 if inner in foreign.COLUMNS else embedding_axis if inner == "tok_embeddings" else 0
        halves = [values, values] if values.ndim == 1 else np.split(values, 2, axis)
        for part, half in zip(parts.values(), halves):
            part[f"layers.{layer}.{inner}.weight" if layer else f"{inner}.weight"] = half.view(FakeTensor)
    for file in parts:
        (tmp_path / file).touch()
    params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6, "multiple_of": 8}
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(RunError, match="reading them needs the package torch"):
        huggingface.open_weights(tmp_path, pool)
    load = types.SimpleNamespace(load=lambda file, **_: parts[file.name])
    monkeypatch.setitem(sys.modules, "torch", load)
    source = huggingface.open_weights(tmp_path, pool)
    assert source.model == published.model
    same_weights(published, source, pool)
    (tmp_path / "params.json").write_text(json.dumps({**params, "moe": True}))
    with pytest.raises(RunError, match="does not compute moe"):
        huggingface.open_weights(tmp_path, pool)


def test_gguf_needs_its_package(run, tmp_path, monkeypatch):
    """Its absence is one line with the command that installs it."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "some.gguf").touch()
    assert says("needs the package gguf … pip install -r", run(tmp_path / "some.gguf", tmp_path / "out", status=1))


def test_gguf_files_are_read(run, pool, tmp_path):
    """Plain and quantized tensors are what the published folder has, and texts have the ids of its tokenizer."""
    pytest.importorskip("gguf")
    published = huggingface.open_weights(GOLDEN / "llama", pool)
    small_gguf(tmp_path / "small.gguf")
    source = huggingface.open_weights(tmp_path / "small.gguf", pool)
    assert source.model == published.model
    small_gguf(tmp_path / "other.gguf", is_causal=False)
    with pytest.raises(RunError, match="is_causal = False is not what models/ computes"):
        huggingface.open_weights(tmp_path / "other.gguf", pool)
    same_weights(published, source, pool, but=["weights/transformer/w_o"])
    w_o = [read_leaf(weights.checkpoint, "weights/transformer/w_o", pool) for weights in (published, source)]
    np.testing.assert_allclose(*w_o, atol=np.abs(w_o[0]).max() / 127)
    run(tmp_path / "small.gguf", tmp_path / "in")
    text = "In 2024, 17 dogs' names<|end|>\nagain"
    ids = [load_tokenizer(str(tmp_path / "in")), kept_tokenizer(tmp_path / "in")]
    expected = kept_tokenizer(GOLDEN.parent).encode_batch([text])[0].tolist()
    assert [tokenizer.encode_batch([text])[0].tolist() for tokenizer in ids] == [expected, expected]


def test_the_scaling_of_llama3_is_found_in_a_gguf_file(pool, tmp_path):
    """The divisors of the angles are llama.cpp's: the factor for wavelengths of over 8192 positions, 1 below 2048,
    smooth between. Other divisors are refused."""
    pytest.importorskip("gguf")
    wavelengths = 2 * np.pi * 500000 ** (np.arange(4) / 4)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    assert divisors[0] == 1 and divisors[-1] == 32
    small_gguf(tmp_path / "small.gguf", 500000.0, rope_freqs=divisors)
    scaling = huggingface.open_weights(tmp_path / "small.gguf", pool).model.rope_scaling
    assert scaling == layers.RopeScaling(kind="llama3", factor=32.0)
    small_gguf(tmp_path / "other.gguf", 500000.0, rope_freqs=np.sqrt(divisors))
    with pytest.raises(RunError, match=r"rope_freqs is not the scaling of Llama 3\.1"):
        huggingface.open_weights(tmp_path / "other.gguf", pool)
