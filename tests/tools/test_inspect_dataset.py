"""The inspection of data sets: what it says of a whole one, and that it finds whatever is not as the format says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from runtime.config.command_line import load
from runtime.data.flat_tokens import write_split
from runtime.data.tokenizers import load_tokenizer, save_dataset_tokenizer
from runtime.terminal import RunError, print_error
from tools import inspect_dataset as tool

ROOT = Path(__file__).resolve().parents[2]
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


def inspect(capsys, path, *arguments):
    """The exit status, and what is printed: lines, runs of blanks as one."""
    status = 0
    try:
        tool.main(load(tool.InspectDataset, None, [f"path='{path}'", *arguments]))
    except RunError as error:
        status = 1
        print_error(error)
    printed = capsys.readouterr()
    return (
        status,
        [" ".join(line.split()) for line in (printed.out + printed.err).splitlines()],
        printed.out + printed.err,
    )


def test_what_a_data_set_holds(data, capsys):
    """Splits, sizes, attributes, lengths, tokenizer and texts, what is a target apart; of a text no control characters."""
    status, lines, printed = inspect(capsys, data, "samples=3")
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


def test_ids_where_there_is_no_tokenizer(data, capsys):
    """Without a tokenizer the ids themselves are shown, of one split if it is asked for."""
    del zarr.open_group(data).attrs["tokenizer"]
    status, lines, _ = inspect(capsys, data, "split=validation", "samples=1")
    assert status == 0 and lines[1] == "tokenizer: not named" and "train" not in lines
    assert any(line.startswith("| 85 112 33 99 102 45 33 112 115 33") for line in lines)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_whole_data_set(data, tmp_path, capsys, zarr_format):
    """What is as the format says is verified with status 0, in both formats of zarr."""
    source = zarr.open_group(data, mode="r")
    copy = zarr.open_group(tmp_path / "copy", mode="w", zarr_format=zarr_format)
    for split in ("train", "validation"):
        group = copy.create_group(split)
        for name, array in source[split].members():
            group.create_array(name, data=array[:], chunks=(50,))
        group.attrs.update(source[split].attrs)
    status, lines, _ = inspect(capsys, tmp_path / "copy", "verify=true")
    assert status == 0 and lines[0].endswith(f"(zarr format {zarr_format})")
    assert lines[-1] == f"{tmp_path}/copy: as the format says"


def test_random_data_sets_are_whole(tmp_path, capsys, monkeypatch):
    """Ragged data sets with empty sequences at every place are as the format says, whatever the sizes of blocks and chunks."""
    rng = np.random.default_rng(0)
    for block in (1, 64, 10**6):
        monkeypatch.setattr(tool, "BLOCK", block)
        sequences = [rng.integers(0, 100, rng.choice([0, 0, 1, 3, 50])) for _ in range(rng.integers(1, 30))]
        for split in ("train", "validation"):
            write_split(tmp_path / f"{block}", split, sequences, chunk_tokens=int(rng.integers(8, 70)))
        assert inspect(capsys, tmp_path / f"{block}", "verify=true", "samples=0")[0] == 0


# ---------------------------------------------------------------- violations


def change(name, index, value):
    def damage(path):
        zarr.open_group(path)["train"][name][index] = value

    return damage


def attribute(**values):
    return lambda path: zarr.open_group(path)["train"].attrs.update(values)


def chunk(name, index, content):
    def damage(path):
        file = path / "train" / name / "c" / str(index)
        file.unlink() if content is None else file.write_bytes(content)

    return damage


def flip(name, index):
    def damage(path):
        file = path / "train" / name / "c" / str(index)
        content = bytearray(file.read_bytes())
        content[-6] ^= 4
        file.write_bytes(content)

    return damage


def both(*damages):
    return lambda path: [damage(path) for damage in damages]


# seq_starts is 0, 45, 45, 65, 265, 565
VIOLATIONS = {
    "id too large": (
        change("encoded_tokens", 100, 2 * 300),
        ["encoded_tokens[100] is the id 300, expected no id above max_token_id, 227"],
    ),
    "max_token_id too small": (
        both(attribute(max_token_id=226), change("encoded_tokens", slice(0, 64), 3)),
        [
            *(f"encoded_tokens[{i}] is the id 227, expected no id above max_token_id, 226" for i in range(67, 117, 5)),
            "… and 30 more: ids above max_token_id",
            *(f"encoded_tokens[{i}] is marked as a sequence's first token, and no sequence starts there in seq_starts" for i in range(1, 11)),
            "… and 52 more: tokens that are marked as first and are not",
        ],
    ),
    "marked first": (
        change("encoded_tokens", 70, 2 * 5 + 1),
        ["encoded_tokens[70] is marked as a sequence's first token, and no sequence starts there in seq_starts"],
    ),
    "first not marked": (
        change("encoded_tokens", 45, 2 * 5),
        ["encoded_tokens[45] is not marked as a sequence's first token, and sequence 2 starts there in seq_starts"],
    ),
    "another start": (
        change("seq_starts", 3, 66),
        [
            "encoded_tokens[65] is marked as a sequence's first token, and no sequence starts there in seq_starts",
            "encoded_tokens[66] is not marked as a sequence's first token, and sequence 3 starts there in seq_starts",
        ],
    ),
    "starts that decrease": (
        change("seq_starts", 3, 20),
        [
            "seq_starts[3] is 20, less than 45 before it, expected increasing numbers",
            "since seq_starts is damaged, it is not compared with the tokens that are marked as first",
        ],
    ),
    "starts beyond": (
        change("seq_starts", 4, 2**63 + 5000),
        [
            "seq_starts[4] is 9223372036854780808, expected at most the number of tokens, 565",
            "seq_starts[5] is 565, less than 9223372036854780808 before it, expected increasing numbers",
            "since seq_starts is damaged, it is not compared with the tokens that are marked as first",
        ],
    ),
    "last start": (
        change("seq_starts", 5, 564),
        ["seq_starts of DATA/train ends with 564, expected 565, the length of encoded_tokens: the data set is damaged or only partly written, write or copy it again"],
    ),
    "first start": (
        change("seq_starts", 0, 1),
        ["seq_starts of DATA/train starts with 1, expected 0: the data set is damaged, write it again"],
    ),
    "lost chunk of tokens": (
        chunk("encoded_tokens", 2, None),
        ["cannot read encoded_tokens of DATA/train from 128 to 192 (the file train/encoded_tokens/c/2 is missing): the data set is damaged or out of reach; write or copy it again"],
    ),
    "damaged chunk of targets": (
        chunk("is_target", 8, b"x" * 30),
        ["cannot read is_target of DATA/train from 512 to 565 (the file train/is_target/c/8 has 30 bytes and was written with another number): the data set is damaged or out of reach; write or copy it again"],
    ),
    "flipped bit": (
        flip("seq_starts", 0),
        [
            "cannot read seq_starts of DATA/train from 0 to 1 (the file train/seq_starts/c/0 is not what was written (its crc32c differs)): the data set is damaged or out of reach; write or copy it again",
        ],
    ),
    "no max_token_id": (
        lambda path: zarr.open_group(path)["train"].attrs.put({}),
        ["DATA/train has no attribute 'max_token_id': the writer did not finish, or is none of flat-tokens; write it again"],
    ),
    "bos_id": (attribute(bos_id=-1), ["attribute 'bos_id' of DATA/train is -1, expected a token id from 0 to 2147483647"]),
    "ids of the tokenizer": (
        attribute(max_token_id=300, bos_id=257),
        [
            "max_token_id is 300, expected an id of the tokenizer bytes_utf8, below 257",
            "bos_id is 257, expected an id of the tokenizer bytes_utf8, below 257",
        ],
    ),
    "length of is_target": (
        lambda path: zarr.open_group(path)["train/is_target"].resize((500,)),
        ["is_target of DATA/train has 500 entries, expected one a token, 565"],
    ),
    "no array": (
        lambda path: zarr.open_group(path)["train"].__delitem__("seq_starts"),
        ["DATA/train has no array 'seq_starts', so it is no flat-tokens split; it holds 'encoded_tokens', 'is_target'"],
    ),
    "no split": (
        lambda path: zarr.open_group(path).__delitem__("train"),
        ["the data set DATA has no split 'train'; it holds 'validation'"],
    ),
    "tokenizer": (
        lambda path: zarr.open_group(path).attrs.update(tokenizer={"name": "bytes_utf8"}),
        ["the tokenizer of the data set DATA cannot be read (KeyError: 'bos_id')"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage, expected", VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_is_found(data, capsys, damage, expected):
    """Each is printed with its index or its name, counted, and ends with status 1; the other split is read all the same."""
    damage(data)
    status, lines, printed = inspect(capsys, data, "verify=true", "samples=0")
    assert status == 1 and max(map(len, printed.splitlines())) <= 120 + len(str(data))
    joined = " ".join(lines)
    for text in expected:
        assert " ".join(text.replace("DATA", str(data)).split()) in joined, joined
    more = sum(int(text.split()[2]) for text in expected if text.startswith("…"))
    lines_of_violations = sum(not text.startswith(("…", "since")) for text in expected)
    count = lines_of_violations + more
    assert lines[-1] == f"error: {data}: {count} violation{'s' * (count > 1)} of the format"
    assert "validation" in lines


def test_damage_that_is_seen_at_once(data, capsys):
    """Without verify, lengths that cannot be are refused rather than shown."""
    change("seq_starts", 3, 20)(data)
    status, lines, _ = inspect(capsys, data)
    assert status == 1 and lines[-1] == f"error: seq_starts of {data}/train is damaged: verify=true says where"


def test_command(data):
    """The documented command and its help run; what is no data set is one message and status 1."""
    command = [sys.executable, "-m", "tools.inspect_dataset"]
    done = subprocess.run([*command, f"path={data}", "verify=true"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith(f"{data}: as the format says\n")
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Shows what a flat-tokens data set holds" in done.stdout


def test_what_is_no_data_set(data, tmp_path, capsys):
    """A path that holds none, and a split that there is not, are one message."""
    status, lines, _ = inspect(capsys, tmp_path / "none")
    assert status == 1 and lines[0].startswith(f"error: the data set {tmp_path}/none does not exist")
    status, lines, _ = inspect(capsys, data / "train", "verify=true")
    assert status == 1 and lines[0].startswith(f"error: {data}/train is one split of a data set")
    status, lines, _ = inspect(capsys, data, "split=test")
    assert (
        status == 1 and lines[-1] == f"error: the data set {data} has no split 'test'; it holds 'train', 'validation'"
    )


# ---------------------------------------------------------------- an object store

IN_AN_OBJECT_STORE = """
import atexit, gc, sys

