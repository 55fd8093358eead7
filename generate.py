"""Text from a model: a run, a checkpoint or a published folder. The same tokens on every mesh, alone or in a batch.

    python -m generate runs/local_shakespeare prompt='HAMLET.' tokens=300
    python -m generate SmolLM2-135M-Instruct chat=true prompt='Why is the sky blue?'   # without one: a conversation
    python -m generate SmolLM2-135M-Instruct input=questions.jsonl prompt_field=question to=answers.jsonl top_p=0.9
    python -m generate runs/local_shakespeare prompt_ids=[1,2,3] temperature=0 output=ids mesh.t=2
    python -m generate bert-base-uncased prompt='The capital of France is [MASK].'     # which an encoder fills in

models/decoding.py has the mathematics.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from models.decoding import Drawing, Drawn, Generator
from models.huggingface import Source, open_weights, read_json, require_same_program, restored
from models.layers import act, stored
from models.mesh import Mesh as FamilyMesh
from models.reading import Reader
from runtime.check import check_sizes
from runtime.cluster.processes import start
from runtime.config import command_line
from runtime.config.keys import Count, NotEmpty
from runtime.config.rebuild import Origins, shown
from runtime.data.sources import kept_tokenizer
from runtime.data.tokenizers import CHATML, END_OF_TURN, ChatError, Tokenizer, load_dataset_tokenizer, load_tokenizer
from runtime.files import MOST_BYTES, read_bytes, read_text
from runtime.run import with_shardings
from runtime.terminal import RunError, print_error, printable, progress, run_errors
from shardlib.shardtypes import narrowed

# Keys that are of a model that fills in masked tokens, too.
FILLING = (
    "model", "prompt", "prompt_ids", "input", "prompt_field", "output", "to", "rows", "allow_program_change",
    "compute_dtype", "mesh",
)  # fmt: skip


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Mesh:
    d: Count = 1  # devices among which the rows are divided
    t: Count = 1  # devices among which heads, d_ff and the vocabulary are


@dataclass(frozen=True, kw_only=True)
class Generate(Drawing):
    WORDS: ClassVar = ("model",)

    model: str  # a run, a checkpoint, or a published folder
    prompt: str | None = None  # what the text begins with; with chat, the user's message
    prompt_ids: tuple[int, ...] | None = None  # the same as ids, to which nothing is added
    input: str | None = None  # a file of prompts: .txt, one a line, or .jsonl
    prompt_field: str = "prompt"  # of each line of .jsonl; a list of messages is a chat
    chat: bool = False  # through the model's chat template
    samples: Count = 1  # texts for each prompt
    beams: Count = 1  # above 1: beam search in place of drawing
    length_penalty: float = 1.0  # of beam search: a text's log probability is divided by its length to this power
    stop: tuple[NotEmpty, ...] = ()  # a text ends before any of these
    output: Literal["text", "ids", "jsonl"] = "text"  # ids: of the new tokens alone
    to: str | None = None  # a .jsonl file that is continued, with a line for each text; none: standard output
    rows: Count = 8  # texts that are written at the same time
    allow_program_change: bool = False  # decode a run although its train.py computes another model than models/
    compute_dtype: Literal["bfloat16", "float32"] | None = None  # null: the model's; float32 on a CPU
    # Of the layers: int8, in a byte an element, which rounds them; split, over d too, and gathered for each token.
    weights: Literal["int8", "split"] | None = None
    mesh: Mesh = field(default_factory=Mesh)


# == From a folder to a generator ======================================================================================
@dataclass(frozen=True)
class Served:
    """A model that is ready, with its tokenizer."""

    generator: Any  # a Generator; a Reader of an encoder, which writes nothing
    source: Source
    tokenizer: Tokenizer | None
    start: tuple[int, ...]  # ids that stand before each prompt
    end: tuple[int, ...]  # ids that stand behind it, where an encoder reads it
    length: int  # tokens of a row that it was trained on

    def ids_of(self, prompt: str | Sequence[int] | Sequence[dict]) -> list[int]:
        """The ids of a text, or of a chat up to the answer's first token; ids stay as they are. There is always one.

        Raises:
          RunError: there is no tokenizer, or an id is none of the vocabulary.
          ChatError: the chat cannot be rendered.
        """
        if isinstance(prompt, str):
            ids = [*self.start, *self.encoded(prompt), *self.end]
        elif all(isinstance(each, int) for each in prompt):
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
        if len(ids) < least or not all(0 <= each < vocab for each in ids):
            wrong = [each for each in ids if not 0 <= each < vocab][:5]
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
        """What an answer in a chat ends before: a tokenizer may have no token for the end of ChatML's turns."""
        return (*stop, END_OF_TURN) if self.is_chatml else tuple(stop)


