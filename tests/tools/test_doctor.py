"""tools.doctor: what it finds, what it says of what is wrong, and its exit status."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest
from tools.doctor_measure import collectives, data, storage

import train
from runtime import program
from runtime.checkpoints.store import LocalStore
from runtime.config.command_line import load
from runtime.tracking.trackers import PACKAGES
from tools import doctor, doctor_measure
from tools.doctor import asked_for, needed, pins_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def small(monkeypatch):
    """Measures on little, so that it takes no time."""
    monkeypatch.setattr(doctor_measure, "PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(doctor_measure, "COLLECTIVE_BYTES", {"cpu": 4096})
    monkeypatch.setattr(doctor_measure, "FILE_BYTES", 1000)


@pytest.fixture
def versions(monkeypatch):
    """Versions that importlib.metadata shall find instead of the true ones; None: not installed."""
    others: dict[str, str | None] = {}
    true_version = metadata.version

    def version(name):
        found = others[name] if name in others else true_version(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    return others


def run(monkeypatch, *arguments):
    """`python -m tools.doctor ARGUMENTS` in this process; returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
    try:
        doctor.run()
    except SystemExit as stop:
        return stop.code
    return 0


CONFIG = program.with_keys(program.ProgramKey, train)


def by_part(rows):
    return {part: (found, fix) for part, found, fix in rows}


def mesh(d, t):
    return doctor_measure.start(load(train.Config, overrides=[f"mesh.d={d}", f"mesh.t={t}"]))


def test_the_whole_table(monkeypatch, capsys, tmp_path, small):
    """A machine where all is well: a row for each part in its order, 120 columns, status 0, no file left."""
    assert run(monkeypatch, f"paths.root_working_dir={tmp_path}/runs") == 0
    text = capsys.readouterr().out
    rows = [line[7:33].strip() for line in text.splitlines() if line.startswith("ok ")]
    sent = [f"{kind} {axis}" for axis in "dt" for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    assert rows == ["python", "packages", "devices", "mesh", "matrix product bfloat16", *sent, "data", "store"]
    assert max(map(len, text.splitlines())) <= 120
    assert "8 × cpu (cpu), processes: 1" in text and "d=4 × t=2" in text
    tokens = f"tokens of {ROOT}/synthetic_dataset.zarr/train in "
    assert re.search(rf"ok data [\d,]+ {tokens}[\d,]+ rows of 64, .* steps in 1 epoch, ", re.sub(r"\s+", " ", text))
    assert text.endswith("\n\nNothing that this run needs is missing or broken.\n")
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_named_last_with_status_1(monkeypatch, capsys, tmp_path, small):
    """A mesh that the devices are too few for and a store that cannot be written: both have a fix; the rest is measured."""
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "mesh.d=16", f"paths.root_working_dir={tmp_path}/file") == 1
    shown = capsys.readouterr()
    text = re.sub(r"\s+", " ", shown.out)
    assert "WRONG mesh d=16 × t=2: command line: mesh.d × mesh.t = 16 × 2: expected 8 devices or fewer" in text
    assert "fix: mesh.d=8 mesh.t=1" in text and "matrix product bfloat16" in text and "all-gather" not in text
    assert "WRONG store" in text and f'fix: mkdir -p "{tmp_path}/file"' in text
    assert shown.err == "error: missing or broken: mesh, store; the fix of each is below it\n"
    assert max(map(len, shown.out.splitlines())) <= 120


