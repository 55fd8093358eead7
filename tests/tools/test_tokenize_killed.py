"""tools/tokenize_text.py that is killed, by kill -9, at moments drawn at random: in the end the bytes are the same."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from pages import ROOT

# Imports once and forks for each life, so that what is killed is the work and not the imports. No thread runs when it
# forks.
# The first life is not killed: its output is the measure, and its time tells within which the others are.
KILLER = """
import json, os, random, signal, sys, time
import runtime.data.documents, tools.tokenize_text
from runtime.config.command_line import load
runtime.data.documents.BLOCK_BYTES = 2048
tools.tokenize_text.RECORD_S = 0.02
overrides, folder, kills = json.loads(sys.argv[1])
draws, killed, outputs, whole = random.Random(0), 0, 0, None
while killed < kills or not finished:
    output = f"{folder}/killed{outputs}" if whole else f"{folder}/whole"
    config = load(tools.tokenize_text.TokenizeText, None, [*overrides, f"output={output}"])
    begun, child = time.monotonic(), os.fork()
    if not child:
        tools.tokenize_text.main(config)
        os._exit(0)
    if whole and killed < kills:
        time.sleep(draws.uniform(0, whole / 3))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    finished = status == 0
    killed += not finished
    outputs += finished and whole is not None
    whole = whole or time.monotonic() - begun
print(json.dumps([killed, outputs]))
"""


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text, records of which some are bad, compressed and not: every kind of position that a record of progress
    holds."""
    folder, draws = tmp_path_factory.mktemp("corpus"), random.Random(0)

    def text():
        words = ("".join(draws.choices("abcdefghé", k=draws.randint(2, 9))) for _ in range(draws.randint(0, 100)))
        return " ".join(words)

    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        for number in range(300):
            file.write("no json\n" if number % 97 == 0 else json.dumps({"text": text()}) + "\n")
    (folder / "b.txt").write_text("\n".join(text() for _ in range(200)))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text()}) + "\n" for _ in range(300)))
    return [
        f"input='{folder}/*'", "tokenizer=train_bpe", "bpe_vocab=300", "validation_fraction=0.1", "document_bytes=500",
        "on_bad_record=skip",
    ]  # fmt: skip


@pytest.mark.slow
def test_killed_ten_times(tmp_path, corpus):
    """A program that is killed ten times at random moments and started again writes the bytes of an uninterrupted
    run."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, json.dumps([corpus, str(tmp_path), 10])],
        cwd=ROOT, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    killed, outputs = json.loads(done.stdout.splitlines()[-1])
    assert killed == 10 and outputs >= 1
    for number in range(outputs):
        assert files(tmp_path / f"killed{number}") == files(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_killed_command(tmp_path, corpus, processes):
    """The same of the whole command, with several processes, and none of them is left over."""
    command = [sys.executable, "-m", "tools.tokenize_text", *corpus]
    begun = time.monotonic()
    subprocess.run([*command, f"output={tmp_path}/whole", f"processes={processes}"], cwd=ROOT, check=True)
    whole, draws = time.monotonic() - begun, random.Random(processes)
    for _ in range(10):
        child = subprocess.Popen(
            [*command, f"output={tmp_path}/killed", f"processes={processes}"], cwd=ROOT, start_new_session=True
        )
        time.sleep(draws.uniform(0.2, 1.2) * whole)
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError):  # of the last one's session, which its workers are in
        for _ in range(5000):  # one that has just started imports first, which takes long on a busy machine
            os.killpg(child.pid, signal.SIGCONT)
            time.sleep(0.2)
    subprocess.run([*command, f"output={tmp_path}/killed", "processes=2"], cwd=ROOT, check=True)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