def start_mesh(config: Any) -> jax.sharding.Mesh:
    """The mesh that a config with `mesh` and `origins` asks for, of this host's devices."""
    alone = SimpleNamespace(coordinator=None)
    return start(
        SimpleNamespace(
            mesh=FamilyMesh(**vars(config.mesh)), origins=Origins(), num_hosts=1, check_only=False, cluster=alone
        )
    )


def opened(path: str, axes: Mapping[str, int], compute_dtype: str | None, pool: Executor) -> tuple[Source, Any, Any]:
    """A model of models/: where it is, what it computes, and the shapes of its weights, which a mesh can split.

    Args:
      axes: the sizes of the mesh's.
      compute_dtype: None is the model's.
    Raises:
      RunError: there is none, it is of no family, or the mesh cannot split it.
    """
    source = open_weights(path, pool)
    if source.family is None:
        raise RunError(f"{path} is of a model that models/ does not compute: write a family for it (docs/models.md)")
    act.dtype = stored.dtype = compute_dtype or source.model.compute_dtype
    model = replace(source.model, compute_dtype=act.dtype)
    shapes = jax.eval_shape(functools.partial(source.family.init, model), np.uint32(0))
    type_ = narrowed(source.family.Weights, shapes)
    mesh_of_run = SimpleNamespace(mesh=SimpleNamespace(**axes), model=model, training=(), origins=Origins())
    check_sizes(mesh_of_run, type_, shapes)
    return source, model, jax.tree.map(lambda x, of: jax.ShapeDtypeStruct(x.shape, of.element.dtype), shapes, type_)


def require_writer(source: Source) -> None:
    if source.family.KIND == "encoder":
        raise RunError(f"{source.folder} is of a model that writes no text: generate fills in its masked tokens")


def serve(
    path: str, mesh: jax.sharding.Mesh, compute_dtype: str | None = None, kept: str | None = None,
    allow_program_change: bool = False, is_read: bool = False,
) -> Served:  # fmt: skip
    """Reads a model onto the current mesh; one that may write as a `Reader` too, where `is_read` says so. Raises
    RunError as `opened`, and where `require_same_program` or a value
    of the published files does."""
    with ThreadPoolExecutor() as pool:
        # XLA:CPU computes bfloat16 by way of float32.
        dtype = compute_dtype or ('float32' if jax.default_backend() == 'cpu' else None)
        source, model, shapes = opened(path, mesh.shape, dtype, pool)
        if not allow_program_change:
            require_same_program(source, None, "allow_program_change=true")
        shapes = with_shardings(shapes, narrowed(source.family.Weights, shapes))
        weights = restored(source, model, shapes, pool)
    tokenizer, (start, end) = _tokenizer(source)
    decoder_start = None
    if source.family.KIND == "both":
        decoder_start = whole_number(source.decoder_start, f"{source.folder}: decoder_start_token_id", 0, model.vocab)
    if tokenizer is not None and not tokenizer.chat_template:
        tokenizer = replace(tokenizer, chat_template=CHATML)
    if source.config is None:
        length = source.checkpoint.attributes["config"]["training"]["tokens"]["len"]
    else:
        length = source.config.get("max_position_embeddings")
        length = 2**30 if length is None else length
    length = whole_number(length, f"{source.folder}: the length of a row (max_position_embeddings)", 1, 2**31)
    if hasattr(model, "positions"):  # a table of them, which ends
        length = model.positions - getattr(model, "first_position", 0)
    if is_read or source.family.KIND == "encoder":
        generator = Reader(source.family, model, weights, mask_of(source, tokenizer))
    else:
        generator = Generator(source.family, model, weights, _ends(source, tokenizer), decoder_start, kept)
    return Served(generator, source, tokenizer, start, end, length)


