"""Refuses combinations that cannot run before anything is compiled. The messages say what to set instead.

The loader of configs calls check_combinations; a run calls check_dataset once the data set is open, and check_resume
once it knows its checkpoint. A section's dataclass checks what concerns the section alone.
"""

import math
import os
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from runtime.config.rebuild import refuse, shown
from runtime.config.sizes import nearest_divisors


def check_combinations(config: Any) -> None:
    """Raises RunError: all contradictions between keys, and where these were set."""
    refuse([*_sources(config), *(_problem(config, key, text) for wrong, key, text in _contradictions(config) if wrong)])


def _sources(config: Any) -> Iterator[str]:
    """Problems unless one of three keys says where the data come from; `mixture` may hold hf_dataset.path."""
    of, names = config.origins.of, [source.filespec for source in config.mixture]
    sources = [key for key in ("flat_tokens.filespec", "mixture", "hf_dataset.path") if attrgetter(key)(config)]
    if os.path.expanduser(config.hf_dataset.path or "") in names:
        sources.remove("hf_dataset.path")
    if not sources:
        fix = "expected the data set to train on, or `mixture`, or hf_dataset.path; add flat_tokens.filespec=..."
        yield f"{config.origins.config_file}: flat_tokens.filespec is missing: {fix}"
    for other in sources[1:]:
        empty = "[]" if sources[0] == "mixture" else "null"
        fix = f"expected one of them; delete the other, on the command line by {sources[0]}={empty}"
        if sources[0] == "mixture":
            fix += ", or mix the text with the rest: a source whose filespec is hf_dataset.path"
        yield f"{of(other)}: {other} is set, and so is {sources[0]} ({of(sources[0])}): {fix}"
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"{of('mixture')}: mixture[{index}].filespec = {shown(name)}"
            yield f"{what}: it is in the mixture already: add up the weights"


def _contradictions(config: Any) -> Iterator[tuple[bool, str, str]]:
    """Each possible contradiction: whether it is there, its key, and what is expected."""
    parts = config.paths.model_name.split("/")
    is_outside = parts[0] in ("", "~") or ".." in parts or not set(parts) - {"", "."}
    inside = "expected a folder's name under paths.root_working_dir; set that for another place"
    yield is_outside, "paths.model_name", inside

    no_eval = config.patience is not None and config.eval_interval is None
    yield no_eval, "patience", "it counts validations: set eval_interval, or patience=null"
    no_save = config.patience is not None and config.checkpoint_interval is None
    yield no_save, "patience", "it keeps the best checkpoint: set checkpoint_interval, or patience=null"
    by = getattr(config, "best_by", "validation_loss")
    yield by != "validation_loss" and config.patience is None, "best_by", "patience goes by it: set that too"
    names = [os.path.basename(file) for file in getattr(config, "eval_tasks", ())]
    yield len(set(names)) < len(names), "eval_tasks", "their figures are named by file: give each another name"
    yield bool(names) and config.eval_interval is None, "eval_tasks", "validations score them: set eval_interval"

    warmup, decay = (getattr(config.training, key, 0) for key in ("warmup_steps", "steps_for_lr"))
    yield decay < warmup, "training.steps_for_lr", f"the warmup is longer, training.warmup_steps = {warmup}"

    is_stream, is_packed = bool(config.hf_dataset.path), config.flat_tokens.sequence_packing
    no_end = "only flat_tokens.filespec ends; a mixture and hf_dataset.path begin again: delete the key"
    yield bool(config.mixture or is_stream) and config.flat_tokens.epochs != 1, "flat_tokens.epochs", no_end
    tokenizer = "expected bytes_utf8, a tokenizer.json, or the name of a tokenizer on the Hugging Face hub"
    yield is_stream and not config.hf_dataset.tokenizer, "hf_dataset.tokenizer", tokenizer
    packed = "hf_dataset.path is always packed; delete the key"
    yield is_stream and not is_packed, "flat_tokens.sequence_packing", packed
    first = "so many batches of hf_dataset.path are tokenized for validation: set it to 16, say"
    yield is_stream and config.validation_batches is None, "validation_batches", first

    coordinator, process, hosts = config.cluster.coordinator, config.cluster.process_id, config.num_hosts
    is_address = coordinator is None or bool(re.fullmatch(r".+:\d+", coordinator))
    yield not is_address, "cluster.coordinator", "expected HOST:PORT, of the host that runs process 0"
    one_of = f"expected 0 to {hosts - 1}, since num_hosts = {hosts}"
    yield process is not None and not 0 <= process < hosts, "cluster.process_id", one_of
    how_many = "cluster.coordinator is set: expected how many processes it coordinates"
    yield coordinator is not None and hosts == 1, "num_hosts", how_many
    axes = vars(config.mesh)
    devices = math.prod(axes.values())
    keys, sizes = (" × ".join(map(str, words)) for words in ([f"mesh.{axis}" for axis in axes], axes.values()))
    shared = f"the mesh's {devices} devices ({keys} = {sizes}) cannot be shared evenly by {hosts} hosts"
    yield devices % hosts > 0, "num_hosts", f"{shared}: set num_hosts to {nearest_divisors(devices, hosts)}"


def check_dataset(
    config: Any, max_token_id: int, steps_available: int | None, epochs_needed: int, bos_id: int = 0
) -> None:
    """Raises RunError: the vocabulary is too small for the data's ids, or they hold fewer steps (None: without end).
    epochs_needed: so many hold the config's steps."""
    mixed = ", ".join(source.filespec for source in config.mixture)
    filespec = mixed or config.flat_tokens.filespec or config.hf_dataset.path
    steps, epochs = config.training.steps, config.flat_tokens.epochs
    problems = []
    if config.model.vocab <= max(max_token_id, bos_id):
        is_stream = config.hf_dataset.path and not mixed
        source = f"the tokenizer {config.hf_dataset.tokenizer}" if is_stream else f"the data set {filespec}"
        what = f"token ids up to {max_token_id}" if max_token_id >= bos_id else f"the bos_id {bos_id}"
        needed = max(max_token_id, bos_id) + 1
        problems.append(_problem(config, "model.vocab", f"{source} has {what}: set model.vocab to {needed} or more"))
    if steps_available is not None and steps > steps_available:
        holds = f"the data set {filespec} holds {steps_available} steps in flat_tokens.epochs = {epochs}"
        fix = f"set flat_tokens.epochs={epochs_needed}, or training.steps={steps_available}"
        problems.append(_problem(config, "training.steps", f"{holds}: {fix}"))
    refuse(problems)


def _problem(config: Any, key: str, text: str) -> str:
    return f"{config.origins.of(key)}: {key} = {shown(attrgetter(key)(config))}: {text}"
