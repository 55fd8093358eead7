"""What to run: yaml files and `key=value` composed by hydra, then rebuilt here into typed, frozen dataclasses.

    python -m train --config-name=c4_h200x1_84m training.steps=100 paths.model_name=first_try
    python -m train --help        # every key with its type, default and meaning, every config with its first line
    python -m train --cfg job     # what hydra composes, without running it
    python -m train -m training.learning_rate=3e-3,1e-2    # a sweep: one run after the other, each in its own folder

hydra composes untyped yaml on the defaults of the program's dataclass, which are the config `base`; its typed mode
would cut 2.9 to 2. runtime/config/rebuild.py then checks keys and types, and runtime/config/checks.py combinations.
Importing these does not import JAX."""

import contextlib
import ctypes
import dataclasses
import difflib
import functools
import gc
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
import yaml
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runtime.config.arguments import no_flag, read
from runtime.config.checks import check_combinations
from runtime.config.help import help_page, program_of
from runtime.config.keys import DROPPED_KEYS, RunConfig
from runtime.config.rebuild import COMMAND_LINE, MISSING, Origins, as_tree, default_tree, rebuild
from runtime.files import flat, multiply, parse_yaml, read_text
from runtime.terminal import (
    NothingToTrain,
    RunError,
    heartbeat,
    leave,
    output_is_failing,
    print_error,
    print_line,
    print_note,
    refusals,
    run_errors,
)

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"
BASE = "base"  # in each config's defaults list
TRUST = "allow_code_in_config=true"
HYDRA_SETTINGS = (  # a run has its own folder and its own log
    *("hydra.run.dir=.", "hydra.output_subdir=null", "hydra.sweep.subdir=.", "hydra/job_logging=none"),
    *("hydra/hydra_logging=none", "hydra.help.template='${help_page:}'"),
)

C = TypeVar("C")


class Refused(Exception):
    """A job of a sweep ended with an error, which is printed already. hydra still runs the other jobs."""


def run(main: Callable[..., None], config_class: type, *others: Any) -> None:
    """Composes the config of the command line and calls main(config, *others), for each job of a sweep.

    A run starts from config_class.CONFIG by default; other programs have no yaml (runtime/config/arguments.py).

        if __name__ == "__main__":
            run(main, Config)

    Exits with 1 after an exception of `refusals()`, whose message is printed alone; with 130 after an interrupt, 75
    when a signal stopped a run that can go on, and 141 when nobody reads its output any more (`| head`). Any other
    exception is a defect and passes through.
    """
    _keep_memory()
    arguments = sys.argv[1:]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises its errors instead of printing a page
    try:
        if issubclass(config_class, RunConfig):
            with _readable_errors(), heartbeat(1, print_line):
                _run(main, config_class, others)
        elif {"--help", "-h"} & set(arguments):
            print(help_page(main, config_class, None, CONFIG_FOLDER))
        else:
            is_server = getattr(config_class, "IS_SERVER", False)  # its silence is that of its clients
            # A tool's standard output may be its result.
            beat = contextlib.nullcontext() if is_server else heartbeat(2, lambda text: print_error(text, "note"))
            with beat, _readable_program():
                main(read(config_class, arguments), *others)
        if output_is_failing():  # what it took may be a part of the result
            leave(1)
        if sys.stdout:  # None where it was closed
            sys.stdout.flush()  # so that a broken pipe is handled here, and not at Python's exit
    except BrokenPipeError:
        leave(141)
    except refusals() as error:
        print_error(_said(error))
        leave(1)
    except Refused:
        leave(1)
    except KeyboardInterrupt:
        print_note("interrupted")
        leave(130)
    finally:
        sys.argv[1:] = arguments


