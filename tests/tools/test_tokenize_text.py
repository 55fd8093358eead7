"""tools/tokenize_text.py: from every kind of input to the same sequences; splits, targets, faults of the input and of
the output."""

import bz2
import errno
import fcntl
import gzip
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import zarr
from parts import assert_refuses, says
from ragged import FlatTokens, files, write_lines

import tools.tokenize_text
from models.mesh import Mesh
from models.t5 import PairBatch
from runtime.config import command_line
from runtime.data import documents
from runtime.data.batches import Loader
from runtime.data.flat_tokens import open_split
from runtime.data.split_writer import SplitWriter
from runtime.data.tokenizers import CHATML, load_dataset_tokenizer, train_bpe
from runtime.terminal import RunError
from shardlib.mesh import make_mesh
from shardlib.shardtypes import make_shardings
from tools import text_records
from tools.convert import write_tokenizer
from tools.text_records import text_ends

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def template():
    """The key that says this template."""
    Path("template.jinja").write_text(CHAT_TEMPLATE)
    return "chat_template=template.jinja"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Paths are of a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


def tokenize(*overrides):
    """Runs the tool, which writes x.zarr, and a validation split, where nothing else is said no such split."""
    given = ["validation_fraction=0", "output=x.zarr", *overrides]
    tools.tokenize_text.main(command_line.load(tools.tokenize_text.TokenizeText, None, given))


def tokenize_records(records, *overrides):
    """The same of these records in a.jsonl."""
    write_lines("a.jsonl", records)
    tokenize("input=a.jsonl", *overrides)


def sequences(path="x.zarr", split="train"):
    """The texts of a split, and the ids and targets of each."""
    data, tokenizer = open_split(path, split), load_dataset_tokenizer(path)
    bounds = data.seq_starts[:].astype(int)
    parts = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    assert (data.encoded_tokens[:][bounds[:-1]] & 1).all() and (data.encoded_tokens[:] & 1).sum() == len(parts)
    ids = data.encoded_tokens[:] >> 1
    assert data.max_token_id == ids.max() and data.bos_id == tokenizer.bos_id
    targets = None if data.weight is None else [data.weight[:][part] for part in parts]
    return [tokenizer.decode(ids[part]) for part in parts], [ids[part] for part in parts], targets


def of_both_splits(path="x.zarr"):
    """The texts of training, and those of validation."""
    return [sequences(path, split)[0] for split in ("train", "validation")]


def texts(count, seed=0):
    draws = random.Random(seed)
    return ["".join(draws.choices("abc é你🎉\n\t\"\\", k=draws.randint(1, 60))) for _ in range(count)]