def whole_number(value: Any, what: str, low: int = 0, below: int = 2**32) -> int:
    """A whole number that stands in a published file. Raises RunError where it is something else."""
    if type(value) is not int or not low <= value < below:
        raise RunError(f"{what} = {shown(value)}: expected a whole number from {low} to {below - 1}")
    return value


def mask_of(source: Source, tokenizer: Tokenizer | None) -> int | None:
    """The id of a masked token: what a run's config says, or its tokenizer."""
    of_run = {} if source.config is not None else source.checkpoint.attributes["config"].get("masking", {})
    return of_run["token"] if of_run.get("token") is not None else tokenizer and tokenizer.id_of("mask_token")


Around = tuple[tuple[int, ...], tuple[int, ...]]  # ids that stand before a text, and behind it


def _tokenizer(source: Source) -> tuple[Tokenizer | None, Around]:
    """A run's tokenizer, whose sequences all begin with bos_id but for an encoder; or a published one, which says what
    stands around a text."""
    kind = "encoder" if source.family is None else source.family.KIND
    tokenizer = kept_tokenizer(source.folder)
    if source.config is None:
        if tokenizer is None:  # of a run from before it was kept: its data has it
            data = source.checkpoint.attributes["config"].get("flat_tokens", {}).get("filespec")
            tokenizer = data and load_dataset_tokenizer(data)
        return tokenizer, (() if tokenizer is None or kind == "encoder" else (tokenizer.bos_id,), ())
    if tokenizer is None and (source.folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(source.folder))
    if tokenizer is None:
        return None, ((), ())
    around = tuple(tokenizer.backend.encode("", add_special_tokens=True).ids)
    if kind == "both":  # T5's add nothing but an end
        return tokenizer, ((), around)
    return tokenizer, (around[:1], around[1:] if kind == "encoder" else ())


def _ends(source: Source, tokenizer: Tokenizer | None) -> list[int]:
    """The tokens that end a text: as published, or the tokenizer's end token."""
    file, ends = source.folder / "generation_config.json", (source.config or {}).get("eos_token_id")
    if source.config is not None and file.exists():
        ends = read_json(file).get("eos_token_id", ends)
    if ends is None and tokenizer:
        ends = tokenizer.id_of("eos_token")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return sorted({whole_number(each, f"{source.folder}: eos_token_id") for each in ends})


# == Prompts and texts =================================================================================================
class Text:
    """A text as its tokens come: what can be shown already, and whether it has ended.

    Args:
      stop: the text ends before any of these.
    """

    def __init__(self, served: Served, stop: Sequence[str] = ()):
        self.served, self.stop, self.ids, self.log_probs = served, stop, [], []
        self.shown, self.has_ended = "", False

    def add(self, drawn: Drawn) -> str:
        """What is new of the text; a character of several tokens when it is whole."""
        if self.has_ended:
            return ""
        self.ids, self.log_probs = self.ids + drawn.tokens, self.log_probs + drawn.log_probs
        text = self.text()
        if cut := [place for stop in self.stop if (place := text.find(stop)) >= 0]:
            self.has_ended, text = True, text[: min(cut)]
            # A burst goes on behind the stop: what it drew there is no part of the text.
            while any(stop in self.text(self.ids[:-1]) for stop in self.stop):
                self.ids, self.log_probs = self.ids[:-1], self.log_probs[:-1]
        elif text.endswith("\ufffd") or any(text.endswith(stop[:n]) for stop in self.stop for n in range(1, len(stop))):
            return ""
        return self._show(text)

    def end(self) -> str:
        """The rest, of a text that goes on no more."""
        return "" if self.has_ended else self._show(self.text())

    def text(self, ids: Sequence[int] | None = None) -> str:
        tokenizer, ends = self.served.tokenizer, self.served.generator.ends
        ids = self.ids if ids is None else ids
        return "" if tokenizer is None else tokenizer.decode([each for each in ids if each not in ends])

    def _show(self, text: str) -> str:
        new, self.shown = text[len(self.shown) :], text
        return new


