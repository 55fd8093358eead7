"""Scores a run with its own program, however train.py was changed: the copy of it in the run folder.

    python -m tools.score runs/changed exam.jsonl program=run

A trainer's validation step adds up the losses of a batch's targets. If these are one continuation, the sum is minus its
log likelihood. So continuations are computed one by one, and no answer is written.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.huggingface import Source, weights_in
from models.likelihoods import Pair, room_of
from models.mesh import placed
from runtime import program
from runtime.checkpoints.checkpoint import open_newest, restore
from runtime.config.resume import config_of
from runtime.data.sources import kept_tokenizer
from runtime.run import with_shardings
from runtime.terminal import RunError, progress
from shardlib.mesh import current_mesh
from shardlib.shardtypes import make_shardings
from tools.hosts import is_first
from tools.ready import OnDevices, ReadyModel
from tools.tasks import Scorer


class OwnProgram:
    """A run's program.py and its config, for the mesh of a tool.

    Raises:
      RunError: it has none, it or what it is made of has changed, or the mesh has other axes.
    """

    def __init__(self, keys: OnDevices):
        with ThreadPoolExecutor(1) as pool:
            self.checkpoint = open_newest(keys.model, pool)
        path, attributes = self.checkpoint.path, self.checkpoint.attributes
        self.folder = Path(path).parents[1]
        if "family" in attributes:
            raise RunError(f"program=run: {path} is of a file of models/, of which a run keeps no copy: leave it out")
        self.trainer = program.of_run(self.folder, attributes, is_changed=keys.allow_program_change)
        config: Any = config_of(self.trainer.Config, attributes)
        axes, asked = vars(config.mesh), vars(keys.mesh)
        if missing := [f"mesh.{axis}" for axis in asked.keys() - axes.keys() if asked[axis] > 1]:
            raise RunError(f"{missing[0]}: the program of {path} has the axes {', '.join(axes)}")
        self.config = replace(config, mesh=replace(config.mesh, **{axis: asked.get(axis, 1) for axis in axes}))

    def scorer(self, compute_dtype: str | None, length: int) -> "OwnScorer":
        """A `Scorer` on the current mesh."""
        config, trainer, tokenizer = self.config, self.trainer, kept_tokenizer(self.folder)
        if tokenizer is None:
            raise RunError(f"{self.folder} has no tokenizer, which texts need")
        if compute_dtype is not None:
            config = replace(config, model=replace(config.model, compute_dtype=compute_dtype))
        state, _ = trainer.shapes(config)
        like = {"weights": with_shardings(state, trainer.State).weights}
        with ThreadPoolExecutor() as pool:
            weights = restore(replace(self.checkpoint, arrays=weights_in(self.checkpoint)), like, pool)["weights"]
        _, add_batch = trainer.mapped_steps(config, tokenizer.bos_id)
        source = Source(self.checkpoint, None, config.model, self.folder)
        ready = ReadyModel(None, source, tokenizer, (tokenizer.bos_id,), (), config.training.tokens.len)
        return OwnScorer(ready, length, functools.partial(jax.jit(add_batch), weights), trainer.TokenBatch)


class OwnScorer(Scorer):
    """Log likelihoods by a validation step. A row begins with bos_id in the place of its first token, as in training.

    Args:
      add_batch: the trainer's validation step, without its weights.
      batch_type: the trainer's TokenBatch, with the fields of `Batch`.
    """

    kind = "decoder"

    def __init__(self, ready: ReadyModel, length: int, add_batch: Callable, batch_type: type):
        self.ready, self.length, self.add_batch, self.batch_type = ready, ready.at_most(length), add_batch, batch_type
        mesh: Any = current_mesh()
        # Two rows a device, as in `Scorer`: the continuation's, and others without targets.
        self.rows = 2 * mesh.size // make_shardings(batch_type).targets.shard_shape((mesh.size, 1))[0]

    def __call__(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log probability of each pair's continuation; and False, since what greedy decoding writes is unknown."""
        shown = progress(self.cut(pairs), unit=" texts", disable=not is_first())
        return [(self._log_probability(*pair), False) for pair in shown]

    def _log_probability(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        ids, first = [*context, *continuation][1:], len(context) - 1
        shape = self.rows, room_of(len(ids), self.length)
        targets, is_start, is_target = np.zeros(shape, np.uint32), np.zeros(shape, bool), np.zeros(shape, bool)
        targets[0, : len(ids)], is_target[0, first : len(ids)] = ids, True
        is_start[0, len(ids) :] = True
        batch = placed(self.batch_type(targets, is_start, is_target), self.batch_type)
        loss, _ = self.add_batch(np.float32(0), np.float32(0), batch)
        return -float(loss)
