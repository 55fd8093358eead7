"""The inspection of data sets: what it says of a whole one, and that it finds what is not as the format says."""

import subprocess
import sys

import numpy as np
import pytest
import zarr
from pages import ROOT
from parts import says

from runtime.data.split_writer import write_split
from runtime.data.tokenizers import load_tokenizer, save_dataset_tokenizer
from tools import inspect_dataset as tool

TEXTS = ["To be, or not to be:\n   that is the question.", "", "Ay,\x1bthere's the rub.", "é€" * 40, "x" * 300]


@pytest.fixture
def data(tmp_path):
    """A data set of bytes in chunks of 64 tokens, whose prompts are no targets."""
    path = tmp_path / "data.zarr"
    tokenizer = load_tokenizer("bytes_utf8")
    sequences = tokenizer.encode_batch(TEXTS)
    masks = [np.arange(len(ids)) >= 7 for ids in sequences]
    write_split(path, "train", sequences, is_target=masks, chunk_tokens=64, attributes={"made_by": "a test"})
    write_split(path, "validation", sequences[:1], chunk_tokens=64)
    save_dataset_tokenizer(zarr.open_group(path), tokenizer)
    return path


@pytest.fixture
def inspect(called):
    """Calls the tool: the exit status, and what is printed, as lines, runs of blanks as one."""

    def call(path, *arguments):
        status, *printed = called(tool.main, tool.InspectDataset, f"path='{path}'", *arguments)
        return status, [" ".join(line.split()) for line in "".join(printed).splitlines()], "".join(printed)

    return call


def test_what_a_data_set_holds(data, inspect):
    """Splits, sizes, attributes, lengths, tokenizer and texts, what is a target apart; no control characters."""
    status, lines, printed = inspect(data, "samples=3")
    assert status == 0 and "\x1b" not in printed
    assert lines[:2] == [f"{data} (zarr format 3)", "tokenizer: bytes_utf8, ids below 257, bos_id 0"]
    train = lines[lines.index("train") : lines.index("validation")]
    assert train[1:4] == [
        'made_by: "a test"',
        "565 tokens in 5 sequences; no id is above 227; bos_id is 0",
        "tokens of a sequence: 113.0 on average; least, quartiles, most: 0, 20, 45, 200, 300",
    ]
    assert train[train.index("sequence 0: the 45 tokens from 0 on") + 1 :][:3] == [
        "context | To be,",
        "target | or not to be:",
        "target | that is the question.",
    ]
    assert "sequence 2: the 20 tokens from 45 on" in train and "sequence 4: the 300 tokens from 265 on" in train
    assert "context | Ay,\\x1bthe" in lines
    validation = lines[lines.index("validation") :]
    assert validation[-2:] == ["| To be, or not to be:", "| that is the question."]


def test_ids_where_there_is_no_tokenizer(data, inspect):
    """The ids themselves are shown if there is no tokenizer, of one split if it is asked for."""
    del zarr.open_group(data).attrs["tokenizer"]
    status, lines, _ = inspect(data, "split=validation", "samples=1")
    assert status == 0 and lines[1] == "tokenizer: not named" and "train" not in lines
    assert any(line.startswith("| 85 112 33 99 102 45 33 112 115 33") for line in lines)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_whole_data_set(data, tmp_path, inspect, zarr_format):
    """What is as the format says is verified with status 0, in both formats of zarr."""
    source = zarr.open_group(data, mode="r")
    copy = zarr.open_group(tmp_path / "copy", mode="w", zarr_format=zarr_format)
    for split in ("train", "validation"):
        group = copy.create_group(split)
        for name, array in source[split].members():
            group.create_array(name, data=array[:], chunks=(50,))
        group.attrs.update(source[split].attrs)
    status, lines, _ = inspect(tmp_path / "copy", "verify=true")
    assert status == 0 and lines[0].endswith(f"(zarr format {zarr_format})")
    assert lines[-1] == f"{tmp_path}/copy: as the format says"


# ---------------------------------------------------------------- violations


def change(name, index, value):
    def damage(path):
        zarr.open_group(path)["train"][name][index] = value

    return damage


