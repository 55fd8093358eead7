"""A split that grows while it is read: a process beside the run tokenizes text into a data set of the run folder.

    split = GrowingSplit(where="the data set my_texts, split 'train'", path="runs/a/tokens/train-0f1e.zarr", ...)
    split.reach(10**6)      # waits until a million tokens are there; False: the data end before
    split.token_count       # NO_END until the end is reached

The process is tools.tokenize_text, which records in the data set how far it is and, killed, goes on from there. The
first host starts it when it wants more than is there, and tells it on its standard input how much. All hosts read the
data set, so they must share the run folder, as for checkpoints.
"""

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import zarr
import zarr.errors

from runtime import beside
from runtime.data.chunks import check_chunks, open_checked, read_errors
from runtime.data.documents import BLOCK_BYTES
from runtime.data.flat_tokens import Split, open_split
from runtime.data.read_ahead import NO_END
from runtime.data.tokenizers import Tokenizer
from runtime.terminal import RunError, print_line, wrapped

POLL_S = 0.1  # from one look at the data set to the next, while waiting
LONGEST_WAIT_S = 20.0  # at the end of a run, for the tokenizing process to record its progress


class GrowingSplit(Split):
    """A data set holds the beginning of the split, and more when more is asked for.

    Args:
      where: its name in messages.
      files: the number of the text's files.
      path: the data set, a folder or a URL, whose split `train` is written.
      keys: other keys of tools.tokenize_text, with their values.
      tokens_ahead: how many tokens may be written beyond those that were asked for; the last block of text, of
        BLOCK_BYTES, is written whole.
      most_tokens: how many the run will ask for, plus tokens_ahead.
    """

    def __init__(
        self,
        *,
        where: str,
        files: int,
        tokenizer: Tokenizer,
        path: str,
        keys: Mapping[str, str],
        tokens_ahead: int,
        most_tokens: int,
    ):
        nothing = np.empty(0, np.uint32)
        super().__init__(where, nothing, nothing.astype(np.uint64), None, None, tokenizer.vocab - 1, tokenizer.bos_id)
        self.files, self._path, self._most_tokens = files, path, most_tokens
        self._tokens_ahead, self._tokens, self._is_whole = tokens_ahead, 0, False
        keys = {**keys, "output": path, "tokens_ahead": str(tokens_ahead)}
        self._process = Tokenizing(where, keys) if jax.process_index() == 0 else None
        self._is_closed = threading.Event()
        self._lock = threading.Lock()  # batches and buffers are read by threads of their own

    @property
    def token_count(self) -> int:
        return self._tokens if self._is_whole else NO_END

    @property
    def text(self) -> str:
        if self._is_whole:
            return super().text
        return (
            f"{self.where} ({self.files:,} files), tokenized beside the run into {self._path}: "
            f"at most {4 * (self._most_tokens + BLOCK_BYTES) / 1e6:,.1f} MB of disk"
        )

    def reach(self, tokens: int) -> bool:
        """Waits for so many tokens, or the end of the data. Returns whether the tokens are there. Raises RunError: the
        text cannot be tokenized, or the split was closed."""
        with self._lock:
            is_enough = lambda count: self._is_whole or count <= self._tokens  # noqa: E731
            if not is_enough(tokens + self._tokens_ahead):
                self._look()
            if self._process and not is_enough(tokens + self._tokens_ahead) and not self._is_closed.is_set():
                self._process.ask(tokens)
            while not is_enough(tokens):
                failure = self._process and self._process.failure()
                self._look()  # what it wrote before it ended counts
                if not is_enough(tokens) and failure:
                    raise RunError(failure)
                if not is_enough(tokens) and self._is_closed.wait(POLL_S):
                    raise RunError(f"{self.where} is closed")
            if self._process and (self._is_whole or self._tokens >= self._most_tokens):
                self._process.close()
        return tokens <= self._tokens

    def close(self) -> None:
        """Ends the waiting, and the process."""
        self._is_closed.set()
        with self._lock:
            if self._process:
                self._process.close()

    def _look(self) -> None:
        """Takes over the tokens that are there by now."""
        try:
            dataset = open_checked(self._path, self._is_closed)
        except (FileNotFoundError, zarr.errors.GroupNotFoundError):
            return  # the process has not begun
        except read_errors() as error:
            raise RunError(f"{self._path} cannot be read ({type(error).__name__}: {error})") from error
        attributes: dict[str, Any] = dataset.attrs.asdict()
        if "made_by" in attributes:
            whole = open_split(self._path, "train", closing=self._is_closed)
            self.encoded_tokens, self.seq_starts = whole.encoded_tokens, whole.seq_starts
            self._tokens, self._is_whole = whole.encoded_tokens.shape[0], True
            if jax.process_index() == 0:
                print_line(wrapped(f"all of {self.where} is tokenized: {self._tokens:,} tokens"))
            return
        written = attributes.get("tokenizing", {}).get("splits", {}).get("train", {})
        if written.get("tokens", 0) > self._tokens:
            array = dataset["train/encoded_tokens"]
            assert isinstance(array, zarr.Array)
            check_chunks(array)
            self.encoded_tokens, self._tokens = array, written["tokens"]


class Tokenizing:
    """`python -m tools.tokenize_text` beside the run."""

    def __init__(self, where: str, keys: Mapping[str, str]):
        self._where, self._arguments = where, [f"{key}={value}" for key, value in keys.items()]
        self._process: subprocess.Popen | None = None
        self._asked = -1

    def ask(self, tokens: int) -> None:
        """Lets the process write so many tokens, and those that it may write ahead."""
        if self._process is None:
            self._output = tempfile.TemporaryFile()
            self._process = beside.start("tools.tokenize_text", self._arguments, self._output)
        if tokens > self._asked:
            self._asked = tokens
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and failure() says why
                self._process.stdin.write(b"%d\n" % tokens)

    def failure(self) -> str:
        """Why the process has ended; empty while it works. When its work is done, the data set says so."""
        if self._process is None or (status := self._process.poll()) is None:
            return ""
        self._output.seek(0)
        _, said, reason = self._output.read().decode(errors="replace").rpartition("error: ")
        reason = reason.strip() if said else f"the process ended with status {status}"
        return f"{self._where} cannot be tokenized: {reason}"

    def close(self) -> None:
        """Ends the process until more is asked for. What it has recorded stays."""
        if self._process is not None:
            beside.end(self._process, LONGEST_WAIT_S)
            self._output.close()
            self._process, self._asked = None, -1
