"""Text that a trained model writes.

    python -m tools.sample runs/local_shakespeare
    python -m tools.sample runs/local_shakespeare prompt="HAMLET." tokens=500 temperature=0.8 seed=1

A plain loop on one device: for each token the model computes a whole row of training.tokens.len tokens again. Once the
text is longer than a row, the model sees its last tokens only. The model is the one of the program that trained the
run, a copy of which is in the checkpoint, and the tokenizer the one in the run folder.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from runtime import program
from runtime.checkpoints.directory import Checkpoints
from runtime.config import command_line
from runtime.config.keys import Count, NotNegative, Seed
from runtime.config.resume import config_of
from runtime.data.sources import kept_tokenizer, tokenizer_of
from runtime.data.tokenizers import Tokenizer
from runtime.run import with_shardings
from runtime.terminal import RunError, print_error, printable
from shardlib.mesh import make_mesh
from shardlib.shardtypes import typed_shard_map


@dataclass(frozen=True, kw_only=True)
class Sample:
    WORDS: ClassVar = ("run",)

    run: str  # a run folder, whose newest checkpoint is used
    prompt: str = ""  # what the text begins with
    tokens: Count = 400  # how many the model adds
    temperature: NotNegative = 0.8  # 0: always the likeliest token
    seed: Seed = 0  # of the random choice
    program: str | None = None  # a trainer's module or file, in place of the one that trained the run


def main(config: Sample) -> None:
    trainer, trained, weights = load_run(config.run, config.program)
    tokenizer = find_tokenizer(config.run, trained)
    prompt, length = tokenizer.encode_batch([config.prompt])[0].tolist(), trained.training.tokens.len
    with jax.set_mesh(mesh_of(trained)):
        next_logits = logits_of(trainer, trained, weights, tokenizer.bos_id)
        drawn = sample(next_logits, prompt, config.tokens, length, temperature=config.temperature, seed=config.seed)
        for text in pieces(tokenizer, prompt, drawn):
            print(printable(text), end="", flush=True)
        print()


def load_run(folder: str, name: str | None = None) -> tuple[Any, Any, Any]:
    """The trainer of a run, or the one of this name instead, its config, and the weights of the run's newest
    checkpoint,
    on one device. Raises RunError where no checkpoint reads whole, or the trainer's weights are others."""
    kept = {"keep_last": None, "keep_every": None}
    checkpoints = Checkpoints(f"{folder}/checkpoints", **kept, asynchronous=False, timeout_s=60, max_io_threads=16)
    step = checkpoints.latest()
    if step is None:
        raise RunError(f"there is no complete checkpoint in {folder}/checkpoints: give the folder of a run, runs/NAME")
    attributes = checkpoints.attributes(step)
    trainer: Any
    if name is None:
        trainer, notes = program.of_checkpoint(attributes)
    else:
        trainer, notes = program.load(name), [f"{name} is taken, not the program that trained the run"]
    for note in notes:
        print_error(note, "note")
    if not hasattr(trainer, "forward"):
        raise RunError(f"{trainer.__file__} has no function `forward`, without which nothing can be sampled")
    config: Any = config_of(trainer.Config, attributes)
    trainer.act.dtype = config.model.compute_dtype
    state, _ = trainer.shapes(config)
    with jax.set_mesh(mesh_of(config)):
        _, state = checkpoints.restore(with_shardings(state, trainer.State), step)
    checkpoints.close()
    return trainer, config, state.weights


def mesh_of(config: Any) -> jax.sharding.Mesh:
    """One device along all axes of the run's mesh."""
    return make_mesh(dict.fromkeys(vars(config.mesh), 1), devices=jax.devices()[:1])


def find_tokenizer(folder: str, config: Any) -> Tokenizer:
    """The tokenizer that the run folder holds, or its data. Raises RunError where none does."""
    tokenizer = kept_tokenizer(Path(folder)) or tokenizer_of(config)
    if tokenizer is None:
        path = config.mixture[0].filespec if config.mixture else config.flat_tokens.filespec
        raise RunError(f"{path} names no tokenizer, so that its ids are no text")
    return tokenizer


def logits_of(trainer: Any, config: Any, weights: Any, bos_id: int) -> Callable[[Any, int], jax.Array]:
    """A function of a batch of one row and a position: what the model says of the token there, given those before."""
    forward = typed_shard_map(functools.partial(trainer.forward, config.model, config.training, bos_id))

    @jax.jit
    def logits(weights: Any, batch: Any, position: jax.Array) -> jax.Array:
        hidden = forward(weights, batch)[0, position]
        unembed = weights.unembed.astype(hidden.dtype)
        return jnp.einsum("m,vm->v", hidden, unembed, preferred_element_type=jnp.float32)

    def of_row(tokens: np.ndarray, position: int) -> jax.Array:
        false = np.zeros(tokens.shape, bool)
        batch = trainer.TokenBatch(targets=tokens, is_seq_start=false, is_target=false)
        return logits(weights, batch, np.int32(position))

    return of_row


def sample(
    next_logits: Callable, ids: list[int], tokens: int, length: int, *, temperature: float, seed: int
) -> Iterator[int]:
    """Draws tokens that go on from these ids, one after another, each from softmax(logits / temperature)."""
    key, ids = jax.random.key(seed), list(ids)
    for number in range(tokens):
        # A row predicts each of its tokens from those before: the model is asked for the one after the last.
        seen = ids[-(length - 1) :]
        targets = np.zeros((1, length), np.uint32)
        targets[0, : len(seen)] = seen
        logits = next_logits(targets, len(seen))
        if temperature > 0:
            logits = logits / temperature + jax.random.gumbel(jax.random.fold_in(key, number), logits.shape)
        ids.append(int(jnp.argmax(logits)))
        yield ids[-1]


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: Iterator[int]) -> Iterator[str]:
    """The text of prompt and ids as these come; a character that is made of several tokens when it is whole."""
    seen, shown = list(prompt), ""
    for each in ids:
        seen.append(each)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(seen)[len(shown) :]


if __name__ == "__main__":
    command_line.run(main, Sample)
