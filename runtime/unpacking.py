"""Checks others' compressed chunks of zarr before they are unpacked: a kilobyte may say a gigabyte.

    require_readable(array)                        # at its opening
    require_size(array.compressors[0], content, 1024)  # of format 2, before decoding; zarr does so in format 3

zarr takes its codecs of format 3 from a registry, where bounded ones replace its own when this module is imported.
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numcodecs
import zarr
import zarr.codecs
import zarr.registry

FORMAT_2 = (numcodecs.Blosc, numcodecs.Zstd, numcodecs.GZip, numcodecs.Zlib, numcodecs.LZ4)
FORMAT_3 = {
    zarr.codecs.BytesCodec, zarr.codecs.TransposeCodec, zarr.codecs.ShardingCodec, zarr.codecs.Crc32cCodec,
}  # fmt: skip
KNOWN = "blosc, zstd, gzip and crc32c are read, of format 2 also zlib and lz4, without filters"


class Bounded:
    """Mixed into zarr's compressors: checks a chunk's size before it is decompressed."""

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        size = math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        require_size(self, chunk_bytes.to_bytes(), size)
        return await super()._decode_single(chunk_bytes, chunk_spec)  # type: ignore[misc]


for _codec in (zarr.codecs.GzipCodec, zarr.codecs.BloscCodec, zarr.codecs.ZstdCodec):
    _name = _codec.__name__.removesuffix("Codec").lower()
    _bounded: Any = type(_codec.__name__, (Bounded, _codec), {"__module__": __name__})
    zarr.registry.register_codec(_name, _bounded)
    zarr.config.set({f"codecs.{_name}": f"{__name__}.{_codec.__name__}"})
    FORMAT_3.add(_bounded)


def require_readable(array: zarr.Array) -> None:
    """Raises ValueError: a codec is none whose result is bounded, or zarr would raise anything when it reads."""
    about: Any = array.metadata
    if array.dtype.kind not in "biufc":
        raise ValueError(f"{array.path or 'an array'} holds {array.dtype}, expected numbers")
    if any(size < 1 for size in array.chunks):
        raise ValueError(f"{array.path or 'an array'} has chunks of the shape {list(array.chunks)}")
    if not isinstance(about.attributes, dict):
        raise ValueError(f"{array.path or 'an array'} has attributes that are no object in braces")
    if about.zarr_format == 2:
        is_known = not about.filters and isinstance(about.compressor, (*FORMAT_2, type(None)))
    else:
        is_known = {type(codec) for codec in _within(about.codecs)} <= FORMAT_3
    if not is_known:
        raise ValueError(f"{array.path or 'an array'} has another codec: {KNOWN}")


def _within(codecs: Iterable[Any]) -> Iterator[Any]:
    for codec in codecs:
        yield codec
        if isinstance(codec, zarr.codecs.ShardingCodec):
            yield from _within([*codec.codecs, *codec.index_codecs])


def require_size(codec: Any, content: bytes, size: int) -> None:
    """Raises ValueError: the content is not that of a chunk of so many bytes, whether compressed once more or not; or,
    as blosc says, it is not whole."""
    most = 2 * size + 2**16
    if isinstance(codec, zarr.codecs.GzipCodec | numcodecs.GZip | numcodecs.Zlib):
        unpacked = _zlib_size(content, most)
    elif isinstance(codec, zarr.codecs.BloscCodec | numcodecs.Blosc):
        unpacked, written = int.from_bytes(content[4:8], "little"), int.from_bytes(content[12:16], "little")
        if written != len(content):  # numcodecs 0.16 decodes incompressible values that were cut short to garbage
            raise ValueError(f"it has {len(content)} bytes and was written with {written}")
    elif isinstance(codec, zarr.codecs.ZstdCodec | numcodecs.Zstd):
        unpacked = _zstd_size(content)
    else:
        unpacked = int.from_bytes(content[:4], "little") if isinstance(codec, numcodecs.LZ4) else 0
    if unpacked > most:
        raise ValueError(f"it unpacks to more than the {size} bytes of a chunk")


def _zlib_size(content: bytes, most: int) -> int:
    """The size of all members, counted up to where it is more than `most`."""
    size = 0
    while content and size <= most:
        member = zlib.decompressobj(zlib.MAX_WBITS | 32)
        size += len(member.decompress(content, most + 1))
        content = member.unused_data
    return size


def _zstd_size(content: bytes) -> int:
    """The size that the first frame says (RFC 8878, section 3.1.1.1). Raises ValueError: it says none."""
    about = content[4] if len(content) > 4 else 0
    is_single = about >> 5 & 1
    size_bytes = [is_single, 2, 4, 8][about >> 6]
    start = 6 - is_single + [0, 1, 2, 4][about & 3]
    if not size_bytes:
        raise ValueError("it does not say to what size it unpacks")
    return int.from_bytes(content[start : start + size_bytes], "little") + 256 * (size_bytes == 2)
