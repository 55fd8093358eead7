"""Programs that are ended again and again, robbed of their disk and files, or attacked: tests/torture*.py, in small."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from pages import ROOT, run_in
from ragged import files

from tests.torture_tools import JOBS, write_corpus

NOT_LOST = "no checkpoint was lost, and the losses of all 60 steps are bit for bit those of a run left alone"


@pytest.mark.slow
@pytest.mark.parametrize("arguments, last_line", [
    ("torture kills=12 faults=[]", NOT_LOST),
    ("torture kills=1 faults=[file_size,descriptors]", NOT_LOST),
    ("torture program=train_any kills=4 faults=[descriptors]", NOT_LOST),
    ("torture_tools kills=20", "nothing was lost: "),
    ("torture_tools kills=16 only=[records]", "nothing was lost: "),
    ("torture_server minutes=1", "the answers are those of before"),
])  # fmt: skip
def test_nothing_is_lost(tmp_path, arguments, last_line):
    """Inputs, checkpoints and data are as those of programs left alone, and a server answers as before it."""
    name, *arguments = arguments.split()
    said = run_in(ROOT, ["python", "-m", f"tests.{name}", f"folder={tmp_path}/torture", "seed=1", *arguments])
    assert said.splitlines()[-1].startswith(last_line)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_tokenizing_is_killed(tmp_path, processes):
    """The command that is killed ten times at random moments, with several processes, writes the bytes of an
    uninterrupted one, and none of them is left over."""
    draws = random.Random(processes)
    write_corpus(tmp_path / "corpus", ["".join(draws.choices("abcdefghé ", k=300)) for _ in range(300)])
    command = JOBS["records"].arguments.format(inputs=tmp_path, to=f"{tmp_path}/killed").split()
    command = [sys.executable, "-m", "tools.tokenize_text", *command, f"processes={processes}"]
    begun = time.monotonic()
    subprocess.run([*command, f"output={tmp_path}/whole"], cwd=ROOT, check=True)
    whole = time.monotonic() - begun
    for _ in range(10):
        child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        time.sleep(draws.uniform(0.2, 1.2) * whole)
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError):  # of the last one's session, which its workers are in
        for _ in range(5000):  # one that has just started imports first, which takes long on a busy machine
            os.killpg(child.pid, signal.SIGCONT)
            time.sleep(0.2)
    subprocess.run([*command, "processes=2"], cwd=ROOT, check=True)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
