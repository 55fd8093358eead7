"""Numbers that others publish: accuracy on multiple choice, exact match and ROUGE of answers, bits a byte of texts.

    python -m score runs/local_shakespeare play.txt                                 # bits a byte
    python -m score weights/smollm2 exam.jsonl questions.jsonl to=answers.jsonl     # docs/evaluation.md: their fields
    python -m score weights/smollm2 harness=arc_easy,hellaswag mesh.t=2             # tasks of lm-eval-harness

All are made of log likelihoods of a continuation after a context. Continuations of one context share a row, in which
the context is read once.

Legend as in train.py.
"""

import contextlib
import difflib
import functools
import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax import lax

from generate import Generate, Mesh, Served, serve, start_mesh, write
from models import layers
from models.context import ALONE, attention_where, deal_heads
from models.decoding import SLOTS, Generator, devices_of_rows
from models.huggingface import Source
from models.layers import act
from models.reading import Reader, of_targets
from runtime.config import command_line
from runtime.config.keys import Count, NotEmpty, Steps
from runtime.config.rebuild import Origins, rebuild
from runtime.data.tokenizers import ChatError, Tokenizer
from runtime.files import open_file, read_text
from runtime.terminal import RunError, columns, needs_package, print_error, print_line, progress, run_errors
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, f32, i32, make_shardings, narrowed, pytree_dataclass, u32
from shardlib.typed import typed

INSTALL = "pip install -r requirements-score.txt"
ROUGE = ("rouge1", "rouge2", "rougeL")
MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # of a harness task


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Score:
    WORDS: ClassVar = ("model", "tasks")

    model: str  # a run, a checkpoint, or a published folder
    tasks: tuple[str, ...] = ()  # files: .jsonl of choices, questions or texts; any other is a text
    harness: str | None = None  # tasks of lm-eval-harness: arc_easy,hellaswag
    include_path: str | None = None  # a folder with your own tasks of lm-eval-harness
    num_fewshot: Steps | None = None  # examples before each question of a harness task; null: as the task says
    limit: Count | None = None  # only so many of each task, the first ones
    delimiter: str = " "  # between a context and its choices
    chat: bool = False  # questions go through the model's chat template
    tokens: Count = 256  # of an answer, at most, if a harness task does not say
    stop: tuple[NotEmpty, ...] = ("\n",)  # an answer ends before any of these
    length: Count = 2048  # tokens that are read at once, at most: contexts lose their beginning, texts are divided
    to: str | None = None  # a .jsonl file, with a line for each answer
    rows: Count = 8  # that are computed at the same time
    allow_program_change: bool = False  # score a run although its train.py computes another model than models/
    compute_dtype: Literal["bfloat16", "float32"] | None = None  # null: the model's; float32 on a CPU
    mesh: Mesh = field(default_factory=Mesh)


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


# == Log likelihoods ===================================================================================================
@pytree_dataclass
class Packed:
    """Rows of contexts, each with its continuations behind it, as `pack` lays them."""

    tokens: u32['B/b L']
    targets: u32['B/b L']  # what comes next, where a continuation is read
    context: i32['B/b L']  # the context's number; 0: nothing is there
    continuation: i32['B/b L']  # the continuation's number among those of its context; 0: the context itself
    position: i32['B/b L']  # in a context with this continuation alone


@typed
def log_probs(family, model, ends, stack, rows: Packed) -> tuple[f32['B/b L'], i32['B/b L']]:
    """`of_targets` of a family without an encoder.

    A continuation sees its context and itself. 4 · Q · K · L² / t bytes a row are in memory. Sent over t: the sums of
    the layers, as in decoding, and 20 bytes a token.

    Args:
      family: a module of models/.
      ends, stack: its `Ends` and its stacked `Gathered`.
    """
    mask = family.mask(model)
    distance = rows.position[:, :, None] - rows.position[:, None]
    same = rows.continuation[:, :, None] == rows.continuation[:, None]
    sees = (rows.context[:, :, None] == rows.context[:, None]) & (same | (rows.continuation == 0)[:, None])
    sees = sees & (distance >= 0)

    position = ALONE.part(rows.position)

    def layer(x: act['B/b L/c M'], of_layer):
        w, window = of_layer

        def attend(q, k, v):
            near = distance < (layers.ALL if attend.window is None else attend.window)
            return deal_heads(functools.partial(attention_where, allowed=sees & near, cap=mask.cap), q, k, v), None

        attend.window = mask.of_layer(window)
        x, _, _ = family.layer(model, x, w, attend, position, 'M')
        return x, None

    x = family.embed(model, ends, ALONE.part(rows.tokens), position, 'M')
    x, _ = lax.scan(layer, x, (stack, mask.by_layer()))
    return of_targets(ends.unembed, mask.logits_cap, family.final(model, ends, x, 'M'), rows.targets)


