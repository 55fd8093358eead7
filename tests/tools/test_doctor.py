"""tools.doctor: what it finds, what it says of what is wrong, and its exit status."""

import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import train
from runtime import program
from runtime.checkpoints.store import LocalStore
from runtime.config.command_line import load
from runtime.data import batches
from tools import doctor
from tools.doctor import collectives, data, packages, storage

ROOT = Path(__file__).parents[2]
CONFIG = program.with_keys(program.ProgramKey, train)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Measures on little, so that it takes no time."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(doctor, "COLLECTIVE_BYTES", {"cpu": 4096})
    monkeypatch.setattr(doctor, "FILE_BYTES", 1000)


@pytest.fixture
def run(called):
    """`python -m tools.doctor ARGUMENTS` in this process: the exit status, what it prints and its error."""

    def call(*arguments):
        status, out, error = called(doctor.main, CONFIG, *arguments)
        assert max(map(len, out.splitlines()), default=0) <= 120
        return status, out, error

    return call


def words(text):
    return re.sub(r"\s+", " ", text)


def by_part(rows):
    return {part: (found, fix) for part, found, fix in rows}


def mesh(d, t):
    return doctor.start(load(train.Config, overrides=[f"mesh.d={d}", f"mesh.t={t}"]))


def test_the_whole_table(run, tmp_path):
    """A machine where all is well: a row for each part in its order, status 0, no file left."""
    status, text, _ = run(f"paths.root_working_dir={tmp_path}/runs")
    rows = [line[7:33].strip() for line in text.splitlines() if line.startswith("ok ")]
    sent = [f"{kind} {axis}" for axis in "dt" for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    assert rows == ["python", "packages", "devices", "mesh", *sent, "data", "store"]
    assert status == 0 and "8 × cpu (cpu), processes: 1" in text and "d=4 × t=2" in text
    tokens = f"tokens of {ROOT}/synthetic_dataset.zarr/train in "
    assert re.search(rf"ok data [\d,]+ {tokens}[\d,]+ rows of 64, .* steps in 1 epoch, ", words(text))
    assert text.endswith("\n\nNothing that this run needs is missing or broken.\n")
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_named_last_with_status_1(run, tmp_path):
    """A mesh that the devices are too few for, data that are not there and a store that cannot be written: each has a
    fix; the rest is measured."""
    (tmp_path / "file").write_text("")
    root, path = f"paths.root_working_dir={tmp_path}/file", f"flat_tokens.filespec={tmp_path}/c4.zarr"
    status, text, error = run("--config-name=c4_h200x1_84m", "mesh.d=16", root, path)
    assert status == 1 and error == "error: missing or broken: mesh, data, store; the fix of each is below it\n"
    text = words(text)
    assert "WRONG mesh d=16 × t=1: command line: mesh.d × mesh.t = 16 × 1: expected 8 devices or fewer" in text
    assert "fix: mesh.d=8 mesh.t=1" in text and "all-gather" not in text
    assert f"WRONG data the data set {tmp_path}/c4.zarr does not exist: set flat_tokens.filespec to " in text
    assert "fix: as it says; docs/data.md has how to write a data set from your own text" in text
    assert "WRONG store" in text and f'fix: mkdir -p "{tmp_path}/file"' in text


def test_devices_that_jax_cannot_start(monkeypatch, run):
    """A driver that does not work is a finding."""

    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver")

    monkeypatch.setattr(jax, "devices", devices)
    status, text, error = run()
    assert status == 1 and error.startswith("error: missing or broken: devices; ")
    assert "WRONG devices JAX does not start: Unable to initialize backend 'cuda': no driver fix: nvidia-smi" in words(
        text
    )


def test_versions_against_the_tested_ones(monkeypatch):
    """Another version than the pinned one is said and breaks nothing; a missing package, or tracker that the run writes
    to, does, with the command that installs it; of other trackers nothing is said."""
    others = {"zarr": None, "numpy": "2.0.0", "wandb": None, "clearml": None}
    installed = [SimpleNamespace(name=each.name, version=each.version) for each in metadata.distributions()]
    found = [each for each in installed if others.get(each.name, each.version) is not None]
    for each in found:
        each.version = others.get(each.name, each.version)
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    rows = by_part(packages(load(train.Config, overrides=["tracking.to=[wandb]"])))
    texts = [(ROOT / f"requirements-{file}.txt").read_text() for file in ("cpu", "trackers")]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(texts), re.MULTILINE))
    assert set(rows) == {"python", "numpy", "zarr", "wandb", "packages"}
    for name in ("zarr", "wandb"):
        assert rows[name] == ("not installed, which this run needs", f"pip install {name}=={pins[name]}")
    assert rows["numpy"] == (f"2.0.0, not the tested {pins['numpy']}: it may work", "")
    assert re.fullmatch(r"\d+ of \d+ at the tested versions", rows["packages"][0])


