"""Where a run's batches come from: the config says it by one of `flat_tokens.filespec`, `mixture` and
`hf_dataset.path`."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.batches import Batch, Loader
from runtime.data.chunks import open_group
from runtime.data.flat_tokens import absolute_path
from runtime.data.hf_stream import HuggingFaceLoader
from runtime.data.tokenizers import BYTES, Tokenizer, load_dataset_tokenizer, load_tokenizer
from runtime.terminal import RunError


def open_data(config: Any, split: str, sharding: Batch) -> Loader | HuggingFaceLoader:
    """The loader of one split: `train`, or `validation`, which is read in order, once, and no further than
    validation_batches. Raises RunError where the data cannot be opened."""
    is_training = split == "train"
    batches = None if is_training else config.validation_batches
    tokens, read_length = config.training.tokens, getattr(config.training.tokens, "read_len", 0)
    rows = {"batch": tokens.batch, "length": tokens.len, "sharding": sharding}
    doubles_at = getattr(config.training, "batch_doubles_at", ())
    if config.hf_dataset.path:
        if read_length:
            raise RunError(
                "hf_dataset.path gives no tokens for an encoder: write flat tokens with format=pairs instead"
            )
        if doubles_at:
            raise RunError(
                "training.batch_doubles_at: rows of hf_dataset.path have no numbers: write flat tokens instead"
            )
        return HuggingFaceLoader(config.hf_dataset, split, **rows, batches=batches)
    io_threads = config.io.max_io_threads
    options: dict[str, Any] = {"read_length": read_length, "doubles_at": doubles_at}
    options |= {"mixture": config.mixture, "shuffle": is_training, "batches": batches, "io_threads": io_threads}
    return Loader(config.flat_tokens, split, **rows, **options)


def bytes_per_token(config: Any) -> float | None:
    """How many bytes of text a token of the data stands for, the mean; None where the data do not say.

    Of bytes_utf8 that is 1. Of another tokenizer it is known where tools.tokenize_text read plain text, of which it
    recorded the size. Of a mixture it is the mean by weight, if all sources say it.
    """
    if config.hf_dataset.path:
        return 1.0 if config.hf_dataset.tokenizer == BYTES else None
    weights = {source.filespec: source.weight for source in config.mixture} or {config.flat_tokens.filespec: 1.0}
    known = [_bytes_per_token(open_group(absolute_path(path), mode="r").attrs.asdict()) for path in weights]
    if None in known:
        return None
    return float(np.average(np.array(known, float), weights=list(weights.values())))


def _bytes_per_token(attributes: dict[str, Any]) -> float | None:
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
    """The tokenizer that made the run's ids; of a mixture its first source's; None where the data name none."""
    if config.hf_dataset.path:
        return load_tokenizer(config.hf_dataset.tokenizer)
    return load_dataset_tokenizer(config.mixture[0].filespec if config.mixture else config.flat_tokens.filespec)


def keep_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copies a tokenizer into a run folder, which is then enough to sample from."""
    (folder / RECORD).write_text(json.dumps(dataclasses.asdict(tokenizer)), encoding="utf-8")


def kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The one that `keep_tokenizer` has copied."""
    file = folder / RECORD
    return Tokenizer(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """What tells it from another: of its content, not its name."""
    content = {**dataclasses.asdict(tokenizer), "name": ""}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
