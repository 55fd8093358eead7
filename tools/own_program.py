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
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from models.huggingface import Source, averaged, weights_in
from models.likelihoods import Pair, room_of
from models.mesh import placed
from runtime import program
from runtime.check import check_sizes
from runtime.checkpoints.checkpoint import open_newest, restore
from runtime.config.rebuild import Origins
from runtime.config.resume import config_of
from runtime.run import with_shardings
from runtime.terminal import RunError, progress
from shardlib.mesh import current_mesh
from shardlib.shardtypes import make_shardings
from tools.hosts import is_first
from tools.ready import OnDevices, ReadyModel, tokenizer_of
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
        # Of a run in an object store program.py is here, where the run was.
        self.folder = Path("runs", path.split("/")[-3]) if "://" in path else Path(path).resolve().parents[1]
        if "family" in attributes:
            raise RunError(f"program=run: {path} is of a file of models/, of which a run keeps no copy: leave it out")
        self.trainer = program.of_run(self.folder, attributes, is_changed=keys.allow_program_change)
        config: Any = config_of(self.trainer.Config, attributes)
        if keys.compute_dtype is not None and not hasattr(config.model, "compute_dtype"):
            raise RunError(f"compute_dtype: the model of {path} has no such key: leave it out")
        axes, asked = vars(config.mesh), vars(keys.mesh)
        if missing := [f"mesh.{axis}" for axis in asked.keys() - axes.keys() if asked[axis] > 1]:
            raise RunError(f"{missing[0]}: the program of {path} has the axes {', '.join(axes)}")
        self.config = replace(config, mesh=replace(config.mesh, **{axis: asked.get(axis, 1) for axis in axes}))

    def scorer(self, compute_dtype: str | None, length: int) -> "OwnScorer":
        """A `Scorer` on the current mesh. compute_dtype: where the model has such a key."""
        config, trainer, model = self.config, self.trainer, self.config.model
        if compute_dtype is not None and hasattr(model, "compute_dtype"):
            model = replace(model, compute_dtype=compute_dtype)
        source = Source(self.checkpoint, None, model, self.folder)
        tokenizer = tokenizer_of(source)
        if tokenizer is None:
            raise RunError(f"{self.folder} has no tokenizer, which texts need: give its data one (docs/data.md)")
        state = jax.eval_shape(functools.partial(trainer.init_state, model), np.uint32(0))
        sizes = SimpleNamespace(mesh=config.mesh, model=model, training=(), origins=Origins())
        like = {"weights": with_shardings(check_sizes(sizes, trainer.State, state), trainer.State).weights}
        with ThreadPoolExecutor() as pool:
            arrays = weights_in(averaged(self.checkpoint))
            weights = restore(replace(self.checkpoint, arrays=arrays), like, pool)["weights"]
        _, add_batch = trainer.mapped_steps(replace(config, model=model), tokenizer.bos_id)
        ready = ReadyModel(None, source, tokenizer, (tokenizer.bos_id,), (), config.training.tokens.len)
        return OwnScorer(ready, length, functools.partial(jax.jit(add_batch), weights), trainer.TokenBatch)


class OwnScorer(Scorer):
    """Log likelihoods by a validation step. Its rows begin with bos_id, as in training, also where `Scorer` begins with
    another token: with the one before a window of a text, or with the first that is left of a long context.

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
        targets, is_target = np.zeros(shape, np.uint32), np.zeros(shape, bool)
        targets[0, : len(ids)], is_target[0, first : len(ids)] = ids, True
        batch = self.batch_type(targets=targets, is_seq_start=np.zeros(shape, bool), is_target=is_target)
        loss, _ = self.add_batch(np.float32(0), np.float32(0), placed(batch, self.batch_type))
        return -float(loss)
