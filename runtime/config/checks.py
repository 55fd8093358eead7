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

LONGEST_NAME = 255  # bytes of a file's or folder's name, on nearly every file system


def check_combinations(config: Any) -> None:
    """Refuses hosts that cannot share the mesh, and keys that contradict each other. Each value is in range already.

    config has the keys of runtime.config.keys.RunConfig and those of train.py's Model and Training, which this room
    does not import. Raises RunError with every problem, each with the file or `command line` that set the key.
    """
    wrong = [_problem(config, key, text) for is_wrong, key, text in _contradictions(config) if is_wrong]
    refuse([*_sources(config), *_hosts(config), *wrong])


def _sources(config: Any) -> Iterator[str]:
    """Exactly one of three keys says where the data come from."""
    of = config.origins.of
    given = [key for key in ("flat_tokens.filespec", "mixture", "hf_dataset.path") if _get(config, key)]
    if not given:
        yield (
            f"{config.origins.config_file}: flat_tokens.filespec is missing: expected the data set to train on; add "
            "it there, or flat_tokens.filespec=... to the command line (or `mixture`, or hf_dataset.path)"
        )
    for other in given[1:]:
        yield (
            f"{of(other)}: {other} is set, and so is {given[0]} ({of(given[0])}): expected one of them, since each "
            f"says where the data come from; delete the other, on the command line by {given[0]}="
            f"{'[]' if given[0] == 'mixture' else 'null'}"
        )
    names = [source.filespec for source in config.mixture]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"{of('mixture')}: mixture[{index}].filespec = {shown(name)}"
            yield f"{where}: it is in the mixture already: add up the weights"


def _contradictions(config: Any) -> Iterator[tuple[bool, str, str]]:
    """Whether something is wrong, the key that says it, and what is expected."""
    training, checkpoint, hosts = config.training, config.checkpoint, config.num_hosts
    name, longest = config.paths.model_name, max(len(part.encode()) for part in config.paths.model_name.split("/"))
    yield (
        name.startswith(("/", "~")) or ".." in name.split("/") or not set(name.split("/")) - {"", "."},
        "paths.model_name",
        "expected a folder's name under paths.root_working_dir; set that for another place",
    )
    yield (
        longest > LONGEST_NAME,
        "paths.model_name",
        f"a folder's name has at most {LONGEST_NAME} bytes, and this has {longest}: shorten it; in a sweep, whose "
        "jobs' names say what differs, sweep fewer keys at once",
    )

    epochs, is_stream = config.flat_tokens.epochs, bool(config.hf_dataset.path)
    no_end = "a mixture has no end: a source that runs out starts its next epoch; delete the key"
    yield bool(config.mixture) and epochs != 1, "flat_tokens.epochs", no_end
    tokenizer = "expected bytes_utf8, a tokenizer.json, or the name of a tokenizer on the Hugging Face hub"
    yield is_stream and not config.hf_dataset.tokenizer, "hf_dataset.tokenizer", tokenizer
    no_end = "hf_dataset.path has no end: it begins again; delete the key"
    yield is_stream and epochs != 1, "flat_tokens.epochs", no_end
    packed = "hf_dataset.path is always packed; delete the key"
    yield is_stream and not config.flat_tokens.sequence_packing, "flat_tokens.sequence_packing", packed
    yield (
        is_stream and config.validation_batches is None,
        "validation_batches",
        "with hf_dataset.path, each validation reads the same first batches, which are kept in memory: set it to "
        "16, say",
    )

    coordinator, process = config.cluster.coordinator, config.cluster.process_id
    is_address = coordinator is None or re.fullmatch(r".+:\d+", coordinator)
    yield not is_address, "cluster.coordinator", "expected HOST:PORT, of the host that runs process 0"
    one_of = f"expected 0 to {hosts - 1}, since num_hosts = {hosts}"
    yield process is not None and not 0 <= process < hosts, "cluster.process_id", one_of
    how_many = "cluster.coordinator is set: expected how many processes it coordinates"
    yield coordinator is not None and hosts == 1, "num_hosts", how_many

    d_head = getattr(config.model, "d_head", 0)  # of a trainer that has it
    yield (
        d_head % 2 == 1,
        "model.d_head",
        f"rotary embeddings turn the two halves of a head, so it must be even: set it to {nearest_multiples(d_head, 2)}",
    )
    yield (
        training.steps_for_lr < training.warmup_steps,
        "training.steps_for_lr",
        "the learning rate's schedule ends before its warmup does (training.warmup_steps = "
        f"{training.warmup_steps}): set training.steps_for_lr to at least {training.warmup_steps}, usually to "
        f"training.steps = {training.steps}",
    )
    yield (
        bool(checkpoint.keep_every) and not checkpoint.keep_last,
        "checkpoint.keep_every",
        "it says which checkpoints outlive checkpoint.keep_last, which is null and keeps all: set that to 1 or more, "
        "or checkpoint.keep_every to null",
    )


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


def check_dataset(config: Any, max_token_id: int, steps_available: int | None, bos_id: int = 0) -> None:
    """Refuses a vocabulary too small for the data, and more steps than flat_tokens.epochs passes over the data hold.

    max_token_id, bos_id: of the data set. steps_available: whole steps in flat_tokens.epochs passes over `train`; None
    where there is no end.
    """
    filespec = (
        config.flat_tokens.filespec or config.hf_dataset.path or ", ".join(one.filespec for one in config.mixture)
    )
    steps, epochs, rows = config.training.steps, config.flat_tokens.epochs, config.training.tokens
    source = f"the tokenizer {config.hf_dataset.tokenizer}" if config.hf_dataset.path else f"the data set {filespec}"
    problems = []
    if config.model.vocab <= max(max_token_id, bos_id):
        what = f"token ids up to {max_token_id}" if max_token_id >= bos_id else f"the bos_id {bos_id}"
        needed = max(max_token_id, bos_id) + 1
        problems.append(_problem(config, "model.vocab", f"{source} has {what}: set model.vocab to {needed} or more"))
    if steps_available == 0:
        text = (
            f"the data set {filespec} is too small for one step of {rows.batch} × {rows.len} tokens (batch × len) in "
            f"flat_tokens.epochs = {epochs}: set training.tokens.batch or training.tokens.len lower, or name a larger "
            "data set"
        )
        problems.append(_problem(config, "training.tokens.batch", text))
    elif steps_available is not None and steps > steps_available:
        text = (
            f"the data set {filespec} holds {steps_available} steps in flat_tokens.epochs = {epochs}: set "
            f"flat_tokens.epochs={-(-steps * epochs // steps_available)}, or training.steps={steps_available}"
        )
        problems.append(_problem(config, "training.steps", text))
    refuse(problems)


def check_resume(config: Any, checkpoint_step: int) -> None:
    """Refuses to go on from a checkpoint that has all the steps already.

    checkpoint_step: how many steps the checkpoint has behind it.
    """
    if config.training.steps <= checkpoint_step:
        folder = f"{config.paths.root_working_dir}/{config.paths.model_name}"
        text = (
            f"nothing to train: the run in {folder} has a checkpoint after {checkpoint_step} steps; raise "
            "training.steps, or give the new run its own paths.model_name"
        )
        raise RunError(_problem(config, "training.steps", text))


def _get(config: Any, key: str) -> Any:
    return attrgetter(key)(config)


def _problem(config: Any, key: str, text: str) -> str:
    return f"{config.origins.of(key)}: {key} = {shown(_get(config, key))}: {text}"
