"""What SECURITY.md says of data from others."""

import json
import pathlib
import pickle

import pytest
import zarr

from runtime.data.flat_tokens import open_split
from runtime.terminal import RunError


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


@pytest.mark.parametrize("where", [{"compressor": {"id": "pickle"}}, {"filters": [{"id": "pickle"}]}])
def test_data_are_never_unpickled(where, tmp_path):
    """A data set whose chunks say that they are pickles is refused, and no code in them runs."""
    train = zarr.open_group(tmp_path / "data", mode="w", zarr_format=2).create_group("train")
    train.attrs["max_token_id"] = 9
    for name, type_, values in (("encoded_tokens", "uint32", [2] * 8), ("seq_starts", "uint64", [0, 8])):
        train.create_array(name, shape=(len(values),), chunks=(8,), dtype=type_, compressors=None)[:] = values
    opened = open_split(str(tmp_path / "data"), "train")
    assert opened.encoded_tokens[:].tolist() == [2] * 8
    metadata = tmp_path / "data/train/encoded_tokens/.zarray"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | where))
    (tmp_path / "data/train/encoded_tokens/0").write_bytes(pickle.dumps(Touches(tmp_path / "code_ran")))
    with pytest.raises(RunError, match=r"the data set .* cannot be opened .*pickle"):
        open_split(str(tmp_path / "data"), "train").encoded_tokens[:]
    assert not (tmp_path / "code_ran").exists()
