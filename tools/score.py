"""Numbers that others publish: accuracy on multiple choice, exact match and ROUGE of answers, bits a byte of texts.

    python -m tools.score runs/local_shakespeare play.txt                               # bits a byte
    python -m tools.score weights/smollm2 exam.jsonl questions.jsonl to=answers.jsonl   # docs/evaluation.md: fields
    python -m tools.score weights/smollm2 harness=arc_easy,hellaswag mesh.t=2           # tasks of lm-eval-harness

All are made of log likelihoods of a continuation after a context. Continuations of one context share a row, in which
the context is read once.

Legend as in train.py.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax

from ledger.pages.table import columns
from runtime.config import command_line
from runtime.files import open_file, write_whole
from runtime.terminal import RunError, print_line, run_errors
from tools.harness import Harness, Judge
from tools.hosts import from_first, is_first
from tools.own_program import OwnProgram
from tools.ready import OnDevices, append, compute_dtype, ready_model, start_mesh
from tools.tasks import Scorer, Scoring, check_tasks, read_task, score_questions, summary


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Score(Harness, Scoring, OnDevices):
    WORDS: ClassVar = ("model", "tasks")

    tasks: tuple[str, ...] = ()  # files: .jsonl of choices, questions or texts; any other is a text
    to: str | None = None  # a .jsonl file, with a line for each answer
    program: Literal["models", "run"] = "models"  # run: the run's own, its folder's program.py, which this then runs


# == All of it =========================================================================================================
def row(task: str, metric: str, value: float, error: Any, count: int) -> tuple[str, str, str, str, str]:
    return task, metric, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "", str(count or "")


def require_writable(file: Path) -> None:
    with run_errors(f"to={file} cannot be written"):
        if os.path.lexists(file):
            with open_file(file) as there:
                if (first := there.read(9)) and first != b'{"task": ':
                    raise RunError(f"to={file} has lines that this program did not write: give another file")
        file.open("a").close()


def main(config: Score) -> None:
    """Scores a model on tasks: a table, and with to=FILE a line for each answer."""
    if not config.tasks and not config.harness:
        raise RunError("there is nothing to score: name files, or harness=TASK,TASK")
    if config.harness and config.chat:
        raise RunError("chat=true is for questions in files; lm-eval-harness asks its tasks as they are")
    to, *files = (os.path.realpath(os.path.expanduser(path)) for path in (config.to or "", *config.tasks))
    if config.to and to in files:
        raise RunError(f"to={config.to} is one of the tasks, and would be lost: give another file")

    def keep(task: str, answers: Iterable[Mapping[str, Any]]) -> None:
        if config.to:
            append(Path(to), ({"task": task, "number": number, **answer} for number, answer in enumerate(answers)))

    table, judge = [("task", "metric", "value", "±", "of")], None
    own = OwnProgram(config) if config.program == "run" else None
    with jax.set_mesh(start_mesh(config, own and own.config.mesh)):
        tasks = [(file, *read_task(file, config.limit)) for file in config.tasks]
        asks = config.harness or score_questions in [how for _, how, _ in tasks]
        if own is not None and (asks or config.rows != Scoring.rows):
            raise RunError("program=run scores choices and texts, one by one: answers, harness and rows are without it")
        check_tasks(None, tasks)
        if config.harness:
            judge = Judge(config, "harness")
        if config.to:
            from_first(lambda: require_writable(Path(to)))
        if own is not None:
            scorer: Scorer = own.scorer(compute_dtype(config), config.length)
        else:
            scorer = Scorer(ready_model(config), config.rows, config.length)
        check_tasks(scorer.ready.source.family, tasks)
        if score_questions in [how for _, how, _ in tasks]:
            scorer.room_before(config.tokens)
        if config.to:  # nothing is refused any more
            from_first(lambda: write_whole(Path(to), ""))
        for task, how, records in tasks:
            answers = how(scorer, records, config)
            keep(task, ({**asdict(record), **answer} for record, answer in zip(records, answers)))
            table += [row(task, *metric, len(answers)) for metric in summary(answers)]
        if judge is not None:
            scores = judge(scorer, config)
            for task, answers in scores.get("samples", {}).items():
                keep(task, answers)
            table += [row(*figure) for figure in judge.figures(scores)]
    if is_first():
        print_line("\n".join(columns(table, right={2, 3, 4})))


if __name__ == "__main__":
    command_line.run(main, Score)
