"""hf_dataset.path: a data set that grows while it is read. Which rows there are and who waits for whom, with a writer
in place of the process; and what the process itself does with text, a kill and a bad record."""

import gzip
import json
import os
import random
import signal
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small
from fsspec.implementations.memory import MemoryFileSystem
from parts import assert_refuses, says
from ragged import FlatTokens, HostSharding, as_numpy, assert_equal, encoded, ragged, read_all, sharding
from several_hosts import TINY, logged

from runtime import retries
from runtime.config import resume
from runtime.config.command_line import load
from runtime.config.keys import HuggingFaceDataset, Source
from runtime.data import growing
from runtime.data.batches import Batch, Loader
from runtime.data.flat_tokens import open_split
from runtime.data.growing import GrowingSplit
from runtime.data.read_ahead import NO_END
from runtime.data.sources import growing_split, tokenizer_of
from runtime.data.split_writer import SplitWriter, open_for_writing, write_split
from runtime.data.tokenizers import save_dataset_tokenizer, train_bpe
from train import Config

IDS = SimpleNamespace(vocab=1001, bos_id=0)
SEQUENCES = ragged(0, count=150)
TOKENS = encoded(SEQUENCES)


class Writer:
    """Stands in for the process: when asked, it writes sequences until there are as many tokens as it may write."""

    def __init__(self, where, keys):
        self.path, self.ahead = keys["output"], int(keys["tokens_ahead"])
        self.asked, self.is_closed = 0, False

    def ask(self, tokens):
        self.asked = max(self.asked, tokens)
        dataset = open_for_writing(self.path)
        before = dataset.attrs.get("tokenizing", {}).get("splits", {}).get("train")
        writer = SplitWriter(dataset, "train", chunk_tokens=64, resume=before)
        for ids in SEQUENCES[writer.sequence_count :]:
            if writer.token_count >= self.asked + self.ahead:
                break
            writer.append(ids.astype(np.uint32), np.array([len(ids)]))
        state = writer.flush()
        dataset.attrs["tokenizing"] = {"splits": {"train": state}}
        if writer.sequence_count == len(SEQUENCES):
            writer.finish(0)
            dataset.attrs.put({"made_by": {}, "counts": {}})

    def failure(self):
        return ""

    def close(self):
        self.is_closed = True


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The path of a data set that Writer writes."""
    monkeypatch.setattr(growing, "Tokenizing", Writer)
    return tmp_path / "tokens.zarr"


def split_at(path, *, ahead=0, most=10**6, **keys):
    return GrowingSplit(
        where="the text", files=3, tokenizer=IDS, path=str(path), keys=keys, tokens_ahead=ahead, most_tokens=most
    )


def loader(split, *, on=None, batch=4, length=32, name="train", **options):
    shape = {"batch": batch, "length": length, "sharding": on or sharding()}
    return Loader(FlatTokens(None), name, growing={"my_texts": split}, **shape, **options)


def rows(batch):
    """A batch's rows as flat tokens."""
    targets, is_seq_start, is_target = as_numpy(batch)
    assert is_target.all()
    return 2 * targets + is_seq_start


# ---------------------------------------------------------------- which rows


