"""What to run: yaml files and `key=value` composed by hydra, then rebuilt here into typed, frozen dataclasses.

    python -m train --config-name=c4_h200x1_84m training.steps=100 paths.model_name=first_try
    python -m train --help        # every key with its type, default and meaning, every config with its first line
    python -m train --cfg job     # what hydra composes, each key explained, without running it
    python -m train -m training.learning_rate=3e-3,1e-2    # a sweep: one run after the other, each in its own folder

hydra composes untyped yaml and lets `+paths.mistyped=x` through, and its typed mode cuts 2.9 to 2 and reads "no" as a
boolean. So it only composes. runtime/config/rebuild.py checks keys and types and reports all problems at once;
runtime/config/checks.py then refuses combinations that cannot run. Importing these imports no JAX.
"""

import contextlib
import dataclasses
import difflib
import gc
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runtime.config.arguments import constant_keys, hydra_arguments, tolerant
from runtime.config.checks import check_combinations
from runtime.config.help import annotated, configs_of, help_page
from runtime.config.keys import REFUSED_KEYS, RunConfig
from runtime.config.rebuild import MISSING, as_tree, find_origins, from_here, rebuild
from runtime.config.sweep import Sweep
from runtime.terminal import RunError, leave, print_error, refusals

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"
DEFAULT_CONFIG = "local_test_synthetic"

C = TypeVar("C")


# ---------------------------------------------------------------- entry points


def run(main: Callable[[Any], None], config_class: type, config_name: str | None = None) -> None:
    """Composes the config that the command line asks for and calls main with it, once, or once for each job of a sweep.

    Without a name a run starts from DEFAULT_CONFIG, any other program from the defaults of its dataclass alone.

        if __name__ == "__main__":
            run(main, Config)

    Exits with 1 after a RunError or a refusal by shardlib's check, which is printed to stderr as `error: ...` without a
    traceback, with 130 after an interrupt, with 75 when a signal stopped a run that can go on
    (runtime/cluster/signals.py), and with 141 when nobody reads its output any more (`| head`). Any other exception is
    a defect and passes through.
    """
    try:
        _run(main, config_class, config_name or _default(config_class))
        sys.stdout.flush()  # here, so that a broken pipe is met here and not by Python's end
    except BrokenPipeError:
        _leave_unread()


