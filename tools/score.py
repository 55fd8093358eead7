"""Numbers that others publish: accuracy on multiple choice, exact match and ROUGE of answers, bits a byte of texts.

    python -m tools.score runs/local_shakespeare play.txt                               # bits a byte
    python -m tools.score weights/smollm2 exam.jsonl questions.jsonl to=answers.jsonl   # docs/evaluation.md: fields
    python -m tools.score weights/smollm2 harness=arc_easy,hellaswag mesh.t=2           # tasks of lm-eval-harness

All are made of log likelihoods of a continuation after a context. Continuations of one context share a row, in which
the context is read once.

Legend as in train.py.
"""

import contextlib
import difflib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import jax

from runtime.config import command_line
from runtime.config.keys import Count, Steps
from runtime.config.rebuild import Origins, rebuild
from runtime.files import open_file
from runtime.terminal import RunError, columns, needs_package, print_line, run_errors
from tools.hosts import Calls, from_first, is_first
from tools.ready import OnDevices, Writing, ready_model, start_mesh
from tools.tasks import INSTALL, Answers, Document, Scorer, Scoring, check_tasks, read_task, score_documents, summary

MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # of a harness task


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Score(Scoring, OnDevices):
    WORDS: ClassVar = ("model", "tasks")

    tasks: tuple[str, ...] = ()  # files: .jsonl of choices, questions or texts; any other is a text
    harness: str | None = None  # tasks of lm-eval-harness: arc_easy,hellaswag
    include_path: str | None = None  # a folder with your own tasks of lm-eval-harness
    num_fewshot: Steps | None = None  # examples before each question of a harness task; null: as the task says
    limit: Count | None = None  # only so many of each task, the first ones
    to: str | None = None  # a .jsonl file, with a line for each answer


# == Tasks of lm-eval-harness ==========================================================================================
def harness_tasks(config: Score) -> Any:
    """lm-eval-harness's tasks. Raises RunError if those that the config names are not among them."""
    with needs_package("harness", "lm_eval", INSTALL):
        from lm_eval.tasks import TaskManager
    manager, names = TaskManager(include_path=config.include_path), (config.harness or "").split(",")
    for name in names:
        if not manager.match_tasks([name]):
            near = [f"; the nearest is {match}" for match in difflib.get_close_matches(name, manager.all_tasks, n=1)]
            raise RunError(f"harness: there is no task {name}{''.join(near)}")
    return manager


def harness_model(scorer: Scorer, calls: Calls, config: Score) -> Any:
    """The model as lm-eval-harness asks for it, on the first process."""
    from lm_eval.api.model import LM

    class Clearshard(LM):
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return calls.lead("likelihoods", [scorer.pair(*request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            answers = calls.lead("documents", [request.args[0] for request in requests])
            return [answer["log_likelihood"] for answer in answers]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [
                text
                for settings, group in itertools.groupby(requests, lambda request: request.args[1])
                for text in calls.lead("write", [request.args[0] for request in group], drawing(dict(settings)))
            ]

    def drawing(settings: dict[str, Any]) -> dict[str, Any]:
        """A task's generation_kwargs as keys of `Writing`; greedy unless they say otherwise."""
        for name, ours in {"until": "stop", "num_beams": "beams", **dict.fromkeys(MOST_TOKENS, "tokens")}.items():
            if name in settings:
                settings[ours] = settings.pop(name)
        if not settings.pop("do_sample", settings.get("temperature", 0) > 0):
            settings["temperature"] = 0
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        return {"tokens": config.tokens, "temperature": 1, **settings, "rows": config.rows}

    return Clearshard()


def score_harness(scorer: Scorer, manager: Any, config: Score, results: "Results") -> None:
    """The harness asks on the first process; the others compute what it asks for."""

    def write(prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        return scorer.write(prompts, rebuild(Writing, settings, Origins("generation_kwargs")))

    def documents(texts: Sequence[str]) -> Answers:
        return score_documents(scorer, [Document(text=text) for text in texts], config)

    calls = Calls(likelihoods=scorer, documents=documents, write=write)
    if not is_first():
        return calls.follow()
    from lm_eval.evaluator import simple_evaluate

    how = {"task_manager": manager, "num_fewshot": config.num_fewshot, "limit": config.limit}
    scores = simple_evaluate(harness_model(scorer, calls, config), tasks=(config.harness or "").split(","), **how)
    calls.end()
    for task, values in scores["results"].items():
        results.keep(task, scores["samples"].get(task, ()))
        for key, value in values.items():  # 'acc,none', 'acc_stderr,none'; what follows the comma is a filter
            name, comma, filter_ = key.partition(",")
            if comma and isinstance(value, int | float) and not name.endswith("_stderr"):
                count = scores["n-samples"].get(task, {}).get("effective", 0)
                results.add(task, key.removesuffix(",none"), value, values.get(f"{name}_stderr,{filter_}"), count)


# == All of it =========================================================================================================
class Results:
    """The table; and a file with a line for each answer, once it is open."""

    def __init__(self) -> None:
        self.table = [("task", "metric", "value", "±", "of")]
        self.file: Any = None

    def open(self, to: str) -> None:
        with run_errors(f"to={to} cannot be written"):
            if os.path.lexists(to):
                open_file(to).close()
            self.file = open(to, "w", encoding="utf-8")

    def close(self) -> None:
        if self.file:
            with run_errors(f"to={self.file.name} cannot be written"):
                self.file.close()

    def add(self, task: str, metric: str, value: float, error: Any, count: int) -> None:
        shown = f"{error:.4f}" if isinstance(error, float) else ""
        self.table.append((task, metric, f"{value:.4f}", shown, str(count)))

    def keep(self, task: str, answers: Sequence[dict[str, Any]]) -> None:
        for number, answer in enumerate(answers if self.file else ()):
            self.file.write(json.dumps({"task": task, "number": number, **answer}, default=str) + "\n")


def main(config: Score) -> None:
    """Scores a model on tasks: a table, and with to=FILE a line for each answer."""
    if not config.tasks and not config.harness:
        raise RunError("there is nothing to score: name files, or harness=TASK,TASK")
    if config.harness and config.chat:
        raise RunError("chat=true is for questions in files; lm-eval-harness asks its tasks as they are")
    to, *files = (os.path.realpath(os.path.expanduser(path)) for path in (config.to or "", *config.tasks))
    if config.to and to in files:
        raise RunError(f"to={config.to} is one of the tasks, and would be lost: give another file")
    results, managers = Results(), list[Any]()
    with contextlib.closing(results), jax.set_mesh(start_mesh(config)):
        tasks = [(file, *read_task(file, config.limit)) for file in config.tasks]
        check_tasks(None, tasks)
        if config.harness:
            from_first(lambda: managers.append(harness_tasks(config)))
        if config.to:
            from_first(lambda: results.open(to))
        ready = ready_model(config)
        check_tasks(ready.source.family, tasks)
        scorer = Scorer(ready, config.rows, config.length)
        for task, how, records in tasks:
            answers = how(scorer, records, config)
            results.keep(task, [{**asdict(record), **answer} for record, answer in zip(records, answers)])
            for metric in summary(answers):
                results.add(task, *metric, len(answers))
        if config.harness:
            score_harness(scorer, next(iter(managers), None), config, results)
    if is_first():
        print_line("\n".join(columns(results.table, right={2, 3, 4})))


if __name__ == "__main__":
    command_line.run(main, Score)
