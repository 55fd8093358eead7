"""The documents of a Hugging Face data set, or of a folder of text files, as one stream of tokens for each host.

    stream = TokenStream(config.hf_dataset, "train", tokenizer, share=0, shares=2, state={}, endless=True)
    tokens, count = stream.take(1024)       # as flat tokens: 2 * id + 1 where a document starts, else 2 * id
    stream.position                         # of the token after these

Documents come in the order they are stored in. Each belongs to one share; who reads which follows from the number of
files and of shares alone, so that the positions of all shares say what has been read.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from runtime.data.documents import BadRecord, File, decoded, find_splits, place, read_blocks, records, values
from runtime.data.tokenizers import Tokenizer
from runtime.terminal import RunError, print_line

THREADS = 2  # that tokenize, per host


class Position(NamedTuple):
    """Of a share's next token: what comes before it in the order epoch, file, document, token has been read."""

    epoch: int = 0  # passes over the split that are done
    file: int = 0  # of the split
    document: int = 0  # of the file
    token: int = 0  # of the document


class TokenStream:
    """The tokens of one share of a split's documents, one after another: 2 * id + 1 where a document starts, else 2 *
    id.

    Files are dealt out whole as far as that comes out even; the documents of the rest one by one. So each document
    belongs to one share, and a host opens few files that are not its own.

    Args:
      hf_dataset: the section of the config.
      split: `train` or `validation`; the config says what the data set calls it.
      share, shares: which one, of how many.
      state: what `state` of an earlier stream gave, to go on there; {} begins at the beginning.
      endless: begins again at the end.
    Raises:
      RunError: the data set cannot be opened.
    """

    where: str  # for messages
    files: int
    position: Position  # of the next token

    def __init__(
        self,
        hf_dataset: Any,
        split: str,
        tokenizer: Tokenizer,
        share: int,
        shares: int,
        state: dict[str, Any],
        endless: bool,
    ):
        self.where, self._split, self._files = open_documents(hf_dataset, split)
        self.files, self._field = len(self._files), hf_dataset.text_field
        self._share, self._shares, self._endless = share, shares, endless
        self._tokenizer = tokenizer
        # How far each share got, for each number of shares that the run has had, the latest last.
        self._done = self._restored(state)
        goes_on = bool(self._done) and len(self._done[-1]) == shares
        self._earlier = self._done[:-1] if goes_on else self._done
        latest = self._done[-1] if self._done else [Position()]
        self._begin = self.position = latest[share] if goes_on else min(latest)
        self._continues = self._begin if goes_on else None  # a document whose first tokens the last batch held
        self._rest = np.empty(0, np.uint32)  # of the document that `position` is in
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._documents = self._read_documents()

    def take(self, count: int) -> tuple[np.ndarray, int]:
        """The next `count` tokens, uint32, and how many there were: fewer only at the end of a stream that has one.

        Raises:
          RunError: the data cannot be read.
        """
        tokens, filled = np.empty(count, np.uint32), 0
        while filled < count:
            if not len(self._rest):
                document = next(self._documents, None)
                if document is None:
                    break
                self.position, self._rest = document
            piece = self._rest[: count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._rest = self._rest[len(piece) :]
            epoch, file, number, token = self.position
            at_end = not len(self._rest)
            self.position = Position(epoch, file, *((number + 1, 0) if at_end else (number, token + len(piece))))
        if self._endless and filled < count:
            raise RunError(f"{self.where} cannot be read on, since it failed before: start the run again")
        return tokens, filled

    def state(self, positions: list[Sequence[int]]) -> dict[str, Any]:
        """Where all shares are, as JSON values. positions: of each share, in their order."""
        layouts: list[Any] = [*self._earlier, positions]
        done = [[list(position) for position in layout] for layout in layouts]
        return {"split": self._split, "files": self.files, "positions": done}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _restored(self, state: dict[str, Any]) -> list[list[Position]]:
        if not state:
            return []
        if (state["split"], state["files"]) != (self._split, self.files):  # allowed by allow_config_change
            if jax.process_index() == 0:
                print_line(
                    f"{self.where} is read from its beginning: the position in the checkpoint is of split "
                    f"'{state['split']}' of {state['files']} files, not of '{self._split}' of {self.files}"
                )
            return []
        return [[Position(*position) for position in layout] for layout in state["positions"]]

    def _owner(self, file: int, document: int, shares: int) -> int:
        """The share that a document belongs to."""
        return (file if file < self.files - self.files % shares else document) % shares

    def _used(self, epoch: int, file: int, document: int) -> int | None:
        """How many tokens of a document were read before the state that the stream goes on from; None for all."""
        used = 0
        for layout in self._done:
            position = layout[self._owner(file, document, len(layout))]
            if (epoch, file, document) < position[:3]:
                return None
            if (epoch, file, document) == position[:3]:
                used = max(used, position.token)
        return used

    def _read_documents(self) -> Iterator[tuple[Position, np.ndarray]]:
        """The share's documents with where they begin, tokenized by the workers while the next ones are read."""
        waiting: deque[tuple[list[Position], Any]] = deque()
        tokens_of_pass = 0

        def oldest() -> Iterator[tuple[Position, np.ndarray]]:
            nonlocal tokens_of_pass
            positions, future = waiting.popleft()
            for position, ids in zip(positions, future.result()):
                tokens_of_pass += len(ids)
                encoded = ids << np.uint32(1)
                # A document that another share began starts anew here, since what stands before it is another one.
                if position != self._continues or not position.token:
                    encoded[position.token : position.token + 1] |= np.uint32(1)
                if position.token < len(encoded):
                    yield position, encoded[position.token :]

        # From the pass after this one on, all of the share's documents are read.
        latest = max((position.epoch for layout in self._done for position in layout), default=0)
        for epoch in itertools.count(self._begin.epoch) if self._endless else [0]:
            for file in range(self._begin.file if epoch == self._begin.epoch else 0, self.files):
                try:
                    for positions, texts in self._read_file(epoch, file):
                        waiting.append((positions, self._pool.submit(self._tokenizer.encode_batch, texts)))
                        while len(waiting) > THREADS:
                            yield from oldest()
                except RunError:  # is met when the documents before it have been used
                    while waiting:
                        yield from oldest()
                    raise
            while waiting:
                yield from oldest()
            if self._endless and not tokens_of_pass and epoch > latest:
                share = f" for share {self._share} of {self._shares}" if self._shares > 1 else ""
                raise RunError(f"{self.where} holds no text{share}: use more data, or fewer hosts")
            tokens_of_pass = 0

    def _read_file(self, epoch: int, file: int) -> Iterator[tuple[list[Position], list[str]]]:
        """The share's documents of a file, some at a time, that have not been read before."""
        if self._share not in {self._owner(file, number, self._shares) for number in range(self._shares)}:
            return
        first, is_text = 0, self._files[file].kind == "text"
        for block in read_blocks(self._files[file : file + 1]):
            positions: list[Position] = []
            texts: list[str] = []
            for document, (number, record) in enumerate(records(block), first):
                first += 1
                if self._owner(file, document, self._shares) != self._share:
                    continue
                if (tokens := self._used(epoch, file, document)) is None:
                    continue
                try:
                    texts.append(
                        decoded(record) if is_text and isinstance(record, bytes) else values(record, [self._field])[0]
                    )
                except BadRecord as error:
                    yield positions, texts
                    fix = "mend it, or set hf_dataset.text_field to the field that holds the text"
                    raise RunError(f"{place(block, number)}: {error}: {fix}") from error
                positions.append(Position(epoch, file, document, tokens))
            yield positions, texts


def open_documents(hf_dataset: Any, split: str) -> tuple[str, str, list[File]]:
    """What messages call the split, what the data set calls it, and its files.

    Raises:
      RunError: a package, the data set or the split is missing.
    """
    splits = find_splits(hf_dataset.path, hf_dataset.name)
    where = f"the data set {os.path.expanduser(hf_dataset.path)}" + (f" ({hf_dataset.name})" if hf_dataset.name else "")
    name = "train" if split == "train" else hf_dataset.validation_split
    if name not in splits:
        held = ", ".join(f"'{each}'" for each in splits)
        fix = "" if split == "train" else "set hf_dataset.validation_split to one of them, or "
        raise RunError(f"{where} has no split '{name}'; it holds {held}: {fix}add {name}.jsonl to a folder of your own")
    return f"{where}, split '{name}'", name, splits[name]
