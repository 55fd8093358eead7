"""Refusals of a loader before it reads: data that do not fit the run or each other, too few, too much memory."""

from collections.abc import Sequence
from typing import Any

from runtime.data.flat_tokens import Split
from runtime.data.rows import PackedRows, SequenceRows
from runtime.terminal import RunError

MAX_BYTES = 4 * 2**30  # host memory that one split may take


def check_rows(split: Split, length: int, read_length: int, is_packed: bool, batch: Any) -> None:
    """Refuses a split in other rows than the run's, or with more than its batch holds. batch: its sharding."""
    where = split.where
    if bool(read_length) != bool(split.read_length):
        pairs, encoder = "pairs" if split.read_length else "no pairs", "an" if read_length else "no"
        raise RunError(f"{where} holds {pairs} of what is read and what is written: this program has {encoder} encoder")
    is_other = (split.row_length, split.read_length) != (length, read_length)
    if split.row_length and (is_other or not is_packed):
        keys = f"training.tokens.len={split.row_length}"
        keys += f" and training.tokens.read_len={split.read_length}" if split.read_length else ""
        rows = f"rows of {split.row_length} tokens, which hold sequences whole"
        raise RunError(f"{where} was written in {rows}: set {keys}, with flat_tokens.sequence_packing=true")
    if split.targets == "weight" and not hasattr(batch, "weight"):
        fix = "write the data set without them, or train with a program whose batch has the field `weight`"
        raise RunError(f"{where} holds weights of targets, which this program's loss does not take: {fix}")


def check_same_bos_id(splits: Sequence[Split]) -> int:
    if len({split.bos_id for split in splits}) > 1:
        texts = ", ".join(f"{split.bos_id} in {split.where}" for split in splits)
        what = "the input before a sequence's first token"
        raise RunError(f"the sources of the mixture differ in bos_id, {what}: {texts}: write them with one tokenizer")
    return splits[0].bos_id


def check_enough(sources: Sequence[PackedRows | SequenceRows], steps: int | None, epochs: int, batch: int) -> None:
    """Refuses less than a batch; and a source without rows where rows come again (steps is None, or a mixture)."""
    fix = "lower training.tokens.batch or training.tokens.len, or use more data"
    for rows in sources:
        if rows.count == 0 and (steps is None or len(sources) > 1):
            raise RunError(f"{rows.text}: each source needs at least one row; {fix}")
    if steps == 0:
        texts = "; ".join(rows.text for rows in sources)
        raise RunError(f"{texts}: in flat_tokens.epochs = {epochs} that is less than one batch of {batch}; {fix}")


def check_batch(rows: int, length: int) -> None:
    """Checks a host's rows before anything is allocated: a token takes 5 bytes."""
    if (size := 5 * rows * length) > MAX_BYTES:
        what = f"a batch of {rows} rows of {length} tokens on each host takes {size:,} bytes of host memory"
        raise RunError(f"{what}, more than {MAX_BYTES:,}: lower training.tokens.batch or training.tokens.len")


def check_memory(most_bytes: int, names: Sequence[str]) -> None:
    if most_bytes > MAX_BYTES:
        keys = "flat_tokens.read_blocks_per_shuffle_buffer, flat_tokens.sequences_per_read_block or io.max_io_threads"
        what = f"reading {', '.join(names)} takes up to {most_bytes:,} bytes of host memory"
        raise RunError(f"{what}, more than {MAX_BYTES:,}: lower {keys}")
