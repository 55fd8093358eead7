"""runtime/data/documents.py: blocks hold whole records, the same ones wherever reading begins."""

import gzip
import json
import random
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import small

from runtime.data import documents
from runtime.data.documents import decoded, find_files, find_splits, place, read_blocks, records, values


def texts(seed, count=300):
    rng = random.Random(seed)
    return ["".join(rng.choices("ab é€𝄞", k=rng.randint(1, 90))) for _ in range(count)]


def write(folder, kind):
    """Two files of a kind, of which the first one begins with a byte order mark, with an empty one between them; the
    texts."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder.mkdir()
    for number, some in enumerate((texts(1), [], texts(2))):
        path = folder / f"train-{number}.{kind}"
        mark = "" if number else "\ufeff"
        lines = mark + "".join(json.dumps({"text": text}) + ("\n" if text < "b" else "\r\n\n") for text in some)
        lines = lines.encode()
        if kind == "parquet":
            table = pyarrow.table({"text": pyarrow.array(some, pyarrow.string())})
            pyarrow.parquet.write_table(table, path, row_group_size=70)
        elif kind == "txt":
            path.write_text(mark + "".join(f"{text}\n" for text in some))
        elif kind == "jsonl.zst":  # several frames
            frames = [zstandard.ZstdCompressor().compress(lines[at : at + 999]) for at in range(0, len(lines), 999)]
            path.write_bytes(b"".join(frames))
        else:
            path.write_bytes(gzip.compress(lines) if kind == "jsonl.gz" else lines)
    return texts(1) + texts(2)


def read(blocks):
    """The texts, and after each block how many came by then and its position."""
    found, places = [], [(0, (0, 0, 0))]
    for block in blocks:
        for _, record in records(block):
            found.append(decoded(record) if block.file.kind == "text" else values(record, ["text"])[0])
        places.append((len(found), block.position))
    return found, places


@pytest.mark.parametrize("by_name", [False, *small.slow(True)], ids=["files", "data set"])
@pytest.mark.parametrize("kind", ["txt", *small.slow("jsonl"), "jsonl.gz", "jsonl.zst", "parquet"])
def test_reading_continues_at_each_place(tmp_path, monkeypatch, kind, by_name):
    """Reading from the position after a block gives the records that follow it, in the same blocks; an empty file is
    one block."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(documents, "BLOCK_ROWS", 64)
    expected = write(tmp_path / "in", kind)
    files = find_splits(f"{tmp_path}/in", "")["train"] if by_name else find_files(f"{tmp_path}/in/*")
    assert [file.kind for file in files] == [{"t": "text", "j": "lines", "p": "rows"}[kind[0]]] * 3
    found, places = read(read_blocks(files))
    assert found == expected and len(places) > 8
    for index, (count, position) in enumerate(places):
        rest, later = read(read_blocks(files, position))
        assert rest == expected[count:] and [at for _, at in later[1:]] == [at for _, at in places[index + 1 :]]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_a_url_with_a_query(tmp_path, kind):
    """What stands behind the path of a URL does not say how its file is read."""
    write(tmp_path / "in", kind)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/in/train-0.{kind}?signature=a.b"
        try:
            assert read(read_blocks(find_files(url)))[0] == texts(1)
        finally:
            server.shutdown()


def test_places_are_lines_and_rows(tmp_path):
    """A record's place names its file and, from 1, its line, blank ones counted; or, from 0, its row."""
    for kind, expected in (("jsonl", "/train-2.jsonl:"), ("parquet", "/train-2.parquet, row ")):
        write(tmp_path / kind, kind)
        *_, block = read_blocks(find_files(f"{tmp_path}/{kind}/*"))
        number, _ = records(block)[-1]
        assert place(block, number) == f"{tmp_path}/{kind}{expected}{number}"
        if kind == "jsonl":
            lines = (tmp_path / "jsonl/train-2.jsonl").read_bytes().split(b"\n")
            assert values(lines[number - 1], ["text"]) == [texts(2)[-1]]
        else:
            assert number == 299
