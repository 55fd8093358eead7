"""Text that a trained model writes.

    python -m tools.sample runs/local_shakespeare
    python -m tools.sample runs/local_shakespeare --prompt "HAMLET." --tokens 500 --temperature 0.8 --seed 1

A plain loop on one device: for each token the model computes a whole row of training.tokens.len tokens again. Once the
text is longer than a row, the model sees its last tokens only.
"""

import argparse
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import train
from runtime.checkpoints.directory import Checkpoints
from runtime.config.resume import config_of
from runtime.data.batches import TokenBatch
from runtime.data.tokenizers import Tokenizer, load_dataset_tokenizer, load_tokenizer
from runtime.run import with_shardings
from runtime.terminal import RunError, refusals
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shardtypes import f32, i32, make_shardings, typed_shard_map


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m tools.sample"
    )
    parser.add_argument("run_folder", help="its newest checkpoint is used")
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=400, help="how many the model adds (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice (%(default)s)")
    arguments = parser.parse_args()
    try:
        with jax.set_mesh(make_mesh({"d": 1, "t": 1}, devices=jax.devices()[:1])):
            config, weights = load_run(arguments.run_folder)
            tokenizer = tokenizer_of(config)
            prompt = tokenizer.encode_batch([arguments.prompt])[0].tolist()
            drawn = sample(
                config.model, config.training, weights, tokenizer.bos_id, prompt,
                tokens=arguments.tokens, length=config.training.tokens.len, temperature=arguments.temperature, seed=arguments.seed,
            )  # fmt: skip
            for text in pieces(tokenizer, prompt, drawn):
                print(text, end="", flush=True)
            print()
    except refusals() as error:
        sys.exit(f"error: {error}")


def load_run(folder: str) -> tuple[train.Config, train.Weights]:
    """The config and the weights of a run's newest checkpoint, on the current mesh.

    Raises:
      RunError: there is no checkpoint that reads whole.
    """
    kept = {"keep_last": None, "keep_every": None}
    checkpoints = Checkpoints(f"{folder}/checkpoints", **kept, asynchronous=False, timeout_s=60, max_io_threads=16)
    step = checkpoints.latest()
    if step is None:
        raise RunError(f"there is no complete checkpoint in {folder}/checkpoints: give the folder of a run, runs/NAME")
    config = config_of(train.Config, checkpoints.attributes(step))
    train.act.dtype = config.model.compute_dtype
    state, _ = train.shapes(config)
    _, state = checkpoints.restore(with_shardings(state, make_shardings(train.State)), step)
    checkpoints.close()
    return config, state.weights


def tokenizer_of(config: train.Config) -> Tokenizer:
    """The tokenizer that the run's data set holds. Raises RunError where it holds none."""
    if config.hf_dataset.tokenizer:
        return load_tokenizer(config.hf_dataset.tokenizer)
    path = config.mixture[0].filespec if config.mixture else config.flat_tokens.filespec
    tokenizer = load_dataset_tokenizer(path)
    if tokenizer is None:
        raise RunError(f"{path} names no tokenizer, so that its ids are no text")
    return tokenizer


def sample(
    model: train.Model, training: train.Training, weights: train.Weights, bos_id: int, ids: list[int],
    *, tokens: int, length: int, temperature: float, seed: int,
) -> Iterator[int]:  # fmt: skip
    """Draws tokens that go on from these ids, one after another, each from softmax(logits / temperature)."""

    def next_logits(weights: train.Weights, row: TokenBatch, position: i32['']) -> f32['B/d V/t']:
        x = train.forward(model, training, bos_id, weights, row)
        unembed = shardops.all_gather('V/t M/d -> V/t M', weights.unembed, dtype=train.act)
        last = lax.dynamic_index_in_dim(x, position, axis=1, keepdims=False)
        return shardops.einsum_unreduced('B/d M, V/t M -> B/d V/t', last, unembed, preferred_element_type=jnp.float32)

    next_logits = jax.jit(typed_shard_map(next_logits))
    key, ids = jax.random.key(seed), list(ids)
    false = np.zeros((1, length), bool)
    for number in range(tokens):
        # A row predicts each of its tokens from those before: the model is asked for the one after the last.
        seen = ids[-(length - 1) :]
        targets = np.zeros((1, length), np.uint32)
        targets[0, : len(seen)] = seen
        logits = next_logits(weights, TokenBatch(targets, false, false), np.int32(len(seen)))[0]
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
    main()
