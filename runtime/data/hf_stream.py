"""Training straight from a Hugging Face data set, or from a folder of text files, without writing flat tokens first.

    with HuggingFaceLoader(config.hf_dataset, "train", batch=64, length=1024, sharding=sharding) as loader:
        batch = loader.load(0)      # of global arrays; then 1, 2, …: a stream goes on in order
        state = loader.state()      # where the batches so far end: JSON values, for the checkpoint

Rows are filled with documents one after another, in the order they are stored in. What a row has no room for begins the
next one, or the next batch's first: nothing is dropped and nothing padded. Each host reads and tokenizes a share of the
documents, for its own rows; at the end of its share it begins again.
"""

import contextlib
import itertools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from runtime.data.batches import BATCHES_AHEAD, Batch, Batches, token_batch
from runtime.data.flat_tokens import ENCODED_PADDING
from runtime.data.read_ahead import NO_END, ReadAhead
from runtime.data.token_stream import Position, TokenStream
from runtime.data.tokenizers import load_tokenizer
from runtime.terminal import RunError, print_line

STEPS_REMEMBERED = 1000  # whose documents can be named


class HuggingFaceLoader(Batches):
    """Loads the batches of one split, as runtime.data.batches.Loader does for flat tokens.

    Args:
      hf_dataset: the section of the config.
      split: `train` or `validation`; the config says what the data set calls it.
      batch: rows of a batch, over all hosts.
      length: tokens of a row.
      sharding: of a batch. Hosts that hold the same rows read the same share.
      batches: None to train, without end. A number to validate: one pass of so many batches at most, read at once and
        kept in memory, so that each validation sees the same; the last is filled up with what is no target.
    Raises:
      RunError: the data set or the tokenizer cannot be opened, or the first batch cannot be read.
    """

    def __init__(
        self,
        hf_dataset: Any,
        split: str,
        *,
        batch: int,
        length: int,
        sharding: Batch,
        batches: int | None = None,
    ):
        self._config, self._split, self._batch, self._sharding = hf_dataset, split, batch, sharding
        self._host_rows, self._share, self._shares = host_share(sharding.targets, batch, length)
        self._shape = len(self._host_rows), length
        self._tokenizer = load_tokenizer(hf_dataset.tokenizer)
        self.max_token_id, self.bos_id = self._tokenizer.vocab - 1, self._tokenizer.bos_id
        self._kept: list[tuple[np.ndarray, int]] = []
        self.steps = None
        self._open(0, {}, endless=batches is None)
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            if batches is None:
                self._batches(0)  # so that what is wrong shows before anything is compiled
            else:
                takes = (self._stream.take(self._shape[0] * length) for _ in range(batches))
                self._kept = list(itertools.takewhile(lambda take: take[1] > 0, takes))
                self.steps = int(on_all_hosts(len(self._kept)).max())
                if not self.steps:
                    raise RunError(f"{self._stream.where} holds no text")
            opened.pop_all()

    def load(self, step: int) -> Batch:
        """The batch of a step: in training the step after the last one, in validation any.

        Raises:
          RunError: the data cannot be read.
        """
        if self.steps is not None:  # another host may hold a batch more than this one
            return self._place(*self._kept[step] if step < len(self._kept) else (np.full(0, ENCODED_PADDING), 0))
        batch, end = self._batches(step)
        if end.epoch > self._ends[step - 1].epoch and jax.process_index() == 0:
            print_line(f"step {step + 1}: {self._stream.where} has been read to its end and begins again")
        self._ends[step] = end
        self._ends.pop(step - STEPS_REMEMBERED, None)
        return batch

    def state(self) -> dict[str, Any]:
        """Where the batches loaded so far end, as JSON values for a checkpoint. Called by all hosts alike; sends 20
        bytes a host."""
        of_hosts = on_all_hosts([self._share, *self._ends[max(self._ends)]]).tolist()
        positions = {share: position for share, *position in of_hosts}
        return self._stream.state([positions[share] for share in sorted(positions)])

    def resume(self, step: int, state: dict[str, Any]) -> None:
        """Continues with this step where an earlier loader's `state` says, at the beginning where it says nothing.

        With the same number of shares the batches are those that the earlier loader would have loaded. With another
        number they hold what that one had not loaded yet, each token once a pass, in other rows.
        """
        if step:
            self.close()
            self._open(step, state, endless=True)

    @property
    def summary(self) -> str:
        """What is read, in one line."""
        end = "without end" if self.steps is None else f"{self.steps:,} batches of {self._batch} are read"
        shares = f", in {self._shares} shares" if self._shares > 1 else ""
        return f"{self._stream.where}: {self._stream.files} files{shares}; {end}"

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this split from another, as JSON values: a checkpoint keeps it, so that no run goes on with other
        data."""
        return {"files": self._stream.files, "max_token_id": self.max_token_id, "bos_id": self.bos_id}

    def rows_of(self, step: int) -> list[str]:
        """Where a recent batch comes from, as far as this host's rows go; for a person who looks at what made a step
        bad."""
        places = self._ends[step - 1], self._ends[step]
        begin, end = (f"token {at.token} of document {at.document} of file {at.file}" for at in places)
        return [f"{self._stream.where}, from {begin} to before {end}, of share {self._share} of {self._shares}"]

    def _open(self, step: int, state: dict[str, Any], endless: bool) -> None:
        self._stream = TokenStream(
            self._config, self._split, self._tokenizer, self._share, self._shares, state, endless
        )
        self._next_step = step
        self._ends = {step - 1: self._stream.position}  # of recent batches
        self._batches = ReadAhead(self._read_batch, NO_END, BATCHES_AHEAD, "stream_batches")
        self._opened = contextlib.ExitStack()
        self._opened.callback(self._stream.close)
        self._opened.callback(self._batches.close)

    def _read_batch(self, step: int) -> tuple[Batch, Position]:
        if step != self._next_step:
            raise RunError(f"{self._stream.where} is a stream, read in order: step {step} is not the next")
        tokens, count = self._stream.take(self._shape[0] * self._shape[1])
        self._next_step += 1
        return self._place(tokens, count), self._stream.position

    def _place(self, tokens: np.ndarray, count: int) -> Batch:
        """The global batch of this host's rows: so many tokens one after another, the rest being padding."""
        rows = np.full(self._shape, ENCODED_PADDING)
        rows.reshape(-1)[:count] = tokens[:count]
        is_target = np.arange(rows.size).reshape(rows.shape) < count
        return token_batch(rows, is_target, self._host_rows, self._batch, self._sharding)


def host_share(sharding: jax.sharding.Sharding, batch: int, length: int) -> tuple[np.ndarray, int, int]:
    """The rows of a batch that this host's devices hold, its share, and the number of shares: one for each set of
    rows."""
    rows_of: dict[int, set[int]] = {}
    indices: Any = sharding.devices_indices_map((batch, length))
    for device, (rows, _) in indices.items():
        rows_of.setdefault(device.process_index, set()).update(range(batch)[rows])
    shares = sorted({tuple(sorted(rows)) for rows in rows_of.values()})
    if sum(map(len, shares)) > batch:
        devices = len(sharding.device_set) // len(rows_of)
        raise RunError(
            "hf_dataset.path needs hosts that have all their rows of a batch in common or none: choose sizes of the "
            f"mesh's axes, from the last to the first, that fill the {devices} devices of a host without a rest"
        )
    own = tuple(sorted(rows_of[jax.process_index()]))
    return np.array(own), shares.index(own), len(shares)


def on_all_hosts(value: Any) -> np.ndarray:
    """The value of each host, int32; called by all alike."""
    value = np.asarray(value, np.int32)
    return value[None] if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(value))