def _run(main: Callable[[Any], None], config_class: type, config_name: str | None) -> None:
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        file = _explaining_file(config_class)
        print("\n".join(help_page(main, config_class, config_name, CONFIG_FOLDER, file)))
        gc.freeze()  # else Python, as it ends, looks through all of JAX for what could be freed: 0.4 s
        return

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises its errors for us to print, instead of printing a page
    failed = False
    sweep = Sweep()

    def job(composed: DictConfig) -> None:
        # Caught here rather than outside hydra, so that one refused job does not end a sweep.
        nonlocal failed
        hydra_node = HydraConfig.get()
        sweep.has_table = hydra_node.mode == RunMode.MULTIRUN and issubclass(config_class, RunConfig)
        try:
            with sweep.job(hydra_node.overrides.task) as one:
                constant = constant_keys(arguments, CONFIG_FOLDER)
                one.config = _finish(config_class, composed, hydra_node, constant)
                main(one.config)
        except refusals() as error:
            failed = True
            print_error(error)
        except BrokenPipeError:
            print("what read the output has gone (broken pipe)", file=sys.stderr)
            _leave_unread()

    try:
        with tempfile.TemporaryDirectory() as sweep_folder, sweep:
            sys.argv[1:] = hydra_arguments(arguments, sweep_folder, CONFIG_FOLDER)
            line = " ".join(arguments)
            is_part = re.search(r"(^| )(--package|-p)[ =]", line)
            is_shown = re.search(r"(^| )(--cfg|-c)[ =]job( |$)", line) and not is_part
            shown = io.StringIO() if is_shown else sys.stdout
            with _readable_errors(config_class), contextlib.redirect_stdout(shown):
                hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)(job)()
            if is_shown:
                print(annotated(config_class, shown.getvalue(), _explaining_file(config_class)))
    except RunError as error:
        failed = True
        print_error(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        leave(130)
    finally:
        sys.argv[1:] = arguments
    if failed:
        leave(1)


def _leave_unread() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
    leave(141)


def load(config_class: type[C], config_name: str | None = None, overrides: Sequence[str] = ()) -> C:
    """The same config as the command line would give, for tests and tools.

        load(Config, "local_test_synthetic", ["training.steps=5"])

    Raises RunError where `run` would print one.
    """
    folder, config_name = CONFIG_FOLDER, config_name or _default(config_class)
    with _readable_errors(config_class), hydra.initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        composed = hydra.compose(config_name, [tolerant(text, folder) for text in overrides], return_hydra_config=True)
        hydra_node = composed.hydra
        with open_dict(composed):
            del composed["hydra"]
        return _finish(config_class, composed, hydra_node)


def to_yaml(config: Any) -> str:
    """The resolved config as yaml that loads again; for the run folder's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(as_tree(config)))


# ---------------------------------------------------------------- from hydra's tree to ours


def _finish(config_class: type[C], composed: DictConfig, hydra_node: DictConfig, constant: Collection[str] = ()) -> C:
    """A config_class from what hydra composed, or a RunError with everything that is wrong with it.

    constant: keys of overrides that all jobs of a sweep share.
    """
    with _readable_errors(config_class):
        content = OmegaConf.to_container(composed, resolve=True)
    if issubclass(config_class, RunConfig) and isinstance(content.setdefault("paths", {}), dict):
        content["paths"]["model_name"] = _model_name(content["paths"].get("model_name", MISSING), hydra_node, constant)

    folders = [Path(source.path) for source in hydra_node.runtime.config_sources if source.schema == "file"]
    origins = find_origins(hydra_node.job.config_name, folders, hydra_node.overrides.task)
    config = rebuild(config_class, content, origins, REFUSED_KEYS)
    if isinstance(config, RunConfig):
        paths = dataclasses.replace(config.paths, root_working_dir=os.path.expanduser(config.paths.root_working_dir))
        flat_tokens, *mixture = (
            dataclasses.replace(source, filespec=source.filespec and os.path.expanduser(source.filespec))
            for source in (config.flat_tokens, *config.mixture)
        )
        config = dataclasses.replace(config, paths=paths, flat_tokens=flat_tokens, mixture=tuple(mixture))
        object.__setattr__(config, "origins", origins)  # frozen for everyone else
        check_combinations(config)
    return config


def _model_name(given: Any, hydra_node: DictConfig, constant: Collection[str]) -> Any:
    """The run's name: the given one or the config's; in a sweep with what differs, so that no jobs share a folder."""
    name = Path(hydra_node.job.config_name).name if given == MISSING else given
    overrides = [text for text in hydra_node.overrides.task if text.partition("=")[0] not in constant]
    overrides = [text.lstrip("+") for text in overrides if not text.lstrip("+").startswith("paths.")]
    if hydra_node.mode != RunMode.MULTIRUN or not overrides or not isinstance(name, str):
        return name
    return name + "_" + re.sub(r"[^\w.=,-]", "-", "_".join(overrides))


# ---------------------------------------------------------------- hydra's errors


@contextlib.contextmanager
def _readable_errors(config_class: type) -> Iterator[None]:
    """Turns what hydra, omegaconf and the yaml reader raise into a RunError of one line."""
    try:
        yield
    except MissingConfigException as error:
        if not str(error).startswith("Cannot find primary config"):
            raise RunError(_one_line(error)) from error
        names = configs_of(config_class, CONFIG_FOLDER)
        nearest = difflib.get_close_matches(str(error.missing_cfg_file), names, n=1)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        folder = from_here(CONFIG_FOLDER)
        raise RunError(
            f"there is no config {error.missing_cfg_file} in {folder}{hint}; there are {', '.join(names)}"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise RunError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("See https:", "object_type="))]
    text = " ".join(lines).replace("'++", "'")
    if text.startswith("no viable alternative") and " " in text.partition("'")[2]:
        text += ": a value with a space or = in it needs quotes, and the shell takes one pair away: 'KEY=[\"a b=1\"]'"
    return text


def _default(config_class: type) -> str | None:
    return DEFAULT_CONFIG if issubclass(config_class, RunConfig) else None


def _explaining_file(config_class: type) -> Path | None:
    """The yaml whose comments explain keys besides the dataclasses': what all runs share."""
    return CONFIG_FOLDER / "base.yaml" if issubclass(config_class, RunConfig) else None