def mapped(family: Any, model: Any, stack: Any) -> typed_shard_map:
    """`log_probs` of one model over the mesh; stack: shapes."""
    Ends, Layers = family.Ends, narrowed(Array['layers', family.Gathered], stack)

    @typed
    def score(ends: Ends, stack: Layers, rows: Packed) -> tuple[f32['B/b L'], i32['B/b L']]:
        return log_probs(family, model, ends, stack, rows)

    return typed_shard_map(score)


Pair = tuple[Sequence[int], Sequence[int]]  # a context's ids and a continuation's, one of each or more


Places = list[list[tuple[int, slice]]]  # of each pair, the rows and where in them its continuation's targets are


def room_of(longest: int, length: int) -> int:
    """A row's tokens: few programs are compiled."""
    return min(max(SLOTS, 1 << (longest - 1).bit_length()), length)


def pack(pairs: Sequence[Pair], length: int) -> tuple[np.ndarray, Places]:
    """Rows, int64 [row, field of `Packed`, L], and of each pair the row and the places that its continuation has.

    Of a context all tokens but the last are read once. Each continuation begins with that last one, and is read up to
    its own last token but one, so that every place has one target. A context that does not fit into a row with all its
    continuations is read again in the next.
    """
    of_context: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        of_context.setdefault(tuple(context), []).append(index)
    longest = max(len(context) + len(continuation) - 1 for context, continuation in pairs)
    room = room_of(longest, length)
    rows: list[np.ndarray] = []
    places: Places = [[]] * len(pairs)
    used = room
    for number, ((*before, last), indices) in enumerate(of_context.items(), 1):
        need, is_read = min(len(before) + sum(len(pairs[each][1]) for each in indices), room), False
        for nth, index in enumerate(indices, 1):
            after = pairs[index][1]
            if used + (len(after) if is_read else need) > room:
                rows.append(np.zeros((5, room), np.int64))
                used, is_read = 0, False
            parts = [] if is_read else [(before, [0] * len(before), 0, 0)]
            for tokens, targets, of, start in [*parts, ([last, *after[:-1]], after, nth, len(before))]:
                place, count = slice(used, used + len(tokens)), len(tokens)
                rows[-1][:, place] = tokens, targets, [number] * count, [of] * count, range(start, start + count)
                places[index], used, is_read = [(len(rows) - 1, place)], used + count, True
    return np.stack(rows), places


def written(pairs: Sequence[Pair], length: int, start: int) -> tuple[np.ndarray, Places]:
    """The same for T5, in the order of `ReadRows`: a pair a row, whose context the encoder reads."""
    room = room_of(max(len(part) for pair in pairs for part in pair), length)
    rows = np.zeros((len(pairs), 6, room), np.int64)
    for (tokens, targets, segment, _, read, read_segment), (context, after) in zip(rows, pairs):
        tokens[: len(after)], targets[: len(after)], segment[: len(after)] = [start, *after[:-1]], after, 1
        read[: len(context)], read_segment[: len(context)] = context, 1
    return rows, [[(number, slice(len(after)))] for number, (_, after) in enumerate(pairs)]


def masked_one_by_one(pairs: Sequence[Pair], length: int, end: Sequence[int], mask: int) -> tuple[np.ndarray, Places]:
    """The same for BERT: a row for each token of a continuation, which is masked there (Salazar et al. 2020, 2.1)."""
    room = room_of(max(len(context) + len(after) for context, after in pairs) + len(end), length)
    rows, places = [], []
    for context, after in pairs:
        whole, first = [*context, *after, *end], len(rows)
        for place in range(len(context), len(context) + len(after)):
            rows.append(np.zeros((4, room), np.int64))
            tokens, targets, segment, _ = rows[-1]
            tokens[: len(whole)], targets[: len(whole)], segment[: len(whole)] = whole, whole, 1
            tokens[place] = mask
        places.append([(first + n, slice(len(context) + n, len(context) + n + 1)) for n in range(len(after))])
    return np.stack(rows), places


