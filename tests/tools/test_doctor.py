"""tools.doctor: what it finds, what it says of what is wrong, and its exit status."""

import re
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import jax
import pytest
from pages import ROOT
from parts import says

import train
import train_any
from runtime import program
from runtime.checkpoints.store import LocalStore
from runtime.config.command_line import load
from runtime.data import refusals
from tools import doctor
from tools.doctor import all_reduces, data, packages, storage

CONFIG = program.with_keys(program.ProgramKey, train)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Measures on little, so that it takes no time."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(doctor, "ALL_REDUCE_BYTES", {"cpu": 4096})


@pytest.fixture
def run(called):
    """`python -m tools.doctor ARGUMENTS` in this process: the exit status, what it prints and its error."""

    def call(*arguments):
        status, out, error = called(doctor.main, CONFIG, *arguments)
        assert all(len(line) <= 120 or len(line.split()) == 1 for line in out.splitlines())  # a long path is not broken
        return status, out, error

    return call


def words(text):
    return re.sub(r"\s+", " ", text)


def mesh(d, t):
    return doctor.start(load(train.Config, overrides=[f"mesh.d={d}", f"mesh.t={t}"]))


def test_the_whole_table(run, tmp_path):
    """A machine where all is well: a row for each part in its order, status 0, no file left."""
    status, text, _ = run(f"paths.root_working_dir={tmp_path}")
    rows = [line[7:33].strip() for line in text.splitlines() if line.startswith("ok ")]
    assert rows == ["packages", "devices", "mesh", "all-reduce d", "all-reduce t", "data", "store"]
    assert status == 0 and "8 × cpu (cpu), processes: 1" in text and "d=4 × t=2" in text
    tokens = f"tokens of {ROOT}/synthetic_dataset.zarr/train in "
    assert re.search(rf"ok data [\d,]+ {tokens}[\d,]+ rows of 64, .* steps in 1 epoch, ", words(text))
    assert text.endswith("\n\nNothing that this run needs is missing or broken.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_program_whose_model_is_in_its_files(called, tmp_path):
    """Fine-tuning takes its vocabulary from its initial weights."""
    keys = f"--config-name=finetune_smollm2 initial_weights={ROOT}/tests/models/golden/llama mesh.t=2"
    config = program.with_keys(program.ProgramKey, train_any)
    keys += f" flat_tokens.filespec=synthetic_dataset.zarr program=train_any paths.root_working_dir={tmp_path}"
    status, text, _ = called(doctor.main, config, *keys.split())
    assert status == 1 and "ok store" in words(text)
    assert says("model.vocab = 40: … synthetic_dataset.zarr … up to 249", text)


def test_what_is_wrong_is_named_last_with_status_1(run, tmp_path):
    """Data that are not there and a store that cannot be written: each has a fix; the rest is measured."""
    (tmp_path / "file").write_text("")
    root, path = f"paths.root_working_dir={tmp_path}/file", f"flat_tokens.filespec={tmp_path}/c4.zarr"
    status, text, error = run("--config-name=c4_h200x1_84m", "mesh.d=8", root, path)
    assert status == 1 and error.startswith("error: missing or broken: data, store; ")
    text = words(text)
    assert "ok all-reduce d" in text and "all-reduce t" not in text
    assert says(f"WRONG data … {tmp_path}/c4.zarr does not exist: set flat_tokens.filespec … fix: … docs/data.md", text)
    assert "WRONG store" in text and f'fix: mkdir -p "{tmp_path}/file"' in text


def test_a_mesh_that_the_devices_are_too_few_for(run):
    """It comes first, with what would fit."""
    status, text, error = run("mesh.d=16")
    assert status == 1 and error.startswith("error: missing or broken: devices; ")
    parts = "WRONG devices command line: mesh.d × mesh.t = 16 × 2: expected 8 devices … product is 8"
    assert says(parts, text) and "all-reduce" not in text


def test_devices_that_jax_cannot_start(monkeypatch, run):
    """A driver that does not work is a finding; a host that does not come ends the job."""

    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver")

    monkeypatch.setattr(jax, "devices", devices)
    status, text, error = run()
    assert status == 1 and error.startswith("error: missing or broken: devices; ")
    assert says("WRONG devices JAX does not start: … no driver fix: nvidia-smi", text)
    monkeypatch.setattr(doctor, "start", mock.Mock(side_effect=doctor.RunError("host 2 does not come")))
    assert run("num_hosts=2") == (1, "", "error: host 2 does not come\n")


def test_versions_against_the_tested_ones(monkeypatch):
    """Another version than the pinned one is said and breaks nothing. A missing package, or tracker that the run writes
    to, is wrong, with the command that installs it; other trackers are not mentioned."""
    version, others = metadata.version, {"zarr": None, "numpy": "2.0.0", "wandb": None, "clearml": None}

    def changed(name):
        found = others[name] if name in others else version(name)
        if found is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(metadata, "version", changed)
    texts = [(ROOT / f"requirements-{file}.txt").read_text() for file in ("cpu", "trackers")]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(texts), re.MULTILINE))
    missing = [f"{name}=={pins[name]}" for name in ("zarr", "wandb")]
    found = f"{', '.join(missing)}: not installed, which this run needs"
    assert packages(["wandb"]) == ("packages", found, f"pip install {' '.join(missing)}")
    del others["zarr"], others["wandb"]
    _, found, fix = packages([])
    assert not fix and found.endswith(f"; numpy 2.0.0, not the tested {pins['numpy']}: it may work")


