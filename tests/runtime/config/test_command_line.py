"""`python -m train` as hydra's users know it: flags, sweeps, launchers, completion; what it prints and how it ends."""

import dataclasses
import json
import os
import pickle
import platform
import subprocess
import sys
from contextlib import nullcontext
from typing import ClassVar

import pytest
import small
import yaml
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from pages import ROOT
from parts import says

import train
from runtime.config import command_line
from runtime.config.command_line import load
from runtime.config.rebuild import as_tree
from runtime.terminal import RunError
from shardlib.spec import ShardingError


def run(monkeypatch, *arguments, main=lambda config: None):
    """Runs main as `python -m train ARGUMENTS` would; returns the exit status."""
    return small.start(monkeypatch, main, train.Config, *arguments)


def configs_of(monkeypatch, *arguments):
    """The exit status, and the configs for which main was called."""
    seen = []
    return run(monkeypatch, *arguments, main=seen.append), seen


def test_run_calls_main_with_the_config(monkeypatch, tmp_path):
    """The published command's arguments work in any order; hydra leaves no folder, changes no directory and restores
    argv."""
    monkeypatch.chdir(tmp_path)
    seen = []
    flags = ["--config-name=local_test_synthetic", "+paths.model_name=synthetic_000"]
    for arguments in (flags, flags[::-1], ["--config-name", "local_test_synthetic", flags[1]]):
        assert run(monkeypatch, *arguments, main=lambda config: seen.append((config, os.getcwd()))) == 0
        assert sys.argv[1:] == arguments
    assert [config.paths.model_name for config, _ in seen] == ["synthetic_000"] * 3
    assert {folder for _, folder in seen} == {str(tmp_path)} and list(tmp_path.iterdir()) == []


def raising(error):
    def main(config):
        raise error

    return main


REFUSED = ShardingError("'M/d' names mesh axis d\n  at model.py:7")


@pytest.mark.parametrize("arguments, error, text", [
    (["training.steps=[1"], None, "no viable alternative at input '[1'"),
    (["--config-name=c4_h200_84m"], None,
     "there is no config c4_h200_84m in configs; the nearest is c4_h200x1_84m; there are c4, "),
    (["--cfg", "job", "--config-name=nope"], None, "there is no config nope in configs"),
    (["--config-path=FOLDER"], None, "there is no config local_test_synthetic in FOLDER; there are mine\n"),
    (["--config-dir=FOLDER", "--config-name=mini"], None,
     "there is no config mini in configs or FOLDER; the nearest is mine; there are c4, "),
    (["--config-dir=/nowhere"], None, "Additional config directory '/nowhere' not found"),
    (["--config-name"], None, "command line: argument --config-name/-cn: expected one argument\n"),
    (["--steps=3"], None, "command line: --steps=3 is no flag: keys are given as steps=VALUE, a config as --"),
    (["+="], None, "'+=' has no key: expected key=value\n"),
    ([], RunError("the disk is full"), "the disk is full\n"),
    ([], REFUSED, f"{REFUSED}\n"),
], ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "")  # fmt: skip
def test_an_error_is_said_without_traceback(monkeypatch, capsys, tmp_path, arguments, error, text):
    """Status is 1 and stderr has the message, for a bad override, an unknown config, with all there are and where,
    main's own RunError and shardlib's refusal."""
    (tmp_path / "mine.yaml").touch()
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    assert run(monkeypatch, *arguments, main=raising(error)) == 1
    stderr = capsys.readouterr().err.replace(str(tmp_path), "FOLDER")
    assert stderr.startswith(f"error: {text}") and stderr.count("\n") == str(error).count("\n") + 1


def test_defects_and_interrupts_pass_through(monkeypatch, capsys):
    """Nothing else is printed alone: a defect keeps its traceback, an interrupt is status 130."""
    with pytest.raises(KeyError, match="a defect"):
        run(monkeypatch, main=raising(KeyError("a defect")))
    assert run(monkeypatch, main=raising(KeyboardInterrupt)) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize("attention", ["cudnn_masked", "splash"])