@pytest.mark.parametrize("d, t, ahead", [(1, 1, 0), (4, 2, 100), (1, 1, 10**6)])
def test_rows_are_the_sequences_one_after_another(written, d, t, ahead):
    """Rows are the sequences joined, in their order, whoever waits for whom; after the last whole one the first comes
    again. The batch of a step is the same for a loader that begins there."""
    count = len(TOKENS) // 32
    expected = np.resize(TOKENS[: count * 32], (3 * count, 32))
    steps = 3 * count // 4
    with loader(split_at(written, ahead=ahead), on=sharding(d, t)) as walker:
        assert walker.steps is None and walker.identity == {"files": 3, "max_token_id": 1000, "bos_id": 0}
        batches = [walker.load(step) for step in range(steps)]
    np.testing.assert_array_equal(np.concatenate(list(map(rows, batches))), expected[: 4 * steps])
    for path in (written, written.with_name("other.zarr")):  # what is there already, and what is not yet
        with loader(split_at(path, ahead=ahead)) as jumper:
            for step in (steps // 2, 3, steps - 1):
                assert_equal(jumper.load(step), batches[step])


def test_no_more_is_asked_for_than_is_read(written):
    """The loader asks and waits for a row when it comes near it, and lets the writer go when it needs no more. The
    summary says what disk it takes."""
    split = split_at(written, ahead=64, most=2200)
    with loader(split) as data:
        assert split.token_count == NO_END
        said = f"the text (3 files), tokenized beside the run into {written}: at most 4.2 MB of disk"
        assert data.summary.startswith(said)
        data.load(0)
        writer = split._process
        assert 4 * 32 <= writer.asked <= 2 * 8 * 4 * 32 + 3 * 4 * 32 < len(TOKENS)  # two buffers, and batches ahead
        assert split.encoded_tokens.shape[0] <= writer.asked + 64 + 40 and not writer.is_closed
        data.load(16)
        assert writer.is_closed


def test_validation_is_a_bounded_pass_that_repeats(written):
    """It reads the first batches, the same each time; if there are fewer, all of them, the last filled up with no
    targets."""
    whole = len(TOKENS) // 32
    shape = {"shuffle": False}
    with loader(split_at(written), batches=2, **shape) as few:
        assert few.steps == 2
        for _ in range(2):
            np.testing.assert_array_equal(np.concatenate([rows(few.load(i)) for i in (0, 1)]).ravel(), TOKENS[:256])
    with loader(split_at(written), batches=10**6, **shape) as every:
        assert every.steps == -(-whole // 4)
        targets, is_seq_start, is_target = read_all(every)
    assert is_target.all(axis=1).tolist() == [True] * whole + [False] * (len(targets) - whole)
    np.testing.assert_array_equal((2 * targets + is_seq_start)[is_target], TOKENS[: whole * 32])


def test_a_store_that_fails_while_it_grows(monkeypatch, tmp_path):
    """The data set is looked at again, as chunks are read again."""
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.001)
    fails, kept = [], MemoryFileSystem.cat_file

    class Failing(Writer):
        def ask(self, tokens):
            super().ask(tokens)
            fails.append(OSError("503 Slow Down"))

    def cat_file(self, path, *args, **kwargs):
        if path == f"/{tmp_path.name}/zarr.json" and fails:
            raise fails.pop()
        return kept(self, path, *args, **kwargs)

    monkeypatch.setattr(growing, "Tokenizing", Failing)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with loader(split_at(f"memory://{tmp_path.name}")) as data:
        np.testing.assert_array_equal(rows(data.load(0)).ravel(), TOKENS[: 4 * 32])
    assert not fails


def test_another_host_waits_for_the_first(written, monkeypatch):
    """A host that is not the first starts no process; it reads what the first has written, as soon as it is there."""
    first = split_at(written)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    other = split_at(written)
    assert other._process is None
    found = []
    thread = threading.Thread(target=lambda: found.append(other.reach(500)))
    thread.start()
    assert first.reach(500)
    thread.join(600)
    assert found == [True] and other.encoded_tokens[:500].tolist() == TOKENS[:500].tolist()
    waiting = loader(other)
    threading.Timer(0.3, waiting.close).start()
    assert_refuses("the text is closed", waiting.load, 40)
    assert first.reach(len(TOKENS)) and not first.reach(len(TOKENS) + 1)


def test_what_other_programs_ask_for(written, monkeypatch):
    """A batch that doubles takes the same rows one after another; text has nothing for an encoder; less than a row is
    refused."""
    with loader(split_at(written), doubles_at=(2,)) as data:
        found = np.concatenate([rows(data.load(step)) for step in range(4)])
    np.testing.assert_array_equal(found.ravel(), TOKENS[: (2 + 2 + 4 + 4) * 32])
    assert_refuses("the text holds no pairs", loader, split_at(written), read_length=8)
    message = "3 tokens of the text in 0 rows of 32, 3 … too few … each source"
    monkeypatch.setattr(sys.modules[__name__], "SEQUENCES", [np.arange(3)])
    assert_refuses(message, loader(split_at(written.with_name("short.zarr"))).__enter__)


def test_a_mixture_with_a_data_set(written, tmp_path):
    """The text has its share of the rows, one after another, beside a data set's, which are shuffled; a loader may
    begin at any step. In validation each source has its share, in batches of its own; where the text ends first, the
    pass ends with it. A checkpoint can tell other weights and another data set."""
    beside = tmp_path / "beside.zarr"
    for name in ("train", "validation"):
        write_split(beside, name, [np.full(32, 2000 + row) for row in range(10)], chunk_tokens=64)
    mixture = [Source(filespec="my_texts", weight=3), Source(filespec=str(beside), weight=1)]
    with loader(split_at(written), mixture=mixture) as data, loader(split_at(written), mixture=mixture) as jumper:
        found = np.concatenate([rows(data.load(step)) for step in range(10)])
        assert_equal(jumper.load(7), data.load(7))
        assert data.steps is None and data.metrics(9)["tokens_per_source"] == {"my_texts": 960, str(beside): 320}
        kept = {"files": 3, "rows": [10], "dropped_tokens": 0, "shares": [3, 1], "max_token_id": 2009, "bos_id": 0}
        assert data.identity == {**kept, "ends": [open_split(beside, "train").ends]}
    is_text = found[:, 0] < 4000
    np.testing.assert_array_equal(found[is_text].ravel(), TOKENS[: 30 * 32])
    of_data = found[~is_text][:, 1] // 2 - 2000
    assert sorted(of_data) == list(range(10)) != of_data.tolist()
    for weight, batches, counts in ((1, 3, [6, 6]), (50, 10**6, [len(TOKENS) // 32, 2])):
        mixture[0] = Source(filespec="my_texts", weight=weight)
        passed = {"name": "validation", "mixture": mixture, "shuffle": False, "batches": batches}
        with loader(split_at(written), **passed) as data:
            targets, is_seq_start, is_target = read_all(data)
            rows_read = (2 * targets + is_seq_start)[is_target[:, 0]]
        assert [np.sum(rows_read[:, 0] < 4000), np.sum(rows_read[:, 0] >= 4000)] == counts
        np.testing.assert_array_equal(rows_read[: counts[0]].ravel(), TOKENS[: counts[0] * 32])
        assert (rows_read[counts[0] :, 1] // 2 - 2000).tolist() == list(range(counts[1]))


def test_hosts_of_a_mixture_go_on_together(written, tmp_path, monkeypatch):
    """The first host asks for the text of all, of which by these weights it has no row itself, over its end too."""
    beside = tmp_path / "beside.zarr"
    write_split(beside, "train", [np.full(32, 2000 + row) for row in range(50)], chunk_tokens=64)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: None)
    mixture = [Source(filespec=str(beside), weight=7), Source(filespec="my_texts", weight=1)]
    whole, loaders = sharding(8, 1).targets, []
    for host, device in enumerate(whole.mesh.devices.flat):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        of_host = Batch(*[HostSharding(whole, frozenset([device]))] * 3)
        loaders.append(loader(split_at(written), on=of_host, batch=8, mixture=mixture))
    steps = 2 * len(TOKENS) // 32

    def walk():
        for data in loaders:
            data.begin()
        for step in range(steps):
            for data in loaders:
                data.load(step)
        done.append(steps)

    done: list[int] = []
    walking = threading.Thread(target=walk, daemon=True)
    walking.start()
    walking.join(600)
    for data in loaders:
        data.close()
    assert done == [steps]


# ---------------------------------------------------------------- the process


def write(path, texts, field="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts))


def stream(path, root, *, split="train", ahead=1, **keys):
    """The split that a run in `root` reads."""
    keys = {"tokenizer": "bytes_utf8", **keys}
    return growing_split(
        SimpleNamespace(
            hf_dataset=HuggingFaceDataset(path=str(path), tokens_ahead=ahead, **keys),
            training=SimpleNamespace(tokens=SimpleNamespace(batch=4, len=32), steps=10**6),
            paths=SimpleNamespace(root_working_dir=str(root), model_name="run"),
            validation_batches=2,
            mixture=(),
        ),
        split,
    )


def tokens_of(texts):
    """The texts as flat tokens, by another way: ids are bytes + 1, and the first of each text is marked."""
    return [2 * (byte + 1) + (place == 0) for text in texts for place, byte in enumerate(text.encode())]


@pytest.mark.slow
def test_killed_and_a_bad_record(tmp_path):
    """The process writes no further than it may, in blocks of a megabyte. A killed process is reported, and the next
    goes on without losing or repeating a token. A bad record is named by file and number when the tokens before its
    block have been read, in each run."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab é€𝄞", k=rng.randint(0, 9000))) for _ in range(1000)]
    write(tmp_path / "in/train-0.jsonl", texts)
    with gzip.open(tmp_path / "in/train-1.jsonl.gz", "wt") as file:
        file.write('{"text": "x"}\n{"text": "cut o')
    expected = np.array(tokens_of(texts), np.uint32)
    assert len(expected) > 6 * 2**20
    split = stream(tmp_path / "in", tmp_path, ahead=1000)
    assert split.reach(10)
    size = split._tokens
    assert 10 <= size <= 1010 + 2**20
    assert split.reach(size + 10**6)
    os.killpg(split._process._process.pid, signal.SIGKILL)
    assert_refuses("split 'train' cannot be tokenized: … status -9", split.reach, size + 5 * 10**6)
    split.close()
    for _ in range(2):
        split = stream(tmp_path / "in", tmp_path, ahead=1000)
        place = f"{tmp_path}/in/train-1.jsonl.gz:2: no JSON (Unterminated … column 10): mend … hf_dataset.text_field"
        assert_refuses(place, split.reach, len(expected) + 1)
        np.testing.assert_array_equal(split.encoded_tokens[: split._tokens], expected)
        split.close()


@pytest.mark.slow
def test_files(tmp_path):
    """Each line of a .txt is a document; .parquet, .json and another field are read too; other keys, and another split,
    are another data set of the run."""
    import pyarrow
    import pyarrow.parquet

    texts = ["one line", "", "another é"]
    for kind in ("txt", "json", "rows"):
        (tmp_path / kind).mkdir()
    (tmp_path / "txt/train.txt").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "txt/test.txt").write_text("".join(f"{text}\n" for text in texts[::-1]))
    (tmp_path / "json/train.json").write_text(json.dumps([{"text": text} for text in texts]))
    pyarrow.parquet.write_table(pyarrow.table({"content": texts}), tmp_path / "rows/train.parquet")
    cases = [
        (stream(tmp_path / "txt", tmp_path), texts),
        (stream(tmp_path / "txt", tmp_path, split="validation", validation_split="test"), texts[::-1]),
        (stream(tmp_path / "json", tmp_path), texts),
        (stream(tmp_path / "rows", tmp_path, text_field="content"), texts),
    ]
    for split, _ in cases:  # all at once
        split._process.ask(100)
    for split, held in cases:
        assert split.reach(18) and not split.reach(19) and split.token_count == 18
        assert np.asarray(split.encoded_tokens).tolist() == tokens_of(held)
        split.close()
    assert len(list((tmp_path / "run/tokens").iterdir())) == 4


@pytest.mark.slow
def test_other_text_is_refused(tmp_path):
    """Text that has changed since its beginning was tokenized is refused, with what to do. The process ends when the
    run does, without being told."""
    write(tmp_path / "in/train.jsonl", ["x" * 1000] * 3000)
    split = stream(tmp_path / "in", tmp_path)
    split.reach(1)
    process = split._process._process
    process.stdin.close()  # as the system does for a run that was killed
    assert process.wait(600) == 0
    split.close()
    write(tmp_path / "in/train.jsonl", ["y" * 1000] * 2000)
    write(tmp_path / "in/train-1.jsonl", ["y" * 1000] * 2000)
    split = stream(tmp_path / "in", tmp_path)
    assert_refuses("put the text back … or delete this folder", split.reach, 2_500_000)
    split.close()


def test_missing(tmp_path, monkeypatch):
    """A folder, data set, split or package that is missing is named at once, with what is there and what to do."""
    expected = "expected … on the Hugging Face hub or a folder"
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "texts"
    for split in ("train", "validation"):
        write(folder / f"{split}.jsonl", ["a"])
    test = {"split": "validation", "validation_split": "test"}
    for path, keys, message in (
        (tmp_path / "none", {}, f"hf_dataset.path: … no folder {tmp_path}/none: {expected}"),
        (tmp_path / "empty", {}, f"hf_dataset.path: … {tmp_path}/empty (EmptyDatasetError … {expected}"),
        (folder, test, f"{folder} has no split 'test'; it holds 'train', 'validation': set"),
    ):
        assert_refuses(message, stream, path, tmp_path, **keys)
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = "hf_dataset.path needs the package datasets … pip install -r requirements-text.txt"
    assert_refuses(message, stream, folder, tmp_path)


def test_text_and_data_sets_have_one_tokenizer(tmp_path):
    """A data set that is mixed with text has its tokenizer, which a run may take from there; another is refused."""
    trained, path = train_bpe(iter(["ab ab"]), 260), tmp_path / "bpe.zarr"
    save_dataset_tokenizer(open_for_writing(path), trained)
    open_for_writing(tmp_path / "unnamed.zarr")

    def found(name):
        sources = (
            Source(filespec=str(tmp_path / folder), weight=1) for folder in ("texts", "bpe.zarr", "unnamed.zarr")
        )
        text = HuggingFaceDataset(path=f"{tmp_path}/texts", tokenizer=str(name))
        return tokenizer_of(SimpleNamespace(hf_dataset=text, mixture=tuple(sources)))

    assert found(path) == trained
    assert_refuses(f"{path} … another tokenizer (bpe_260) … hf_dataset.tokenizer = bytes_utf8", found, "bytes_utf8")
    unnamed = f"{tmp_path}/unnamed.zarr"
    assert_refuses(f"{unnamed} names no tokenizer: expected", found, unnamed)


# ---------------------------------------------------------------- in a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    for name, count in (("train-0", 150), ("train-1", 3), ("validation", 40)):
        write(path / f"{name}.jsonl", ["".join(rng.choices("ab é", k=rng.randint(0, 90))) for _ in range(count)])
    return path


def start(monkeypatch, *overrides):
    """Runs as `python -m train <TINY> <overrides>` would; returns the exit status."""
    of_text = "model.vocab=258", "hf_dataset.tokenizer=bytes_utf8", "training.steps_for_lr=12"
    return small.start_training(monkeypatch, *TINY, *of_text, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_run_goes_on_bit_for_bit(folder, monkeypatch, tmp_path, is_mixed):
    """Trained straight from a folder, past its end, and beside a data set in a mixture, stopped after 3 of 20 steps and
    started again, the losses are those of a run that was never stopped. No process is left."""
    where = [f"hf_dataset.path={folder}", f"paths.root_working_dir={tmp_path}", "training.steps=20", "eval_interval=3"]
    if is_mixed:
        sources = f"{{filespec:synthetic_dataset.zarr,weight:1}},{{filespec:{folder},weight:3}}"
        where += [f"mixture=[{sources}]", "model.vocab=1024"]
    assert start(monkeypatch, *where, "paths.model_name=whole") == 0
    assert start(monkeypatch, *where, "paths.model_name=halves", "training.steps=3") == 0
    assert start(monkeypatch, *where, "paths.model_name=halves") == 0
    training, *validation = (logged(tmp_path / "whole", name) for name in ("loss", "validation_loss"))
    assert len(training) == 20 and np.isfinite([*training.values()]).all() and training[20] < training[1]
    assert [logged(tmp_path / "halves", name) for name in ("loss", "validation_loss")] == [training, *validation]


WRONG = {
    "model.vocab=256": "model.vocab = 256 … bytes_utf8 … ids up to 256: set model.vocab to 257",
    "hf_dataset.tokenizer=null": "hf_dataset.tokenizer = null: expected bytes_utf8, a tokenizer.json",
    "validation_batches=null": "validation_batches = null: … batches of hf_dataset.path",
    "flat_tokens.sequence_packing=false": "flat_tokens.sequence_packing = false: hf_dataset.path … packed",
    "hf_dataset.text_field=body": "train-0.jsonl:1: no field 'body'; it has 'text', 'other'",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_run_that_cannot_be(folder, override, monkeypatch, capsys, tmp_path):
    """What cannot be streamed ends with status 1 and one line, before anything is compiled; but for bad text before
    anything is written."""
    where = [f"hf_dataset.path={folder}", f"paths.root_working_dir={tmp_path}/runs"]
    assert start(monkeypatch, *where, override) == 1
    printed = capsys.readouterr().err
    assert says(f"error: … {WRONG[override]}", printed) and printed.count("\n") == 1
    assert (tmp_path / "runs").exists() == ("text_field" in override)


@pytest.mark.parametrize("positions, text", [
    ([[[0, 1, 0, 3]]], ""),
    ([[[0, 1, 0, 3], [0, 0, 1, 0]]], "a share of its documents for each host"),
    ([[[0, 1, 0, 3]], [[0, 2, 0, 0]]], "a share of its documents for each host"),
    ([[[1, 0, 0, 3]]], "a pass that begins within a row"),
])  # fmt: skip
def test_runs_of_an_earlier_program(positions, text):
    """A checkpoint that says where in the text its run was is gone on from where its rows were these; where they were
    others it is refused, with what to do."""
    config = load(Config, "local_test_synthetic")
    position = {"split": "train", "files": 3, "positions": positions}
    checkpoint = config, {}, {"data_position": position}, "checkpoint x"
    if not text:
        assert resume.compare(*checkpoint) == []
    else:
        message = f"checkpoint x … the order of hf_dataset.path: {text} -> one row after another"
        assert_refuses(message, resume.compare, *checkpoint)