@pytest.mark.parametrize("keys, text", [
    (["flat_tokens.filespec=null",
      "mixture=[{filespec: synthetic_dataset.zarr, weight: 1}, {filespec: none.zarr, weight: 2}]"],
     f"{ROOT}/none.zarr does not exist: "),
    (["training.steps=9999"], "command line: training.steps = 9999: … synthetic_dataset.zarr holds"),
    (["model.vocab=64", "training.steps=9999"],
     "2 problems in the configuration; command line: model.vocab = 64: "),
])  # fmt: skip
def test_data_that_the_run_refuses(keys, text):
    """Each source of a mixture is opened, and the data are held against the steps and the vocabulary."""
    ((part, found, fix),) = data(load(CONFIG, overrides=keys), mesh(4, 2))
    assert part == "data" and fix and says(text, found)


def test_data_of_a_mixture_and_of_a_stream(monkeypatch, tmp_path):
    """A row says what each source holds. Without its package a stream is wrong in the run's words; so are data that
    take too much memory."""
    (tmp_path / "other.zarr").symlink_to(ROOT / "synthetic_dataset.zarr")
    sources = "{filespec: synthetic_dataset.zarr, weight: 1}, {filespec: " + f"{tmp_path}/other.zarr, weight: 3" + "}"
    ((_, found, fix),) = data(load(CONFIG, overrides=["flat_tokens.filespec=null", f"mixture=[{sources}]"]), mesh(4, 2))
    assert not fix and "; without end; " in found
    assert re.match(r"25\.00% from [\d,]+ tokens of .*; 75\.00% from [\d,]+ tokens of .*/other\.zarr/train in ", found)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("a line\n" * 2000)
    stream = ["flat_tokens.filespec=null", f"hf_dataset.path={tmp_path}", "hf_dataset.tokenizer=bytes_utf8"]
    config = load(CONFIG, overrides=[*stream, "validation_batches=1"])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        ((_, found, fix),) = data(config, mesh(4, 2))
    assert fix and says("hf_dataset.path needs the package datasets … pip install", found)
    ((_, found, fix),) = data(config, mesh(4, 2))
    text = f"{tmp_path}, split 'train' (1 files), tokenized beside the run into … .zarr: at most"
    assert not fix and says(text, found)
    assert not Path("runs/local_test_synthetic/tokens").exists()  # the doctor owns no run
    monkeypatch.setattr(refusals, "MAX_BYTES", 1000)
    ((_, found, fix),) = data(load(CONFIG), mesh(4, 2))
    assert fix and "more than 1,000: " in found


def test_other_hosts_say_what_is_wrong_with_them(monkeypatch, capsys):
    """One process prints what is well, and each process what is missing on its own host."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(doctor, "rows", lambda _: [("packages", "all", ""), ("data", "none", "copy")])
    with pytest.raises(doctor.RunError, match="missing or broken: data; "):
        doctor.main(None)
    assert capsys.readouterr().out == f"WRONG  data                      none\n{' ' * 33}fix: copy\n"


def test_bandwidth_counts_the_bytes_that_leave_a_device(monkeypatch):
    """4 MiB on each of 4 devices count twice three quarters, for the sum's two halves, as in the ledger."""
    monkeypatch.setattr(doctor, "ALL_REDUCE_BYTES", {"cpu": 4 * 2**20})
    monkeypatch.setattr(doctor, "_seconds", lambda run: 1e-3)
    assert list(all_reduces(mesh(4, 1))) == [("all-reduce d", "6.29 GB/s leave each device", "")]


def test_a_collective_with_wrong_values_is_broken(monkeypatch):
    """A sum that leaves a device out is no speed to be proud of."""
    monkeypatch.setattr(doctor.lax, "psum", lambda x, axis_name: x * 3)
    ((part, found, fix),) = all_reduces(mesh(4, 1))
    assert part == "all-reduce d" and fix and found.startswith("of ones it makes 3 to 3, expected 4")


def test_an_object_store(object_store):
    """Any URL that checkpoints can be written to; nothing stays there."""
    ((_, found, fix),) = storage(f"{object_store}/runs")
    assert not fix and found == f"{object_store}/runs: what was read is what was written"
    assert doctor.open_store(object_store, 10).files("runs") == {}


def test_a_store_that_fails(monkeypatch, tmp_path):
    """A package that is missing has its command, and what is read must be what was written."""
    ((_, _, fix),) = storage("gs://bucket/runs")
    assert fix == "pip install gcsfs"
    monkeypatch.setattr(LocalStore, "read", lambda self, name, most=0: b"other")
    ((_, found, fix),) = storage(str(tmp_path))
    assert fix and found == f"{tmp_path}: what was read is not what was written"
    assert list(tmp_path.iterdir()) == []
