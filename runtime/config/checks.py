"""Combinations that cannot run, refused before anything is compiled: each message says what to set instead.

These functions read a config and a few numbers and nothing else, so each is called as soon as its numbers are known:
check_combinations by the loader, check_num_hosts and check_mesh when the devices are there, check_dataset when the data
set is open, check_resume when a checkpoint is found.
"""

import math
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from runtime.config.rebuild import refuse, shown
from runtime.terminal import RunError
from shardlib.sizes import nearest_divisors, nearest_multiples

# Key and unit. What is counted must be there at least once: an interval of 0 steps would never come to an end.
COUNTS = {
    "num_hosts": "processes",
    "cluster.num_processes": "processes, or null",
    "checkpoint_interval": "steps",
    "eval_interval": "steps",
    "log_interval": "steps",
    "checkpoint.keep_last": "checkpoints, or null for all",
    "checkpoint.keep_every": "steps, or null",
    "io.max_io_threads": "threads",
    "io.max_data_bytes": "bytes",
    "validation_batches": "batches, or null for all",
    "flat_tokens.epochs": "passes over the training data",
    "hf_dataset.num_workers": "threads",
    "flat_tokens.read_blocks_per_shuffle_buffer": "blocks",
    "flat_tokens.sequences_per_read_block": "sequences",
    "training.steps": "steps",
    "training.steps_for_lr": "steps",
    "training.tokens.batch": "rows",
    "training.tokens.len": "tokens",
    "training.microbatches": "microbatches",
    "training.max_consecutive_bad_steps": "steps",
    "model.d_model": "",
    "model.n_q_per_kv": "heads",
    "model.n_kv": "heads",
    "model.d_head": "",
    "model.layers": "layers",
    "model.vocab": "ids",
    "model.d_ff": "",
    "model.rope_max_timescale": "positions",
}
NOT_NEGATIVE = ("training.warmup_steps", "training.weight_decay", "training.adam_eps", "training.adam_eps_root")
ABOVE_ZERO = (
    "training.learning_rate",
    "training.max_grad_norm",
    "model.norm_eps",
    "checkpoint.interval_minutes",
    "checkpoint.timeout_s",
)
FRACTIONS = ("training.cosine_learning_rate_final_fraction",)
BETAS = ("training.adam_b1", "training.adam_b2")
SEEDS = ("training.seed", "flat_tokens.seed")
CHOICES = {
    "model.compute_dtype": ("bfloat16", "float32"),
    "model.attention": ("auto", "einsum", "blockwise", "cudnn_masked", "splash"),
    "training.gradient_reduce_dtype": ("float32", "bfloat16"),
    "training.save_for_backward": ("everything", "inputs"),
    "flat_tokens.long_sequences": ("split", "truncate"),
}
LONGEST_NAME = 255  # bytes of a file's or folder's name, on nearly every file system
TEXTS = ("paths.root_working_dir", "paths.model_name", "flat_tokens.filespec", "hf_dataset.path", "tracking.project")


def check_combinations(config: Any) -> None:
    """Refuses values out of range, hosts that cannot share the mesh, and schedules that contradict themselves.

    config has the keys of runtime.config.keys.RunConfig and those of train.py's Model and Training, which this room
    does not import. Raises RunError with every problem, each with the file or `command line` that set the key.
    """
    refuse(list(_out_of_range(config)))  # first and alone, since the divisions below need sizes above 0
    refuse([*_sources(config), *_hosts(config), *_contradictions(config)])


def _out_of_range(config: Any) -> Iterator[str]:
    counts = COUNTS | {f"mesh.{axis}": "devices" for axis in vars(config.mesh)}
    for key, unit in _there(config, counts).items():
        if _get(config, key) is not None and _get(config, key) < 1:
            yield _problem(config, key, f"expected 1 or more {unit}".rstrip())
    for key in _there(config, NOT_NEGATIVE):
        if _get(config, key) < 0:
            yield _problem(config, key, "expected 0 or more")
    for key in _there(config, ABOVE_ZERO):
        if _get(config, key) is not None and _get(config, key) <= 0:
            yield _problem(config, key, "expected more than 0")
    for key in _there(config, FRACTIONS):
        if not 0 <= _get(config, key) <= 1:
            yield _problem(config, key, "expected a fraction, 0 to 1")
    for key in _there(config, BETAS):
        if not 0 <= _get(config, key) < 1:
            yield _problem(config, key, "expected 0 or more and less than 1")
    for key in SEEDS:
        if not 0 <= _get(config, key) < 2**32:
            yield _problem(config, key, "expected 0 to 4294967295 (32 bits)")
    for key, choices in _there(config, CHOICES).items():
        if _get(config, key) not in choices:
            yield _problem(config, key, f"expected {' or '.join(choices)}")
    for key in TEXTS:
        if _get(config, key) is not None and not _get(config, key).strip():
            yield _problem(config, key, "expected a name")
    name = config.paths.model_name
    if name.startswith(("/", "~")) or ".." in name.split("/"):
        yield _problem(
            config,
            "paths.model_name",
            "expected a folder's name under paths.root_working_dir; set that for another place",
        )
    longest = max(len(part.encode()) for part in name.split("/"))
    if longest > LONGEST_NAME:
        yield _problem(
            config,
            "paths.model_name",
            f"a folder's name has at most {LONGEST_NAME} bytes, and this has {longest}: shorten it; in a sweep, whose "
            "jobs' names "
            "say what differs, sweep fewer keys at once",
        )


