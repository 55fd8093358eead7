"""Compares a run with the checkpoint that it resumes from, and says what may have changed.

A checkpoint's attributes hold `config`, all keys of the run, and `data`, which identifies the data set. With another
batch size or length a step's number would mean other rows, some trained on twice and some never: such changes are
refused. Other changes (steps, learning rate, intervals, mesh, paths, threads) are logged.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from runtime.config.keys import DROPPED_KEYS
from runtime.config.rebuild import Origins, as_tree, default_tree, rebuild, shown, take_out
from runtime.files import flat
from runtime.terminal import RunError

# Keys and sections that may not change: shapes, vocabulary, data and their order, seeds, moments.
FIXED = (
    "model", "lora", "train", "training.seed", "training.tokens", "training.batch_doubles_at", "training.optimizer",
    "training.moment_dtype", "flat_tokens", "mixture", "hf_dataset",
)  # fmt: skip
# Keys of these that may change: how attention is computed, what changes no batch, and paths, since `data` tells sets
# apart.
FREE = (
    "model.attention", "flat_tokens.epochs", "flat_tokens.filespec", "hf_dataset.validation_split",
    "hf_dataset.tokens_ahead",
)  # fmt: skip
UNIMPORTANT = ("allow_config_change", "check_only")

C = TypeVar("C")


def description(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that `compare` needs. data: JSON values that identify the data set."""
    return {"config": as_tree(config), "data": dict(data)}


def config_of(config_class: type[C], attributes: Mapping[str, Any]) -> C:
    """The config of the checkpoint's run. Raises RunError: there is none, or what does not fit config_class."""
    if not isinstance(attributes.get("config"), dict):
        raise RunError("the checkpoint does not say which configuration it was trained with: another program wrote it")
    config = copy.deepcopy(attributes["config"])
    for key in DROPPED_KEYS:
        take_out(config, key)
    return rebuild(config_class, config, Origins())


def compare(
    config: Any, data: Mapping[str, Any], attributes: Mapping[str, Any], where: str, program: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Lines `key: before -> now` for what differs from the checkpoint `where` with these attributes.

    Args:
      program: what differs in the program, which may not change.
      about: more attributes that may not change.
    Raises:
      RunError: what changed and may not, with both values, unless allow_config_change is set.
    """
    defaults = flat(default_tree(type(config))) | {key: value for key, (value, _) in DROPPED_KEYS.items()}
    before, now = flat(attributes.get("config", {})), flat(as_tree(config))
    changes: list[str] = []
    refused: list[str] = []
    for key in dict.fromkeys([*before, *now]) if before else []:
        # A key that one of the two programs lacks has the effect of its default.
        old, new = before.get(key, defaults.get(key)), now.get(key, defaults.get(key))
        if old == new or key in UNIMPORTANT:
            continue
        line = f"  {key}: {shown(old)} -> {shown(new)}" + (f" ({config.origins.of(key)})" if key in now else "")
        is_fixed = key not in FREE and any(f"{key}.".startswith(f"{fixed}.") for fixed in FIXED)
        is_fixed |= key == "training.ema_decay" and not (old and new)  # the state has an average, or has none
        (refused if is_fixed else changes).append(line)
    known = attributes.get("data", {})
    # Earlier programs did not record these.
    data = {name: value for name, value in data.items() if name not in ("tokenizer", "ends") or name in known}
    if known and known != data:
        refused.append(f"  the data: {shown(known)} -> {shown(data)}")
    if other := _other_order(attributes.get("data_position") or {}):
        fix = "a new run may take its initial_weights from this one"
        refused.append(f"  the order of hf_dataset.path: {other} -> one row after another; {fix}")
    for name, value in (about or {}).items() if before else ():
        if attributes.get(name) != value:
            refused.append(f"  {name}: {shown(attributes.get(name))} -> {shown(value)}")
    if program:
        refused.append(f"  the program: {', '.join(program)}")
    if refused and not config.allow_config_change:
        what = f"{where} was trained with another {'program or ' if program else ''}configuration:"
        fix = "Set these as they were, give the new run its own paths.model_name, or go on with the change by "
        raise RunError("\n".join([what, *refused, f"{fix}allow_config_change=true."]))
    return changes + refused


def _other_order(position: Mapping[str, Any]) -> str:
    """How an earlier program read text, if not as rows are read now. Its `positions` have, for each number of hosts
    that the run had had, where each host was: (pass, file, document, token)."""
    layouts = position.get("positions", [])
    if len(layouts) > 1 or any(len(hosts) > 1 for hosts in layouts):
        return "a share of its documents for each host"
    return "a pass that begins within a row" if any(epoch for hosts in layouts for epoch, *_ in hosts) else ""
