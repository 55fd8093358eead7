"""Tasks of lm-eval-harness, for tools.score and for a run that trains: it asks and judges, our model answers.

judge = Judge(Harness(harness="arc_easy"), "harness")    # all processes call this, and what follows
scores = judge(scorer, Scoring())
for task, metric, value, error, count in judge.figures(scores):
    ...
"""

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from runtime.config.keys import Count, Steps
from runtime.config.rebuild import Origins, rebuild
from runtime.data.documents import reading
from runtime.terminal import RunError, needs_package
from tools.hosts import Calls, from_first, is_first
from tools.ready import Writing
from tools.tasks import INSTALL, Answers, Document, Scorer, Scoring, score_documents

MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # a task's names for it


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Tasks of lm-eval-harness, and how much of all tasks is asked."""

    harness: str | None = None  # names of its tasks: arc_easy,hellaswag
    include_path: str | None = None  # a folder with your own tasks of lm-eval-harness
    num_fewshot: Steps | None = None  # examples before each question of a harness task; null: as the task says
    limit: Count | None = None  # only so many of each task, files too, the first ones

    def __post_init__(self) -> None:
        if not self.harness and (self.include_path is not None or self.num_fewshot is not None):
            raise ValueError("harness: include_path and num_fewshot are for its tasks: name some, or leave them out")


class Judge:
    """lm-eval-harness with its tasks, which are loaded once.

    Args:
      key: the config's, for messages.
    Raises:
      RunError: there is no such task, its data cannot be read, or the package is missing.
    """

    def __init__(self, config: Harness, key: str):
        self.config, self.tasks = config, list[Any]()
        self.metrics: list[str] = from_first(lambda: self._load(key))  # 'arc_easy/acc', of groups too

    def _load(self, key: str) -> list[str]:
        with needs_package(key, "lm_eval", INSTALL):
            from lm_eval.tasks import TaskManager
        manager, metrics = TaskManager(include_path=self.config.include_path), list[str]()
        known = set[str]()
        for pattern in (self.config.harness or "").split(","):
            if not (names := manager.match_tasks([pattern])):
                near = [
                    f"; the nearest is {match}" for match in difflib.get_close_matches(pattern, manager.all_tasks, 1)
                ]
                raise RunError(f"{key}: there is no task {pattern}{''.join(near)}")
            for name in names:
                with reading(name):
                    loaded = manager.load(name)
                groups, tasks = loaded["groups"], loaded["tasks"]
                if twice := known & tasks.keys():
                    raise RunError(f"{key}: {min(twice)} is asked for twice, by its name or in a group: leave one out")
                known |= tasks.keys()
                self.tasks += [groups[name]] if name in groups else tasks.values()
                for task in tasks.values():
                    filters = [filter_["name"] for filter_ in task.config.filter_list or ()] or ["none"]
                    metrics += [named(task.task_name, *of) for of in itertools.product(task.aggregation(), filters)]
                for group in groups.values():
                    for metric in group.aggregate_metric_list or ():
                        metrics += [named(group.name, metric.metric, of) for of in metric.filter_list or ["none"]]
        return metrics

    def __call__(self, scorer: Scorer, config: Scoring, has_errors: bool = True) -> dict[str, Any]:
        """The results of lm-eval-harness, on the first process, which asks; the others compute, and get nothing.

        has_errors: standard errors too. For that of a perplexity or an F1 score it forks this process, once a core, and
          draws 100,000 samples.
        """

        def write(prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
            return scorer.write(prompts, rebuild(Writing, settings, Origins("generation_kwargs")))

        def documents(texts: Sequence[str]) -> Answers:
            return score_documents(scorer, [Document(text=text) for text in texts], config)

        calls = Calls(SimpleNamespace(likelihoods=scorer, documents=documents, write=write))
        if not is_first():
            calls.follow()
            return {}
        from lm_eval.evaluator import simple_evaluate

        how: dict[str, Any] = {"num_fewshot": self.config.num_fewshot, "limit": self.config.limit}
        how |= {} if has_errors else {"bootstrap_iters": 0}
        scores = simple_evaluate(model_of(scorer, calls, config), tasks=self.tasks, **how)
        calls.end()
        return scores

    def figures(self, scores: dict[str, Any]) -> Iterator[tuple[str, str, float, Any, int]]:
        """Each figure: its task, its metric, its value, the standard error, and of how many questions."""
        for task, values in scores.get("results", {}).items():
            for key, value in values.items():  # 'acc,none', 'acc_stderr,none'; what follows the comma is a filter
                name, comma, filter_ = key.partition(",")
                if comma and isinstance(value, int | float) and not name.endswith("_stderr"):
                    count = scores["n-samples"].get(task, {}).get("effective", 0)
                    yield task, key.removesuffix(",none"), value, values.get(f"{name}_stderr,{filter_}"), count


def model_of(scorer: Scorer, calls: Calls, config: Scoring) -> Any:
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


def named(task: str, metric: str, filter_: str) -> str:
    return f"{task}/{metric},{filter_}".removesuffix(",none")
