"""Runs that are ended again and again, and robbed of their disk and files: tests/torture.py, in small."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    ["kills=12 faults=[]", "kills=1 faults=[file_size,descriptors]", "program=train_any kills=4 faults=[descriptors]"],
)
def test_nothing_is_lost(tmp_path, arguments):
    """No checkpoint is lost, statuses say what happened, and the losses are bit for bit those of a run left alone."""
    command = [sys.executable, "-m", "tests.torture", f"folder={tmp_path}/torture", "seed=1", *arguments.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("no checkpoint was lost, and the losses of all 60 steps are bit")


@pytest.mark.slow
def test_nothing_is_lost_by_tools(tmp_path):
    """Two signals to each program that writes: inputs are untouched, folders whole or not there, bytes the same."""
    command = [sys.executable, "-m", "tests.torture_tools", f"folder={tmp_path}/torture", "kills=18"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("nothing was lost: ")