def _keep_memory() -> None:
    """Lets the C library (glibc) keep the memory that this process frees, such as XLA:CPU's after each step. Call it
    before any thread starts: a thread with its own heap maps blocks above 64 MB, and unmaps them when freed.

    Else the kernel takes it back and zeroes it for the next step: 0.19 of 1.5 s of local_test_synthetic's processor
    time a step on one simulated device, 0.28 of 2.0 s on eight (two cores, jax 0.10.2, 2026-11-21); and
    tools/tokenize_text.py reads 95 in place of 111 MB of text a second.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block has its own mapping
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: however much is free at the heap's end, it stays


def _said(error: Exception) -> Exception | str:
    is_open = isinstance(error, OSError) and error.filename is None
    return f"standard output, or another open file, fails: {error}" if is_open else error


def load(config_class: type[C], config_name: str | None = None, overrides: Sequence[str] = ()) -> C:
    """The config of a command line, for tests and tools: load(Config, "local_test_synthetic", ["training.steps=5"]).
    Raises RunError, as `run` prints it."""
    if not issubclass(config_class, RunConfig):
        return read(config_class, overrides)
    name, overrides, folder = config_name or config_class.CONFIG, list(map(_tolerant, overrides)), str(CONFIG_FOLDER)
    _keep_memory()  # in a notebook nothing else does
    _prepare(config_class)
    with _readable_errors(), hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
        composed = hydra.compose(name, overrides, return_hydra_config=True)
        node = composed.hydra
        with open_dict(composed):
            del composed["hydra"]
        return _finish(config_class, composed, node)


def to_yaml(config: Any) -> str:
    """The config as yaml, which loads again."""
    return OmegaConf.to_yaml(OmegaConf.create(as_tree(config)))


# ---------------------------------------------------------------- to hydra


def _run(main: Callable[..., None], config_class: Any, others: Sequence[Any]) -> None:
    gc.freeze()  # else Python's collector goes through all of JAX again and again: 0.4 s of --help
    parser = get_args_parser()
    parser.error = _refused_flag  # type: ignore[method-assign]
    parsed, unknown = parser.parse_known_intermixed_args(sys.argv[1:])
    if unknown:
        raise no_flag(unknown[0], "a config as --config-name=NAME, ")
    overrides = [_tolerant(text) for text in parsed.overrides if text != TRUST]
    _prepare(config_class, is_trusted=TRUST in parsed.overrides)

    def page(*, _root_: Any) -> str:
        explained = getattr(sys.modules[main.__module__], "explained", lambda model: config_class)
        return help_page(main, explained(_root_.get("model")), config_class.CONFIG, CONFIG_FOLDER).replace("$", "$$")

    @functools.wraps(main)  # so that hydra names the job after main's file
    def job(composed: DictConfig) -> None:
        node = HydraConfig.get()
        try:
            with _readable_program():
                main(_finish(config_class, composed, node, overrides), *others)
        except BrokenPipeError:
            leave(141)  # hydra would say that the job failed
        except NothingToTrain as said:
            print_line(str(said))
        except refusals() as error:
            print_error(_said(error))
            if node.mode != RunMode.MULTIRUN:
                leave(1)
            raise Refused from None

    OmegaConf.register_new_resolver("help_page", page, replace=True)
    if not parsed.shell_completion:  # its arguments are hydra's own
        flags = [text for text in sys.argv[1:] if text not in parsed.overrides]
        sys.argv[1:] = [*flags, "--", *HYDRA_SETTINGS, *overrides]
    hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_class.CONFIG)(job)()


def _refused_flag(message: str) -> NoReturn:
    """Says what argparse says, without its page of usage, and with the status of all refusals."""
    raise RunError(f"{COMMAND_LINE}: {message}")


def _prepare(config_class: type, is_trusted: bool = False) -> None:
    """Registers the defaults and FileConfigSource with hydra."""
    ConfigStore.instance().store(BASE, default_tree(config_class))
    Plugins.instance()  # registers hydra's own source of files, which ours replaces
    SourcesRegistry.instance().types["file"] = FileConfigSource
    FileConfigSource.is_trusted = is_trusted


def _tolerant(override: str) -> str:
    """An override that hydra accepts for any key, so that `rebuild` can answer a mistyped one: `a=1` and `+a=1` become
    `++a=1`. `~` is quoted, since hydra's grammar does not allow it."""
    if re.match(r"[+~]*($|[=@])", override):
        raise RunError(f"{override!r} has no key: expected key=value")
    key = re.match(r"\+{0,2}([A-Za-z_][\w.]*)=", override)
    if not key or key[1].startswith("hydra.") or (CONFIG_FOLDER / key[1]).is_dir():
        return override
    if not re.search(r"""['"\[{(]""", override):
        override = re.sub(r"(?<=[=,])(~[^,]*)", r"'\1'", override)
    return f"++{override.lstrip('+')}"


