"""The command `clearshard`."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from pages import ROOT

from tools import cli


def test_every_program_is_a_command():
    """The commands are the programs at the top and the tools, and no others."""
    tools = "benchmark checkpoint compare convert doctor embed generate inspect_dataset make_dataset plan score serve "
    tools += "tokenize_text"
    assert list(cli.programs()) == ["train", "train_any", *tools.split()]
    run = [path.stem for path in (ROOT / "tools").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert sorted(run) == tools.split()


@pytest.mark.parametrize("arguments, says", [
    ([], "usage: clearshard {train,"),
    (["plant"], "error: clearshard has no command plant: expected"),
])  # fmt: skip
def test_it_says_what_there_is(arguments, says, monkeypatch, capsys):
    """It lists the commands where none is given, or an unknown one."""
    monkeypatch.setattr(sys, "argv", ["clearshard", *arguments])
    try:
        cli.main()
        said = capsys.readouterr().out
    except SystemExit as stop:
        said = stop.code
    assert says in said


def test_a_command_runs_its_module(monkeypatch, capsys):
    """The module runs as `python -m` runs it, with the rest of the arguments; nothing is added to what it prints."""
    monkeypatch.setattr(sys, "argv", ["clearshard", "plan", "hosts=1"])
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(cli.runpy, "run_module", lambda name, **_: print(name, *sys.argv, sys.path))
    cli.main()
    assert capsys.readouterr().out == "tools.plan clearshard plan hosts=1 ['', 'elsewhere']\n"


@pytest.mark.slow
def test_the_wheel_runs(tmp_path):
    """An installed clearshard finds its configurations and its templates, outside of the repository."""
    source = tmp_path / "source"
    left = shutil.ignore_patterns(".*", "runs", "tests", "docs", "*.zarr", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left)
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", str(wheels)]
    subprocess.run([*pip, str(source)], check=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(installed)
    kept = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert all((installed / path).exists() for path in kept)

    def said(*arguments):
        run = f"import sys; sys.path[0] = {str(installed)!r}; from tools.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", run, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("--version").startswith("clearshard 0.1.0, jax ")
    assert "claims" in said("train", "check_only=true")
    said("plan", "hardware=h200", "hosts=1", "folder=plan")
    assert "shardops.all_gather('B/d L M/t -> B/d L M', x)" in (tmp_path / "plan/ledger.txt").read_text()
    said("make_dataset")
    assert re.search(r"^ok +packages +python ", said("doctor"), re.MULTILINE)
