"""Tasks that say how good a model is: files of choices, questions and texts, scored by log likelihoods and answers."""

import functools
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.decoding import devices_of_rows, on_mesh, with_whole_rows
from models.huggingface import Source, open_weights
from models.likelihoods import Packed, Pair, mapped, masked_one_by_one, pack, written
from models.mesh import placed
from models.reading import Reader
from runtime.config.keys import Count, NotEmpty, Steps
from runtime.config.rebuild import Origins, rebuild
from runtime.data.tokenizers import ChatError, Tokenizer
from runtime.files import read_text
from runtime.terminal import RunError, install, needs_package, progress, run_errors
from shardlib.mesh import current_mesh
from tools.hosts import from_first, is_first, note, shared
from tools.ready import ReadyModel, Writing, json_lines, with_weights, without_drops, write

INSTALL = install("score")
ROUGE = ("rouge1", "rouge2", "rougeL")


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How tasks are scored."""

    delimiter: str = " "  # between a context and its choices
    chat: bool = False  # questions go through the model's chat template
    tokens: Count = 256  # an answer's length, at most, if a harness task does not say
    stop: tuple[NotEmpty, ...] = ("\n",)  # an answer ends before any of these
    length: Count = 2048  # tokens that are read at once, at most: contexts lose their beginning, texts are divided
    rows: Count = 8  # batch size, in rows


@dataclass(frozen=True, kw_only=True)
class Choices:
    context: str
    choices: tuple[NotEmpty, ...]
    answer: Steps  # the number of the right one, from 0


@dataclass(frozen=True, kw_only=True)
class Question:
    question: NotEmpty
    answer: tuple[NotEmpty, ...]  # each is right; in a file also one text


@dataclass(frozen=True, kw_only=True)
class Document:
    text: NotEmpty


# == Log likelihoods of texts ====
class Scorer:
    """Log likelihoods from a model that is ready.

    Args:
      rows: how many are computed at once; as many on each device along b, at least two.
      length: tokens that are read at once, at most.
    """

    def __init__(self, ready: ReadyModel, rows: int, length: int):
        self.ready, self.length = ready, ready.at_most(length)
        # At least two a device: for one row with one head JAX broadcasts in another way, which the check refuses.
        self.rows = max(-(-rows // devices_of_rows()), 2) * devices_of_rows()
        family: Any = ready.source.family
        model = ready.source.model
        self.kind = family.KIND
        if self.kind == "decoder":
            self.compiled = jax.jit(mapped(family, model, ready.generator.weights[1]))
        else:
            self.reader = Reader(family, model, None)
            if self.kind == "encoder" and ready.generator.mask is None:
                raise RunError(f"{ready.source.folder} has no mask_token, by which an encoder is scored")

    def __call__(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log probability of each pair's continuation, in nats, and whether greedy decoding writes just that."""
        if not pairs:
            return []
        kept = self.cut(pairs)
        if self.kind == "both":
            packed, places = written(kept, self.length, self.ready.generator.start)
        elif self.kind == "decoder":
            packed, places = pack(kept, self.length)
        else:
            packed, places = masked_one_by_one(kept, self.length, self.ready.end, self.ready.generator.mask)
        log_prob, best = np.zeros((2, -(-len(packed) // self.rows) * self.rows, packed.shape[2]))
        for start in progress(range(0, len(packed), self.rows), unit=" batches", disable=not is_first()):
            batch = packed[start : start + self.rows]
            batch = np.pad(batch, ((0, self.rows - len(batch)), (0, 0), (0, 0)))
            log_prob[start : start + self.rows], best[start : start + self.rows] = self._found(batch)
        targets = packed[:, 1]
        return [
            (
                float(sum(log_prob[place].sum() for place in of_pair)),
                all((best[place] == targets[place]).all() for place in of_pair),
            )
            for of_pair in places
        ]

    def cut(self, pairs: Sequence[Pair]) -> list[Pair]:
        """A pair longer than `length` loses its beginning, as in lm-eval-harness."""
        if self.kind == "both":  # an encoder's row and a decoder's
            kept = [(before[-self.length :], after[-self.length :]) for before, after in pairs]
        else:  # the last token is no input of a decoder
            room = self.length + 1 if self.kind == "decoder" else self.length - len(self.ready.end)
            kept = [(before[-max(room - len(after), 1) :], after[-(room - 1) :]) for before, after in pairs]
        if count := sum([*map(len, ours)] != [*map(len, whole)] for ours, whole in zip(kept, pairs)):
            note(f"{count} of {len(pairs)} are longer than {self.length} tokens and lose their beginning")
        return kept

    def _found(self, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The targets' log probabilities, and the likeliest ids, in some packed rows."""
        if self.kind != "decoder":
            generator = self.ready.generator
            self.reader.take(generator.of_encoder if self.kind == "both" else generator.weights)
            return self.reader.predict([*packed.swapaxes(0, 1)])
        kinds = (np.uint32, np.uint32, np.int32, np.int32, np.int32)
        rows = Packed(*(packed[:, number].astype(kind) for number, kind in enumerate(kinds)))
        log_prob, best = self.compiled(*self.ready.generator.weights, placed(rows, Packed))
        return np.asarray(log_prob), np.asarray(best)

    # ---- of texts

    def pair(self, context: str, continuation: str) -> Pair:
        """A context's ids and a continuation's, divided as lm-eval-harness does: spaces at the context's end go with
        the continuation, and both are one text to the tokenizer."""
        kept = context.rstrip()
        before, whole = self.ready.encoded(kept), self.ready.encoded(context + continuation)
        if len(whole) <= len(before):
            raise RunError(f"{continuation[:40]!r} is no token of its own after its context: begin it with a space")
        if self.kind == "both":  # the encoder reads the context as its own text
            return [*before, *self.ready.end], whole[len(before) :]
        first = self.ready.start if before or self.kind == "encoder" else (self.ready.require_tokenizer().bos_id,)
        return [*first, *before], whole[len(before) :]

    def windows(self, text: str) -> list[Pair]:
        """A whole text in windows of `length` tokens that do not overlap, each after one token of the window before;
        the last is filled up with context, as in lm-eval-harness."""
        ids, size = self.ready.encoded(text), self.length
        first: Sequence[int] = [self.ready.require_tokenizer().bos_id]
        pairs: list[Pair] = []
        if self.kind == "encoder":
            size, first = size - len(self.ready.end) - 1, self.ready.start
        for start in range(0, len(ids), size):
            end = min(start + size, len(ids))
            pairs.append((ids[max(end - size - 1, 0) : start] if start else first, ids[start:end]))
        return pairs

    def room_before(self, tokens: int) -> int:
        """How many tokens of a prompt an answer of so many leaves room for."""
        if tokens >= self.length:
            raise RunError(f"tokens = {tokens}: expected fewer than the {self.length} that are read at once: set it")
        return self.length - tokens

    def write(self, prompts: Sequence[Any], config: Writing) -> list[str]:
        """The answers to texts or chats; of a long prompt the end stays that leaves room for config.tokens."""
        if self.kind == "encoder":
            raise RunError(f"{self.ready.source.folder} fills in masked tokens: it answers no questions")
        room = self.room_before(config.tokens)
        try:
            ids = [self.ready.ids_of(prompt)[-room:] for prompt in prompts]
        except ChatError as error:
            raise RunError(f"chat=true: {error}") from error
        texts = write(self.ready, config, ids, [0] * len(ids))
        return [text.shown for text in progress(texts, total=len(ids), unit=" answers", disable=not is_first())]


# == Tasks of files ====================================================================================================
Answers = list[dict[str, Any]]  # what is written of each; numbers are averaged


def score_choices(scorer: Scorer, records: Sequence[Choices], config: Scoring) -> Answers:
    """acc: the right choice is the likeliest; acc_norm: by character; acc_bytes: by byte; as in lm-eval-harness."""
    pairs = [scorer.pair(record.context, config.delimiter + choice) for record in records for choice in record.choices]
    scores, answers = iter(scorer(pairs)), []
    for record in records:
        sums = np.array([next(scores)[0] for _ in record.choices])
        sizes = {"acc": 1, "acc_norm": [*map(len, record.choices)]}
        sizes["acc_bytes"] = [len(choice.encode()) for choice in record.choices]
        right = {name: float(np.argmax(sums / size) == record.answer) for name, size in sizes.items()}
        answers.append({**right, "log_likelihoods": sums.tolist()})
    return answers


def score_questions(scorer: Scorer, records: Sequence[Question], config: Scoring) -> Answers:
    """exact_match without spaces around, ROUGE's F-measures (Lin 2004) without stemming; the best answer counts."""
    from rouge_score.rouge_scorer import RougeScorer

    rouge = RougeScorer(list(ROUGE))
    stop = scorer.ready.chat_stops(config.stop) if config.chat else config.stop
    writing = Writing(tokens=config.tokens, stop=stop, rows=config.rows, temperature=0.0)
    prompts = [[{"role": "user", "content": record.question}] if config.chat else record.question for record in records]
    answers = []
    for record, text in zip(records, scorer.write(prompts, writing)):
        scores = {"exact_match": float(text.strip() in [want.strip() for want in record.answer])}
        scores |= {name: score.fmeasure for name, score in rouge.score_multi(record.answer, text).items()}
        answers.append({**scores, "text": text})
    return answers


def score_documents(scorer: Scorer, records: Sequence[Document], config: Scoring) -> Answers:
    """The log likelihood of each text, with its tokens and bytes."""
    windows = [scorer.windows(record.text) for record in records]
    scores = iter(scorer([pair for window in windows for pair in window]))
    return [
        {
            "log_likelihood": sum(next(scores)[0] for _ in pairs),
            "tokens": sum(len(after) for _, after in pairs),
            "bytes": len(record.text.encode()),
        }
        for record, pairs in zip(records, windows)
    ]


# By the field that only this kind has.
KINDS: dict[str, tuple[type, Callable]] = {
    "choices": (Choices, score_choices),
    "question": (Question, score_questions),
    "text": (Document, score_documents),
}
METRICS: dict[Callable, tuple[str, ...]] = {  # the metrics in `summary`
    score_choices: ("acc", "acc_norm", "acc_bytes"),
    score_questions: ("exact_match", *ROUGE),
    score_documents: ("bits_per_byte", "perplexity"),
}


def read_task(file: str, limit: int | None) -> tuple[Callable, list[Any]]:
    """How a file is scored, and its records. Raises RunError with the line that is wrong."""

    def read() -> str:
        with run_errors(f"the task {file} cannot be read", ValueError):
            return read_text(os.path.expanduser(file))

    text = from_first(read)
    if not text.strip():
        raise RunError(f"the task {file} is empty")
    if not file.endswith(".jsonl"):
        return score_documents, [Document(text=text)]
    kind, records = "", []
    for where, content in itertools.islice(json_lines(file, text), limit):
        kind = kind or next((name for name in KINDS if name in content), "")
        if not kind:
            raise RunError(f"{where}: expected an object with the field choices, question or text")
        if isinstance(content.get("answer"), str):
            content["answer"] = [content["answer"]]
        known: Any = KINDS[kind][0]
        record = rebuild(known, {key: content[key] for key in known.__annotations__ if key in content}, Origins(where))
        if kind == "choices" and record.answer >= len(record.choices):
            raise RunError(f"{where}: answer = {record.answer}: there are {len(record.choices)} choices, from 0 on")
        records.append(record)
    return KINDS[kind][1], records


def summary(answers: Answers) -> Iterator[tuple[str, float, float | None]]:
    """The metrics of a task: name, value, and standard error where it is a mean."""
    if "log_likelihood" in answers[0]:
        nats, tokens, size = (sum(answer[key] for answer in answers) for key in ("log_likelihood", "tokens", "bytes"))
        yield "bits_per_byte", -nats / size / math.log(2), None
        with np.errstate(over="ignore"):
            yield "perplexity", float(np.exp(-nats / tokens)), None
    for name in (name for name, value in answers[0].items() if isinstance(value, float) and name != "log_likelihood"):
        values = np.array([answer[name] for answer in answers])
        yield name, values.mean(), values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else None


def check_tasks(family: Any, tasks: Sequence[tuple[str, Callable, Any]]) -> None:
    """Raises RunError where the model cannot answer, or a package is missing that compares answers."""
    if asked := [file for file, how, _ in tasks if how is score_questions]:
        if family is not None and family.KIND == "encoder":
            raise RunError(f"{asked[0]}: questions are for models that write, and this one fills in masked tokens")
        with needs_package("scoring answers", "rouge_score", INSTALL):
            importlib.import_module("rouge_score")


class InRun:
    """Tasks while train_any.py trains, with its weights as they are; all processes call it together.

    whole: makes the family's weights from the trained ones.
    special_id: as in train_any's `mapped_steps`.
    judge: of harness.py, for its tasks; None: there are only files.

    Raises:
      RunError: a task cannot be read or its package is missing, or the run cannot be scored.
    """

    def __init__(
        self, config: Any, tokenizer: Tokenizer | None, whole: Callable[[Any], Any], special_id: int, judge: Any = None
    ):
        if tokenizer is None:
            raise RunError("eval_tasks, eval.harness: expected data that name their tokenizer")
        self.tasks = [(file, *read_task(file, config.eval.limit)) for file in config.eval_tasks]
        self.family = sys.modules[type(config.model).__module__]
        check_tasks(self.family, self.tasks)
        self.metrics = [f"score/{Path(file).name}/{name}" for file, how, _ in self.tasks for name in METRICS[how]]
        self.judge = judge
        if judge is not None:
            self.metrics += [f"score/{name}" for name in judge.metrics]
        self.model, self.tokenizer = without_drops(config.model), tokenizer
        self.whole, self.special_id = whole, special_id
        self.published = None  # the config.json of the first weights: it decides what stands around a text
        if config.initial_weights is not None:
            with ThreadPoolExecutor(1) as pool:
                self.published = open_weights(config.initial_weights, pool).config
        length = config.training.tokens.len
        self.config = Scoring(length=length, tokens=min(Scoring.tokens, length // 2))
        self.scorer: Scorer | None = None

    def __call__(self, weights: Any) -> tuple[dict[str, float], str]:
        """Metrics by their names in metrics.jsonl, and the first answers to questions. The weights are gathered over d,
        in the type of activations, while it lasts."""
        weights, mesh = self.whole(weights), current_mesh()
        if (whole := with_whole_rows(mesh)) == mesh:
            return self._scores(weights)
        with jax.set_mesh(whole):
            return self._scores(jax.tree.map(functools.partial(on_mesh, whole), weights))

    def _scores(self, weights: Any) -> tuple[dict[str, float], str]:
        if self.scorer is None:
            source = Source(None, self.family, self.model, Path(), self.published)
            ready = with_weights(source, weights, self.tokenizer, self.special_id, self.config.length)
            self.scorer = Scorer(ready, self.config.rows, self.config.length)
        else:
            self.scorer.ready.generator.take(weights)
        metrics: dict[str, float] = {}
        samples: list[str] = []
        for file, how, records in self.tasks:
            answers = how(self.scorer, records, self.config)
            metrics |= {f"score/{Path(file).name}/{name}": float(value) for name, value, _ in summary(answers)}
            if how is score_questions:
                samples += [f"{record.question}\n→ {answer['text']}\n" for record, answer in zip(records[:8], answers)]
        if self.judge is not None:
            figures = self.judge.figures(self.judge(self.scorer, self.config, has_errors=False))
            metrics |= shared({f"score/{task}/{metric}": float(value) for task, metric, value, *_ in figures})
        self.scorer.ready.generator.take(None)
        return metrics, "\n".join(samples)