def _sources(config: Any) -> Iterator[str]:
    """Exactly one of three keys says where the data come from."""
    keys = ("flat_tokens.filespec", "mixture", "hf_dataset.path")
    given = [key for key in keys if _get(config, key)]
    if not given:
        yield (
            f"{config.origins.config_file}: flat_tokens.filespec is missing: expected the data set to train on; add "
            "it there, or "
            "flat_tokens.filespec=... to the command line (or `mixture`, or hf_dataset.path)"
        )
    for other in given[1:]:
        yield (
            f"{config.origins.of(other)}: {other} is set, and so is {given[0]} ({config.origins.of(given[0])}): "
            "expected one of them, "
            f"since each says where the data come from; delete the other, on the command line by {given[0]}="
            f"{'[]' if given[0] == 'mixture' else 'null'}"
        )
    if config.hf_dataset.path:
        yield from _stream(config)
    names = [source.filespec for source in config.mixture]
    for index, source in enumerate(config.mixture):
        where = f"{config.origins.of('mixture')}: mixture[{index}]"
        if not source.filespec.strip():
            yield f"{where}.filespec = {shown(source.filespec)}: expected a name"
        if source.filespec in names[:index]:
            yield f"{where}.filespec = {shown(source.filespec)}: it is in the mixture already: add up the weights"
        if source.weight <= 0:
            yield (
                f"{where}.weight = {shown(source.weight)}: expected more than 0; delete a source that is not to be read"
            )
    if config.mixture and config.flat_tokens.epochs != 1:
        yield _problem(
            config,
            "flat_tokens.epochs",
            "a mixture has no end: a source that runs out starts its next epoch; delete the key",
        )


def _stream(config: Any) -> Iterator[str]:
    """What hf_dataset.path needs, and what has no meaning with it."""
    if not config.hf_dataset.tokenizer:
        yield _problem(
            config,
            "hf_dataset.tokenizer",
            "expected bytes_utf8, a tokenizer.json, or the name of a tokenizer on the Hugging Face hub",
        )
    if config.validation_batches is None:
        yield _problem(
            config,
            "validation_batches",
            "with hf_dataset.path, each validation reads the same first batches, which are kept in memory: set it to "
            "16, say",
        )
    if config.flat_tokens.epochs != 1:
        yield _problem(config, "flat_tokens.epochs", "hf_dataset.path has no end: it begins again; delete the key")
    if not config.flat_tokens.sequence_packing:
        yield _problem(config, "flat_tokens.sequence_packing", "hf_dataset.path is always packed; delete the key")


def _hosts(config: Any) -> Iterator[str]:
    axes = vars(config.mesh)
    devices = math.prod(axes.values())
    if devices % config.num_hosts:
        keys, sizes = (" × ".join(map(str, each)) for each in ([f"mesh.{axis}" for axis in axes], axes.values()))
        yield _problem(
            config,
            "num_hosts",
            f"the mesh's {devices} devices ({keys} = {sizes}) cannot be shared evenly by {config.num_hosts} hosts: "
            f"set num_hosts to {nearest_divisors(devices, config.num_hosts)}",
        )


