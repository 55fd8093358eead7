"""Where a run's batches come from: the config says it by one of `flat_tokens.filespec`, `mixture` and `hf_dataset.path`."""

from typing import Any

import jax

from runtime.data import Loader
from runtime.hf_stream import HuggingFaceLoader


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
    return Loader(
        config.flat_tokens,
        split,
        **rows,
        mixture=config.mixture,
        shuffle=is_training,
        batches=None if is_training else config.validation_batches,
        io_threads=config.io.max_io_threads,
        max_bytes=config.io.max_data_bytes,
    )
