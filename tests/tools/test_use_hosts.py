"""generate, score and serve in a job of two processes write what one process writes; the first reads and writes."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time

import jax
import pytest
import several_hosts as hosts
from jax.experimental import multihost_utils
from several_hosts import nothing_is_left  # noqa: F401 a fixture

from models.decoding import Drawing
from tools import generate, score
from tools.hosts import Calls, from_first, shared

EXAM = {"context": "the cat sat on the", "choices": ["mat", "cat"], "answer": 0}
MESH = ["mesh.d=2"]


def program(name):
    return [sys.executable, "-m", f"tools.{name}"]


def printed(folder, name, arguments):
    """What the two processes of a program print on standard output and error."""
    both = hosts.start_two(
        [*map(str, arguments), *MESH], hosts.environment(folder), output=folder / name, program=program(name)
    )
    assert [process.wait(300) for process in both] == [0, 0], (folder / f"{name}.0").read_text()
    return [(folder / f"{name}.{number}").read_text().splitlines() for number in range(2)]


@pytest.fixture
def alone(called, proved_elsewhere):
    """What one process prints."""

    def call(module, config, *arguments):
        status, out, error = called(module.main, config, *arguments)
        assert status == 0, error
        return out

    return call


@pytest.mark.slow
@pytest.mark.slow
def test_two_processes_write_and_score_as_one(cat_run, alone, tmp_path):
    """The first process prints the lines that one process prints: texts of a file, drawn and by beams, log likelihoods
    and answers. The second needs none of the files."""
    (tmp_path / "prompts.txt").write_text("the cat\non\nthe mat. the\n")
    (tmp_path / "exam.jsonl").write_text(json.dumps(EXAM) + "\n")
    (tmp_path / "ask.jsonl").write_text(json.dumps({"question": "the cat sat on the", "answer": "mat"}) + "\n")
    for ways in (["temperature=0.7", "samples=2"], ["beams=2"]):
        keys = [cat_run, f"input={tmp_path}/prompts.txt", "tokens=8", "output=ids", *ways]
        first, second = printed(tmp_path, "generate", keys)
        ids = [line for line in first if line and set(line) <= set("0123456789 ")]
        assert ids == alone(generate, generate.Generate, *keys).splitlines()
        assert not [line for line in second if line in ids]
    keys = [cat_run, tmp_path / "exam.jsonl", tmp_path / "ask.jsonl", "tokens=8", f"to={tmp_path}/answers.jsonl"]
    expected = alone(score, score.Score, *keys).splitlines()
    answers = (tmp_path / "answers.jsonl").read_text()
    first, second = printed(tmp_path, "score", keys)
    assert [line for line in first if line in expected] == expected and not [
        line for line in second if line in expected
    ]
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    for one, other in zip(found, map(json.loads, answers.splitlines()), strict=True):
        sums = [answer.pop("log_likelihoods", [0.0]) for answer in (one, other)]
        assert one == other and sums[0] == pytest.approx(sums[1], abs=1e-4)


@pytest.mark.slow
def test_two_processes_serve_as_one(cat_run, alone, tmp_path):
    """Two requests with a pause between get one process' answers; SIGTERM to both ends both."""
    port, text = hosts.free_port(), "the cat"
    keys = [str(cat_run), f"port={port}", "rows=4", "length=64", *MESH]
    both = hosts.start_two(keys, hosts.environment(tmp_path), output=tmp_path / "serve", program=program("serve"))

    def ask(path, body=None):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as client:
            client.request("POST" if body else "GET", path, json.dumps(body) if body else None)
            return client.getresponse().read()

    def is_there():
        assert all(process.poll() is None for process in both), (tmp_path / "serve.0").read_text()
        try:
            return ask("/health") == b"ok\n"
        except OSError:
            return False

    hosts.wait_until(is_there)
    body = {"prompt": text, "max_tokens": 12, "temperature": 0.7, "seed": 5}
    found = []
    for _ in range(2):
        found.append(json.loads(ask("/v1/completions", body))["choices"][0]["text"])
        time.sleep(6)  # the engine is idle, and the other process waits
    keys = [cat_run, f"prompt={text}", "tokens=12", "temperature=0.7", "seed=5", "output=jsonl"]
    expected = json.loads(alone(generate, generate.Generate, *keys))["text"]
    assert found == [expected] * 2
    for process in both:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(600) for process in both] == [0, 0], (tmp_path / "serve.1").read_text()


@pytest.mark.slow
def test_two_processes_score_while_they_train(cat_run, tmp_path):
    """Numbers and answers of a run's tasks are those of one process."""
    (tmp_path / "exam.jsonl").write_text(json.dumps(EXAM) + "\n")
    (tmp_path / "ask.jsonl").write_text(json.dumps({"question": "the cat sat on the", "answer": "mat"}) + "\n")
    keys = f"""--config-name=finetune_smollm2 flat_tokens.filespec={cat_run.parent}/text.zarr initial_weights={cat_run}
        model.compute_dtype=float32 training.tokens.batch=8 training.tokens.len=32 training.steps=2 mesh.d=2
        training.warmup_steps=0 training.steps_for_lr=2 eval_interval=1 validation_batches=1 train=.*
        eval_tasks=[{tmp_path}/exam.jsonl,{tmp_path}/ask.jsonl]""".split()
    both = hosts.start_two(
        [*keys, *hosts.where(tmp_path / "two")], hosts.environment(tmp_path), output=tmp_path / "log",
        program=[sys.executable, "-m", "train_any"],
    )  # fmt: skip
    assert [process.wait(600) for process in both] == [0, 0], (tmp_path / "log.0").read_text()
    one = [sys.executable, "-m", "train_any", *keys, *hosts.where(tmp_path / "one")]
    subprocess.run(one, cwd=hosts.ROOT, env=hosts.environment(tmp_path), check=True, capture_output=True)
    of_two, of_one = [
        [
            {key: value for key, value in record.items() if key.startswith("score/")}
            for record in hosts.records(tmp_path / name)
            if "score/exam.jsonl/acc" in record
        ]
        for name in ("two", "one")
    ]
    assert len(of_one) == 2 and of_two == of_one
    assert (tmp_path / "two/samples.txt").read_text() == (tmp_path / "one/samples.txt").read_text()


def test_several_processes_share_json(monkeypatch):
    """All get the first one's value, of any length: keys are texts then, and tuples lists."""
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: sent.append(x) or x)
    value, expected = {1: (1, 2), "text": "é" * 1000}, {"1": [1, 2], "text": "é" * 1000}
    assert shared(value) == expected
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda _: sent.pop(0))
    assert shared() == expected and not sent


def test_one_process_sends_nothing():
    """What is shared is what it was; calls that are led are made once."""
    value = {"a": (1, 2), "how": Drawing()}
    made = []
    assert shared(value) is value and from_first(lambda: value) is value
    calls = Calls(made)
    assert calls.lead("append", value) is None and made == [value]
    assert calls.end() is None