def _contradictions(config: Any) -> Iterator[str]:
    training, model = config.training, config.model
    yield from _cluster(config)
    if getattr(model, "d_head", 0) % 2:
        yield _problem(
            config,
            "model.d_head",
            "rotary embeddings turn the two halves of a head, so it must be even: set it to "
            f"{nearest_multiples(model.d_head, 2)}",
        )
    if hasattr(training, "steps_for_lr") and training.steps_for_lr < training.warmup_steps:
        yield _problem(
            config,
            "training.steps_for_lr",
            "the learning rate's schedule ends before its warmup does (training.warmup_steps = "
            f"{training.warmup_steps}): "
            f"set training.steps_for_lr to at least {training.warmup_steps}, usually to training.steps = "
            f"{training.steps}",
        )
    if config.checkpoint.keep_every and not config.checkpoint.keep_last:
        yield _problem(
            config,
            "checkpoint.keep_every",
            "it says which checkpoints outlive checkpoint.keep_last, which is null and keeps all: set that to 1 or "
            "more, or "
            "checkpoint.keep_every to null",
        )
    if hasattr(training, "adam_eps") and training.adam_eps == training.adam_eps_root == 0:
        yield _problem(
            config,
            "training.adam_eps",
            "with training.adam_eps_root = 0 too, Adam divides 0 by 0 where a gradient is 0: set it to 1e-8, say",
        )


def _cluster(config: Any) -> Iterator[str]:
    """What the keys say about the other processes must be possible for num_hosts of them."""
    coordinator, process = config.cluster.coordinator, config.cluster.process_id
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        yield _problem(config, "cluster.coordinator", "expected HOST:PORT, of the host that runs process 0")
    if process is not None and not 0 <= process < config.num_hosts:
        expected = f"expected 0 to {config.num_hosts - 1}, since num_hosts = {config.num_hosts}"
        yield _problem(config, "cluster.process_id", expected)
    if coordinator is not None and config.num_hosts == 1:
        yield _problem(config, "num_hosts", "cluster.coordinator is set: expected how many processes it coordinates")


def check_dataset(config: Any, max_token_id: int, steps_available: int | None, bos_id: int = 0) -> None:
    """Refuses a vocabulary too small for the data, and more steps than flat_tokens.epochs passes over the data hold.

    max_token_id, bos_id: of the data set. steps_available: whole steps in flat_tokens.epochs passes over `train`; None
    where there is no end.
    """
    filespec = (
        config.flat_tokens.filespec or config.hf_dataset.path or ", ".join(one.filespec for one in config.mixture)
    )
    steps, epochs = config.training.steps, config.flat_tokens.epochs
    source = f"the tokenizer {config.hf_dataset.tokenizer}" if config.hf_dataset.path else f"the data set {filespec}"
    problems = []
    if config.model.vocab <= max(max_token_id, bos_id):
        what = f"token ids up to {max_token_id}" if max_token_id >= bos_id else f"the bos_id {bos_id}"
        needed = max(max_token_id, bos_id) + 1
        problems.append(
            _problem(
                config,
                "model.vocab",
                f"{source} has {what}: set model.vocab to {needed} or more",
            )
        )
    if steps_available is None:
        pass
    elif steps_available < 1:
        problems.append(
            _problem(
                config,
                "training.tokens.batch",
                f"the data set {filespec} is too small for one step of {config.training.tokens.batch} × "
                f"{config.training.tokens.len} tokens (batch × len) in flat_tokens.epochs = {epochs}: set "
                "training.tokens.batch or "
                f"training.tokens.len lower, or name a larger data set",
            )
        )
    elif steps > steps_available:
        needed = -(-steps * epochs // steps_available)
        problems.append(
            _problem(
                config,
                "training.steps",
                f"the data set {filespec} holds {steps_available} steps in flat_tokens.epochs = {epochs}: set "
                f"flat_tokens.epochs={needed}, or training.steps={steps_available}",
            )
        )
    refuse(problems)


def check_resume(config: Any, checkpoint_step: int) -> None:
    """Refuses to go on from a checkpoint that has all the steps already.

    checkpoint_step: how many steps the checkpoint has behind it.
    """
    if config.training.steps <= checkpoint_step:
        folder = f"{config.paths.root_working_dir}/{config.paths.model_name}"
        raise RunError(
            _problem(
                config,
                "training.steps",
                f"nothing to train: the run in {folder} has a checkpoint after {checkpoint_step} steps; raise "
                "training.steps, or "
                "give the new run its own paths.model_name",
            )
        )


def _there(config: Any, keys: Any) -> Any:
    """Those of the keys that the trainer's config has."""

    def is_there(key: str) -> bool:
        section, _, name = key.rpartition(".")
        return hasattr(_get(config, section) if section else config, name)

    return {key: keys[key] for key in keys if is_there(key)} if isinstance(keys, dict) else filter(is_there, keys)


def _get(config: Any, key: str) -> Any:
    return attrgetter(key)(config)


def _problem(config: Any, key: str, text: str) -> str:
    return f"{config.origins.of(key)}: {key} = {shown(_get(config, key))}: {text}"
