"""Where a run's batches come from: one of `flat_tokens.filespec`, `mixture`, which may have hf_dataset.path among its
sources, and `hf_dataset.path`."""

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.batches import UNSHUFFLED_BATCHES, Batch, Loader
from runtime.data.chunks import open_checked
from runtime.data.documents import find_splits
from runtime.data.flat_tokens import absolute_path
from runtime.data.growing import GrowingSplit
from runtime.data.row_stream import BUFFERS_AHEAD
from runtime.data.tokenizers import BYTES, Tokenizer, load_dataset_tokenizer, load_tokenizer
from runtime.files import read_text
from runtime.terminal import RunError, run_errors


def open_data(config: Any, split: str, sharding: Batch) -> Loader:
    """The loader of one split: `train`, or `validation`, read in order, once, up to validation_batches.

    With hf_dataset.path it tokenizes into the run folder, which this run must own. Raises RunError: no data to open."""
    tokens, is_training = config.training.tokens, split == "train"
    options: dict[str, Any] = {
        "batch": tokens.batch,
        "length": tokens.len,
        "read_length": getattr(tokens, "read_len", 0),
        "sharding": sharding,
        "doubles_at": getattr(config.training, "batch_doubles_at", ()),
        "mixture": config.mixture,
        "shuffle": is_training,
        "batches": None if is_training else config.validation_batches,
        "io_threads": config.io.max_io_threads,
    }
    if config.hf_dataset.path:
        options["growing"] = {os.path.expanduser(config.hf_dataset.path): growing_split(config, split)}
    return Loader(config.flat_tokens, split, **options)


def growing_split(config: Any, split: str) -> GrowingSplit:
    """The tokens of hf_dataset.path, not begun yet. Raises RunError: a package, data set or split is missing."""
    stream, tokens = config.hf_dataset, config.training.tokens
    where = f"the data set {os.path.expanduser(stream.path)}" + (f" ({stream.name})" if stream.name else "")
    name = "train" if split == "train" else stream.validation_split
    splits = find_splits(stream.path, stream.name)
    if name not in splits:
        held = ", ".join(f"'{name}'" for name in splits)
        fix = "" if split == "train" else "set hf_dataset.validation_split to one of them, or "
        raise RunError(f"{where} has no split '{name}'; it holds {held}: {fix}add {name}.jsonl to a folder of your own")
    keys = {
        "hf_dataset.path": stream.path,
        "hf_dataset.name": stream.name or "",
        "hf_dataset.split": name,
        "tokenizer": stream.tokenizer,
        "fields": json.dumps([stream.text_field]),
        "separator": "\\n",  # a line of a text file is a document
        "validation_fraction": "0",
    }
    # Another stream under the same config is another data set.
    identity = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]
    weights = {source.filespec: source.weight for source in config.mixture}
    share = weights[os.path.expanduser(stream.path)] / sum(weights.values()) if weights else 1.0
    batches, batches_ahead, ahead = config.validation_batches, 0, 0
    if split == "train":
        batches, batches_ahead = config.training.steps, 2 * (1 + BUFFERS_AHEAD) * UNSHUFFLED_BATCHES
        ahead = stream.tokens_ahead
    rows = math.ceil(batches * tokens.batch * share) + batches_ahead * tokens.batch
    return GrowingSplit(
        where=f"{where}, split '{name}'",
        files=len(splits[name]),
        tokenizer=load_tokenizer(stream.tokenizer),
        path=absolute_path(f"{config.paths.root_working_dir}/{config.paths.model_name}/tokens/{split}-{identity}.zarr"),
        keys=keys,
        tokens_ahead=ahead,
        most_tokens=rows * tokens.len + ahead,
    )


def bytes_per_token(config: Any) -> float | None:
    """The mean number of bytes of text a token; None where the data do not say.

    bytes_utf8 has 1. For another tokenizer it is known if tools.tokenize_text read plain text and recorded its size;
    for a mixture it is the mean by weight, if all sources say it.
    """
    text = os.path.expanduser(config.hf_dataset.path or "")
    of_text = 1.0 if config.hf_dataset.tokenizer == BYTES else None
    weights = {source.filespec: source.weight for source in config.mixture} or {text or config.flat_tokens.filespec: 1}
    known = [of_text if path == text else _bytes_per_token(path) for path in weights]
    if None in known:
        return None
    return float(np.average(np.array(known, float), weights=list(weights.values())))


def _bytes_per_token(path: str) -> float | None:
    attributes: dict[str, Any] = open_checked(absolute_path(path)).attrs.asdict()
    if (attributes.get("tokenizer") or {}).get("name") == BYTES:
        return 1.0
    made_by = attributes.get("made_by") or {}
    written = made_by.get("config") or {}
    inputs = [written[key] for key in ("input", "validation") if written.get(key)]
    if "counts" in attributes and inputs and all(name.endswith(".txt") for name in inputs):
        return made_by["input_size"] / max(attributes["counts"]["tokens"], 1)
    return None


# ---------------------------------------------------------------- the tokenizer of a run

RECORD = "tokenizer_record.json"  # in the run folder; not the form of the package `tokenizers`, which is in it


def tokenizer_of(config: Any) -> Tokenizer | None:
    """The tokenizer that made the run's ids: of the text, else of the first source; None where the data name none.

    Raises RunError: a data set that is mixed with the text has other ids.
    """
    stream = config.hf_dataset
    if not stream.path:
        return load_dataset_tokenizer(config.mixture[0].filespec if config.mixture else config.flat_tokens.filespec)
    tokenizer, text = load_tokenizer(stream.tokenizer), os.path.expanduser(stream.path)
    for name in (source.filespec for source in config.mixture if source.filespec != text):
        other = load_dataset_tokenizer(name)
        if other is not None and not other.has_ids_of(tokenizer):
            what = f"{name} was written with another tokenizer ({other.name}) than hf_dataset.tokenizer"
            raise RunError(f"{what} = {stream.tokenizer}: set that to {name}, to take the data set's")
    return tokenizer


def keep_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copies a tokenizer into a run folder, which is then enough to sample from."""
    (folder / RECORD).write_text(json.dumps(dataclasses.asdict(tokenizer)), encoding="utf-8")


def kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that `keep_tokenizer` has copied. Raises RunError: it is damaged."""
    file = folder / RECORD
    with run_errors(f"{file} cannot be read", ValueError, TypeError, RecursionError):
        return Tokenizer(**json.loads(read_text(file))) if os.path.lexists(file) else None