def test_a_kernel_that_cannot_run_here_is_refused(monkeypatch, capsys, tmp_path, attention):
    """The message says what it needs and what would do; nothing is compiled or written."""
    arguments = [f"model.attention={attention}", f"paths.root_working_dir={tmp_path}"]
    assert run(monkeypatch, *arguments, main=train.main) == 1
    message = capsys.readouterr().err
    refused = f"error: model.attention = {attention} needs"
    assert message.startswith(refused)
    assert message.endswith("; auto is blockwise here\n") and list(tmp_path.iterdir()) == []


# ---- sweeps


def test_a_sweep_runs_every_job_in_its_own_folder(monkeypatch, capsys, tmp_path):
    """A refused job does not end the others; each run's folder is named by what differs."""
    monkeypatch.chdir(tmp_path)
    status, configs = configs_of(monkeypatch, "-m", "training.steps=5,0,10", "+paths.model_name=x")
    seen = [(config.paths.model_name, config.training.steps) for config in configs]
    assert status == 1 and seen == [("x_training.steps=5", 5), ("x_training.steps=10", 10)]
    first, last = capsys.readouterr().err.splitlines()
    assert says("error: command line: training.steps = 0: expected … 1 to 2147483647", first)
    assert says("overrides: ['++training.steps=0', '++paths.model_name=x']", last)
    status, configs = configs_of(monkeypatch, "--multi", "paths.model_name=a,b")
    assert status == 0 and [config.paths.model_name for config in configs] == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]  # hydra's own record of a sweep


def test_a_job_of_a_sweep_is_named_by_what_differs(monkeypatch, tmp_path):
    """Keys that all jobs share are no part of it, however they are written; groups are."""
    monkeypatch.chdir(tmp_path)
    constant = [f"{sign}{key}=1" for key in ("log_interval", "eval_interval", "mesh.t") for sign in ("", "+", "++")]
    constant += ["mixture=[ ]", "~training.seed", "training={seed: 3}", "paths.root_working_dir=~/runs"]
    swept = ["training.steps=5,10", "+model.d_ff=choice(64)"]
    for arguments, names in [
        ([*constant, *swept], [f"local_test_synthetic_training.steps={steps}_model.d_ff=64" for steps in (5, 10)]),
        (["training.steps=5"], ["local_test_synthetic"]),
        (["--config-name=c4", "size=84m,1b"], ["c4_size=84m", "c4_size=1b"]),
    ]:
        status, configs = configs_of(monkeypatch, "-m", *arguments)
        assert status == 0 and [config.paths.model_name for config in configs] == names


class Elsewhere(BasicLauncher):
    """A launcher as plugins are: of a job on another machine comes back what can be pickled."""

    def launch(self, job_overrides, initial_job_idx):
        done = super().launch(job_overrides, initial_job_idx)
        for job in done:
            if job.status == JobStatus.FAILED:
                job._return_value = pickle.loads(pickle.dumps(job._return_value))
        return done


def test_a_launcher_plugin_runs_the_jobs(monkeypatch, capsys, tmp_path):
    """`hydra/launcher=NAME` on the command line chooses a plugin's own config group, with its settings."""
    monkeypatch.chdir(tmp_path)
    target = {"_target_": "hydra_plugins.elsewhere.Elsewhere", "name": "local"}
    ConfigStore.instance().store("elsewhere", target, "hydra/launcher", "hydra.launcher", provider="elsewhere")
    monkeypatch.setattr(Plugins.instance(), "_instantiate", lambda config: plugin(config))
    instantiate = Plugins._instantiate

    def plugin(config):
        if config._target_ == target["_target_"] and config.name == "far":
            return Elsewhere()
        return instantiate(Plugins.instance(), config)

    arguments = ["hydra/launcher=elsewhere", "hydra.launcher.name=far"]
    status, configs = configs_of(monkeypatch, "-m", *arguments, "training.steps=5,0,6")
    assert status == 1 and [config.training.steps for config in configs] == [5, 6]
    assert "training.steps = 0: expected" in capsys.readouterr().err


# ---- what a yaml may not do