class Scorer:
    """Log likelihoods by a model that is ready.

    Args:
      rows: that are computed at the same time; as many on each device along b, two at least.
      length: tokens that are read at once, at most.
    """

    def __init__(self, served: Served, rows: int, length: int):
        self.served, self.length = served, min(length, served.length)
        # At least two a device: of one row with one head JAX broadcasts in another way, which the check refuses.
        self.rows = max(-(-rows // devices_of_rows()), 2) * devices_of_rows()
        family, model = served.source.family, served.source.model
        self.kind = family.KIND
        if self.kind == "decoder":
            self.compiled = jax.jit(mapped(family, model, served.generator.weights[1]))
        else:
            self.reader = Reader(family, model, None)
            if self.kind == "encoder" and served.generator.mask is None:
                raise RunError(f"{served.source.folder} has no mask_token, by which an encoder is scored")

    def __call__(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Of each pair the log probability of its continuation, in nats, and whether greedy decoding writes just that.

        What is longer than `length` loses the beginning of its context, as in lm-eval-harness.
        """
        if not pairs:
            return []
        # What a row must hold of a context and a continuation: the last token of these is no input of a decoder.
        room = self.length + 1 if self.kind == "decoder" else self.length - len(self.served.end)
        if cut := sum(len(after) + (self.kind != "both") * len(context) > room for context, after in pairs):
            print_error(f"{cut} of {len(pairs)} are longer than {self.length} tokens and lose their beginning", "note")
        if self.kind == "both":
            packed, places = written(
                [(each[-self.length :], after[-self.length :]) for each, after in pairs],
                self.length, self.served.generator.start,
            )  # fmt: skip
        else:
            kept = [(each[-max(room - len(after), 1) :], after[-(room - 1) :]) for each, after in pairs]
            of_encoder = self.length, self.served.end, getattr(self.served.generator, "mask", None)
            packed, places = pack(kept, self.length) if self.kind == "decoder" else masked_one_by_one(kept, *of_encoder)
        log_prob, best = np.zeros((2, -(-len(packed) // self.rows) * self.rows, packed.shape[2]))
        for start in progress(range(0, len(packed), self.rows), unit=" batches"):
            some = packed[start : start + self.rows]
            some = np.pad(some, ((0, self.rows - len(some)), (0, 0), (0, 0)))
            log_prob[start : start + self.rows], best[start : start + self.rows] = self._found(some)
        targets = packed[:, 1]
        return [
            (
                float(sum(log_prob[place].sum() for place in of_pair)),
                all((best[place] == targets[place]).all() for place in of_pair),
            )
            for of_pair in places
        ]

    def _found(self, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of some packed rows the targets' log probabilities, and the likeliest ids."""
        if self.kind != "decoder":
            generator = self.served.generator
            self.reader.take(generator.of_encoder if self.kind == "both" else generator.weights)
            return self.reader.predict(some.swapaxes(0, 1))
        kinds = (np.uint32, np.uint32, np.int32, np.int32, np.int32)
        rows = Packed(*(some[:, number].astype(kind) for number, kind in enumerate(kinds)))
        found = self.compiled(*self.served.generator.weights, jax.device_put(rows, make_shardings(Packed)))
        return tuple(map(np.asarray, found))

    # ---- of texts

    def pair(self, context: str, continuation: str) -> Pair:
        """A context's ids and a continuation's, divided as lm-eval-harness does: spaces at the context's end go with
        the continuation, and both are one text to the tokenizer."""
        kept = context.rstrip()
        before, whole = self.served.encoded(kept), self.served.encoded(context + continuation)
        if len(whole) <= len(before):
            raise RunError(f"{continuation[:40]!r} is no token of its own after its context: begin it with a space")
        if self.kind == "both":  # which reads a text of its own
            return [*before, *self.served.end], whole[len(before) :]
        first = self.served.start if before or self.kind == "encoder" else (self.served.tokenizer.bos_id,)
        return [*first, *before], whole[len(before) :]

    def windows(self, text: str) -> list[Pair]:
        """A whole text in windows of `length` tokens that do not overlap, each after one token of the window before;
        the last is filled up with context, as in lm-eval-harness."""
        ids, pairs, size, first = self.served.encoded(text), [], self.length, [self.served.tokenizer.bos_id]
        if self.kind == "encoder":
            size, first = size - len(self.served.end) - 1, self.served.start
        for start in range(0, len(ids), size):
            end = min(start + size, len(ids))
            pairs.append((ids[max(end - size - 1, 0) : start] if start else first, ids[start:end]))
        return pairs

    def write(self, prompts: Sequence[Any], config: Generate) -> list[str]:
        """What the model writes after texts or chats; a prompt keeps the end that leaves room for config.tokens."""
        if (room := self.length - config.tokens) < 1:
            raise RunError(f"tokens = {config.tokens}: expected fewer than the {self.length} that are read at once")
        try:
            ids = [self.served.ids_of(prompt)[-room:] for prompt in prompts]
        except ChatError as error:
            raise RunError(f"chat=true: {error}") from error
        texts: list[str] = []
        for start in progress(range(0, len(ids), config.rows), unit=" batches"):
            some = ids[start : start + config.rows]
            texts += [text.shown for text in write(self.served, config, some, [0] * len(some), lambda *_: None)]
        return texts


# == Tasks of files ====================================================================================================
Answers = list[dict[str, Any]]  # what is written of each; numbers are averaged


def score_choices(scorer: Scorer, records: Sequence[Choices], config: Score) -> Answers:
    """acc: the right choice is the likeliest; acc_norm: by character; acc_bytes: by byte; as in lm-eval-harness."""
    pairs = [scorer.pair(each.context, config.delimiter + choice) for each in records for choice in each.choices]
    found, answers = iter(scorer(pairs)), []
    for record in records:
        sums = np.array([next(found)[0] for _ in record.choices])
        sizes = {"acc": 1, "acc_norm": [*map(len, record.choices)]}
        sizes["acc_bytes"] = [len(choice.encode()) for choice in record.choices]
        right = {name: float(np.argmax(sums / size) == record.answer) for name, size in sizes.items()}
        answers.append({**right, "log_likelihoods": sums.tolist()})
    return answers


def score_questions(scorer: Scorer, records: Sequence[Question], config: Score) -> Answers:
    """exact_match, of texts without the spaces around them; ROUGE's F-measures (Lin 2004), without stemming. The best
    of several right answers counts."""
    from rouge_score.rouge_scorer import RougeScorer

    rouge = RougeScorer(list(ROUGE))
    generate = Generate(model=config.model, tokens=config.tokens, stop=config.stop, rows=config.rows, temperature=0.0)
    prompts = [[{"role": "user", "content": each.question}] if config.chat else each.question for each in records]
    answers = []
    for record, text in zip(records, scorer.write(prompts, generate)):
        scores = {"exact_match": float(text.strip() in [each.strip() for each in record.answer])}
        scores |= {name: max(rouge.score(each, text)[name].fmeasure for each in record.answer) for name in ROUGE}
        answers.append({**scores, "text": text})
    return answers


def score_documents(scorer: Scorer, records: Sequence[Document], config: Score) -> Answers:
    """The log likelihood of each text, with its tokens and bytes."""
    windows = [scorer.windows(each.text) for each in records]
    found = iter(scorer([pair for each in windows for pair in each]))
    return [
        {
            "log_likelihood": sum(next(found)[0] for _ in pairs),
            "tokens": sum(len(after) for _, after in pairs),
            "bytes": len(each.text.encode()),
        }
        for each, pairs in zip(records, windows)
    ]


# By the field that only they have.
KINDS: dict[str, tuple[type, Callable]] = {
    "choices": (Choices, score_choices),
    "question": (Question, score_questions),
    "text": (Document, score_documents),
}
METRICS: dict[Callable, tuple[str, ...]] = {  # of `summary`
    score_choices: ("acc", "acc_norm", "acc_bytes"),
    score_questions: ("exact_match", *ROUGE),
    score_documents: ("bits_per_byte", "perplexity"),
}


def read_task(file: str, limit: int | None) -> tuple[Callable, list[Any]]:
    """How a file is scored, and its records. Raises RunError with the line that is wrong."""
    with run_errors(f"the task {file} cannot be read", ValueError):
        text = read_text(os.path.expanduser(file))
    if not text.strip():
        raise RunError(f"the task {file} is empty")
    if not file.endswith(".jsonl"):
        return score_documents, [Document(text=text)]
    kind, records = "", []
    for number, line in enumerate(text.rstrip("\n").split("\n")[:limit], 1):
        where = f"{file}, line {number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{where}: expected an object: {error}") from None
        kind = kind or next((each for each in KINDS if isinstance(content, dict) and each in content), "")
        if not kind or not isinstance(content, dict):
            raise RunError(f"{where}: expected an object with the field choices, question or text")
        if isinstance(content.get("answer"), str):
            content["answer"] = [content["answer"]]
        known = KINDS[kind][0]
        record = rebuild(known, {key: content[key] for key in known.__annotations__ if key in content}, Origins(where))
        if kind == "choices" and record.answer >= len(record.choices):
            raise RunError(f"{where}: answer = {record.answer}: there are {len(record.choices)} choices, from 0 on")
        records.append(record)
    return KINDS[kind][1], records


def summary(answers: Answers) -> Iterator[tuple[str, float, float | None]]:
    """The metrics of a task: name, value, and standard error where it is a mean."""
    if "log_likelihood" in answers[0]:
        nats, tokens, size = (sum(each[key] for each in answers) for key in ("log_likelihood", "tokens", "bytes"))
        yield "bits_per_byte", -nats / size / math.log(2), None
        yield "perplexity", math.exp(-nats / tokens), None
    for name in (name for name, value in answers[0].items() if isinstance(value, float) and name != "log_likelihood"):
        values = np.array([each[name] for each in answers])
        yield name, values.mean(), values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else None


def check_tasks(family: Any, tasks: Sequence[tuple[str, Callable, Any]]) -> None:
    """Raises RunError where the model cannot answer, or a package is missing that compares answers."""
    if asked := [file for file, how, _ in tasks if how is score_questions]:
        if family is not None and family.KIND == "encoder":
            raise RunError(f"{asked[0]}: questions are for models that write, and this one fills in masked tokens")
        with needs_package("scoring answers", "rouge_score", INSTALL):
            importlib.import_module("rouge_score")


class InRun:
    """Tasks of files while train_any.py trains, with its weights as they are; on one host.

    whole: the family's weights, of what is trained.
    special_id: as of train_any's `mapped_steps`.

    Raises:
      RunError: a task cannot be read or its package is missing, or the run cannot be scored.
    """

    def __init__(self, config: Any, tokenizer: Tokenizer | None, whole: Callable[[Any], Any], special_id: int):
        if tokenizer is None or config.num_hosts > 1:
            raise RunError("eval_tasks: expected one host, and data that name their tokenizer")
        self.tasks = [(file, *read_task(file, None)) for file in config.eval_tasks]
        self.family = sys.modules[type(config.model).__module__]
        check_tasks(self.family, self.tasks)
        self.metrics = [f"score/{Path(file).name}/{name}" for file, how, _ in self.tasks for name in METRICS[how]]
        self.model, self.tokenizer, self.whole, self.special_id = config.model, tokenizer, whole, special_id
        length = config.training.tokens.len
        self.config = Score(model="the run", length=length, tokens=min(Score.tokens, length // 2))
        self.scorer: Scorer | None = None

    def __call__(self, weights: Any) -> tuple[dict[str, float], str]:
        """Metrics by their names in metrics.jsonl, and the first answers to questions. The weights are gathered over d,
        in the type of activations, while it lasts."""
        weights = self.whole(weights)
        if self.scorer is None:
            end = self.tokenizer.id_of("eos_token")
            ends = [] if end is None else [end]
            start = () if self.family.KIND == "encoder" else (self.tokenizer.bos_id,)
            if self.family.KIND == "encoder":
                generator = Reader(self.family, self.model, weights, self.special_id)
            else:
                decoder_start = self.special_id if self.family.KIND == "both" else None
                generator = Generator(self.family, self.model, weights, ends, decoder_start)
            source = Source(None, self.family, self.model, Path())
            served = Served(generator, source, self.tokenizer, start, (), self.config.length)
            self.scorer = Scorer(served, self.config.rows, self.config.length)
        else:
            generator = self.scorer.served.generator
            generator.take(weights)
        metrics, samples = {}, []
        for file, how, records in self.tasks:
            answers = how(self.scorer, records, self.config)
            metrics |= {f"score/{Path(file).name}/{name}": float(value) for name, value, _ in summary(answers)}
            if how is score_questions:
                samples += [f"{each.question}\n→ {answer['text']}\n" for each, answer in zip(records[:8], answers)]
        generator.take(None)
        return metrics, "\n".join(samples)


# == Tasks of lm-eval-harness ==========================================================================================
def harness_tasks(config: Score) -> tuple[Any, list[str]]:
    """lm-eval-harness's tasks, and the names of those that are asked for."""
    with needs_package("harness", "lm_eval", INSTALL):
        from lm_eval.tasks import TaskManager
    manager, names = TaskManager(include_path=config.include_path), config.harness.split(",")
    for name in names:
        if not manager.match_tasks([name]):
            near = [f"; the nearest is {each}" for each in difflib.get_close_matches(name, manager.all_tasks, n=1)]
            raise RunError(f"harness: there is no task {name}{''.join(near)}")
    return manager, names


def harness_model(scorer: Scorer, config: Score) -> Any:
    """The model as lm-eval-harness asks for it."""
    from lm_eval.api.model import LM

    class Clearshard(LM):
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return scorer([scorer.pair(*each.args) for each in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            answers = score_documents(scorer, [Document(text=each.args[0]) for each in requests], config)
            return [each["log_likelihood"] for each in answers]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [
                text
                for settings, some in itertools.groupby(requests, lambda each: each.args[1])
                for text in scorer.write([each.args[0] for each in some], drawing(dict(settings)))
            ]

    def drawing(settings: dict[str, Any]) -> Generate:
        """A task's generation_kwargs; greedy, if they do not say else."""
        for name, ours in {"until": "stop", "num_beams": "beams", **dict.fromkeys(MOST_TOKENS, "tokens")}.items():
            if name in settings:
                settings[ours] = settings.pop(name)
        if not settings.pop("do_sample", settings.get("temperature", 0) > 0):
            settings["temperature"] = 0
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        ours = {"model": config.model, "rows": config.rows}
        settings = {"tokens": config.tokens, "temperature": 1, **settings, **ours}
        return rebuild(Generate, settings, Origins("generation_kwargs"))

    return Clearshard()


# == All of it =========================================================================================================
def main(config: Score) -> None:
    """Scores a model on tasks: a table, and with to=FILE a line for each answer."""
    if not config.tasks and not config.harness:
        raise RunError("there is nothing to score: name files, or harness=TASK,TASK")
    if config.harness and config.chat:
        raise RunError("chat=true is of the questions of files; tasks of lm-eval-harness are given as they are")
    to, *files = (os.path.realpath(os.path.expanduser(each)) for each in (config.to or "", *config.tasks))
    if config.to and to in files:
        raise RunError(f"to={config.to} is one of the tasks, and would be lost: give another file")
    tasks = [(file, *read_task(file, config.limit)) for file in config.tasks]
    check_tasks(None, tasks)
    manager, names = harness_tasks(config) if config.harness else (None, [])
    with contextlib.ExitStack() as opened:
        file = None
        if config.to:
            with run_errors(f"to={config.to} cannot be written"):
                if os.path.lexists(to):
                    open_file(to).close()
                file = opened.enter_context(open(to, "w", encoding="utf-8"))
        mesh = start_mesh(config)
        opened.enter_context(jax.set_mesh(mesh))
        served = serve(config.model, mesh, config.compute_dtype, None, config.allow_program_change)
        check_tasks(served.source.family, tasks)
        scorer = Scorer(served, config.rows, config.length)
        table = [("task", "metric", "value", "±", "of")]

        def add(task: str, metric: str, value: float, error: Any, count: int) -> None:
            table.append((task, metric, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "", str(count)))

        def keep(task: str, answers: Answers) -> None:
            for number, each in enumerate(answers if file else ()):
                file.write(json.dumps({"task": task, "number": number, **each}, default=str) + "\n")

        for task, how, records in tasks:
            answers = how(scorer, records, config)
            keep(task, [{**asdict(record), **each} for record, each in zip(records, answers)])
            for metric in summary(answers):
                add(task, *metric, len(answers))
        if names:
            from lm_eval.evaluator import simple_evaluate

            given = {"tasks": names, "task_manager": manager, "num_fewshot": config.num_fewshot, "limit": config.limit}
            found = simple_evaluate(harness_model(scorer, config), **given)
            for task, values in found["results"].items():
                keep(task, found["samples"].get(task, ()))
                for key, value in values.items():  # 'acc,none', 'acc_stderr,none'; what follows the comma is a filter
                    name, comma, filter_ = key.partition(",")
                    if comma and isinstance(value, int | float) and not name.endswith("_stderr"):
                        count = found["n-samples"].get(task, {}).get("effective", 0)
                        add(task, key.removesuffix(",none"), value, values.get(f"{name}_stderr,{filter_}"), count)
    print_line("\n".join(columns(table, right={2, 3, 4})))


if __name__ == "__main__":
    command_line.run(main, Score)
