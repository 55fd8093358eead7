"""Whatever stands in a file or on the command line: one clear message, or a run that works.

Never a traceback, a hang of over 10 seconds, a gigabyte of memory, another value than was written, or a file changed
outside of the run's folder. The cases are drawn by hypothesis, the same ones each time.
"""

import contextlib
import gzip
import hashlib
import io
import json
import resource
import shutil
import struct
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from checkpoint_state import SPECS, mesh_of, numpy_state
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from pages import ROOT
from published import small_gguf
from ragged import FlatTokens, ragged, sharding
from safetensors.numpy import load_file, save_file

import train
from runtime.checkpoints.directory import Checkpoints
from runtime.config import command_line
from runtime.config.command_line import load
from runtime.data.batches import Loader
from runtime.data.split_writer import write_split
from runtime.files import flat
from runtime.terminal import RunError
from runtime.tracking.recorded import read_run
from runtime.tracking.report import report_page
from tools import compare, convert, inspect_dataset, tokenize_text

pytestmark = pytest.mark.filterwarnings("default")  # a warning is no traceback
LONGEST_S, LARGEST_BYTES = 10, 2**30


ACCEPTED: list[bool] = []  # what was not refused, of the cases so far
TIMES = pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.slow)])


def fuzz(check, examples, *drawn):
    """Runs the check on so many cases, the same ones each time. Where all of them are refused nothing is shown."""
    how = dict(deadline=None, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink])
    ACCEPTED.clear()
    settings(max_examples=examples, suppress_health_check=list(HealthCheck), **how)(given(*drawn)(check))()
    assert len(ACCEPTED) > examples / 100