def write_rows(columns, **options):
    """A table in a.parquet."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), "a.parquet", **options)


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("seed", range(20))
def test_documents_by_size(seed):
    """A text cut by size is whole, its documents end with lines where these are short, and between characters where
    not."""
    draws = random.Random(seed)
    alphabet = "ab é你🎉" + "\n" * draws.choice([0, 1, 4])
    data = "".join(draws.choices(alphabet, k=draws.randint(0, 2000))).encode()
    ends = text_ends(data, b"", 100, final=True)
    assert (ends or [0])[-1] == len(data)
    for start, end in zip([0, *ends], ends):
        data[start:end].decode()
        if end < len(data):
            by_line = data.find(b"\n", start + 99, start + 200) + 1
            assert end == by_line if by_line else start + 97 <= end <= start + 100
        # A reader that holds less of it ends the documents that it is sure of at the same places.
        some = text_ends(data[start : start + 700], b"", 100, final=False)
        assert [start + offset for offset in some] == [place for place in ends if place > start][: len(some)]


@pytest.mark.parametrize("separator", ["\n\n", "aa", "<|endoftext|>"])
def test_documents_by_separator(monkeypatch, separator):
    """A separator ends a document wherever the blocks that are read end; it is part of none, and what is empty is
    none."""
    text = "".join(random.Random(1).choices(["a", "b", "\n", separator], k=3000))
    Path("a.txt").write_text(text)
    escaped = separator.replace("\n", "\\n")
    for block_bytes in (64, 2**20):
        monkeypatch.setattr(documents, "BLOCK_BYTES", block_bytes)
        tokenize("input=a.txt", f"separator='{escaped}'", "overwrite=true")
        found, _, _ = sequences()
        if separator == "<|endoftext|>":  # the others overlap themselves: where they begin depends on the block
            assert found == [part for part in text.split(separator) if part]
        assert sorted("".join(found).replace(separator, "")) == sorted(text.replace(separator, ""))


def test_every_kind_of_input_gives_the_same():
    """Lines plain and compressed, parquet in row groups, a Hugging Face data set, and URLs: the same sequences, in
    their order."""
    import fsspec
    import zstandard

    documents = texts(700)
    content = "".join(
        json.dumps({"id": 1, "text": text}, ensure_ascii=number % 2 > 0) + "\n" for number, text in enumerate(documents)
    )
    content = content.replace("\n", "\n\n", 3).encode()  # empty lines are no records
    zst = zstandard.ZstdCompressor()
    Path("hub").mkdir()
    for name, stored in {
        "a.jsonl": content,
        "a.jsonl.gz": gzip.compress(content[:999]) + gzip.compress(content[999:]),
        "a.ndjson.bz2": bz2.compress(content),
        "a.json.zst": zst.compress(content[:999]) + zst.compress(content[999:]),
        "b.txt": "<|end|>".join(documents).encode(),
        "hub/train.jsonl": content,
    }.items():
        Path(name).write_bytes(stored)
    write_rows({"id": range(700), "text": documents}, row_group_size=300)
    with fsspec.open("memory://in/a.jsonl", "wb") as file:
        file.write(content)

    inputs = ["input=a.jsonl", "input=a.jsonl.gz", "input=a.ndjson.bz2", "input=a.json.zst", "input=a.parquet"]
    inputs += ["input='memory://in/*.jsonl'", "hf_dataset.path=./hub", "input=b.txt separator='<|end|>'"]
    inputs += ["input='a.jsonl*'"]  # a glob, in the order of names
    for number, arguments in enumerate(inputs):
        output = "memory://out.zarr" if "memory" in arguments else f"{number}.zarr"
        tokenize(*arguments.split(), f"output={output}")
        assert sequences(output)[0] == documents * (2 if "a.jsonl*" in arguments else 1), arguments


def test_a_password_is_not_recorded(capsys):
    """The one in an input's URL is neither printed nor kept in the data set, and the same command finds it complete."""
    import fsspec

    with fsspec.open("memory://me:secret@in/a.jsonl", "wb") as file:
        file.write(b'{"text": "x"}\n{}\n')
    for _ in range(2):
        tokenize("input='memory://me:secret@in/*'", "on_bad_record=skip")
    printed = capsys.readouterr()
    assert "left out: memory:///me:***@in/a.jsonl:2: no field 'text'" in printed.err and " is complete: " in printed.out
    assert "secret" not in printed.out + printed.err
    assert not [name for name, content in files("x.zarr").items() if b"secret" in content]


def test_several_processes_write_the_same(monkeypatch):
    """However many processes tokenize and however large the blocks are: the same bytes in every file."""
    common = ["tokenizer=train_bpe", "bpe_vocab=400", "validation_fraction=0.2"]
    tokenize_records([{"text": text} for text in texts(3000)], *common, "output=one.zarr", "processes=1")
    monkeypatch.setattr(documents, "BLOCK_BYTES", 5000)
    tokenize("input=a.jsonl", *common, "output=two.zarr", "processes=2")
    assert files("one.zarr") == files("two.zarr")
    assert sorted(itertools.chain(*of_both_splits("one.zarr"))) == sorted(texts(3000))


MEMORY = """
import os, sys
import tools.tokenize_text
from runtime.config.command_line import load
for size in (24, 96):
    child = os.fork()
    if not child:
        where = [f"input={sys.argv[1]}/{size}.txt", f"output={sys.argv[1]}/{size}"]
        config = load(tools.tokenize_text.TokenizeText, None, [*where, "validation_fraction=0"])
        tools.tokenize_text.main(config)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    assert status == 0
    print(usage.ru_maxrss)
"""


@pytest.mark.slow
def test_memory_is_bounded():
    """Four times the text takes at most 30 MB more of memory: 96 MB of it, whose ids alone would be 384. What is under
    way at a time is so already in 24 MB."""
    for size in (24, 96):
        Path(f"{size}.txt").write_text(("some words of a line\n" * 50_000)[: 2**20] * size)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, Path().resolve()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    small, large = (int(line) for line in done.stdout.splitlines() if line.isdigit())
    assert large - small < 30_000, (small, large)  # KiB


# ---------------------------------------------------------------- splits and targets


def test_validation_by_hash():
    """About the asked fraction of documents, each by its own text: others come and go without moving it."""
    documents = sorted({f"{number} {text}" for number, text in enumerate(texts(2000))})
    halves = documents[:1000], documents[500:]
    found = []
    for half in halves:
        tokenize_records([{"text": text} for text in half], "validation_fraction=0.1", "overwrite=true")
        train, held_out = map(set, of_both_splits())
        assert train | held_out == set(half) and not train & held_out
        found.append(held_out)
    assert 70 < len(found[0]) < 130  # of 1000; 10 is the standard deviation
    both = set(halves[0]) & set(halves[1])
    assert found[0] & both == found[1] & both


