"""The command line of a program that is configured, as hydra takes it.

hydra_arguments(["training.steps=5", "--config-name=c4_h200x1_84m"], "/tmp/sweep", Path("configs"))
# ['--config-name=c4_h200x1_84m', '--', 'hydra.run.dir=.', ..., '++training.steps=5']
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from runtime.terminal import RunError

# hydra shall only compose: no folder and no log of its own; the run folder is ours.
HYDRA_SETTINGS = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
FLAGS = (
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion"),
    *("config-path", "config-name", "config-dir", "experimental-rerun", "info"),
)
OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)


def hydra_arguments(arguments: Sequence[str], sweep_folder: str, config_folder: Path) -> list[str]:
    """Flags first, and a sweep's own files in a folder that is thrown away.

    Raises:
      RunError: there is no such flag.
    """
    overrides = _overrides(arguments)
    flags = [text for text in arguments if text not in overrides]
    for text in flags:
        _check_flag(text)
    sweep = (f"hydra.sweep.dir='{sweep_folder}'", "hydra.sweep.subdir=.")
    return [*flags, "--", *HYDRA_SETTINGS, *sweep, *(tolerant(text, config_folder) for text in overrides)]


def constant_keys(arguments: Sequence[str], config_folder: Path) -> set[str]:
    """Keys, as hydra takes them ('++training.steps'), that the command line gives one value: all jobs share them."""
    texts = [tolerant(text, config_folder) for text in _overrides(arguments)]
    overrides = OverridesParser.create().parse_overrides(texts)
    is_swept = {each.get_key_element(): each.is_sweep_override() for each in overrides}  # given twice, the last counts
    return {key for key in is_swept if not is_swept[key]}


def tolerant(override: str, config_folder: Path) -> str:
    """An override that hydra takes whether or not the key is there: `a=1` and `+a=1` become `++a=1`.

    So `+paths.model_name=x` and `paths.model_name=x` both work, in configs that set the key and in those that do not,
    and a mistyped key comes to our check and its message. `~` is quoted, which hydra's grammar has no place for.
    """
    match = OVERRIDE.fullmatch(override)
    if not match or match["key"].partition(".")[0] == "hydra" or (config_folder / match["key"]).is_dir():
        return override
    value = match["value"]
    if "~" in value and not re.search(r"""['"\[{(]""", value):
        value = ",".join(f"'{choice}'" if "~" in choice else choice for choice in value.split(","))
    return f"++{match['key']}={value}"


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [text for text in arguments if re.match(r"[+~]{0,2}[A-Za-z_][\w./@]*=|~[A-Za-z_]", text)]


def _check_flag(text: str) -> None:
    """Refuses `--steps=3` and `--confg-name=x`. A flag may be cut short, as argparse takes it: `--multi`."""
    name, given, value = text.removeprefix("--").partition("=")
    if not text.startswith("--") or any(flag.startswith(name) for flag in FLAGS):
        return
    if nearest := difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.75):
        hint = f"the nearest is --{nearest[0]}"
    else:
        hint = f"keys are given without dashes, {name}={value if given else '...'}; --help lists flags and keys"
    raise RunError(f"there is no flag --{name}: {hint}")