def test_it_runs_where_no_package_is_installed():
    """A Python without any package: each is named with the command that installs the tested version; status 1, no traceback."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tools.doctor"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.search(
        r"^WRONG  jax +not installed, which this run needs\n +fix: pip install jax==0\.10\.2$",
        done.stdout,
        re.MULTILINE,
    )
    assert re.fullmatch(
        r"error: missing or broken: jax, .*, Pygments; the fix of each is below it; the rest is looked at when they are there\n",
        done.stderr,
    )


def test_packages_that_do_not_go_together(monkeypatch, capsys):
    """Where JAX or another package cannot be imported the table says which versions are there, and no traceback."""
    monkeypatch.setitem(sys.modules, "tools.doctor_measure", None)  # import then raises ImportError
    status = run(monkeypatch)
    assert status.startswith("error: what is installed cannot be imported: ")
    assert status.endswith("; fix: pip install -r requirements-cpu.txt")
    assert "ok     packages" in capsys.readouterr().out


def test_devices_that_jax_cannot_start(monkeypatch, capsys):
    """A driver that does not work is a finding."""

    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver")

    monkeypatch.setattr(jax, "devices", devices)
    assert run(monkeypatch) == 1
    shown = capsys.readouterr()
    assert (
        "WRONG  devices                   JAX does not start: Unable to initialize backend 'cuda': no driver\n"
        in shown.out
    )
    assert "fix: nvidia-smi says whether a GPU's driver works, " in shown.out
    assert shown.err.startswith("error: missing or broken: devices; ")


def test_versions_against_the_tested_ones(versions):
    """As pinned in requirements-cpu.txt: another version is said and breaks nothing, a missing package does."""
    assert [(part, fix) for part, _, fix in needed()] == [("python", ""), ("packages", "")]
    versions |= {"zarr": None, "numpy": "2.0.0", "plotly": None}
    found, pins = by_part(needed()), pins_of("requirements-cpu.txt")
    assert found["zarr"] == ("not installed, which this run needs", f"pip install zarr=={pins['zarr']}")
    assert found["numpy"] == (f"2.0.0, not the tested {pins['numpy']}: it may work", "")
    assert "plotly" not in found and found["packages"] == ("27 of requirements-cpu.txt at the tested versions", "")


MIXTURE = "mixture=[{filespec: a.zarr, weight: 1}, {filespec: s3://bucket/b.zarr, weight: 1}]"
STREAM = ["flat_tokens.filespec=null", "hf_dataset.path=texts", "validation_batches=1"]


@pytest.mark.parametrize(
    "keys, parts",
    [
        ([], set()),
        ([f"tracking.to=[{','.join(PACKAGES)}]"], {"tensorboardX", "wandb", "clearml", "trackio"}),
        (["paths.root_working_dir=s3://bucket/runs"], {"s3fs"}),
        (["flat_tokens.filespec=s3://bucket/a.zarr"], {"s3fs"}),
        (["flat_tokens.filespec=null", MIXTURE], {"s3fs"}),
        ([*STREAM, "hf_dataset.tokenizer=bytes_utf8"], {"datasets"}),
        ([*STREAM, "hf_dataset.tokenizer=tokenizer.json"], {"datasets", "tokenizers", "transformers"}),
    ],
)
def test_which_packages_the_keys_ask_for(versions, keys, parts):
    """Of all that is optional exactly what the run would refuse to start without is wrong when nothing is installed."""
    files = ("s3", "text", "trackers")
    versions |= dict.fromkeys(name for file in files for name in pins_of(f"requirements-{file}.txt"))
    assert {part for part, _, fix in asked_for(load(train.Config, overrides=keys)) if fix} == parts


def test_a_tracker_that_is_not_installed(monkeypatch, capsys, tmp_path, small, versions):
    """It is wrong where the run is to write to it, with the command; the one beside it is not looked at."""
    versions |= {"wandb": None, "clearml": None}
    assert run(monkeypatch, "tracking.to=[wandb]", f"paths.root_working_dir={tmp_path}") == 1
    shown = capsys.readouterr()
    pin = pins_of("requirements-trackers.txt")["wandb"]
    row = f"WRONG  wandb                     not installed, which this run needs\n{' ' * 33}fix: pip install wandb=={pin}\n"
    assert row in shown.out and "clearml" not in shown.out and "Nothing that this run needs" not in shown.out
    assert shown.err == "error: missing or broken: wandb; the fix of each is below it\n"


def test_data_that_is_not_there(monkeypatch, capsys, tmp_path, small):
    """A published config without its data set: in the run's own words, with status 1; also where the mesh is wrong too."""
    config = ["--config-name=c4_h200x1_84m", f"flat_tokens.filespec={tmp_path}/c4.zarr"]
    root = f"paths.root_working_dir={tmp_path}/runs"
    assert run(monkeypatch, *config, root) == 1
    shown = capsys.readouterr()
    text = re.sub(r"\s+", " ", shown.out)
    assert f"WRONG data the data set {tmp_path}/c4.zarr does not exist: set flat_tokens.filespec to " in text
    assert "fix: as it says; docs/data.md has how to write a data set from your own text" in text
    assert shown.err == "error: missing or broken: data; the fix of each is below it\n"
    assert run(monkeypatch, *config, root, "mesh.d=16") == 1
    assert capsys.readouterr().err == "error: missing or broken: mesh, data; the fix of each is below it\n"


