"""Streaming from a Hugging Face data set, here folders of files: which tokens, on which host, and where it goes on."""

import dataclasses
import functools
import gzip
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small
from ragged import as_numpy, assert_equal, assert_refuses, read_all, sharding
from several_hosts import free_port, without_gloo

from runtime.config.keys import HuggingFaceDataset
from runtime.data import token_stream
from runtime.data.hf_stream import HuggingFaceLoader, host_share
from runtime.data.token_stream import TokenStream

ROOT = Path(__file__).resolve().parents[3]


def write(path, texts, field="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts))


def documents(seed, count, longest=90):
    """Random texts, several of them empty, with letters of one to four bytes."""
    rng = random.Random(seed)
    return ["".join(rng.choices("ab é€𝄞", k=max(0, rng.randint(-9, longest)))) for _ in range(count)]


FILES = [documents(0, 150), documents(1, 3), documents(2, 70)]
ALL = [text for texts in FILES for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files to train on, one to validate on."""
    path = tmp_path_factory.mktemp("texts")
    for number, texts in enumerate(FILES):
        write(path / f"train-{number}.jsonl", texts)
    write(path / "validation.jsonl", documents(3, 20))
    return path


def encoded(texts):
    """The texts as flat tokens, by another way: ids are bytes + 1, and the first of each text is marked."""
    return [2 * (byte + 1) + (place == 0) for text in texts for place, byte in enumerate(text.encode())]


def config(path, **keys):
    return HuggingFaceDataset(path=str(path), tokenizer="bytes_utf8", **keys)


def loader(path, split="train", *, batch=4, length=32, on=None, batches=None, **keys):
    return HuggingFaceLoader(
        config(path, **keys), split, batch=batch, length=length, sharding=on or sharding(), batches=batches
    )


def rows(batch):
    """A batch's rows as flat tokens."""
    targets, is_seq_start, is_target = as_numpy(batch)
    assert is_target.all()
    return 2 * targets + is_seq_start


# ---------------------------------------------------------------- what rows hold


@pytest.mark.parametrize("kind", ["txt", "parquet", "json", "jsonl.gz"])
def test_other_files(tmp_path, kind):
    """Lines of text, parquet with a field of another name, a JSON array, and compressed files are read as well."""
    texts = [text for text in documents(5, 200) if text.strip()]
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"content": texts}), tmp_path / "train.parquet", row_group_size=30)
    elif kind == "txt":
        (tmp_path / "train.txt").write_text("".join(f"{text}\n" for text in texts))
    elif kind == "json":
        (tmp_path / "train.json").write_text(json.dumps([{"content": text} for text in texts]))
    else:
        content = "".join(json.dumps({"content": text}) + "\n" for text in texts)
        (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    with loader(tmp_path, text_field="text" if kind == "txt" else "content") as stream:
        found = np.concatenate([rows(stream.load(step)).reshape(-1) for step in range(30)])
    np.testing.assert_array_equal(found, encoded(texts)[: len(found)])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("d, t", [(1, 1), (4, 2)])
def test_rows_are_the_documents_one_after_another(folder, capsys, monkeypatch, d, t, threads):
    """Rows are the tokenized documents joined, in the files' order, without a gap, past the end of the data into the
    next
    pass, which a line says; a step that is not the next is refused."""
    expected = 2 * encoded(ALL)
    monkeypatch.setattr(token_stream, "THREADS", threads)
    with loader(folder, on=sharding(d, t)) as stream:
        steps = len(expected) // (4 * 32)
        found = np.concatenate([rows(stream.load(step)).reshape(-1) for step in range(steps)])
        assert (stream.steps, stream.dropped_tokens) == (None, 0)
        assert stream.identity == {"files": 3, "max_token_id": 256, "bos_id": 0}
        where = f"the data set {folder}, split 'train'"
        assert_refuses(f"{where} is a stream, read in order: step 7 is not the next", stream.load, 7)
    np.testing.assert_array_equal(found, expected[: len(found)])
    step = len(expected) // 2 // (4 * 32) + 1
    assert capsys.readouterr().out == f"step {step}: {where} has been read to its end and begins again\n"


def test_validation_is_a_bounded_pass_that_repeats(folder):
    """The first batches of the split, the same each time, the last filled up with what is no target; then the end."""
    expected = np.array(encoded(documents(3, 20)))
    whole = -(-len(expected) // 128)
    assert whole > 3 and len(expected) % 128
    with loader(folder, "validation", batches=2) as few, loader(folder, "validation", batches=100) as all_of_it:
        assert (few.steps, all_of_it.steps) == (2, whole)
        for _ in range(2):
            found = np.concatenate([rows(few.load(i)).reshape(-1) for i in (0, 1)])
            np.testing.assert_array_equal(found, expected[:256])
        targets, is_seq_start, is_target = (array.reshape(-1) for array in read_all(all_of_it))
    assert is_target.tolist() == [True] * len(expected) + [False] * (len(targets) - len(expected))
    np.testing.assert_array_equal((2 * targets + is_seq_start)[is_target], expected)
    assert not targets[~is_target].any() and is_seq_start[~is_target].all()


# ---------------------------------------------------------------- hosts


class Numbered:
    """A tokenizer whose tokens are all different: the text "10 15" is the ids 10, 11, … 14."""

    vocab, bos_id = 2**31, 0

    def encode_batch(self, texts):
        return [np.arange(*map(int, text.split()), dtype=np.uint32) for text in texts]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A folder of seven files whose tokens are the numbers from 1 on, and how many there are."""
    path, rng, next_id = tmp_path_factory.mktemp("numbered"), random.Random(0), 1
    for number in range(7):
        texts = []
        for _ in range(rng.choice([0, 1, 5, 100])):
            end = next_id + rng.randrange(12)
            texts.append(f"{next_id} {end}")
            next_id = end
        write(path / f"train-{number}.jsonl", texts)
    return path, next_id - 1


@pytest.fixture
def open_once(monkeypatch):
    """Opens a folder's data set once for all the streams of a test."""
    monkeypatch.setattr(token_stream, "open_documents", functools.lru_cache(token_stream.open_documents))


def stream_of(path, share, shares, state, endless=False):
    return TokenStream(config(path), "train", Numbered(), share, shares, state, endless)


def read(stream, count):
    """The ids of the next tokens."""
    tokens, filled = stream.take(count)
    return (tokens[:filled] >> 1).tolist()


@pytest.mark.parametrize("shares", [1, 2, 3, 5, 7, 8, 11])
def test_each_document_belongs_to_one_host(numbered, open_once, shares):
    """Together the hosts read each document once a pass, each one whole and after its beginning, whatever their number
    and that of the files."""
    path, count = numbered
    ids = []
    for share in range(shares):
        stream = stream_of(path, share, shares, {})
        while found := read(stream, 37):
            ids += found
            assert len(found) < count or shares == 1
        stream.close()
    assert sorted(ids) == list(range(1, count + 1))


def test_a_host_opens_its_own_files_only(folder, monkeypatch):
    """Where files can be dealt out whole, no host reads another's."""
    opened, read_blocks = [], token_stream.read_blocks
    watched = lambda files: (opened.append(files[0].name), read_blocks(files))[1]  # noqa: E731
    monkeypatch.setattr(token_stream, "read_blocks", watched)
    tokenizer = SimpleNamespace(encode_batch=lambda texts: [np.zeros(0, np.uint32) for _ in texts])
    for share in range(3):
        stream = TokenStream(config(folder), "train", tokenizer, share, 3, {}, False)
        assert stream.take(10)[1] == 0
        stream.close()
    assert opened == [f"{folder}/train-{number}.jsonl" for number in range(3)]


@dataclasses.dataclass(eq=False)
class Device:
    process_index: int


def test_share_of_a_host():
    """Hosts with the same rows have one share; hosts whose rows overlap otherwise are refused."""

    def share_of(hosts, rows_of_device, batch=8):  # of process 0
        count = len(rows_of_device)
        table = {Device(i * hosts // count): (slice(*rows), slice(None)) for i, rows in enumerate(rows_of_device)}
        share = host_share(SimpleNamespace(devices_indices_map=lambda _: table, device_set=set(table)), batch, 16)
        return share[0].tolist(), *share[1:]

    halves = [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert share_of(2, halves) == share_of(4, halves) == ([0, 1, 2, 3], 0, 2)
    assert share_of(2, [(None,)] * 4) == (list(range(8)), 0, 1)
    message = (
        "hf_dataset.path needs hosts that have all their rows of a batch in common or none: choose sizes of the mesh's "
        "axes, from the last to the first, that fill the 3 devices of a host without a rest"
    )
    assert_refuses(message, share_of, 2, [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)], 6)


TWO_HOSTS = """
import sys, json
import jax
import numpy as np
host, address, folder, state = int(sys.argv[1]), *sys.argv[2:5]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, host)
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from runtime.data.batches import Batch
from runtime.config.keys import HuggingFaceDataset
from runtime.data.hf_stream import HuggingFaceLoader
from shardlib.mesh import make_mesh
config = HuggingFaceDataset(path=folder, tokenizer="bytes_utf8")
sharding = Batch(*[NamedSharding(make_mesh({"d": 4, "t": 1}, jax.devices()), PartitionSpec("d", None))] * 3)
with HuggingFaceLoader(config, "train", batch=4, length=32, sharding=sharding) as stream:
    stream.resume(3, json.loads(state))
    batches = [stream.load(step) for step in range(3, 8)]
    state = stream.state()
    found = [multihost_utils.process_allgather([b.targets, b.is_seq_start], tiled=True) for b in batches]
with HuggingFaceLoader(config, "validation", batch=4, length=32, sharding=sharding, batches=100) as stream:
    steps = stream.steps
if host == 0:
    print(json.dumps([[(2 * targets + starts).tolist() for targets, starts in found], state, steps]))
"""


@pytest.mark.slow
def test_two_processes(folder):
    """On two real hosts each fills its own rows with its own share, the checkpoint's position has both, and one host
    continues from it."""
    expected = encoded(ALL)
    with loader(folder) as stream:
        first = np.concatenate([rows(stream.load(step)) for step in range(3)]).reshape(-1)
        state = stream.state()
    address = f"localhost:{free_port()}"
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "XLA_FLAGS": ""}}
    command = [sys.executable, "-c", TWO_HOSTS]
    hosts = [
        subprocess.Popen([*command, str(host), address, str(folder), json.dumps(state)], **options) for host in (0, 1)
    ]
    outputs = [host.communicate(timeout=400)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    second, state, steps = json.loads(without_gloo(outputs[0])[-1])
    assert len(state["positions"]) == 2 and len(state["positions"][-1]) == 2
    assert steps == max(-(-len(each) // 64) for each in (encoded(documents(3, 20)[share::2]) for share in (0, 1)))
    with loader(folder) as stream:
        stream.resume(8, state)
        steps = range(8, len(expected) // 128 + 1)
        third = np.concatenate([rows(stream.load(step)) for step in steps]).reshape(-1)
    # The three parts are one pass and the beginning of the next. Starts may be marked anew, so only ids are counted.
    found = np.concatenate([first, np.array(second).reshape(-1), third])[: len(expected)] >> 1
    assert sorted(found.tolist()) == sorted(np.array(expected) >> 1)


# ---------------------------------------------------------------- resuming


def test_resumes_bit_for_bit(folder):
    """From the position after any step, written as JSON and read again, the batches are those of a loader that was
    never
    stopped."""
    last = 2 * len(encoded(ALL)) // 128
    with loader(folder) as stream:
        batches, states = [], []
        for step in range(last):
            batches.append(stream.load(step))
            states.append(json.dumps(stream.state()))
    for step in [1, 2, 5, last // 2 - 1, last // 2, last // 2 + 1, last - 2]:
        with loader(folder) as stream:
            stream.resume(step, json.loads(states[step - 1]))
            for number in (step, step + 1):
                assert_equal(stream.load(number), batches[number])
                assert json.dumps(stream.state()) == states[number]


@pytest.mark.parametrize("seed", range(12))
def test_resumes_on_other_hosts(numbered, open_once, seed):
    """On another number of hosts, and another again, each token of the pass is still read once, however far apart the
    hosts were, and cut documents start anew."""
    path, count = numbered
    rng, ids, state = random.Random(seed), [], {}
    numbers = [rng.randrange(1, 6) for _ in range(4)]
    for shares in [*numbers, numbers[-1], 2]:  # once with the same number as before
        streams = [stream_of(path, share, shares, state) for share in range(shares)]
        for stream in streams:
            for _ in range(rng.randrange(3)):
                ids += read(stream, rng.choice([10, 60, 400]))
        state = json.loads(json.dumps(streams[0].state([stream.position for stream in streams])))
        for stream in streams:
            stream.close()
    for share in range(3):
        stream = stream_of(path, share, 3, state)
        while found := read(stream, 50):
            ids += found
        stream.close()
    assert sorted(ids) == list(range(1, count + 1))
    stream = stream_of(path, 0, 1, {"split": "train", "files": 7, "positions": [[[0, 0, 0, 3], [0, 0, 1, 0]]]})
    assert stream.take(1)[0].tolist() == [2 * 4 + 1]
    stream.close()


def test_other_data_are_read_from_their_beginning(folder, capsys):
    """A position in data of other files is not used, and a line says so; without one, reading begins at the beginning.
    A step's documents can be named."""
    state = {"split": "train", "files": 2, "positions": [[[0, 1, 0, 3]]]}
    where = f"the data set {folder}, split 'train'"
    with loader(folder) as stream:
        first = stream.load(0)
        (text,) = stream.rows_of(0)
        _, file, document, token = stream.state()["positions"][0][0]
        end = f"token {token} of document {document} of file {file}"
        assert text == f"{where}, from token 0 of document 0 of file 0 to before {end}, of share 0 of 1"
        for saved in (state, {}):
            stream.resume(7, saved)
            assert_equal(stream.load(7), first)
    other = "the position in the checkpoint is of split 'train' of 2 files, not of 'train' of 3"
    assert capsys.readouterr().out == f"{where} is read from its beginning: {other}\n"


# ---------------------------------------------------------------- what goes wrong


FIX = "mend it, or set hf_dataset.text_field to the field that holds the text"


def test_missing(folder, tmp_path, monkeypatch):
    """A missing folder, data set, split, field, file or package is named, with what is there and what to do."""
    expected = "expected the name of a data set on the Hugging Face hub or a folder of .txt, .jsonl or .parquet files"
    (tmp_path / "empty").mkdir()
    for path, keys, message in (
        (tmp_path / "none", {}, f"hf_dataset.path: there is no folder {tmp_path}/none: {expected}"),
        ("nobody/nothing", {"name": "en"}, f"hf_dataset.path: cannot read nobody/nothing (…): {expected}"),
        (tmp_path / "empty", {}, f"hf_dataset.path: cannot read {tmp_path}/empty (EmptyDatasetError: …): {expected}"),
        (folder, {"text_field": "body"}, f"{folder}/train-0.jsonl:1: no field 'body'; it has 'text', 'other': {FIX}"),
    ):
        assert_refuses(message, loader, path, **keys)
    message = (
        f"the data set {folder} has no split 'test'; it holds 'train', 'validation': set hf_dataset.validation_split "
        "to one of them, or add test.jsonl to a folder of your own"
    )
    assert_refuses(message, loader, folder, "validation", validation_split="test", batches=1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = "hf_dataset.path needs the package datasets, which is not installed: pip install -r requirements-text.txt"
    assert_refuses(message, loader, folder)


def bad_line(path):
    with path.open("a") as file:
        file.write('{"text": "cut o')


def truncated(path):
    content = gzip.compress(random.Random(0).randbytes(2**20).hex().encode())
    path.with_suffix(".jsonl.gz").write_bytes(content[: len(content) // 2])
    path.unlink()


BROKEN = {  # test_tokenize_text.py has all that can be wrong with a record
    f":2: no JSON (Unterminated string starting at, column 10): {FIX}": bad_line,
    "cannot read … (EOFError: Compressed file ended …": truncated,
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_read_that_fails_in_the_background(tmp_path, monkeypatch, message):
    """What a thread meets is raised by the load that needs it, with the file and the line; what comes after says that
    it failed; no thread is left."""
    write(tmp_path / "train-0.jsonl", ["x" * 100] * 640)
    write(tmp_path / "train-1.jsonl", ["y"])
    BROKEN[message](tmp_path / "train-1.jsonl")
    before, step = set(threading.enumerate()), 0
    monkeypatch.setattr(token_stream, "THREADS", 1)
    with loader(tmp_path) as stream:

        def load_all():
            nonlocal step
            for step in range(1000):
                stream.load(step)

        assert_refuses(f"{tmp_path}/train-1.jsonl{message}" if message[0] == ":" else message, load_all)
        assert 100 < step <= 64000 // 128
        failed = "cannot be read on, since it failed before: start the run again"
        assert_refuses(f"the data set {tmp_path}, split 'train' {failed}", stream.load, step)
    # Others may have come from elsewhere in the process, as a library's own.
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("tokenize")]


def test_no_text(tmp_path):
    """Data without any text end with a message, not with an endless search; so does a host without any."""
    write(tmp_path / "train.jsonl", [""] * 3)
    where = f"the data set {tmp_path}, split 'train' holds no text"
    assert_refuses(f"{where}: use more data, or fewer hosts", loader, tmp_path)
    assert_refuses(where, loader, tmp_path, validation_split="train", split="validation", batches=3)
    write(tmp_path / "train.jsonl", ["1 9", "1 1", "1 1", "1 1"])
    stream = stream_of(tmp_path, 1, 2, {}, endless=True)
    assert_refuses(f"{where} for share 1 of 2: use more data, or fewer hosts", stream.take, 5)
    stream.close()


# ---------------------------------------------------------------- in a run

TINY = [
    "model.d_model=32", "model.n_kv=4", "model.d_head=8", "model.d_ff=64", "model.vocab=258", "validation_batches=2",
    "training.tokens.batch=16", "training.tokens.len=32", "training.steps=6", "training.warmup_steps=2",
    "training.steps_for_lr=12", "checkpoint_interval=3", "eval_interval=3", "log_interval=1",
    "flat_tokens.filespec=null", "hf_dataset.tokenizer=bytes_utf8",
]  # fmt: skip


def start(monkeypatch, *overrides):
    """Runs as `python -m train <TINY> <overrides>` would; returns the exit status."""
    return small.start_training(monkeypatch, *TINY, *overrides)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line[key] for line in lines if key in line] for key in ("loss", "validation_loss")]


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(folder, monkeypatch, tmp_path):
    """Trained straight from a folder, stopped after 3 of 6 steps and started again, the losses are those of a run that
    was never stopped."""
    where = [f"hf_dataset.path={folder}", f"paths.root_working_dir={tmp_path}"]
    assert start(monkeypatch, *where, "paths.model_name=whole") == 0
    assert start(monkeypatch, *where, "paths.model_name=halves", "training.steps=3") == 0
    assert start(monkeypatch, *where, "paths.model_name=halves") == 0
    training, validation = losses(tmp_path / "whole")
    assert (len(training), len(validation)) == (6, 2) and np.isfinite(training).all() and training[-1] < training[0]
    assert losses(tmp_path / "halves") == [training, validation]


WRONG = {
    "model.vocab=256": "model.vocab = 256: the tokenizer bytes_utf8 has token ids up to 256: set model.vocab to 257",
    "hf_dataset.tokenizer=null": "hf_dataset.tokenizer = null: expected bytes_utf8, a tokenizer.json, or the name of",
    "validation_batches=null": "validation_batches = null: of hf_dataset.path the first batches are kept in memory",
    "flat_tokens.sequence_packing=false": "flat_tokens.sequence_packing = false: hf_dataset.path is always packed",
    "flat_tokens.epochs=2": "flat_tokens.epochs = 2: only flat_tokens.filespec ends; a mixture and",
    "flat_tokens.filespec=a.zarr": "hf_dataset.path is set, and so is flat_tokens.filespec (command line): expected",
    "hf_dataset.text_field=body": "train-0.jsonl:1: no field 'body'; it has 'text', 'other': mend it, or set",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_run_that_cannot_be(folder, override, monkeypatch, capsys, tmp_path):
    """What cannot be streamed ends with status 1 and one line, before anything is compiled or written."""
    where = [f"hf_dataset.path={folder}", f"paths.root_working_dir={tmp_path}/runs"]
    assert start(monkeypatch, *where, override) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and WRONG[override] in printed and printed.count("\n") == 1
    assert not (tmp_path / "runs").exists()