def test_validation_given():
    """Files that are named as validation are the validation split, and no part of training where the input names them
    too."""
    for name in "abc":
        Path(f"{name}.txt").write_text(name * 10)
    tokenize("input='*.txt'", "validation=b.txt")
    assert of_both_splits() == [["a" * 10, "c" * 10], ["b" * 10]]
    Path("hub").mkdir()
    for name in ("train", "test"):
        write_lines(f"hub/{name}.jsonl", [{"text": name}])
    tokenize("hf_dataset.path=./hub", "hf_dataset.validation_split=test", "overwrite=true")
    assert of_both_splits() == [["train"], ["test"]]


@pytest.mark.parametrize("tokenizer", ["bytes_utf8", "train_bpe"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts(tokenizer, suffix):
    """A record's prompt and answer are one sequence; exactly the answer's tokens are targets, and each is tokenized on
    its own."""
    records = [{"question": f"{text}?", "answer": text[::-1]} for text in texts(60)] + [{"question": "", "answer": "x"}]
    write_lines("a.jsonl", records)
    write_rows({name: [record[name] for record in records] for name in records[0]})
    fields = ["format=prompt", "fields=[question,answer]", f"tokenizer={tokenizer}", "bpe_vocab=300"]
    tokenize(f"input=a.{suffix}", *fields)
    encode = load_dataset_tokenizer("x.zarr").encode_batch
    for record, ids, is_target in zip(records, *sequences()[1:], strict=True):
        question, answer = encode([record["question"], record["answer"]])
        assert ids.tolist() == [*question, *answer]
        assert is_target.tolist() == [False] * len(question) + [True] * len(answer)


def test_chats_without_a_template(capsys):
    """They are written as ChatML, which the data set keeps."""
    tokenize_records([{"messages": [{"role": "assistant", "content": "x"}]}], "format=chat")
    assert "the tokenizer bytes_utf8 has no chat template: chats are written as ChatML\n" in capsys.readouterr().out
    assert sequences()[0] == ["<|im_start|>assistant\nx<|im_end|>\n"]
    assert load_dataset_tokenizer("x.zarr").chat_template == CHATML


@pytest.mark.parametrize("tokenizer", ["bytes_utf8", "train_bpe"])
def test_chats(template, tokenizer):
    """A chat is one sequence as its template writes it, exactly the assistant's words are targets; both splits have
    them."""
    turns = lambda part: [{"role": "user", "content": part}, {"role": "assistant", "content": part[::-1]}]  # noqa: E731
    chats = [[message for part in texts(3, seed) for message in turns(part)] for seed in range(40)]
    options = ["format=chat", template, f"tokenizer={tokenizer}", "bpe_vocab=300", "validation_fraction=0.3"]
    tokenize_records([{"messages": chat} for chat in chats], *options)
    tokenizer = load_dataset_tokenizer("x.zarr")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    expected = {"".join(f"[{message['role']}]{message['content']}" for message in chat): chat for chat in chats}
    train, held_out = (sequences(split=split) for split in ("train", "validation"))
    assert set(train[0] + held_out[0]) == set(expected) and train[0] and held_out[0]
    for text, ids, is_target in zip(*(a + b for a, b in zip(train, held_out))):
        chat, ids_expected, targets_expected = expected[text], [], []
        if tokenizer.name == "bytes_utf8":  # the turns can be told apart without the code that is tested
            for message in chat:
                header, words = tokenizer.encode_batch([f"[{message['role']}]", message["content"]])
                ids_expected += [*header, *words]
                targets_expected += [False] * len(header) + [message["role"] == "assistant"] * len(words)
        else:
            ids_expected, targets_expected = (part.tolist() for part in tokenizer.encode_chat(chat))
        assert ids.tolist() == ids_expected and is_target.tolist() == targets_expected


# ---------------------------------------------------------------- weights and rows


def test_weights(template):
    """A token's weight is that of its record times that of its message or segment; without `weights` 0 and 1 say what
    is a target."""
    half = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab", "weight": 0.5}]
    none = [{"role": "assistant", "content": "c", "weight": 0}, {"role": "assistant", "content": "d"}]
    segments = [{"text": "ab", "weight": 0.25}, {"text": "c", "weight": 0}, {"text": "de", "weight": None}]
    for format, record, weights, expected in (
        ("text", {"text": "abc", "weight": 2}, True, [2, 2, 2]),
        ("text", {"text": "abc", "weight": 2}, False, None),
        ("prompt", {"in_text": "ab", "out_text": "c", "weight": 0.5}, True, [0, 0, 0.5]),
        ("chat", {"messages": half, "weight": 3}, True, [0] * 18 + [1.5] * 2),
        ("chat", {"messages": none}, False, [0] * 23 + [1]),
        ("segments", {"segments": segments, "weight": 2}, True, [0.5, 0.5, 0, 2, 2]),
        ("segments", {"segments": segments[1:]}, False, [0, 1, 1]),
    ):
        tokenize_records([record], f"format={format}", f"weights={weights}", template, "overwrite=true")
        (found,) = sequences()[2] or [None]
        assert (found if found is None else found.tolist()) == expected, format
        assert open_split("x.zarr", "train").targets == ("weight" if weights else expected and "is_target")


def test_what_ends_a_document():
    """It follows a text, an answer and the last segment, and is a target; the encoder's text ends with it too."""
    record = {"text": "ab", "in_text": "q", "out_text": "a", "segments": [{"text": "q", "weight": 0}, {"text": "ab"}]}
    for format, texts, targets in (
        ("text", ["ab</s>"], None),
        ("prompt", ["qa</s>"], [[0] + [1] * 5]),
        ("segments", ["qab</s>"], [[0] + [1] * 6]),
        ("pairs", ["q</s>", "", "a</s>", ""], [[0] * 5, [0], [1] * 5, [0]]),
    ):
        options = [f"format={format}", "end='</s>'"] + (["row_length=6", "read_length=6"] if format == "pairs" else [])
        tokenize_records([record], *options, "overwrite=true")
        found, _, is_target = sequences()
        assert found == texts and (is_target and [flags.tolist() for flags in is_target]) == targets


def test_an_empty_document_has_no_end(capsys):
    """It is left out with `end` as without: a model would learn to end at once. What is written says that a run needs a
    validation split too."""
    Path("a.txt").write_text("ab\n\nb\n")
    write_lines("a.jsonl", [{"text": "ab"}, {"text": ""}, {"text": "b"}])
    for name in ("a.txt", "a.jsonl"):
        tokenize(
            f"input={name}", "separator='\\n'" if name == "a.txt" else "format=text", "end='</s>'", "overwrite=true"
        )
        assert sequences()[0] == ["ab</s>", "b</s>"]
        assert "1 empty documents left out; a run needs a split validation too\n" in capsys.readouterr().out


@pytest.mark.parametrize("end, eos, behind", [
    ("<|endoftext|>", 0, [0]), ("<the end:1>", 259, [259]), (".", 2, [16]), ("ab", 2, [67, 68]), ("", 2, []),
])  # fmt: skip
def test_the_tokenizer_of_what_ends_a_document(end, eos, behind):
    """A special token becomes the one that ends a text. In pairs the tokenizer puts the end, and nothing else, around
    what an encoder reads, whatever it had there."""
    from tokenizers import AddedToken, processors

    backend = train_bpe(iter(["xy"]), 259).backend
    backend.add_special_tokens([AddedToken("<the end:1>")])
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    Path("own").mkdir()
    write_tokenizer(Path("own"), backend.to_str(), {"eos_token": "<|im_end|>"})
    for keys, around in ((["format=text"], [1]), (["format=pairs", "row_length=6", "read_length=6"], behind)):
        record = {"text": "a", "in_text": "q", "out_text": "a"}
        tokenize_records([record], *keys, f"end='{end}'", "tokenizer=./own", "overwrite=true")
        tokenizer = load_dataset_tokenizer("x.zarr")
        assert tokenizer.id_of("eos_token") == eos
        assert tokenizer.backend.encode("", add_special_tokens=True).ids == around


@pytest.mark.parametrize("too_long, rows, counts", [
    ("refuse", [4, 2, 1, 0, 8], "4 documents, 15 tokens; 1 of padding (6.2%); 1 bad records left out"),
    ("truncate", [4, 2, 1, 0, 8, 8],
     "5 documents, 23 tokens; 1 of padding (4.2%); 1 documents longer than a row cut or left out"),
    ("drop", [4, 2, 1, 0, 8],
     "4 documents, 15 tokens; 1 of padding (6.2%); 1 documents longer than a row cut or left out"),
])  # fmt: skip
def test_documents_longer_than_a_row(capsys, too_long, rows, counts):
    """They are refused with their line, or cut, or left out, and counted. Padding is no text."""
    write_lines("a.jsonl", [{"text": "a" * length} for length in (4, 9, 2, 8, 1)])
    command = ["input=a.jsonl", "row_length=8", f"too_long={too_long}"]
    if too_long == "refuse":
        assert_refuses("a.jsonl:2: 9 tokens for row_length = 8 … larger, or too_long", tokenize, *command)
        command += ["on_bad_record=skip"]
    tokenize(*command)
    assert counts in capsys.readouterr().out
    assert sorted(map(len, sequences()[0])) == sorted(rows)


def test_a_document_that_is_cut_before_its_first_target(capsys):
    """It would train nothing: it is left out, and counted as too long."""
    records = [{"in_text": "q" * length, "out_text": "answer"} for length in (7, 8, 3)]
    tokenize_records(records, "format=prompt", "row_length=8", "too_long=truncate")
    assert sorted(sequences()[0]) == ["qqqanswe", "qqqqqqqa"]
    assert "2 documents, 16 tokens; 3 documents longer than a row cut or left out" in capsys.readouterr().out


def test_rows_of_pairs():
    """A run reads each pair whole: the encoder's n-th sequence of a row and the decoder's are one, with its weight."""
    draws = random.Random(2)
    draw = lambda most: "".join(draws.choices("abcdef", k=draws.randint(1, most)))  # noqa: E731
    pairs = [(draw(9), draw(5), draws.choice([0.5, 1, 2])) for _ in range(200)]
    options = ["format=pairs", "weights=true", "read_length=20", "row_length=12"]
    tokenize_records([{"in_text": a, "out_text": b, "weight": w} for a, b, w in pairs], *options)
    found, text = [], load_dataset_tokenizer("x.zarr").decode
    with jax.set_mesh(make_mesh(vars(Mesh(d=2)), jax.devices()[:2])):
        shape = {"batch": 2, "length": 12, "read_length": 20, "sharding": make_shardings(PairBatch)}
        with Loader(FlatTokens("x.zarr"), "train", **shape, shuffle=False) as loader:
            assert loader.rows < 80  # a pair a row would be 200, and no padding at all 49
            for step in range(loader.steps):
                batch = jax.tree.map(np.asarray, loader.load(step))
                assert batch.read.shape == (2, 20) and batch.targets.shape == (2, 12)
                np.testing.assert_array_equal(batch.is_target, batch.weight > 0)
                for row in range(2):
                    read, written = (
                        np.flatnonzero(starts[row])[1:] for starts in (batch.read_starts, batch.is_seq_start)
                    )
                    parts = np.split(batch.read[row], read), np.split(batch.targets[row], written)
                    for source, target, weight in zip(*parts, np.split(batch.weight[row], written)):
                        if weight[0] > 0:
                            assert len(set(weight)) == 1
                            found.append((text(source), text(target), float(weight[0])))
    assert sorted(found) == sorted(pairs)


def test_rows_of_an_interrupted_run(monkeypatch):
    """A run that is stopped at any block continues to the same bytes, by any number of processes, with rows that hold
    whole chats."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(tools.tokenize_text, "PACKED_TOKENS", 2700)
    monkeypatch.setattr(tools.tokenize_text, "RECORD_S", 0.0)
    options = ["format=chat", "row_length=256", "too_long=drop", "validation_fraction=0.1"]
    chats = [[{"role": "assistant", "content": text}] for text in texts(200)]
    tokenize_records([{"messages": chat} for chat in chats], *options, "output=whole.zarr")
    read = tools.tokenize_text.read_blocks
    for stop in (3, 7, 12):

        def stopped(*args, stop=stop):
            yield from itertools.islice(read(*args), stop)
            raise RunError("stopped")

        with monkeypatch.context() as patch:
            patch.setattr(tools.tokenize_text, "read_blocks", stopped)
            assert_refuses("stopped", tokenize, "input=a.jsonl", *options)
    tokenize("input=a.jsonl", *options, "processes=2")
    assert files("x.zarr") == files("whole.zarr")
    for split in ("train", "validation"):
        data = open_split("x.zarr", split)
        assert data.row_length == 256 and set(range(0, data.token_count, 256)) <= set(data.seq_starts[:].tolist())
    assert len([text for text in itertools.chain(*of_both_splits()) if text]) == 200


# ---------------------------------------------------------------- faults of the input

NO_WORDS = [{"role": "user", "content": "x"}]
LEARN = "nothing to learn"
BAD = {
    "a.jsonl:2: no JSON (Expecting ':' delimiter, column 8)": b'{"text": "x"}\n{"text"\n',
    'a.jsonl:3: list, expected {"field": ...}': b'\n\n["x"]',
    "a.jsonl:2: no field 'text'; it has 'body', 'id'": b'{"text": "x"}\n{"body": "x", "id": 1}\n',
    "a.jsonl:1: no JSON … an integer of over 4,300 digits": b'{"a": ' + b"1" * 5000 + b"}\n",
    "a.jsonl:1: no JSON … nested too deeply": b"[" * 100_000 + b"\n",
    "a.jsonl:1: no field 'text'; it has none": b"{}\n",
    "a.jsonl:1: field 'text' is NoneType, expected text": b'{"text": null}\n',
    "a.jsonl:2: invalid UTF-8 (byte 0xff at 11": b'{"text": "x"}\n{"text": "a\xff"}\n',
    "a.jsonl:1: half of a surrogate pair … expected Unicode": b'{"text": "\\ud83d"}\n',
    "a.jsonl:1: no field 'out_text'; it has 'in_text'": b'{"in_text": "x"}\n',
    f"a.jsonl:1: field 'out_text' is empty … {LEARN}": b'{"in_text": "x", "out_text": ""}\n',
    f"a.jsonl:1: no message is the assistant's … {LEARN}": json.dumps({"messages": NO_WORDS}).encode(),
    "a.jsonl:1: field 'segments': expected a list": b'{"segments": ["x"]}',
    f"a.jsonl:1: all weights are 0 … {LEARN}": b'{"segments": [{"text": "x", "weight": 0}]}',
    "a.jsonl:1: segments[0].weight is nan, expected … to 1,000,000": (b'{"segments": [{"text": "x", "weight": NaN}]}'),
    "a.jsonl:1: segments[1].weight is -1, expected … 0 to 1,000,000": (
        b'{"segments": [{"text": "x"}, {"text": "x", "weight": -1}]}'
    ),
    "a.jsonl:1: … weight 0.5 of segments needs weights=true": (b'{"segments": [{"text": "x", "weight": 0.5}]}'),
    "a.jsonl: the file is empty": b"",
    "a.jsonl.gz: the file is empty": gzip.compress(b""),
    "a.txt: the file is empty": b"",
    "a.txt:2: invalid UTF-8 (byte 0xc3 at 3": b"one\ntwo\xc3\n" + b"three\n" * 40,
    "a.txt:10: invalid UTF-8 (byte 0xe9 at 3": b"one\n" * 9 + b"caf\xe9\n",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_records(capsys, template, message):
    """A record that cannot be taken ends the run with file, line and reason; or is left out, shown and counted, and the
    rest is taken."""
    Path(message.partition(":")[0]).write_bytes(BAD[message])
    format = "prompt" if "out_text" in message else "chat" if "assistant" in message else "text"
    format = "segments" if "segments" in message or "weights" in message else format
    turns = [{"role": "user", "content": "g"}, {"role": "assistant", "content": "ood"}]
    good = {"text": "good", "in_text": "g", "out_text": "ood", "messages": turns, "segments": [{"text": "good"}]}
    write_lines("b.jsonl", [good])
    command = ["input='[ab].*'", f"format={format}", template, "document_bytes=4"]
    assert_refuses(f"/{message} … on_bad_record=skip", tokenize, *command)
    tokenize(*command, "on_bad_record=skip")  # continues where it stopped
    captured = capsys.readouterr()
    assert says(f"left out: … /{message}", captured.err) and "; 1 bad records left out" in captured.out
    assert sequences()[0][-1] == ("[user]g[assistant]ood" if format == "chat" else "good")


def test_many_bad_records(capsys, monkeypatch):
    """Nothing is read behind the first one that is refused. Of those that are left out only ten are shown, all are
    counted, and empty documents are counted apart."""
    numbers, document_of = [], text_records.document_of
    monkeypatch.setattr(text_records, "document_of", lambda *of: numbers.append(of[0]) or document_of(*of))
    records = [{"text": "x"}, {"text": ""}] + [{}] * 30
    assert_refuses("a.jsonl:3: no field 'text'", tokenize_records, records)
    assert numbers == [1, 2, 3]
    tokenize_records(records, "on_bad_record=skip", "overwrite=true")
    captured = capsys.readouterr()
    assert captured.err.count("left out: ") == 10
    assert "1 documents, 1 tokens; 1 empty documents left out; 30 bad records left out" in captured.out


def test_a_record_without_an_end():
    """40 MB of a line, 40 kB as they are stored: refused before they are read whole."""
    Path("a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"a" * 40 * 10**6))
    assert_refuses("/a.jsonl.gz: after byte 0 … over 16,777,216 bytes", tokenize, "input=a.jsonl.gz")


def test_a_row_that_is_too_large():
    """A row of over 16 MiB is named, among a thousand that are not; one of 15 MiB is tokenized."""
    command = "input=a.parquet", "processes=1"
    write_rows({"text": ["x"] * 700 + ["a" * (2**24 + 1)] + ["x"] * 300})
    assert_refuses("/a.parquet, row 700: … over 16,777,216 bytes", tokenize, *command)
    write_rows({"text": ["x"] * 700 + ["a" * 15 * 2**20] + ["x"] * 300})
    tokenize(*command, "overwrite=true")


def test_bad_rows():
    """Rows are named by their number, a column that is not there by those that are, and what is no parquet file, or
    ends too early, is one line."""
    write_rows({"text": ["x"] * 500 + [None]})
    message = "/a.parquet, row 500: field 'text' is NoneType, expected text … on_bad_record=skip"
    assert_refuses(message, tokenize, "input=a.parquet")
    write_rows({"body": ["x"], "id": [1]})
    message = "/a.parquet, row 0: no field 'text'; it has 'body', 'id' … on_bad_record=skip"
    assert_refuses(message, tokenize, "input=a.parquet", "overwrite=true")
    Path("a.parquet").write_bytes(b"PAR1 no")
    assert_refuses("cannot read … /a.parquet (", tokenize, "input=a.parquet", "overwrite=true")
    Path("a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 9999)[:-20])
    assert_refuses("cannot read … /a.jsonl.gz (EOFError: ", tokenize, "input=a.jsonl.gz", "overwrite=true")


ONE_OF = "expected one of input … and hf_dataset.path"
WRONG = {
    "bpe_vocab=256": "bpe_vocab = 256: expected 259 … to 2147483647",
    "bos_id=-1": "bos_id = -1: expected an id from 0",
    "format=json": 'format = "json": expected text or prompt or chat or',
    "document_bytes=1": "document_bytes = 1: expected 4 or more",
    "validation_fraction=1": "validation_fraction = 1: expected … 0 to below 1",
    "on_bad_record=ignore": 'on_bad_record = "ignore": expected fail or skip',
    "processes=-1": "processes = -1: expected … from 0 to 2147483647",
}
REFUSED = [
    (["input=a.jsonl", "format=chat", "end=x"], 'command line: end = "x": the chat template says'),
    (["input=a.jsonl", "format=prompt", "fields=[question]"], 'fields = ["question"]: … each of in_text, out_text'),
    (["input=a.jsonl", "too_long=drop"], 'too_long = "drop": only rows of a row_length'),
    (["input=a.jsonl", "format=pairs", "row_length=8"], 'format = "pairs": … set row_length and read_length'),
    (["input=a.jsonl", "read_length=8"], "read_length = 8: only format=pairs"),
    ([], ONE_OF),
    (["input=a.txt", "hf_dataset.path=x"], ONE_OF),
    (["input=a.txt", *WRONG], " … ".join(["7 problems", *WRONG.values()])),
    (["hf_dataset.path=x", "validation=x"], "validation = x: expected hf_dataset.validation_split"),
    (["input=b.txt"], "cannot read b.txt (FileNotFoundError: "),
    (["input='*.json'"], "no file matches *.json"),
    (["input=hub"], "hub is a folder, expected files: say hub/*.txt"),
    (["input=nothing://x"], "cannot read nothing://x (ValueError: Protocol not known: nothing)"),
    (["input=a.txt", "end=x"], "a.txt is cut by size … end=x needs a separator"),
    (["input=a.txt", "format=prompt"], "a.txt is plain text, but format=prompt needs records"),
    (["input=a.txt", "validation=a.txt"], "validation=a.txt names all of input=a.txt"),
    (["input=a.jsonl", "format=chat", "chat_template=nowhere"], "chat_template=nowhere cannot be read"),
    (["input=a.jsonl", "tokenizer=train_bpe"], "a.jsonl holds no text … trained on"),
    (["hf_dataset.path=no/where"], "hf_dataset.path: cannot read no/where"),
    (["hf_dataset.path=./hub"], "hf_dataset.split: ./hub has no split 'train'; it holds test"),
]


@pytest.mark.parametrize("overrides, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused_before_anything_is_read(overrides, message):
    """What makes no sense is refused at once, all of it together; so is input that is not there or of the wrong
    kind."""
    Path("hub").mkdir()
    Path("a.txt").write_text("text")
    for name in ("a.jsonl", "hub/test.jsonl"):
        write_lines(name, [{}])
    assert_refuses(message, tokenize, *overrides)


def test_no_document_for_a_split():
    """A split that no document came to is an error, which says what to do."""
    for fraction, message in ((0.001, "'validation' of x.zarr … a larger"), (0.999, "'train' of x.zarr … a smaller")):
        refused = f"{message} validation_fraction, or more and smaller documents"
        keys = f"validation_fraction={fraction}", "overwrite=true"
        assert_refuses(refused, tokenize_records, [{"text": "one small text"}], *keys)


# ---------------------------------------------------------------- faults of the output


def test_a_refused_first_record_leaves_nothing_in_the_way():
    """The corrected command needs no overwrite, since no document was written."""
    assert_refuses("no field 'text'; it has 'body'", tokenize_records, [{"body": "some text"}])
    tokenize("input=a.jsonl", "fields=[body]")
    assert sequences()[0] == ["some text"]


def test_output_that_is_there(capsys):
    """The same command says that the output is complete; another one refuses to write over it, or replaces it when told
    to."""
    Path("a.txt").write_text("some text")
    tokenize("input=a.txt")
    before = files("x.zarr")
    tokenize("input=a.txt")
    assert "x.zarr is complete: 1 documents, 9 tokens. overwrite=true" in capsys.readouterr().out
    other = "write to a new path … overwrite=true"
    made = "x.zarr holds a data set … made with another"
    assert_refuses(f"{made} document_bytes: {other}", tokenize, "input=a.txt", "document_bytes=4")
    assert files("x.zarr") == before
    tokenize("input=a.txt", "document_bytes=4", "overwrite=true", "tokenizer=train_bpe", "bpe_vocab=259")
    assert sequences()[0] == ["some", " tex", "t"]
    tokenize("input=a.txt", "overwrite=true")
    assert files("x.zarr") == before
    Path("a.txt").write_text("other texts")
    assert_refuses(f"{made} input (name, size or time): {other}", tokenize, "input=a.txt")

    zarr.open_group("mine", mode="w").create_group("mine")
    assert_refuses(f"mine holds mine already: {other}", tokenize, "input=a.txt", "output=mine")
    zarr.open_group("old", mode="w", zarr_format=2)
    assert_refuses("old is of zarr format 2 … write to a new path", tokenize, "input=a.txt", "output=old")
    Path("others").mkdir()
    for name in ("others/their.partial", "others/work"):
        Path(name).touch()
    message = "others holds work … write to a new folder"
    assert_refuses(message, tokenize, "input=a.txt", "output=others", "overwrite=true")
    assert files("others").keys() == {"their.partial", "work"}


@pytest.mark.parametrize("changed", ["tokenizer.json", "template.jinja"])
@pytest.mark.parametrize("stops", [True, False])
def test_another_file_under_the_same_name(monkeypatch, changed, stops):
    """A tokenizer.json or a chat template that holds something else than when the data set was begun, or completed:
    refused, with its name; overwrite=true begins anew, and makes the bytes of a run that never saw the old one."""
    turns = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in texts(60)]
    write_lines("a.jsonl", [{"messages": messages} for messages in turns])
    Path("tokenizer.json").write_text(train_bpe(texts(60), 300).json)
    Path("template.jinja").write_text(CHATML)
    command = ["input=a.jsonl", "format=chat", "tokenizer=./tokenizer.json", "bos_id=0", "chat_template=template.jinja"]
    with monkeypatch.context() as patch:
        if stops:
            patch.setattr(SplitWriter, "finish", lambda *_: (_ for _ in ()).throw(RunError("stopped")))
            assert_refuses("stopped", tokenize, *command)
        else:
            tokenize(*command)
    new = CHATML.replace("im_start", "im_begin") if changed == "template.jinja" else train_bpe(texts(9), 280).json
    Path(changed).write_text(new)
    assert_refuses("made with another content of tokenizer or chat_template", tokenize, *command)
    tokenize(*command, "overwrite=true")
    tokenize(*command, "output=y.zarr")
    assert files("x.zarr") == files("y.zarr")


def test_written_by_two_at_once():
    """A data set that another process is writing is refused."""
    Path("x.zarr").mkdir()
    descriptor = os.open("x.zarr", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    message = "x.zarr is being written … wait for it, or write"
    assert_refuses(message, tokenize_records, [{"text": "some text"}])
    os.close(descriptor)
    tokenize("input=a.jsonl")


def test_failed_write(monkeypatch):
    """A write that fails ends the run with its reason, nothing opens as a data set, and the same command continues to
    the same bytes."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(tools.tokenize_text, "RECORD_S", 0.0)
    tokenize_records([{"text": text} for text in texts(1000)], "output=whole.zarr")
    put, left = zarr.storage.LocalStore.set, 0

    async def put_or_fail(self, key, value, *rest):
        nonlocal left
        left -= 1
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return await put(self, key, value, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.storage.LocalStore, "set", put_or_fail)
        for left in (3, 12, 21, 22, 23, 24, 25):  # chunks, metadata, the record of progress  # noqa: B007
            assert_refuses("cannot write x.zarr: OSError: [Errno 28]", tokenize, "input=a.jsonl")
            assert_refuses("", open_split, "x.zarr", "train")
    tokenize("input=a.jsonl")
    assert files("x.zarr") == files("whole.zarr")


def test_dead_process(monkeypatch):
    """A process that dies is an error, not a hang."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    read = tools.tokenize_text.read_blocks

    def deadly(*args):
        for number, block in enumerate(read(*args)):
            if number == 3:
                multiprocessing.active_children()[0].kill()
            yield block

    monkeypatch.setattr(tools.tokenize_text, "read_blocks", deadly)
    message = "process died … too little memory: run it again … with fewer"
    assert_refuses(message, tokenize_records, [{"text": text} for text in texts(2000)], "processes=2")