CODE = "callbacks: {x: {_target_: builtins.open, file: ran, mode: w}}\n"
OPENS = "_target_: builtins.open, file: ran, mode: w"
TEXTS = {
    "a key": ("evil", f"defaults: [local_test_synthetic, _self_]\nhydra:\n  {CODE}"),
    "a header": ("size/evil", f"# @package hydra\n{CODE}"),
    "a header with a dot": ("size/evil", f"# @package hydra.callbacks\nx: {{{OPENS}}}\n"),
    "a folder": ("hydra/job_logging/evil", "handlers: {x: {(): builtins.open, file: ran, mode: w}}\n"),
    "a defaults list": ("evil", "defaults: [local_test_synthetic, size@hydra.callbacks.x: harmless, _self_]\n"),
}


@pytest.mark.parametrize("name, text", TEXTS.values(), ids=TEXTS)
def test_a_yaml_may_not_run_code(monkeypatch, capsys, tmp_path, name, text):
    """What sets hydra's own keys is refused with its file, in a run, a sweep and --help, before hydra acts on it."""
    folder = tmp_path / "configs"
    (folder / name).parent.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(text)
    (folder / "size").mkdir(exist_ok=True)
    (folder / "size/harmless.yaml").write_text("_target_: builtins.open\nfile: ran\nmode: w\n")
    monkeypatch.chdir(tmp_path)
    choice = f"{name.rpartition('/')[0]}=evil" if "/" in name else "log_interval=1"
    arguments = ["--config-dir=configs", f"--config-name={'c4' if '/' in name else 'evil'}", choice]
    for more in ([], ["-m"], ["--help"]):
        assert run(monkeypatch, *arguments, *more, main=pytest.fail) == 1
        parts = f"error: configs/{name}.yaml: `hydra` … can run code: delete it … allow_code_in_config=true"
        assert says(parts, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs"]


def test_a_yaml_that_is_trusted_sets_what_it_wants(monkeypatch, tmp_path):
    """allow_code_in_config=true, which is no key of a config, lets a file describe a sweep."""
    text = "defaults: [local_test_synthetic, _self_]\n"
    text += "hydra: {mode: MULTIRUN, sweeper: {params: {training.steps: '5,6'}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    arguments = [f"--config-dir={tmp_path}", "--config-name=mine", "allow_code_in_config=true"]
    status, configs = configs_of(monkeypatch, *arguments)
    assert status == 0 and [config.training.steps for config in configs] == [5, 6]


# ---- hydra's flags


def test_configs_of_another_folder(monkeypatch, tmp_path):
    """--config-dir adds a folder whose configs may build on ours, and messages name its files."""
    (tmp_path / "mine.yaml").write_text("defaults: [c4_a100x8_1b, _self_]\ntraining: {steps: 60}\n")
    _, [config] = configs_of(monkeypatch, f"--config-dir={tmp_path}", "--config-name=mine")
    assert config.training.steps == 60 and config.paths.model_name == "mine"
    for key, file in [
        ("training.steps", tmp_path / "mine.yaml"),
        ("model.vocab", "configs/size/1b.yaml"),
        ("mesh.d", "configs/machine/a100x8.yaml"),
        ("training.warmup_steps", "configs/c4.yaml"),
        ("io.max_io_threads", tmp_path / "mine.yaml"),
    ]:
        assert config.origins.of(key) == str(file)


def test_cfg_and_info(monkeypatch, capsys):
    """--cfg job prints every key, those with a default too, and a part of them; --info what hydra did."""
    assert run(monkeypatch, "--cfg", "job", "training.steps=7", main=pytest.fail) == 0
    shown, config = yaml.safe_load(capsys.readouterr().out), as_tree(load(train.Config, overrides=["training.steps=7"]))
    assert shown["paths"].pop("model_name") == "???" and config["paths"].pop("model_name") == "local_test_synthetic"
    assert shown == config
    assert run(monkeypatch, "--cfg=job", "--package", "mesh", "mesh.d=8", main=pytest.fail) == 0
    assert capsys.readouterr().out == "# @package mesh\nd: 8\nt: 2\n"
    assert run(monkeypatch, "--info", "defaults", "--config-name=c4", "size=1b", main=pytest.fail) == 0
    assert "| size/1b " in capsys.readouterr().out


@pytest.mark.parametrize("line, choices", [
    ("python train.py training.st", "training.steps= training.steps_for_lr="),
    ("python train.py --config-name=c4 size=2", "size=270m size=2b"),
])  # fmt: skip
def test_the_shell_completes_keys(monkeypatch, capsys, line, choices):
    """The script that `-sc install=bash` prints completes groups and all keys, those with a default too."""
    monkeypatch.setenv("COMP_LINE", line)
    assert run(monkeypatch, "-sc", "query=bash", main=pytest.fail) == 0
    assert capsys.readouterr().out.split() == choices.split()
    assert run(monkeypatch, "-sc", "install=bash", main=pytest.fail) == 0
    assert "complete -o nospace" in capsys.readouterr().out


@pytest.mark.parametrize("is_server", [False, True])
def test_who_is_said_to_be_running_still(monkeypatch, is_server):
    """A tool that says nothing for long; a server says so itself while it loads, and not while it waits for clients."""

    @dataclasses.dataclass(frozen=True)
    class Tool:
        IS_SERVER: ClassVar = is_server

    watched = []
    monkeypatch.setattr(command_line, "heartbeat", lambda descriptor, say: watched.append(descriptor) or nullcontext())
    monkeypatch.setattr(sys, "argv", ["tool"])
    command_line.run(lambda config: None, Tool)
    assert watched == ([] if is_server else [2])


# ---- as a program

PROGRAM = """
import sys
from runtime.config import command_line
assert "jax" not in sys.modules and "pydantic" not in sys.modules
from train import Config
def main(config):
    from runtime.cluster import processes
    processes.prepare_devices(config)
    import jax
    print("devices", jax.device_count())
    processes.prepare_devices(config)  # JAX has started: nothing happens
if __name__ == "__main__":
    command_line.run(main, Config)
"""


def program(folder, *arguments, source=PROGRAM, flags=(), environment=(), output=subprocess.PIPE):
    """Status, stdout and stderr of a program in a process of its own."""
    (folder / "program.py").write_text(source)
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, *flags, folder / "program.py", *arguments],
        env=kept | {"PYTHONPATH": str(ROOT)} | dict(environment),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