@pytest.mark.parametrize(
    "keys, text",
    [
        (["flat_tokens.filespec=null", "mixture=[{filespec: synthetic_dataset.zarr, weight: 1}, {filespec: none.zarr, weight: 2}]"],
         f"the data set {ROOT}/none.zarr does not exist: "),
        (["training.steps=9999"], "command line: training.steps = 9999: the data set synthetic_dataset.zarr holds "),
        (["model.vocab=64", "training.steps=9999"], "2 problems in the configuration; command line: model.vocab = 64: the data set "),
    ],
)  # fmt: skip
def test_data_that_the_run_refuses(keys, text):
    """Each source of a mixture is opened, and the data are held against the steps, the vocabulary and the memory."""
    ((part, found, fix),) = data(load(CONFIG, overrides=keys), mesh(4, 2))
    assert part == "data" and fix and text in found


def test_data_that_take_too_much_memory(monkeypatch):
    """As the run would refuse them."""
    config = load(CONFIG, "local_test_synthetic")
    monkeypatch.setattr(type(config.io), "max_data_bytes", 1000)
    ((_, found, fix),) = data(config, None)
    assert fix and "more than 1,000: " in found


def test_data_of_a_mixture_and_of_a_stream(monkeypatch, tmp_path):
    """What each holds where all is well; without the package for it a stream is wrong as the run would say it."""
    (tmp_path / "other.zarr").symlink_to(ROOT / "synthetic_dataset.zarr")
    sources = "{filespec: synthetic_dataset.zarr, weight: 1}, {filespec: " + f"{tmp_path}/other.zarr, weight: 3" + "}"
    ((_, found, fix),) = data(load(CONFIG, overrides=["flat_tokens.filespec=null", f"mixture=[{sources}]"]), mesh(4, 2))
    assert not fix and "; without end; " in found
    assert re.match(r"25\.00% from [\d,]+ tokens of .*; 75\.00% from [\d,]+ tokens of .*/other\.zarr/train in ", found)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("a line\n" * 2000)
    stream = [*STREAM, f"hf_dataset.path={tmp_path}", "hf_dataset.tokenizer=bytes_utf8"]
    config = load(CONFIG, overrides=stream)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        ((_, found, fix),) = data(config, mesh(4, 2))
    assert fix and found.startswith("hf_dataset.path needs the package datasets, which is not installed: pip install ")
    assert list(data(config, mesh(4, 2))) == [
        ("data", f"the data set {tmp_path}, split 'train': 1 files; without end", "")
    ]


def test_other_hosts_say_what_is_wrong_with_them(capsys):
    """Of several processes one prints what is well, and each what is missing on its own host."""
    doctor.Report().add([("packages", "all", ""), ("data", "none", "copy")], is_leader=False)
    assert capsys.readouterr().out == f"WRONG  data                      none\n{' ' * 33}fix: copy\n"


def test_bandwidth_counts_the_bytes_that_leave_a_device(monkeypatch):
    """As the ledger does: of 4 MiB on 4 devices three quarters for a gather and a scatter, twice that for their sum."""
    monkeypatch.setattr(doctor_measure, "_seconds", lambda run: 1e-3)
    found = by_part(collectives(mesh(4, 1)))
    assert found == {
        "all-gather d": ("3.15 GB/s leave each device", ""),
        "reduce-scatter d": ("3.15 GB/s leave each device", ""),
        "all-reduce d": ("6.29 GB/s leave each device", ""),
        "collectives over t": ("none: one device along it", ""),
    }


def test_a_collective_with_wrong_values_is_broken(monkeypatch, small):
    """A sum that leaves a device out is no speed to be proud of."""
    monkeypatch.setattr(doctor_measure.lax, "psum", lambda x, axis: x * 3)
    found = by_part(collectives(mesh(4, 1)))
    assert [part for part, (_, fix) in found.items() if fix] == ["all-reduce d"]
    assert found["all-reduce d"][0].startswith("wrong values: of ones it makes 3 to 3, expected 4; ")


def test_an_object_store(object_store, small):
    """Any URL that checkpoints can be written to; nothing stays there."""
    ((_, found, fix),) = storage(f"{object_store}/runs", 4)
    assert not fix and re.fullmatch(rf"{object_store}/runs: writes [\d,]+ MB/s, reads [\d,]+ MB/s", found)
    assert doctor_measure.open_store(object_store, 10).files("runs") == {}


def test_a_store_that_fails(monkeypatch, tmp_path, small):
    """A package that is missing has its command, and what is read must be what was written."""
    ((_, _, fix),) = storage("gs://bucket/runs", 4)
    assert fix == "pip install gcsfs"
    monkeypatch.setattr(LocalStore, "read", lambda self, name: b"other")
    ((_, found, fix),) = storage(str(tmp_path), 4)
    assert fix and found == f"{tmp_path}: what was read is not what was written"
    assert list(tmp_path.iterdir()) == []