class FileConfigSource(file_config_source.FileConfigSource):
    """Reads yaml files, and refuses those that set hydra's own keys: its callbacks and `_target_` run code."""

    is_trusted = False

    def load_config(self, config_path: str) -> Any:
        file = Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")
        if os.path.lexists(file):
            try:
                with run_errors(f"{from_here(file)} cannot be read", ValueError):
                    content = parse_yaml(read_text(file))  # first, since hydra's own messages do not name the file
            except yaml.YAMLError as error:
                raise yaml.YAMLError(f"{from_here(file)} cannot be read: {error}") from None
            if not isinstance(content, dict | None):
                raise RunError(f"{from_here(file)} holds {type(content).__name__}, expected keys with values")
        read = super().load_config(config_path)
        assert isinstance(read.config, DictConfig)
        names = [config_path, read.header.get("package"), *read.config]
        names += re.findall(r"@[\w.]+", str(read.config.get("defaults")))
        if not self.is_trusted and any("hydra" in re.split(r"\W", str(name)) for name in names):
            raise RunError(f"{from_here(file)}: `hydra` in a yaml can run code: delete it, or trust it with {TRUST}")
        return read


# ---------------------------------------------------------------- from hydra's tree to ours


def _finish(config_class: Any, composed: DictConfig, node: Any, command_line: Sequence[str] = ()) -> Any:
    """The config_class of what hydra composed. Raises RunError: all that is wrong with it. node: hydra's own settings.
    command_line: the overrides of all jobs of a sweep."""
    with _readable_errors():
        if multiply(re.findall(r"\$\{[^}]*", str(OmegaConf.to_container(composed, resolve=False)))):
            raise RunError("the configuration's ${...} refer to one another: together they may become too large")
        content: Any = OmegaConf.to_container(composed, resolve=True)
        origins = _origins(node)
    if isinstance(content.setdefault("paths", {}), dict):
        content["paths"]["model_name"] = _model_name(content["paths"].get("model_name", MISSING), node, command_line)
    config = rebuild(config_class, content, origins, DROPPED_KEYS)
    paths = dataclasses.replace(config.paths, root_working_dir=os.path.expanduser(config.paths.root_working_dir))
    flat_tokens, *mixture = (
        dataclasses.replace(source, filespec=source.filespec and os.path.expanduser(source.filespec))
        for source in (config.flat_tokens, *config.mixture)
    )
    config = dataclasses.replace(config, paths=paths, flat_tokens=flat_tokens, mixture=tuple(mixture))
    object.__setattr__(config, "origins", origins)  # frozen for everyone else
    check_combinations(config)
    return config


def _model_name(model_name: Any, node: Any, command_line: Sequence[str]) -> Any:
    """The run's name: as set, or the config's; in a sweep with the overrides in which jobs differ."""
    name = Path(node.job.config_name).name if model_name == MISSING else model_name
    if node.mode != RunMode.MULTIRUN or not isinstance(name, str):
        return name
    parsed = OverridesParser.create().parse_overrides(list(command_line))
    is_swept = {override.get_key_element(): override.is_sweep_override() for override in parsed}  # the last counts
    differ = [text.lstrip("+") for text in node.overrides.task if is_swept.get(text.partition("=")[0], True)]
    return re.sub(r"[^\w.=,/-]", "-", "_".join([name, *(text for text in differ if not text.startswith("paths."))]))


