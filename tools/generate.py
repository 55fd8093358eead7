"""Text from a model: a run, a checkpoint or a published folder. The same tokens on every mesh, alone or in a batch.

    python -m tools.generate runs/local_shakespeare prompt='HAMLET.' tokens=300
    python -m tools.generate SmolLM2-135M-Instruct chat=true prompt='Why is the sky blue?'  # none: a conversation
    python -m tools.generate SmolLM2-135M-Instruct input=questions.jsonl prompt_field=question to=answers.jsonl
    python -m tools.generate runs/local_shakespeare prompt_ids=[1,2,3] temperature=0 output=ids mesh.t=2
    python -m tools.generate google-bert/bert-base-uncased prompt='The capital of France is [MASK].'  # fills it in

models/decoding.py has the mathematics.
"""

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax

from models.decoding import FILTERS
from models.huggingface import fingerprint
from models.layers import learned_positions
from models.reading import Reader
from runtime.config import command_line
from runtime.config.keys import Count
from runtime.data.tokenizers import ChatError
from runtime.files import MOST_BYTES, read_bytes
from runtime.terminal import RunError, print_note, printable, progress, run_errors
from tools.hosts import from_first, is_first, note
from tools.ready import OnFewerBytes, ReadyModel, Text, Writing, append, ready_model, start_mesh, values_of, write


# == What is asked for =================================================================================================
@dataclass(frozen=True, kw_only=True)
class Generate(Writing, OnFewerBytes):
    WORDS: ClassVar = ("model",)

    prompt: str | None = None  # what the text begins with; with chat, the user's message
    prompt_ids: tuple[int, ...] | None = None  # the prompt as ids, to which nothing is added
    input: str | None = None  # a file of prompts: .txt, one a line, or .jsonl
    prompt_field: str = "prompt"  # the prompt's field in each line of .jsonl; a list of messages is a chat
    chat: bool = False  # through the model's chat template
    samples: Count = 1  # texts for each prompt
    output: Literal["text", "ids", "jsonl"] = "text"  # ids: of the new tokens alone
    to: str | None = None  # a .jsonl file that is continued, with a line for each text; none: standard output


# == Prompts =================================================================================================
def require_default(config: Generate, keys: Iterable[str], why: str) -> None:
    """Raises RunError for a key that is set where it has no effect."""
    for key in keys:
        if getattr(config, key) != getattr(Generate, key):
            raise RunError(f"{key}: {why}")


def prompts_of(config: Generate) -> list[Any]:
    """The prompts of the command line or of the file: texts, ids, or chats."""
    if config.prompt_ids is not None:
        return [config.prompt_ids]
    if config.input is None:
        return [[{"role": "user", "content": config.prompt}] if config.chat else config.prompt or ""]
    prompts: list[Any] = []
    for where, prompt in values_of(config.input, config.prompt_field):
        if not isinstance(prompt, (str, list)):
            raise RunError(f"{where}: expected an object whose field {config.prompt_field} is a text or messages")
        prompts.append([{"role": "user", "content": prompt}] if config.chat and isinstance(prompt, str) else prompt)
    return prompts


def is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and any(isinstance(part, dict) for part in prompt)


def as_chat(ready: ReadyModel, config: Generate) -> Generate:
    """The config, with the stops of an answer in a chat. Says so if it is ChatML, which the model may not know."""
    if ready.is_chatml:
        note(f"{config.model}: the chat is written as ChatML")
    return replace(config, stop=ready.chat_stops(config.stop))


def require_positions(ready: ReadyModel, longest: int) -> None:
    """Raises RunError for a text beyond learned positions; says so if it is longer than those of the training."""
    if longest > ready.length:
        text = f"up to {longest} tokens, of a model that was trained on {ready.length}"
        if learned_positions(ready.source.model) is not None:
            raise RunError(f"{text}, and knows no more positions: lower tokens")
        note(f"{text}: expect nonsense")


def say(text: str = "", end: str = "\n") -> None:
    if is_first():
        print(text, end=end, flush=True)


def converse(ready: ReadyModel, config: Generate) -> None:
    """A conversation: a line of standard input is a message, its end the end."""
    config, messages = as_chat(ready, config), list[dict]()
    while True:
        say("> ", end="")
        if not (line := sys.stdin.readline()):
            return say()
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            ids = ready.ids_of(messages)
        except ChatError as error:
            raise RunError(str(error)) from error
        require_positions(ready, len(ids) + config.tokens)
        (text,) = write(ready, config, [ids], [0], lambda new: say(printable(new), end=""))
        say()
        messages.append({"role": "assistant", "content": text.shown})


def made_with(ready: ReadyModel, config: Generate) -> dict[str, Any]:
    """What texts follow from besides their prompts: the weights, and how they are written."""
    with ThreadPoolExecutor() as pool:
        model = {"model": fingerprint(ready.source, pool), "compute_dtype": ready.source.model.compute_dtype}
    keys = [field.name for field in fields(Writing) if field.name != "rows"]
    return model | {key: getattr(config, key) for key in ("weights", *keys)} | {"stop": list(config.stop)}