def connections():
    import aiohttp
    found = [each for each in gc.get_objects() if isinstance(each, aiohttp.ClientSession) and not each.closed]
    print("open connections:", len(found))

atexit.register(connections)  # the first, so the last that runs
import tools.inspect_dataset
from runtime.config.command_line import run
run(tools.inspect_dataset.main, tools.inspect_dataset.InspectDataset)
"""


def test_in_an_object_store(data, object_store, capsys):
    """A data set in an object store is shown and verified, its damage is found, and its connections are closed at the end."""
    import s3fs

    url, files = f"{object_store}/data.zarr", s3fs.S3FileSystem()
    files.put(f"{data}/", url, recursive=True)
    here = inspect(capsys, data, "samples=3")[1]
    assert inspect(capsys, url, "samples=3")[:2] == (0, [f"{url} (zarr format 3)", *here[1:]])
    done = subprocess.run(
        [sys.executable, "-c", IN_AN_OBJECT_STORE, f"path={url}", "verify=true", "samples=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    *_, verdict, connections = done.stdout.splitlines()
    assert verdict == f"{url}: as the format says" and connections == "open connections: 0"
    files.rm(f"{url}/train/encoded_tokens/c/3")
    status, lines, _ = inspect(capsys, url, "verify=true")
    assert status == 1 and lines[-1] == f"error: {url}: 1 violation of the format"
    assert "train/encoded_tokens/c/3 is missing" in " ".join(lines)