def write(
    served: Served,
    config: Generate,
    prompts: Sequence[list[int]],
    samples: Sequence[int],
    show: Callable[[int, str], None],
) -> list[Text]:
    """The texts after some prompts, each shown as it grows: show(number, what is new). Samples of a prompt differ by
    their seed."""
    texts = [Text(served, config.stop) for _ in prompts]
    if isinstance(served.generator, Reader):
        return fill(served, texts, prompts, show)
    if config.beams > 1:
        bursts = iter([served.generator.search(prompts, config.tokens, config.beams, config.length_penalty)])
    else:
        drawings = [replace(config, seed=(config.seed + sample) % 2**32) for sample in samples]
        bursts = served.generator.draw(prompts, drawings)
    for burst in bursts:
        for number, (text, drawn) in enumerate(zip(texts, burst)):
            show(number, text.add(drawn))
        if all(text.has_ended for text in texts):
            break
    for number, text in enumerate(texts):
        show(number, text.end())
    return texts


def fill(served: Served, texts: Sequence[Text], prompts: Sequence[list[int]], show: Callable[[int, str], None]) -> Any:
    """The prompts with their masked tokens filled in; a text's ids are those tokens."""
    for number, (text, ids, found) in enumerate(zip(texts, prompts, served.generator.fill(prompts))):
        (text.ids, text.log_probs), text.has_ended, filled = found, True, iter(found[0])
        whole = [next(filled) if each == served.generator.mask else each for each in ids]
        text.shown = text.text(whole[len(served.start) : len(whole) - len(served.end)])
        show(number, text.shown)
    return texts


def check_filling(config: Generate) -> None:
    """Raises RunError for keys that are of models that write."""
    for key in (each.name for each in fields(Generate)):
        if key not in FILLING and getattr(config, key) != getattr(Generate, key):
            raise RunError(f"{key}: {config.model} fills in masked tokens and writes nothing: leave it out")
    if all(getattr(config, key) is None for key in ("prompt", "prompt_ids", "input")):
        raise RunError(f"{config.model} fills in masked tokens: expected prompt, prompt_ids or input")


def prompts_of(config: Generate) -> list[str | tuple[int, ...] | list[dict]]:
    """What stands on the command line, or in the file: texts, ids, or chats."""
    if config.prompt_ids is not None:
        return [config.prompt_ids]
    if config.input is None:
        return [[{"role": "user", "content": config.prompt}] if config.chat else config.prompt or ""]
    with run_errors(f"input={config.input} cannot be read", ValueError):
        lines = read_text(os.path.expanduser(config.input)).removesuffix("\n").split("\n")
    prompts = []
    for number, line in enumerate(lines, 1):
        prompt: Any = line
        if config.input.endswith(".jsonl"):
            try:
                prompt = json.loads(line)[config.prompt_field]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise RunError(
                    f"{config.input}, line {number}: expected an object with the field {config.prompt_field}: {error}"
                ) from None
        if not isinstance(prompt, (str, list)):
            raise RunError(f"{config.input}, line {number}: {config.prompt_field} is no text and no list of messages")
        prompts.append([{"role": "user", "content": prompt}] if config.chat and isinstance(prompt, str) else prompt)
    return prompts


def as_chat(served: Served, config: Generate) -> Generate:
    """The same, with what ends an answer in a chat. A line says where it is ChatML, which the model may not know."""
    if served.is_chatml:
        print_error(f"{config.model}: the chat is written as ChatML", "note")
    return replace(config, stop=served.chat_stops(config.stop))


def converse(served: Served, config: Generate) -> None:
    """A conversation: a line of standard input is a message, its end the end."""
    config, messages = as_chat(served, config), list[dict]()
    while True:
        print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return print()
        messages.append({"role": "user", "content": line.rstrip("\n")})
        (text,) = write(
            served, config, [served.ids_of(messages)], [0], lambda _, new: print(printable(new), end="", flush=True)
        )
        print()
        messages.append({"role": "assistant", "content": text.shown})


def finished(file: Path) -> dict[tuple[int, int], list[int]]:
    """The prompts of the texts that stand in a file of an earlier start; a line that was cut short is taken away."""
    beginning = b'{"prompt_number": '
    with run_errors(f"to={file} cannot be written"):
        *lines, cut = read_bytes(file, MOST_BYTES).split(b"\n") if os.path.lexists(file) else [b""]
        file.open("ab").close()
        try:
            done = {(each["prompt_number"], each["sample"]): each["prompt_ids"] for each in map(json.loads, lines)}
            is_ours = cut[: len(beginning)] == beginning[: len(cut)]
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = False
        if not is_ours:
            raise RunError(f"to={file} has lines that this program did not write: give another file")
        os.truncate(file, file.stat().st_size - len(cut))
    return done


