"""A model that is ready for prompts: from a run, a checkpoint or a published folder onto a mesh, with its tokenizer.

    config = OnDevices(model="runs/first")
    with jax.set_mesh(start_mesh(config)):
        ready = ready_model(config)
        (text,) = write(ready, Writing(tokens=20), [ready.ids_of("HAMLET.")], [0])

The tools that use a model share this: generate, serve, score, embed, plan.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np

from models.decoding import Drawing, Drawn, Generator
from models.huggingface import Source, open_weights, require_same_program, restored
from models.layers import act, learned_positions, stored
from models.mesh import Mesh as FamilyMesh
from models.reading import Reader
from runtime.check import check_sizes
from runtime.cluster.processes import start
from runtime.config.keys import Cluster, Count, NotEmpty
from runtime.config.rebuild import Origins, shown
from runtime.data.sources import kept_tokenizer
from runtime.data.tokenizers import CHATML, END_OF_TURN, Tokenizer, load_dataset_tokenizer, load_tokenizer
from runtime.files import read_text
from runtime.run import with_shardings
from runtime.terminal import RunError, run_errors
from shardlib.mesh import current_mesh
from shardlib.shardtypes import narrowed
from tools.hosts import is_first, note


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Mesh:
    d: Count = 1  # devices among which the rows are divided
    t: Count = 1  # devices among which heads, d_ff and the vocabulary are


@dataclass(frozen=True, kw_only=True)
class OnDevices:
    """A model, and the devices that it runs on."""

    model: str  # a run, a checkpoint, or a published folder
    allow_program_change: bool = False  # says that a run's model is that of models/, although its program was changed
    compute_dtype: Literal["bfloat16", "float32"] | None = None  # null: the model's; float32 on a CPU
    mesh: Mesh = field(default_factory=Mesh)
    num_hosts: Count = 1  # processes of the job, of which the first one reads and writes
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class OnFewerBytes(OnDevices):
    # The layers' weights. int8: a byte an element, which rounds them. split: over d too, and gathered for each token.
    weights: Literal["int8", "split"] | None = None


@dataclass(frozen=True, kw_only=True)
class Writing(Drawing):
    """How texts are written."""

    beams: Count = 1  # above 1: beam search in place of drawing
    length_penalty: float = 1.0  # in beam search a text's log probability is divided by its length to this power
    stop: tuple[NotEmpty, ...] = ()  # a text ends before any of these
    rows: Count = 8  # texts that are written at the same time

    def __post_init__(self) -> None:
        if self.beams > 1 and self.repetition_penalty != 1:
            raise ValueError("repetition_penalty: beam search applies none: expected 1, or beams = 1")


# == From a folder to a generator ======================================================================================
@dataclass(frozen=True)
class ReadyModel:
    """A model that is ready for prompts, with its tokenizer."""

    generator: Any  # a Generator; a Reader of an encoder, which writes nothing
    source: Source
    tokenizer: Tokenizer | None
    start: tuple[int, ...]  # ids that stand before each prompt
    end: tuple[int, ...]  # ids that stand behind it, where an encoder reads it
    length: int  # tokens of a row that it was trained on

    def at_most(self, length: int) -> int:
        """A number of tokens that it knows; says so if these are fewer."""
        if length > self.length:
            note(f"length = {self.length}, not {length}: the model knows no longer texts")
        return min(length, self.length)

    def ids_of(self, prompt: Any) -> list[int]:
        """The ids of a text, or of a chat up to the answer's first token; ids stay as they are. There is always one.

        Args:
          prompt: a text, a list of ids, or a list of messages.
        Raises:
          RunError: there is no tokenizer, or an id is none of the vocabulary.
          ChatError: the chat cannot be rendered.
        """
        if isinstance(prompt, str):
            ids = [*self.start, *self.encoded(prompt), *self.end]
        elif all(isinstance(token, int) for token in prompt):
            return self.checked(prompt)
        else:
            ids = self.require_tokenizer().encode_prompt(prompt).tolist()
            ids = ids if self.start and self.start[:1] == tuple(ids[:1]) else [*self.start, *ids, *self.end]
        return self.checked(ids or [self.require_tokenizer().bos_id])

    def encoded(self, text: str) -> list[int]:
        """A text's ids alone. Raises RunError as `ids_of`."""
        return self.checked(self.require_tokenizer().encode_batch([text])[0].tolist(), least=0)

    def checked(self, ids: Sequence[int], least: int = 1) -> list[int]:
        vocab = self.source.model.vocab
        if len(ids) < least or not all(0 <= token < vocab for token in ids):
            wrong = [token for token in ids if not 0 <= token < vocab][:5]
            raise RunError(f"the prompt has the ids {wrong}: expected one or more, from 0 to {vocab - 1}")
        return list(ids)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RunError(f"{self.source.folder} has no tokenizer, which texts need; generate takes prompt_ids too")
        return self.tokenizer

    @property
    def is_chatml(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.chat_template == CHATML

    def chat_stops(self, stop: Sequence[str]) -> tuple[str, ...]:
        """The stops of an answer in a chat: a tokenizer may have no token for the end of ChatML's turns."""
        return (*stop, END_OF_TURN) if self.is_chatml else tuple(stop)


def start_mesh(config: OnDevices, mesh: Any = None) -> jax.sharding.Mesh:
    """The mesh that the config asks for, with the axes of models/ or of another program's `mesh`, of the devices of all
    processes of the job. The hosts' table goes to standard error: standard output is for texts."""
    with contextlib.redirect_stdout(sys.stderr):
        mesh = mesh or FamilyMesh(**vars(config.mesh))
        hosts = {"num_hosts": config.num_hosts, "cluster": config.cluster}
        return start(SimpleNamespace(mesh=mesh, origins=Origins(), check_only=False, **hosts))


def without_drops(model: Any) -> Any:
    """The model with a slot for each choice: what a capacity drops depends on what else is in a row, so that a text
    would mean something else beside another."""
    return replace(model, capacity=None) if getattr(model, "capacity", None) else model


def opened(config: Any, axes: Mapping[str, int], compute_dtype: str | None, pool: Executor) -> tuple[Source, Any]:
    """A model of models/ as it is computed, and the shapes of its weights, which a mesh can split.

    Args:
      config: has the keys `model` and `allow_program_change`.
      axes: the sizes of the mesh's.
      compute_dtype: None is the model's.
    Raises:
      RunError: there is none, it is of no family, the mesh cannot split it, and as `require_same_program`.
    """
    source = open_weights(config.model, pool)
    if source.family is None:
        fix = "write a family for it (docs/recipes/family.md)"
        raise RunError(f"{config.model}: models/ does not compute this model: {fix}")
    if not config.allow_program_change:
        require_same_program(source, None, "allow_program_change=true")
    act.dtype = stored.dtype = compute_dtype or source.model.compute_dtype
    model = without_drops(replace(source.model, compute_dtype=act.dtype))
    shapes = jax.eval_shape(functools.partial(source.family.init, model), np.uint32(0))
    type_ = narrowed(source.family.Weights, shapes)
    mesh_of_run = SimpleNamespace(mesh=SimpleNamespace(**axes), model=model, training=(), origins=Origins())
    check_sizes(mesh_of_run, type_, shapes)
    shapes = jax.tree.map(lambda x, of: jax.ShapeDtypeStruct(x.shape, of.element.dtype), shapes, type_)
    return replace(source, model=model), shapes


def compute_dtype(config: OnDevices) -> str | None:
    """None: the model's. XLA:CPU computes bfloat16 by way of float32."""
    return config.compute_dtype or ("float32" if jax.default_backend() == "cpu" else None)


def require_writer(source: Source) -> None:
    if source.family is not None and source.family.KIND == "encoder":
        raise RunError(f"{source.folder} is of a model that writes no text: generate fills in its masked tokens")


def ready_model(config: OnDevices, *, is_read: bool = False) -> ReadyModel:
    """Reads a model onto the current mesh. is_read: as in `with_weights`. Raises RunError as `opened`, and for a value
    in the published files."""
    mesh: Any = current_mesh()
    with ThreadPoolExecutor() as pool:
        source, shapes = opened(config, mesh.shape, compute_dtype(config), pool)
        family: Any = source.family
        weights = restored(source, source.model, with_shardings(shapes, narrowed(family.Weights, shapes)), pool)
    tokenizer = tokenizer_of(source)
    special_id = special_of(source, tokenizer)
    if tokenizer is not None and not tokenizer.chat_template:
        tokenizer = replace(tokenizer, chat_template=CHATML)
    if source.config is None:
        length = source.checkpoint.attributes["config"]["training"]["tokens"]["len"]
    else:
        length = source.config.get("max_position_embeddings")
        length = 2**30 if length is None else length
    length = whole_number(length, f"{source.folder}: the length of a row (max_position_embeddings)", 1, 2**31)
    learned = learned_positions(source.model)
    length = length if learned is None else learned
    return with_weights(source, weights, tokenizer, special_id, length, getattr(config, "weights", None), is_read)


def with_weights(
    source: Source, weights: Any, tokenizer: Tokenizer | None, special_id: int | None, length: int,
    kept: str | None = None, is_read: bool = False,
) -> ReadyModel:  # fmt: skip
    """The model of a source with weights on the current mesh.

    Args:
      special_id: the token that T5's decoder reads first, or an encoder's masked one.
      kept: as in `Generator`.
      is_read: a model that writes is a `Reader` too.
    """
    family: Any = source.family
    if is_read or family.KIND == "encoder":
        generator: Any = Reader(family, source.model, weights, special_id)
    else:
        decoder_start = special_id if family.KIND == "both" else None
        generator = Generator(family, source.model, weights, ends_of(source, tokenizer), decoder_start, kept)
    return ReadyModel(generator, source, tokenizer, *around(source, tokenizer), length)


def whole_number(value: Any, what: str, low: int = 0, below: int = 2**32) -> int:
    """A whole number that stands in a published file. Raises RunError where it is something else."""
    if type(value) is not int or not low <= value < below:
        raise RunError(f"{what} = {shown(value)}: expected a whole number from {low} to {below - 1}")
    return value


def special_of(source: Source, tokenizer: Tokenizer | None) -> int | None:
    """The special_id of `with_weights`: that of a masked token is what a run's config says, or its tokenizer."""
    family: Any = source.family
    if family.KIND == "both":
        return whole_number(source.decoder_start, f"{source.folder}: decoder_start_token_id", 0, source.model.vocab)
    of_run = {} if source.config is not None else source.checkpoint.attributes["config"].get("masking", {})
    if of_run.get("token") is not None:
        return of_run["token"]
    return None if tokenizer is None else tokenizer.id_of("mask_token")


def tokenizer_of(source: Source) -> Tokenizer | None:
    tokenizer = kept_tokenizer(source.folder)
    if tokenizer is None and source.config is None:  # an older run did not keep it: its data has it
        data = source.checkpoint.attributes["config"].get("flat_tokens", {}).get("filespec")
        return data and load_dataset_tokenizer(data)
    if tokenizer is None and (source.folder / "tokenizer.json").exists():
        return load_tokenizer(str(source.folder))
    return tokenizer


def around(source: Source, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a model reads before a text, and behind it. A published tokenizer says them, and that of pairs for
    an encoder of T5's kind; in other runs a decoder's are bos_id, an encoder's none."""
    family: Any = source.family
    if tokenizer is None:
        return (), ()
    ids = tuple(tokenizer.backend.encode("", add_special_tokens=True).ids) if tokenizer.json else ()
    if family.KIND == "both":  # T5's add nothing but an end
        return (), ids
    if source.config is None or not tokenizer.json:
        return () if family.KIND == "encoder" else (tokenizer.bos_id,), ()
    return ids[:1], ids[1:] if family.KIND == "encoder" else ()


def ends_of(source: Source, tokenizer: Tokenizer | None) -> list[int]:
    """The tokens that end a text: as published, and in a run, or where nothing is, the tokenizer's end token."""
    ends = (source.config or {}).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    is_run = source.checkpoint is None or not source.is_published
    if tokenizer and (is_run or not ends) and (end := tokenizer.id_of("eos_token")) is not None:
        ends = [*ends, end]
    return sorted({whole_number(end, f"{source.folder}: eos_token_id") for end in ends})


# == Texts ===========================================================================================================
def values_of(path: str, field: str) -> list[tuple[str, Any]]:
    """Each line of an input after where it stands; in .jsonl the value of a field, None where it has none."""
    with run_errors(f"input={path} cannot be read", ValueError):
        text = read_text(os.path.expanduser(path))
    if path.endswith(".jsonl"):
        return [(where, record.get(field)) for where, record in json_lines(path, text)]
    return [(f"{path}, line {number}", line) for number, line in enumerate(text.removesuffix("\n").split("\n"), 1)]


def json_lines(path: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a .jsonl file after where it stands; {} for another value. Raises RunError for what is no JSON."""
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{where}: expected an object: {error}") from None
        yield where, record if isinstance(record, dict) else {}


def append(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds a line of JSON for each record; the first process does it. Raises RunError."""
    if is_first():
        with run_errors(f"to={file} cannot be written"), file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(record, default=str) + "\n" for record in records)


class Text:
    """A text as its tokens come: what can be shown already, and whether it has ended.

    Args:
      stop: the text ends before any of these.
      prompt: the ids of what this text goes on with, if it is no answer.
    """

    def __init__(self, ready: ReadyModel, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self.ready, self.stop = ready, stop
        bos = None if ready.tokenizer is None else ready.tokenizer.bos_id
        self.goes_on = [*prompt] not in ([], [bos]) and ready.generator.start is None
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.shown, self.has_ended = "", False

    def add(self, drawn: Drawn) -> str:
        """Adds tokens and returns the text that is new; a character of several tokens comes when it is whole."""
        if self.has_ended:
            return ""
        self.ids, self.log_probs = self.ids + drawn.tokens, self.log_probs + drawn.log_probs
        text = self.text(self.ids)
        if any(stop in text for stop in self.stop):
            # A burst goes on behind the first stop: what it drew there is no part of the text, another stop neither.
            while any(stop in self.text(self.ids[:-1]) for stop in self.stop):
                self.ids, self.log_probs = self.ids[:-1], self.log_probs[:-1]
            self.has_ended, text = True, self.text(self.ids)
            text = text[: min(place for stop in self.stop if (place := text.find(stop)) >= 0)]
        elif text.endswith("\ufffd") or any(text.endswith(stop[:n]) for stop in self.stop for n in range(1, len(stop))):
            return ""
        return self._show(text)

    def end(self) -> str:
        """Ends the text and returns its rest."""
        return "" if self.has_ended else self._show(self.text(self.ids))

    def text(self, ids: Sequence[int]) -> str:
        tokenizer, ends = self.ready.tokenizer, self.ready.generator.ends
        ids = [token for token in ids if token not in ends]
        if tokenizer is None:
            return ""
        return tokenizer.decode_behind(ids) if self.goes_on else tokenizer.decode(ids)

    def _show(self, text: str) -> str:
        new, self.shown = text[len(self.shown) :], text
        return new


def write(
    ready: ReadyModel, config: Writing, prompts: Sequence[list[int]], samples: Sequence[int],
    show: Callable[[str], None] = lambda new: None, goes_on: bool = False,
) -> Iterator[Text]:  # fmt: skip
    """Texts after prompts, config.rows at a time; what is new of each is shown. Samples of a prompt differ by seed.
    goes_on: they go on with their prompts, and are no answers."""
    for first in range(0, len(prompts), config.rows):
        rows = slice(first, first + config.rows)
        texts = [Text(ready, config.stop, prompt if goes_on else ()) for prompt in prompts[rows]]
        if isinstance(ready.generator, Reader):
            fill(ready, texts, prompts[rows], show)
        elif config.beams > 1:
            extend(
                texts, [ready.generator.search(prompts[rows], config.tokens, config.beams, config.length_penalty)], show
            )
        else:
            drawings = [replace(config, seed=(config.seed + sample) % 2**32) for sample in samples[rows]]
            extend(texts, ready.generator.draw(prompts[rows], drawings), show)
        yield from texts


def extend(texts: Sequence[Text], bursts: Iterable[Sequence[Drawn]], show: Callable[[str], None]) -> None:
    for burst in bursts:
        for text, drawn in zip(texts, burst):
            show(text.add(drawn))
        if all(text.has_ended for text in texts):
            break
    for text in texts:
        show(text.end())


def fill(ready: ReadyModel, texts: list[Text], prompts: Sequence[list[int]], show: Callable[[str], None]) -> None:
    """The prompts with their masked tokens filled in; a text's ids are those tokens."""
    for text, ids, drawn in zip(texts, prompts, ready.generator.fill(prompts)):
        (text.ids, text.log_probs), text.has_ended, filled = drawn, True, iter(drawn[0])
        whole = [next(filled) if token == ready.generator.mask else token for token in ids]
        text.shown = text.text(whole[len(ready.start) : len(whole) - len(ready.end)])
        show(text.shown)