FLAG = "--xla_force_host_platform_device_count=3"


@pytest.mark.parametrize("environment, arguments, devices", [
    ({}, ["num_hosts=2"], 4),
    pytest.param({"XLA_FLAGS": FLAG}, [], 3, marks=pytest.mark.slow),
    pytest.param({}, ["check_only=true"], 1, marks=pytest.mark.slow),
    pytest.param({"JAX_NUM_CPU_DEVICES": "2"}, [], 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_devices_are_simulated_where_nothing_else_says_so(tmp_path, environment, arguments, devices):
    """A fresh process has the mesh's devices without flags, and the person's own flags where they are given."""
    assert program(tmp_path, *arguments, environment=environment) == (0, f"devices {devices}\n", "")


def test_an_error_as_a_program(tmp_path):
    """The whole program ends with status 1 and one line on stderr, without traceback or output."""
    *found, error = program(tmp_path, "training.steps=2.9")
    assert found == [1, ""] and error.count("\n") == 1
    assert says("error: command line: training.steps = 2.9: expected … 1 to 2147483647", error)


@pytest.mark.parametrize("flags, arguments", [((), ["--help"]), (("-u",), [])])
def test_output_that_nobody_reads(tmp_path, flags, arguments):
    """`python -m train --help | head -3`: status 141, as a shell's own programs have it, and not a word."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        assert program(tmp_path, *arguments, flags=flags, output=output) == (141, None, "")


MEMORY = """
import resource, threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from runtime.config import command_line
@dataclass(frozen=True)
class Tool:
    pass
def main(config):
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:  # each thread has been given a heap, before a large block is wanted
        list(pool.map(lambda _: (barrier.wait(), b"x" * 100_000), range(8)))
        faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
        for _ in range(4):
            list(pool.map(lambda _: len(b"x" * 2**27), range(1)))
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print([late - early for early, late in zip(faults, faults[1:])])
command_line.run(main, Tool)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_used_again(tmp_path):
    """A thread's block of 128 MB, 32,768 pages, is new once. A step on CPUs has such a block."""
    status, printed, error = program(tmp_path, source=MEMORY)
    assert status == 0, error
    first, *later = json.loads(printed)
    assert first > 30_000 and max(later) < 300
