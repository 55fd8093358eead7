"""generate, score and serve in a job of two processes write what one process writes; the first reads and writes."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import httpx
import jax
import pytest
import several_hosts as hosts
from jax.experimental import multihost_utils
from ragged import write_lines
from several_hosts import nothing_is_left  # noqa: F401 a fixture

from models.decoding import Drawing
from tools import generate, score
from tools.hosts import Calls, from_first, shared

MESH = ["mesh.d=2"]


@pytest.fixture
def exam(tmp_path):
    """Files of tasks: a choice, and a question."""
    choice = {"context": "the cat sat on the", "choices": ["mat", "cat"], "answer": 0}
    question = {"question": "the cat sat on the", "answer": "mat"}
    return write_lines(tmp_path / "exam.jsonl", [choice]), write_lines(tmp_path / "ask.jsonl", [question])


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
def test_two_processes_write_and_score_as_one(cat_run, alone, exam, tmp_path):
    """The first process prints the lines that one process prints: texts of a file, drawn and by beams, log likelihoods
    and answers. The second needs none of the files."""
    (tmp_path / "prompts.txt").write_text("the cat\non\nthe mat. the\n")
    for ways in (["temperature=0.7", "samples=2"], ["beams=2"]):
        keys = [cat_run, f"input={tmp_path}/prompts.txt", "tokens=8", "output=ids", *ways]
        first, second = printed(tmp_path, "generate", keys)
        ids = [line for line in first if line and set(line) <= set("0123456789 ")]
        assert ids == alone(generate, generate.Generate, *keys).splitlines()
        assert not set(second) & set(ids)
    keys, answers = [cat_run, *exam, "tokens=8", f"to={tmp_path}/answers.jsonl"], []
    expected = alone(score, score.Score, *keys).splitlines()
    answers.append((tmp_path / "answers.jsonl").read_text())
    first, second = printed(tmp_path, "score", keys)
    assert [line for line in first if line in expected] == expected and not set(second) & set(expected)
    answers.append((tmp_path / "answers.jsonl").read_text())
    for both in zip(*(map(json.loads, text.splitlines()) for text in answers), strict=True):
        one, other = (answer.pop("log_likelihoods", [0.0]) for answer in both)
        assert both[0] == both[1] and one == pytest.approx(other, abs=1e-4)


@pytest.mark.slow
def test_two_processes_serve_as_one(cat_run, alone, tmp_path):
    """Two requests with a pause between get one process' answers; SIGTERM to both ends both."""
    port, text = hosts.free_port(), "the cat"
    keys = [str(cat_run), f"port={port}", "rows=4", "length=64", *MESH]
    both = hosts.start_two(keys, hosts.environment(tmp_path), output=tmp_path / "serve", program=program("serve"))

    def is_there():
        assert all(process.poll() is None for process in both), (tmp_path / "serve.0").read_text()
        with contextlib.suppress(httpx.TransportError):
            return client.get("/health").text == "ok\n"

    found, body = [], {"prompt": text, "max_tokens": 12, "temperature": 0.7, "seed": 5}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        hosts.wait_until(is_there)
        for _ in range(2):
            found.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            time.sleep(6)  # the engine is idle, and the other process waits
    keys = [cat_run, f"prompt={text}", "tokens=12", "temperature=0.7", "seed=5", "output=jsonl"]
    expected = json.loads(alone(generate, generate.Generate, *keys))["text"]
    assert found == [expected] * 2
    for process in both:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(600) for process in both] == [0, 0], (tmp_path / "serve.1").read_text()


@pytest.mark.slow
def test_two_processes_score_while_they_train(cat_run, exam, tmp_path):
    """Numbers and answers of a run's tasks are those of one process."""
    keys = f"""--config-name=finetune_smollm2 flat_tokens.filespec={cat_run.parent}/text.zarr initial_weights={cat_run}
        model.compute_dtype=float32 training.tokens.batch=8 training.tokens.len=32 training.steps=2 mesh.d=2
        training.warmup_steps=0 training.steps_for_lr=2 eval_interval=1 validation_batches=1 train=.*
        eval_tasks=[{",".join(map(str, exam))}]""".split()
    train, environment = [sys.executable, "-m", "train_any"], hosts.environment(tmp_path)
    both = hosts.start_two([*keys, *hosts.where(tmp_path / "two")], environment, output=tmp_path / "log", program=train)
    assert [process.wait(600) for process in both] == [0, 0], (tmp_path / "log.0").read_text()
    one = [*train, *keys, *hosts.where(tmp_path / "one")]
    subprocess.run(one, cwd=hosts.ROOT, env=environment, check=True, capture_output=True)
    of_two, of_one = (
        [
            {key: value for key, value in record.items() if key.startswith("score/")}
            for record in hosts.records(tmp_path / name)
            if "score/exam.jsonl/acc" in record
        ]
        for name in ("two", "one")
    )
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