@contextlib.contextmanager
def bounded():
    """What runs inside takes neither 10 s of processor time nor a gigabyte more than before, and prints nowhere."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
    assert time.process_time() - began < LONGEST_S
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < LARGEST_BYTES


def attempt(action):
    """What the action returns, or None when it refuses in words. Any other exception is a failure of the test."""
    with bounded():
        try:
            result = action()
            ACCEPTED.append(True)
            return result
        except RunError as error:
            assert str(error).strip() and "Traceback" not in str(error)
            return None
        except SystemExit as stop:
            assert stop.code == 1
            return None


def ran(module, config, *arguments):
    """Whether a tool has run with these arguments; None where it refuses."""
    return attempt(lambda: module.main(load(config, None, list(map(str, arguments)))) or True)


# ---------------------------------------------------------------- what is drawn

WORDS = st.text(st.characters(exclude_categories=()), max_size=12)
NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**63, -(2**63), 10**30]), st.floats(), st.booleans())
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
RAW = {"deep": "[" * 100_000 + "]" * 100_000, "long": "9" * 5000, "word": "Infinity"}  # what is no value of Python
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
        st.tuples(st.just("write"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("value"), st.floats(0, 1), VALUES),
        st.tuples(st.just("remove"), st.floats(0, 1), st.none()),
        st.tuples(st.just("raw"), st.floats(0, 1), st.sampled_from(["deep", "long", "word"])),
    ),
    min_size=1,
    max_size=3,
)


def edited(data: bytes, edits) -> bytes:
    """The bytes after these edits: of bits and bytes, and of json the values too."""
    for kind, where, what in edits:
        if kind in ("value", "remove", "raw"):
            data = _edited_value(data, kind, where, what)
            continue
        place = min(int(where * len(data)), max(len(data) - 1, 0))
        if kind == "cut":
            data = data[:place]
        elif kind == "write":
            data = data[:place] + what + data[place + len(what) :]
        elif kind == "insert":
            data = data[:place] + what + data[place:]
        elif data:
            data = data[:place] + bytes([data[place] ^ 1 << what]) + data[place + 1 :]
    return data


def _edited_value(data: bytes, kind: str, where: float, what) -> bytes:
    try:
        lines, whole = [json.loads(line) for line in data.splitlines()], False
    except (ValueError, RecursionError):
        try:
            lines, whole = [json.loads(data)], True
        except (ValueError, RecursionError):
            return data
    places: list[tuple] = []

    def walk(node, key):
        for name in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, name))
            walk(node[name], name)

    walk(lines, None)
    if not places:
        return data
    node, name = places[min(int(where * len(places)), len(places) - 1)]
    if kind == "remove":
        del node[name]
    else:
        node[name] = "@raw@" if kind == "raw" else what
    text = json.dumps(lines[0], indent=1) if whole and lines else "\n".join(map(json.dumps, lines)) + "\n"
    return text.replace('"@raw@"', RAW.get(what, "") if kind == "raw" else "").encode("utf-8", "surrogatepass")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(str(p).encode() + p.read_bytes() for p in files_of(folder))).hexdigest()


def damaged(original: Path, at: float, edits) -> Path:
    """A copy of a folder in which one file is edited; the same path each time."""
    copy = original.with_name(original.name + "_copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    files = files_of(copy)
    file = files[min(int(at * len(files)), len(files) - 1)]
    file.write_bytes(edited(file.read_bytes(), edits))
    return copy


# ---------------------------------------------------------------- configurations

KEYS = sorted(flat(command_line.as_tree(load(train.Config))))
NAMES = st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: key[:-1]), WORDS)
TEXTS = st.one_of(
    NUMBERS.map(repr), WORDS,
    st.sampled_from(["null", "${mesh.d}", "${oc.env:HOME}", "${nothing}", "${", "[1,2", "{a:1}", "'", "1e400", "~"]),
)  # fmt: skip


@TIMES
def test_overrides(times):
    """`key=value` of any keys and values."""

    def check(overrides):
        texts = [f"{sign}{key}={value}" for sign, key, value in overrides]
        config = attempt(lambda: load(train.Config, None, texts))
        if config is not None:
            attempt(lambda: train.shapes(config))

    keys = st.tuples(st.sampled_from(["", "+", "++", "~"]), NAMES, TEXTS)
    fuzz(check, 60 * times, st.lists(keys, min_size=1, max_size=3))


@TIMES
def test_yaml_files(times, tmp_path, monkeypatch):
    """A config file of any content."""
    text = yaml.safe_dump(command_line.as_tree(load(train.Config)) | {"defaults": ["base", "_self_"]}).encode()
    monkeypatch.setattr(command_line, "CONFIG_FOLDER", tmp_path)

    def check(edits, more):
        try:
            added = yaml.safe_dump(more).encode("utf-8", "surrogatepass") if more else b""
        except (yaml.YAMLError, ValueError):
            added = b""
        (tmp_path / "fuzzed.yaml").write_bytes(edited(text + added, edits))
        config = attempt(lambda: load(train.Config, "fuzzed"))
        if config is not None:
            attempt(lambda: train.shapes(config))

    fuzz(check, 40 * times, EDITS, st.dictionaries(st.sampled_from(KEYS) | WORDS, VALUES, max_size=2))


@TIMES
def test_data_sets(times, tmp_path):
    """One damaged file of a data set: the batches are those that were written, or there are none."""
    original = tmp_path / "data"
    sequences = ragged(0)
    write_split(original, "train", sequences, is_target=[ids % 3 > 0 for ids in sequences], chunk_tokens=256)

    def batches(path):
        config = FlatTokens(str(path), sequence_packing=True)
        with Loader(config, "train", batch=8, length=8, sharding=sharding(), shuffle=False) as loader:
            loaded = [loader.load(step) for step in range(loader.steps)]
        return np.stack([np.stack([np.asarray(a, np.uint32) for a in batch]) for batch in loaded])

    expected, before = batches(original), digest(original)

    def check(at, edits):
        copy = damaged(original, at, edits)
        if (read := attempt(lambda: batches(copy))) is not None:
            np.testing.assert_array_equal(read, expected)
        ran(inspect_dataset, inspect_dataset.InspectDataset, f"path={copy}", "verify=true")

    fuzz(check, 40 * times, st.floats(0, 1), EDITS)
    assert digest(original) == before


@TIMES
def test_checkpoints(times, tmp_path):
    """One damaged file of two checkpoints: what is restored is bit for bit one of them, under its own step."""
    mesh, original = mesh_of(2, 2), tmp_path / "run"
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    states = {step: jax.device_put(numpy_state(step), shardings) for step in (1, 2)}
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), states[1])
    with contextlib.closing(Checkpoints(str(original), keep_last=2)) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {"skipped_steps": 0})
    before = digest(original)

    def restored(path):
        with contextlib.closing(Checkpoints(str(path), keep_last=2)) as checkpoints:
            return checkpoints.restore(like) if checkpoints.latest() is not None else None

    def check(at, edits):
        if (found := attempt(lambda: restored(damaged(original, at, edits)))) is not None:
            step, state = found
            for read, written in zip(jax.tree.leaves(state), jax.tree.leaves(states[step])):
                assert np.asarray(read).tobytes() == np.asarray(written).tobytes()

    fuzz(check, 40 * times, st.floats(0, 1), EDITS)
    assert digest(original) == before


@TIMES
def test_metrics(times, tmp_path):
    """Damaged files of a run: its page and its comparison are written or refused."""
    original = tmp_path / "run"
    original.mkdir()
    config = command_line.to_yaml(load(train.Config))
    (original / "config.yaml").write_text(config)
    (original / "environment.json").write_text(json.dumps({"jax": "0.10.2", "devices": 8}))
    records = [
        {"step": n, "loss": 5 / n, "learning_rate": 1e-3, "tokens_per_s": 100.0, "grad_norm": 1.0} for n in range(1, 9)
    ]
    (original / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def check(at, edits):
        copy = damaged(original, at, edits)
        run = attempt(lambda: read_run(copy))
        if run is not None:
            assert "<script>alert" not in (attempt(lambda: report_page(run)) or "")
        ran(compare, compare.Compare, original, copy, f"output={tmp_path}/page.html")

    fuzz(check, 40 * times, st.floats(0, 1), EDITS)


@TIMES
def test_texts(times, tmp_path):
    """Damaged text, jsonl and gzip files: tokenized, or refused."""
    lines = "".join(json.dumps({"text": f"the {n}th line ü", "n": n}) + "\n" for n in range(40)).encode()
    contents = {"a.jsonl": lines, "b.txt": lines, "c.jsonl.gz": gzip.compress(lines, mtime=0)}

    def check(name, edits):
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        shutil.rmtree(tmp_path / "out.zarr", ignore_errors=True)
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / name).write_bytes(edited(contents[name], edits))
        overrides = [f"input={tmp_path}/in/*", f"output={tmp_path}/out.zarr", "processes=1", "validation_fraction=0.3"]
        ran(tokenize_text, tokenize_text.TokenizeText, *overrides)

    fuzz(check, 20 * times, st.sampled_from(sorted(contents)), EDITS)


# ---------------------------------------------------------------- published models

GOLDEN, DATA = ROOT / "tests/models/golden", ROOT / "synthetic_dataset.zarr"
HEADERS = st.sampled_from([
    b"", b"\xff" * 8, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 1) + b"{", struct.pack("<Q", 4) + b'{"a"',
    struct.pack("<Q", 5) + b"\xff\xfe{}\n", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{}",
])  # fmt: skip


def with_header(file: bytes, edits) -> bytes:
    """A file of safetensors whose header is edited, with the length that it then has."""
    (length,) = struct.unpack("<Q", file[:8])
    header = edited(file[8 : 8 + length], edits)
    return struct.pack("<Q", len(header)) + header + file[8 + length :]


@TIMES
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "gpt2", "t5", "bert"])
def test_published_models(name, times, tmp_path):
    """A damaged header, file, config.json or index, or another family's config.json: refused with nothing written, or
    what goes out again has the tensors that the format's own reader finds in what came in."""
    original = tmp_path / name
    shutil.copytree(GOLDEN / name, original, ignore=shutil.ignore_patterns("oracle.npz"))
    tensors, index = load_file(original / "model.safetensors"), {}
    for number, part in enumerate(np.array_split(sorted(tensors), 2)):
        index |= dict.fromkeys(map(str, part), f"part{number}.safetensors")
        save_file({key: tensors[key] for key in part}, original / f"part{number}.safetensors")
    before = digest(original)

    def check(what, other, header, edits):
        folder, to, out = tmp_path / "damaged", tmp_path / "in", tmp_path / "out"
        for path in (folder, to, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, folder)
        whole, parts = folder / "model.safetensors", sorted(folder.glob("part*"))
        if what == "index":
            whole.unlink()
            content = json.dumps({"metadata": {}, "weight_map": index}).encode()
            (folder / "model.safetensors.index.json").write_bytes(edited(content, edits))
        for part in parts if what != "index" else []:
            part.unlink()
        if what in ("header", "start", "file"):
            content = whole.read_bytes()
            whole.write_bytes(dict(header=with_header(content, edits), start=header, file=edited(content, edits))[what])
        elif what == "config":
            (folder / "config.json").write_bytes(edited((folder / "config.json").read_bytes(), edits))
        elif what == "family":
            shutil.copy(GOLDEN / other / "config.json", folder)
        ran(convert, convert.Convert, folder, to)
        assert not list(tmp_path.glob("*.partial"))
        if not to.exists():
            return
        ran(convert, convert.Convert, to, out)
        files = [folder / file for file in set(index.values())] if what == "index" else [whole]
        found = {key: value for file in files for key, value in load_file(file).items()}
        written = load_file(out / "model.safetensors")
        assert written and all(tensor.tobytes() == found[key].tobytes() for key, tensor in written.items())

    kinds = st.sampled_from(["header", "start", "file", "config", "index", "family"])
    others = st.sampled_from(sorted(path.name for path in GOLDEN.iterdir()))
    fuzz(check, 8 * times, kinds, others, HEADERS, EDITS)
    assert digest(original) == before


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/0000000000"])
def test_folders_that_are_no_model(place, tmp_path):
    """An empty folder, a data set, one with a config.json alone, a file: refused, and nothing is written."""
    empty, alone = tmp_path / "empty" / place, tmp_path / "alone" / place
    empty.mkdir(parents=True)
    alone.mkdir(parents=True)
    shutil.copy(GOLDEN / "llama/config.json", alone)
    for folder in (empty, alone, alone / "config.json", DATA, tmp_path / "nowhere", tmp_path / ("a" * 300)):
        assert ran(convert, convert.Convert, f"from={folder}", f"to={tmp_path / 'to'}") is None
        assert not (tmp_path / "to").exists()


@TIMES
def test_gguf_files(times, tmp_path):
    """A damaged GGUF file: converted, or refused with nothing written."""
    pytest.importorskip("gguf")
    small_gguf(tmp_path / "small.gguf")
    original, to = (tmp_path / "small.gguf").read_bytes(), tmp_path / "to"

    def check(edits):
        shutil.rmtree(to, ignore_errors=True)
        (tmp_path / "damaged.gguf").write_bytes(edited(original, edits))
        done = ran(convert, convert.Convert, f"from={tmp_path / 'damaged.gguf'}", f"to={to}")
        assert to.exists() == bool(done) and not list(tmp_path.glob("*.partial"))

    fuzz(check, 8 * times, EDITS)