def attribute(**values):
    return lambda path: zarr.open_group(path)["train"].attrs.update(values)


def chunk(name, index, changed):
    """changed: of the bytes of the chunk's file; None: it is lost."""

    def damage(path):
        file = path / "train" / name / "c" / str(index)
        file.write_bytes(changed(file.read_bytes())) if changed else file.unlink()

    return damage


NO_START = "is marked … no sequence starts there in seq_starts"
UNREADABLE = "damaged or out of reach; write or copy"
# What is damaged, how many violations that is, and what is said; seq_starts is 0, 45, 45, 65, 265, 565.
VIOLATIONS = {
    "id too large": (change("encoded_tokens", 100, 2 * 300), 1,
     "encoded_tokens[100] is the id 300, expected … max_token_id, 227"),
    "many": (lambda path: (attribute(max_token_id=226)(path), change("encoded_tokens", slice(0, 64), 3)(path)), 102,
     "encoded_tokens[67] is the id 227, expected … max_token_id, 226; so are 39 more",
     f"encoded_tokens[1] {NO_START}; so are 61 more"),
    "marked first": (change("encoded_tokens", 70, 2 * 5 + 1), 1, f"encoded_tokens[70] {NO_START}"),
    "another start": (change("seq_starts", 3, 66), 2, f"encoded_tokens[65] {NO_START}",
     "encoded_tokens[66] is not marked … a sequence starts there in seq_starts"),
    "starts that decrease": (change("seq_starts", 3, 20), 1, "seq_starts is damaged, it is not compared",
     "sequence 2 goes from 45 to 20 in seq_starts, expected increasing … 565"),
    "starts beyond": (change("seq_starts", 4, 2**63 + 5000), 2, "sequence 3 goes from 65 to 9223372036854780808 in"),
    "last start": (change("seq_starts", 5, 564), 1,
     "seq_starts of DATA/train … from 0 to 564, expected from 0 to 565 … damaged or only partly written"),
    "lost chunk of tokens": (chunk("encoded_tokens", 2, None), 1,
     f"from 128 to 192 (the file train/encoded_tokens/c/2 is missing … {UNREADABLE}"),
    "damaged chunk of targets": (chunk("is_target", 8, lambda content: b"x" * 30), 1,
     "from 512 to 565 (Stored and computed checksum do not match."),
    "flipped bit": (chunk("seq_starts", 0, lambda content: content[:-6] + bytes([content[-6] ^ 4]) + content[-5:]), 1,
     "(Stored and computed checksum do not match."),
    "cut by rows": (attribute(read_length=45, row_length=68), 8,
     "a sequence goes on at 113, where a row … so are 7 more"),
    "bos_id": (attribute(bos_id=-1), 1, "'bos_id' of DATA/train is -1, expected"),
    "ids of the tokenizer": (attribute(max_token_id=300, bos_id=257), 2,
     "max_token_id is 300, expected … bytes_utf8, below 257", "bos_id is 257, expected … bytes_utf8, below 257"),
    "no array": (lambda path: zarr.open_group(path)["train"].__delitem__("seq_starts"), 1,
     "DATA/train has no array 'seq_starts' … it holds 'encoded_tokens', 'is_target'"),
    "no split": (lambda path: zarr.open_group(path).__delitem__("train"), 1,
     "DATA has no split 'train'; it holds 'validation'"),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_found(data, inspect, name):
    """Each kind is printed with the index of its first and a count, and ends with status 1; the other split is still
    read."""
    damage, count, *expected = VIOLATIONS[name]
    damage(data)
    status, lines, printed = inspect(data, "verify=true", "samples=0")
    assert status == 1 and max(map(len, printed.splitlines())) <= 120 + len(str(data))
    joined = " ".join(lines)
    for text in expected:
        assert says(text.replace("DATA", str(data)), joined), joined
    assert "; so are 0 more" not in joined
    assert lines[-1] == f"error: {data}: {count} violation{'s' * (count > 1)} of the format"
    assert "validation" in lines


def test_damage_that_is_seen_at_once(data, inspect):
    """Impossible lengths are refused, not shown, without verify too."""
    change("seq_starts", 3, 20)(data)
    status, lines, _ = inspect(data)
    assert status == 1 and lines[-1].startswith(f"error: seq_starts of {data}/train is damaged: verify=true")


def test_what_is_no_data_set(data, tmp_path, inspect):
    """A path that holds none, a split that there is not, and a tokenizer that cannot be read are one message."""
    status, lines, _ = inspect(tmp_path / "none")
    assert status == 1 and says(f"error: … {tmp_path}/none does not exist", lines[0])
    status, lines, _ = inspect(data / "train")
    assert status == 1 and lines[-1].endswith("a split itself: give the folder above")
    status, lines, _ = inspect(data, "split=test")
    assert status == 1 and says(f"error: … {data} has no split 'test'; it holds 'train', 'validation'", lines[-1])
    zarr.open_group(data).attrs.update(tokenizer={"name": "bytes_utf8"})
    status, lines, _ = inspect(data, "verify=true")
    assert status == 1 and says(f"error: the tokenizer of … {data} cannot be read (KeyError: 'bos_id')", lines[-1])


# ---------------------------------------------------------------- an object store

IN_AN_OBJECT_STORE = """
import atexit, gc, sys

def connections():
    import aiohttp
    found = [session for session in gc.get_objects()
             if isinstance(session, aiohttp.ClientSession) and not session.closed]
    print("open connections:", len(found))

atexit.register(connections)  # the first, so the last that runs
import tools.inspect_dataset
from runtime.config.command_line import run
run(tools.inspect_dataset.main, tools.inspect_dataset.InspectDataset)
"""


@pytest.mark.slow
def test_in_an_object_store(data, object_store, inspect):
    """A data set in an object store is shown and verified, its damage is found, and its connections are closed at the
    end."""
    import s3fs

    url, files = f"{object_store}/data.zarr", s3fs.S3FileSystem()
    files.put(f"{data}/", url, recursive=True)
    here = inspect(data, "samples=3")[1]
    assert inspect(url, "samples=3")[:2] == (0, [f"{url} (zarr format 3)", *here[1:]])
    command = [sys.executable, "-c", IN_AN_OBJECT_STORE, f"path={url}", "verify=true", "samples=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    *_, verdict, connections = done.stdout.splitlines()
    assert verdict == f"{url}: as the format says" and connections == "open connections: 0"
    files.rm(f"{url}/train/encoded_tokens/c/3")
    status, lines, _ = inspect(url, "verify=true")
    assert status == 1 and lines[-1] == f"error: {url}: 1 violation of the format"
    assert "train/encoded_tokens/c/3 is missing" in " ".join(lines)


def test_weights_are_shown_and_checked(tmp_path, inspect):
    """A sample says the weight of what counts neither 0 nor 1; a weight below 0 is a violation."""
    path, ids = tmp_path / "data.zarr", np.frombuffer(b"q?halfone", np.uint8).astype(int) + 1
    weights = np.float32([0] * 2 + [0.5] * 4 + [1] * 3)
    for split in ("train", "validation"):
        write_split(path, split, [ids], weight=[weights])
    save_dataset_tokenizer(path, load_tokenizer("bytes_utf8"))
    _, _, shown = inspect(path, "samples=1")
    assert "context | q?\n  × 0.5   | half\n  target  | one\n" in shown and "has_weight" not in shown
    zarr.open_group(path)["train/weight"][3] = -2
    status, _, shown = inspect(path, "verify=true")
    assert status == 1 and "1 violation of the format" in shown
    assert "weight[3] is -2.0, expected a finite number" in shown


@pytest.mark.parametrize("content", ["7", "[]", '"group"', '{"zarr_format": 3, "node_type": "group", "attributes": 5}'])
def test_metadata_of_another_kind(data, inspect, content):
    """Whatever JSON stands in zarr.json: one line."""
    (data / "zarr.json").write_text(content)
    status, lines, printed = inspect(data)
    assert status == 1 and printed.startswith("error: ") and len(lines) == 1
