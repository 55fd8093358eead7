"""Where a run's batches come from: the config says it by one of `flat_tokens.filespec`, `mixture` and
`hf_dataset.path`."""

from typing import Any

import jax
import numpy as np

from runtime.data.batches import Loader
from runtime.data.chunks import has_checksums, open_group
from runtime.data.flat_tokens import absolute_path
from runtime.data.hf_stream import HuggingFaceLoader
from runtime.data.tokenizers import BYTES
from runtime.terminal import print_line


def open_data(config: Any, split: str, sharding: jax.sharding.Sharding) -> Loader | HuggingFaceLoader:
    """The loader of one split.

    Args:
      config: train.py's.
      split: `train`, or `validation`, which is read in order, once, and no further than validation_batches.
      sharding: of a batch's arrays 'B/d L'.
    Raises:
      RunError: the data cannot be opened.
    """
    is_training = split == "train"
    rows = {"batch": config.training.tokens.batch, "length": config.training.tokens.len, "sharding": sharding}
    if config.hf_dataset.path:
        return HuggingFaceLoader(
            config.hf_dataset, split, **rows, batches=None if is_training else config.validation_batches
        )
    loader = Loader(
        config.flat_tokens,
        split,
        **rows,
        mixture=config.mixture,
        shuffle=is_training,
        batches=None if is_training else config.validation_batches,
        io_threads=config.io.max_io_threads,
        max_bytes=config.io.max_data_bytes,
    )
    if is_training and jax.process_index() == 0:
        paths = [source.filespec for source in config.mixture] or [config.flat_tokens.filespec]
        old = [
            path for path in paths if not has_checksums(open_group(absolute_path(path), "r")[split]["encoded_tokens"])
        ]
        if old:
            print_line(
                f"{', '.join(old)}: written without checksums, so a bit that flips on disk is not noticed; "
                "written again it has them"
            )
    return loader


def bytes_per_token(config: Any) -> float | None:
    """How many bytes of text a token of the data stands for, the mean; None where the data do not say.

    Of bytes_utf8 that is 1. Of another tokenizer it is known where tools.tokenize_text read plain text, of which it
    recorded the size. Of a mixture it is the mean by weight, if all sources say it.
    """
    if config.hf_dataset.path:
        return 1.0 if config.hf_dataset.tokenizer == BYTES else None
    weights = {source.filespec: source.weight for source in config.mixture} or {config.flat_tokens.filespec: 1.0}
    known = [_bytes_per_token(open_group(absolute_path(path), mode="r").attrs.asdict()) for path in weights]
    return None if None in known else float(np.average(known, weights=list(weights.values())))


def _bytes_per_token(attributes: dict[str, Any]) -> float | None:
    if (attributes.get("tokenizer") or {}).get("name") == BYTES:
        return 1.0
    made_by = attributes.get("made_by") or {}
    written = made_by.get("config") or {}
    inputs = [written.get(key) for key in ("input", "validation") if written.get(key)]
    if "counts" in attributes and inputs and all(name.endswith(".txt") for name in inputs):
        return made_by["input_size"] / max(attributes["counts"]["tokens"], 1)
    return None