def finished(file: Path) -> dict[tuple[int, int], tuple[list[int], dict[str, Any]]]:
    """Prompts whose texts are already in the file, and what these were made with. Drops a last line that was cut
    short."""
    beginning = b'{"prompt_number": '
    with run_errors(f"to={file} cannot be written"):
        *lines, cut = read_bytes(file, MOST_BYTES).split(b"\n") if os.path.lexists(file) else [b""]
        file.open("ab").close()
        try:
            done = {
                (line["prompt_number"], line["sample"]): (line["prompt_ids"], {**line["made_with"]})
                for line in map(json.loads, lines)
            }
            is_ours = cut[: len(beginning)] == beginning[: len(cut)]
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = False
        if not is_ours:
            raise RunError(f"to={file} has lines that this program did not write: give another file")
        os.truncate(file, file.stat().st_size - len(cut))
    return done


def record_of(number: int, sample: int, ids: Sequence[int], text: Text) -> dict[str, Any]:
    return {
        "prompt_number": number,
        "sample": sample,
        "prompt_ids": list(ids),
        "text": text.shown,
        "ids": text.ids,
        "log_probs": text.log_probs,
        "ended": text.has_ended or (text.ids[-1:] != [] and text.ids[-1] in text.ready.generator.ends),
    }


def main(config: Generate) -> None:
    """Writes texts with a model, to standard output or to a file."""
    keys = [key for key in ("prompt", "prompt_ids", "input") if getattr(config, key) is not None]
    if len(keys) > 1:
        raise RunError(f"{' and '.join(keys)}: expected one of them")
    if config.samples > 1 and config.beams > 1:
        raise RunError("samples and beams: beam search finds one text, expected one of them")
    if config.beams > 1:
        require_default(config, ("seed", *FILTERS), "beam search draws nothing: leave it out, or beams")
    if config.chat and not keys:
        why = "a conversation is written to the terminal. Give prompt or input"
        require_default(config, ("to", "output", "samples", "num_hosts"), why)
    with jax.set_mesh(start_mesh(config)):
        file = None if config.to is None else Path(config.to).expanduser()
        kept = from_first(lambda: [] if file is None else list(finished(file).items()))
        done = {tuple(key): ids for key, ids in kept}
        ready = ready_model(config)
        is_filled = isinstance(ready.generator, Reader)
        if is_filled:
            of_writing = {field.name for field in fields(Writing)} - {"rows"}
            why = f"{config.model} fills in masked tokens and writes nothing: leave it out"
            require_default(config, sorted({*of_writing, "samples", "chat", "weights"}), why)
            if not keys:
                raise RunError(f"{config.model} fills in masked tokens: expected prompt, prompt_ids or input")
        if config.chat and not keys:
            return converse(ready, config)
        inputs = from_first(lambda: prompts_of(config))
        config = as_chat(ready, config) if any(map(is_chat, inputs)) else config
        prompts = []
        for number, prompt in enumerate(inputs, 1):
            try:
                prompts.append(ready.ids_of(prompt))
            except (ChatError, RunError) as error:
                raise RunError(f"{config.input}, line {number}: {error}" if config.input else str(error)) from error
        require_positions(ready, max(map(len, prompts)) + (0 if is_filled else config.tokens))
        if any(prompts[number : number + 1] != [ids] for (number, _), (ids, _) in done.items()):
            raise RunError(f"to={file} has texts of other prompts: give another file")
        settings = {} if file is None else from_first(lambda: made_with(ready, config))
        others = {key for key in settings for _, made in done.values() if made.get(key) != settings[key]}
        if others:
            raise RunError(f"to={file} has texts of another {', '.join(sorted(others))}: give another file")
        goes_on = not is_filled and not any(map(is_chat, inputs))
        write_all(ready, config, prompts, goes_on, file, done, settings)


def write_all(
    ready: ReadyModel, config: Generate, prompts: list[list[int]], goes_on: bool, file: Path | None,
    done: Collection[tuple[int, int]], settings: Mapping[str, Any],
) -> None:  # fmt: skip
    """Writes the texts that are not done, in the order of the prompts. settings: as of `made_with`, for the file."""
    numbered = [(number, sample) for number in range(len(prompts)) for sample in range(config.samples)]
    left = [pair for pair in numbered if pair not in done]
    kept = len(numbered) - len(left)
    if kept and is_first():
        print_note(f"to={file}: {kept} of {len(numbered)} texts are there already.")
    # A single text is shown as it grows.
    grows = len(numbered) == 1 and config.output == "text" and file is None

    def show(new: str) -> None:
        if grows:
            say(printable(new), end="")

    if grows and isinstance(config.prompt, str) and not config.chat and not isinstance(ready.generator, Reader):
        show(config.prompt)
    samples = [sample for _, sample in left]
    texts = write(ready, config, [prompts[number] for number, _ in left], samples, show, goes_on)
    is_shown = file is not None and is_first()
    bar = progress(texts, total=len(numbered), initial=kept, unit=" texts", disable=not is_shown)
    for text, (number, sample) in zip(bar, left):
        record = record_of(number, sample, prompts[number], text)
        if file is not None:
            append(file, [record | {"made_with": settings}])
        elif config.output == "text":
            say("" if grows else printable(text.shown))
        else:
            say(json.dumps(record) if config.output == "jsonl" else " ".join(map(str, text.ids)))


if __name__ == "__main__":
    command_line.run(main, Generate)
