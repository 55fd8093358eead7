"""A vector for each text: the hidden states of any model of models/, for search, clustering, or a classifier on top.

    python -m tools.embed google-bert/bert-base-uncased lines.txt to=vectors.npy              # float32 [texts, M]
    python -m tools.embed runs/bert pairs.jsonl to=vectors.npy pool=first mesh.t=2

A line is a text; in .jsonl its field `text` is one, or a list of two that BERT reads as a pair. The hidden states of an
encoder, T5's too, are its output; a decoder's are those that logits are computed from.
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np

from models.decoding import SLOTS
from models.reading import Pool, batch_of
from runtime.config import command_line
from runtime.config.keys import Count
from runtime.files import write_whole
from runtime.terminal import RunError, print_line, progress, run_errors
from tools.hosts import from_first, is_first
from tools.ready import OnDevices, ReadyModel, ready_model, start_mesh, values_of


@dataclass(frozen=True, kw_only=True)
class Embed(OnDevices):
    WORDS: ClassVar = ("model", "input")

    input: str  # a file of texts: .txt, one a line, or .jsonl
    to: str  # an .npy file that is not there yet
    pool: Pool = "mean"  # one vector from a text's hidden states: their mean, the first, or the last
    is_unit: bool = False  # vectors of length 1, whose products are cosines
    rows: Count = 32  # batch size, in texts


def texts_of(path: str) -> list[list[str]]:
    """The text of each line, or its pair of texts. Raises RunError with the line that is wrong."""
    texts = []
    for where, text in values_of(path, "text"):
        parts = [text] if isinstance(text, str) else text
        if not isinstance(parts, list) or len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
            raise RunError(f"{where}: expected an object whose field text is a text, or a list of two")
        texts.append(parts)
    return texts


def ids_of(ready: ReadyModel, parts: Sequence[str]) -> tuple[list[int], int]:
    """The ids of a text or a pair, and how many of them are of the first. Raises RunError where there is none, or a
    second that the model does not know."""
    if len(parts) > 1 and getattr(ready.source.model, "kinds", 1) < 2:
        raise RunError("two texts are for models that know pairs (BERT): expected one")
    first = [*ready.start, *ready.encoded(parts[0]), *ready.end]
    ids = first + [token for part in parts[1:] for token in (*ready.encoded(part), *ready.end)]
    if not 0 < len(ids) <= ready.length:
        raise RunError(f"{parts[0][:40]!r}: {len(ids)} tokens, expected 1 to {ready.length}: shorten it")
    return ids, len(first)


def main(config: Embed) -> None:
    to = Path(config.to).expanduser()

    def begin() -> list[list[str]]:
        texts = texts_of(config.input)
        if os.path.lexists(to) or to.suffix != ".npy":
            raise RunError(f"to={config.to}: expected a file in .npy that is not there yet")
        with run_errors(f"to={config.to} cannot be written"):
            part = to.with_name(f"{to.name}.part")  # as write_whole has one
            part.touch()
            part.unlink()
        return texts

    with jax.set_mesh(start_mesh(config)):
        texts = from_first(begin)
        ready = ready_model(config, is_read=True)
        encoded = [ids_of(ready, parts) for parts in texts]
        vectors = np.zeros((len(encoded), ready.source.model.d_model), np.float32)
        for start in progress(range(0, len(encoded), config.rows), unit=" batches", disable=not is_first()):
            batch = encoded[start : start + config.rows]
            room = -(-max(len(ids) for ids, _ in batch) // SLOTS) * SLOTS
            rows = batch_of([ids for ids, _ in batch], min(room, ready.length), config.rows)
            for kinds, (ids, first) in zip(rows[3], batch):
                kinds[first : len(ids)] = 1
            vectors[start : start + config.rows] = ready.generator.embed(rows, config.pool)[: len(batch)]
    if config.is_unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    if not is_first():
        return
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(vectors))
    with run_errors(f"to={config.to} cannot be written"):
        write_whole(to, header.getvalue(), vectors.data)
    print_line(f"{len(vectors):,} vectors of {vectors.shape[1]:,} numbers: {config.to}")


if __name__ == "__main__":
    command_line.run(main, Embed)