@pytest.mark.parametrize("keys, text", [
    (["flat_tokens.filespec=null",
      "mixture=[{filespec: synthetic_dataset.zarr, weight: 1}, {filespec: none.zarr, weight: 2}]"],
     f"the data set {ROOT}/none.zarr does not exist: "),
    (["training.steps=9999"], "command line: training.steps = 9999: the data set synthetic_dataset.zarr holds "),
    (["model.vocab=64", "training.steps=9999"],
     "2 problems in the configuration; command line: model.vocab = 64: the data set "),
])  # fmt: skip
def test_data_that_the_run_refuses(keys, text):
    """Each source of a mixture is opened, and the data are held against the steps and the vocabulary."""
    ((part, found, fix),) = data(load(CONFIG, overrides=keys), mesh(4, 2))
    assert part == "data" and fix and text in found


def test_data_of_a_mixture_and_of_a_stream(monkeypatch, tmp_path):
    """What each holds where all is well; without the package for it a stream is wrong as the run would say it; so are
    data that take too much memory."""
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
    assert fix and found.startswith("hf_dataset.path needs the package datasets, which is not installed: pip install ")
    text = f"the data set {tmp_path}, split 'train': 1 files; without end"
    assert list(data(config, mesh(4, 2))) == [("data", text, "")]
    monkeypatch.setattr(batches, "MAX_BYTES", 1000)
    ((_, found, fix),) = data(load(CONFIG), None)
    assert fix and "more than 1,000: " in found


def test_other_hosts_say_what_is_wrong_with_them(monkeypatch, capsys):
    """Of several processes one prints what is well, and each what is missing on its own host."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(doctor, "rows", lambda _: [("packages", "all", ""), ("data", "none", "copy")])
    with pytest.raises(doctor.RunError, match="missing or broken: data; "):
        doctor.main(None)
    assert capsys.readouterr().out == f"WRONG  data                      none\n{' ' * 33}fix: copy\n"


def test_bandwidth_counts_the_bytes_that_leave_a_device(monkeypatch):
    """As the ledger does: of 4 MiB on 4 devices three quarters for a gather and a scatter, twice that for their sum."""
    monkeypatch.setattr(doctor, "COLLECTIVE_BYTES", {"cpu": 4 * 2**20})
    monkeypatch.setattr(doctor, "_seconds", lambda run: 1e-3)
    rates = {"all-gather d": 3.15, "reduce-scatter d": 3.15, "all-reduce d": 6.29}
    expected = {kind: (f"{rate} GB/s leave each device", "") for kind, rate in rates.items()}
    assert by_part(collectives(mesh(4, 1))) == expected


def test_a_collective_with_wrong_values_is_broken(monkeypatch):
    """A sum that leaves a device out is no speed to be proud of."""
    monkeypatch.setattr(doctor.lax, "psum", lambda x, axis: x * 3)
    found = by_part(collectives(mesh(4, 1)))
    assert [part for part, (_, fix) in found.items() if fix] == ["all-reduce d"]
    assert found["all-reduce d"][0].startswith("of ones it makes 3 to 3, expected 4; ")


def test_an_object_store(object_store):
    """Any URL that checkpoints can be written to; nothing stays there."""
    ((_, found, fix),) = storage(f"{object_store}/runs", 4)
    assert not fix and re.fullmatch(rf"{object_store}/runs: writes [\d,]+ MB/s, reads [\d,]+ MB/s", found)
    assert doctor.open_store(object_store, 10).files("runs") == {}


def test_a_store_that_fails(monkeypatch, tmp_path):
    """A package that is missing has its command, and what is read must be what was written."""
    ((_, _, fix),) = storage("gs://bucket/runs", 4)
    assert fix == "pip install gcsfs"
    monkeypatch.setattr(LocalStore, "read", lambda self, name: b"other")
    ((_, found, fix),) = storage(str(tmp_path), 4)
    assert fix and found == f"{tmp_path}: what was read is not what was written"
    assert list(tmp_path.iterdir()) == []