def record_of(config: Generate, number: int, sample: int, ids: Sequence[int], text: Text) -> dict[str, Any]:
    return {
        "prompt_number": number,
        "sample": sample,
        "prompt_ids": list(ids),
        "text": text.shown,
        "ids": text.ids,
        "log_probs": text.log_probs,
        "ended": text.has_ended or (text.ids[-1:] != [] and text.ids[-1] in text.served.generator.ends),
    }


def main(config: Generate) -> None:
    """Writes texts with a model, to standard output or to a file."""
    keys = [key for key in ("prompt", "prompt_ids", "input") if getattr(config, key) is not None]
    if len(keys) > 1:
        raise RunError(f"{' and '.join(keys)}: expected one of them")
    if config.samples > 1 and config.beams > 1:
        raise RunError("samples and beams: beam search finds one text, expected one of them")
    if config.chat and not keys:
        for key in ("to", "output", "samples"):
            if getattr(config, key) != getattr(Generate, key):
                raise RunError(f"{key}: a conversation is written to the terminal. Give prompt or input")
    file = None if config.to is None else Path(config.to).expanduser()
    done = {} if file is None else finished(file)
    mesh = start_mesh(config)
    with jax.set_mesh(mesh):
        served = serve(config.model, mesh, config.compute_dtype, config.weights, config.allow_program_change)
        is_filled = isinstance(served.generator, Reader)
        if is_filled:
            check_filling(config)
        if config.chat and not keys:
            return converse(served, config)
        given = prompts_of(config)
        config = as_chat(served, config) if any(isinstance(each, list) for each in given) else config
        prompts = []
        for number, each in enumerate(given, 1):
            try:
                prompts.append(served.ids_of(each))
            except (ChatError, RunError) as error:
                raise RunError(f"{config.input}, line {number}: {error}" if config.input else str(error)) from error
        if (longest := max(map(len, prompts)) + (0 if is_filled else config.tokens)) > served.length:
            text = f"up to {longest} tokens, of a model that was trained on {served.length}"
            if hasattr(served.source.model, "positions"):
                raise RunError(f"{text}, and knows no more positions: lower tokens")
            print_error(f"{text}: expect nonsense", "note")
        if any(prompts[number : number + 1] != [ids] for (number, _), ids in done.items()):
            raise RunError(f"to={file} has texts of other prompts: give another file")
        write_all(served, config, prompts, file, done)


def write_all(
    served: Served, config: Generate, prompts: list[list[int]], file: Path | None, done: Collection[tuple[int, int]]
) -> None:
    """The texts that are not done, a batch of rows after the other, in the order of the prompts."""
    numbered = [(number, sample) for number in range(len(prompts)) for sample in range(config.samples)]
    left = [each for each in numbered if each not in done]
    # A single text is shown as it grows.
    grows = len(numbered) == 1 and config.output == "text" and file is None

    def show(_: int, new: str) -> None:
        if grows:
            print(printable(new), end="", flush=True)

    if grows and isinstance(config.prompt, str) and not config.chat and not isinstance(served.generator, Reader):
        show(0, config.prompt)

    with progress(total=len(numbered), initial=len(done), unit=" texts", disable=file is None) as bar:
        for start in range(0, len(left), config.rows):
            some = left[start : start + config.rows]
            given = [prompts[number] for number, _ in some]
            for each, text in zip(some, write(served, config, given, [sample for _, sample in some], show)):
                record = record_of(config, *each, prompts[each[0]], text)
                if file is not None:
                    with run_errors(f"to={file} cannot be written"), file.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(record) + "\n")
                elif config.output == "jsonl":
                    print(json.dumps(record), flush=True)
                elif config.output == "ids":
                    print(*text.ids, flush=True)
                else:
                    print("" if grows else printable(text.shown), flush=True)
            bar.update(len(some))


if __name__ == "__main__":
    command_line.run(main, Generate)