def _origins(node: Any) -> Origins:
    """Where each key was set. hydra forgets it, so its files are read once more, in its order."""
    written: Any = OmegaConf.to_container(node.overrides, resolve=False)  # with ${...} as it is
    folders = [Path(source.path) for source in node.runtime.config_sources if source.schema == "file"]
    loader, main_file = GlobalHydra.instance().config_loader(), COMMAND_LINE
    by_key: dict[str, str] = {}
    name, overrides = node.job.config_name, [*written["hydra"], *written["task"]]
    for default in loader.compute_defaults_list(name, overrides, RunMode.RUN).defaults:
        stem = str(default.config_path).removesuffix(".yaml")
        for file in [path for folder in folders if (path := folder / f"{stem}.yaml").is_file()][:1]:
            tree: Any = OmegaConf.to_container(OmegaConf.load(file))
            by_key |= dict.fromkeys(flat({default.package: tree} if default.package else tree), from_here(file))
            main_file = from_here(file) if stem == name.removesuffix(".yaml") else main_file
    for override in written["task"]:
        key = re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]
        below = [other for other in by_key if f"{other}.".startswith(f"{key}.") or key.startswith(f"{other}.")]
        by_key |= dict.fromkeys([*below, key], COMMAND_LINE)
    return Origins(main_file, by_key)


def from_here(file: Path) -> str:
    """The path from the working directory of a file below it; else the whole path."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """Turns exceptions of hydra, omegaconf and yaml into a RunError of one line."""
    try:
        yield
    except RecursionError as error:
        raise RunError("the configuration is nested too deeply, or names itself among its defaults") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        text = " ".join(line for line in lines if line and not line.startswith(("See https:", "object_type=")))
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            folder, _, missing = str(error.missing_cfg_file).rpartition("/")
            # Those that hydra has searched, also by --config-path and --config-dir.
            folders = [Path(path, folder) for path in re.findall("path=file://(.+)", str(error))]
            there = (file.stem for place in folders for file in sorted(place.glob("*.yaml")))
            names = list(error.options or (name for name in there if program_of(name) == program_of("")))
            hint = "".join(f"; the nearest is {name}" for name in difflib.get_close_matches(missing, names, n=1))
            where, said_by = " or ".join(map(from_here, folders)), "".join(re.findall("^In '.*?': ", text))
            text = f"{said_by}there is no config {missing} in {where}{hint}; there are {', '.join(names) or 'none'}"
        if group := re.match(r"Could not override '(\w+)'", text):
            text = f"{group[1]}: this config chooses no file of configs/{group[1]}; those that do name it in `defaults`"
        raise RunError(text.replace("'++", "'")) from error
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].partition(".")[0] not in ("hydra", "omegaconf", "yaml"):
            raise  # a defect of ours
        raise RunError(f"the configuration cannot be read: {error}") from error


@contextlib.contextmanager
def _readable_program() -> Iterator[None]:
    """Turns the TypeError of a program that declares a weight, and does not make it, into a RunError."""
    try:
        yield
    except TypeError as error:
        from shardlib.shardtypes import holds_arrays  # loaded, if weights are made

        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        missing = re.match(r"(\w+)\.__init__\(\) missing .* arguments?: '(\w+)'", str(error))
        cls: Any = missing and frame.f_globals.get(missing[1])
        if missing is None or not holds_arrays(cls):
            raise
        lines, first = inspect.getsourcelines(cls)
        declared = next((at for at, text in enumerate(lines, first) if re.match(rf"\s*{missing[2]}\s*:", text)), first)
        where = f"{from_here(Path(frame.f_code.co_filename))}:{line}"
        what = f"{missing[1]} has no {missing[2]}, which line {declared} declares"
        raise RunError(f"{where}: {what}: give it its first value here, {missing[2]}=...") from error
