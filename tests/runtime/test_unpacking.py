"""runtime/unpacking.py: what a few kilobytes of a data set or a checkpoint may unpack to."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs

from runtime.checkpoints.checkpoint import open_checkpoint, read_leaf
from runtime.checkpoints.store import LocalStore
from runtime.data.flat_tokens import open_split
from runtime.terminal import RunError

CHUNK, LARGE = 256, 2**24  # values of a chunk, and of the one that is put in its place
CRC = zarr.codecs.Crc32cCodec()
# The zarr format, and how a chunk is written.
BOUNDED = {
    "blosc": (3, {"compressors": zarr.codecs.BloscCodec()}),
    "zstd": (3, {"compressors": zarr.codecs.ZstdCodec()}),
    "gzip": (3, {"compressors": zarr.codecs.GzipCodec(level=1)}),
    "gzip with a checksum": (3, {"compressors": [zarr.codecs.GzipCodec(level=1), CRC]}),
    "gzip twice": (3, {"compressors": [zarr.codecs.GzipCodec(level=1), zarr.codecs.GzipCodec()]}),
    "zstd in shards": (3, {"compressors": zarr.codecs.ZstdCodec(), "shards": True}),
    "gzip in shards": (3, {"compressors": zarr.codecs.GzipCodec(level=1), "shards": True}),
    "blosc, format 2": (2, {"compressors": numcodecs.Blosc()}),
    "zstd, format 2": (2, {"compressors": numcodecs.Zstd()}),
    "gzip, format 2": (2, {"compressors": numcodecs.GZip(1)}),
    "zlib, format 2": (2, {"compressors": numcodecs.Zlib(1)}),
    "lz4, format 2": (2, {"compressors": numcodecs.LZ4()}),
}
REFUSED = {
    "bz2, format 2": (2, {"compressors": numcodecs.BZ2()}),
    "lzma, format 2": (2, {"compressors": numcodecs.LZMA()}),
    "a filter, format 2": (2, {"compressors": None, "filters": [numcodecs.Zlib()]}),
}


def write(folder, form, how, chunk):
    """A data set, or a checkpoint, of one array that is read at once, in one chunk; returns the chunk's file."""
    group = zarr.open_group(folder, mode="w", zarr_format=form).create_group("train")
    how = {**how, "shards": (chunk,)} if "shards" in how else how
    options = {"shape": (chunk,), "chunks": (chunk,), "fill_value": 7}
    array = group.create_array("encoded_tokens", dtype="uint32", **options, **how)
    array[:] = np.zeros(chunk, np.uint32)
    small = {"dtype": "uint64", "compressors": None}
    group.create_array("seq_starts", shape=(2,), chunks=(2,), **small)[:] = [0, chunk]
    group.attrs.update(max_token_id=9, write_completed=True)
    (file,) = (folder / "train/encoded_tokens").rglob("0")
    return file


def as_data(path):
    return open_split(str(path), "train").encoded_tokens


def as_checkpoint(path):
    with ThreadPoolExecutor(1) as pool:
        return read_leaf(open_checkpoint(LocalStore(str(path)), "train", pool), "encoded_tokens", pool)


@pytest.mark.parametrize("read", [as_data, as_checkpoint])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_chunk_has_its_size(name, read, tmp_path):
    """A chunk of 64 MB in the place of one of a kilobyte: it is refused before it is unpacked. The kilobyte is read."""
    bomb = write(tmp_path / "large", *BOUNDED[name], LARGE).read_bytes()
    file = write(tmp_path / "data", *BOUNDED[name], CHUNK)
    assert read(tmp_path / "data").tolist() == [0] * CHUNK
    file.write_bytes(bomb)
    with pytest.raises(RunError, match=r"unpacks to more than the 1024 bytes|bytes, expected at most"):
        read(tmp_path / "data")


@pytest.mark.parametrize("read", [as_data, as_checkpoint])
@pytest.mark.parametrize("name", REFUSED)
def test_codecs_that_are_not_bounded(name, read, tmp_path):
    """Refused when the array is opened, with those that are read."""
    write(tmp_path / "data", *REFUSED[name], CHUNK)
    with pytest.raises(RunError, match="encoded_tokens has another codec: blosc, zstd, gzip"):
        read(tmp_path / "data")


@pytest.mark.parametrize("read", [as_data, as_checkpoint])
@pytest.mark.parametrize(
    "key, value", [("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [0]}}), ("attributes", 5),
                   ("fill_value", 2**70), ("data_type", "string")],
)  # fmt: skip
def test_what_zarr_does_not_refuse(key, value, read, tmp_path):
    """Metadata that zarr opens, or at which it raises anything: one line."""
    file = write(tmp_path / "data", *BOUNDED["zstd"], CHUNK).parents[1] / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(RunError, match=r"^[^\n]+$"):
        read(tmp_path / "data")


def test_the_second_member_of_a_gzip_file(tmp_path):
    """All members count."""
    file = write(tmp_path / "data", *BOUNDED["gzip"], CHUNK)
    file.write_bytes(file.read_bytes() + gzip.compress(bytes(2**26), 1))
    with pytest.raises(RunError, match="unpacks to more than the 1024 bytes"):
        as_data(tmp_path / "data")
