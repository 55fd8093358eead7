"""Tokenizers: bytes, and what the packages `transformers` and `tokenizers` read.

    tokenizer = load_tokenizer("bytes_utf8")                  # id = byte + 1
    tokenizer = load_tokenizer("my/tokenizer.json")           # or a folder that holds one
    tokenizer = load_tokenizer("openai-community/gpt2")       # a name on the Hugging Face hub
    tokenizer = load_dataset_tokenizer("my.zarr")             # the one that the data set was written with

    tokenizer.encode_batch(["Hi!", ""])    # [array([73, 106, 34], dtype=uint32), array([], dtype=uint32)]
    tokenizer.decode([73, 106, 34])        # "Hi!"

Ids are the tokenizer's. No begin or end token is added: `bos_id` is the input before a sequence. A data set holds
its tokenizer as the attribute `tokenizer` and, but for bytes, the array `tokenizer_json` beside its splits.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import zarr
import zarr.errors
from jaxtyping import Float32, Int64, Integer, UInt32

from runtime.data.apart import Unfinished, apart
from runtime.data.chunks import check_chunks, open_checked, open_group, read_errors
from runtime.data.flat_tokens import LARGEST_ID, absolute_path, open_member
from runtime.files import LARGEST_BYTES, open_file, read_text
from runtime.terminal import RunError, needs_package

BYTES = "bytes_utf8"
END_OF_TEXT = "<|endoftext|>"
START_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
# The template of tokenizers without one. The assistant's turn includes its end, but not the new line after it.
CHATML = """\
{% for message in messages %}
{% if message.tool_calls %}{{ raise_exception('ChatML has no form for tool_calls') }}{% endif %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}

{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
EXPECTED = f"expected {BYTES}, a tokenizer.json, a folder or data set that has one, or a name on the Hugging Face hub"
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")


class ChatError(ValueError):
    """A chat cannot be rendered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    name: str
    bos_id: int  # the input before a sequence
    json: str = ""  # what the package `tokenizers` builds it from; empty for bytes
    chat_template: str = ""  # jinja
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)  # bos_token and such, for the template

    def __post_init__(self) -> None:
        """Raises RunError: a field, which a file may say, is of another type."""
        special = self.special_tokens.items() if isinstance(self.special_tokens, dict) else [(None,)]
        texts = [self.name, self.json, self.chat_template, *chain(*special)]
        if not all(isinstance(text, str) for text in texts) or type(self.bos_id) is not int or self.bos_id < 0:
            raise RunError(f"the tokenizer {str(self.name)[:100]} has a field of another type: {EXPECTED}")

    @cached_property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer`; not for bytes. Raises RunError: it cannot be built."""
        return _backend(self.name, self.json)

    @cached_property
    def vocab(self) -> int:
        """Larger than every id, bos_id included."""
        # Not its number of tokens, since the ids may have holes.
        ids = self.backend.get_vocab(with_added_tokens=True).values() if self.json else [256]
        return max([self.bos_id, *ids]) + 1

    def has_ids_of(self, other: "Tokenizer") -> bool:
        """Whether each token has the same id in both."""
        if self.json == other.json:
            return True
        return bool(self.json and other.json) and self.backend.get_vocab() == other.backend.get_vocab()

    def encode_flat(self, texts: Sequence[bytes]) -> tuple[UInt32[np.ndarray, "tokens"], Int64[np.ndarray, "texts"]]:
        """The ids of all texts (UTF-8), one after another, and how many each text has."""
        if not self.json:
            ids = np.add(np.frombuffer(b"".join(texts), np.uint8), 1, dtype=np.uint32)
            return ids, np.fromiter(map(len, texts), np.int64, len(texts))
        with self._plain_exceptions():
            encodings = self.backend.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.uint32, int(lengths.sum()))
        return ids, lengths

    def _plain_exceptions(self) -> "PlainExceptions":
        return PlainExceptions(f"the tokenizer {self.name} does not encode a text ({{}})")

    def encode_batch(self, texts: Sequence[str]) -> list[UInt32[np.ndarray, "tokens"]]:
        """The ids of each text, without begin or end tokens. Raises RunError: one is no Unicode text."""
        try:
            ids, lengths = self.encode_flat([text.encode() for text in texts])
        except UnicodeEncodeError as error:  # JSON may say "\ud800", and a command line any bytes
            raise RunError(f"character {error.start} is half of a surrogate pair, expected Unicode text") from error
        stops = np.cumsum(lengths).tolist()
        return [ids[start:stop] for start, stop in zip([0, *stops], stops)]

    def encode_chat(
        self, messages: Sequence[dict], weights: Sequence[float] | None = None
    ) -> tuple[UInt32[np.ndarray, "tokens"], Float32[np.ndarray, "tokens"]]:
        """A chat's ids through the chat template, and the weight of each in the loss.

            ids, weight = tokenizer.encode_chat([
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2"},
            ])

        The ids are those of transformers' apply_chat_template, without a leading bos_id. A token has its assistant
        message's weight (`weights`, by default 1), also if only some of its characters belong to the message, and in
        what ends the turn; all others have 0. Raises ChatError: the messages are not as above, none is the assistant's,
        or the template cannot take them; UnicodeEncodeError: they hold half of a surrogate pair.
        """
        text, turns = render_chat(self, messages)
        content = text.encode()
        if not self.json:
            ids, _ = self.encode_flat([content])
            starts = np.arange(len(ids))
            stops = starts + 1
            turns = [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in turns]
        else:
            with self._plain_exceptions():
                encoding = self.backend.encode(text, add_special_tokens=False)
            ids = np.array(encoding.ids, np.uint32)
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        of_turns = [1.0] * len(turns)
        if weights is not None:
            of_turns = [weight for message, weight in zip(messages, weights) if message["role"] == "assistant"]
        if len(of_turns) != len(turns):
            expected = f"expected one for each of its {len(of_turns)} messages, to give it the message's weight"
            raise ChatError(f"the chat template marks {len(turns)} parts as the assistant's, {expected}")
        weight = np.zeros(len(ids), np.float32)
        for (start, stop), of_turn in zip(turns, of_turns):
            weight[(starts < stop) & (stops > start)] = of_turn
        first = int(len(ids) > 0 and ids[0] == self.bos_id)
        return ids[first:], weight[first:]

    def id_of(self, name: str) -> int | None:
        """The id of a special token, `eos_token` or `mask_token`; None where there is none."""
        token = self.special_tokens.get(name)
        return self.backend.token_to_id(token) if token else None

    def encode_prompt(self, messages: Sequence[dict]) -> UInt32[np.ndarray, "tokens"]:
        """The ids of a chat up to where the assistant is to answer, as transformers' apply_chat_template. Raises
        ChatError: there is no chat template, or it cannot take the messages."""
        text, _ = _render(self, _checked_messages(messages), add_generation_prompt=True)
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "tokens"]) -> str:
        """The text of ids, special tokens as written; what is no id is left out."""
        ids = np.asarray(ids, np.int64)
        if not self.json:
            return (ids[(ids >= 1) & (ids <= 256)] - 1).astype(np.uint8).tobytes().decode(errors="replace")
        with PlainExceptions(f"the tokenizer {self.name} does not decode its ids ({{}})"):
            return self.backend.decode(ids[(ids >= 0) & (ids < self.vocab)].tolist(), skip_special_tokens=False)

    def decode_behind(self, ids: Sequence[int]) -> str:
        """The text of ids that come behind others: SentencePiece's decoders take the space from a text's beginning."""
        return self.decode([self.bos_id, *ids])[len(self.decode([self.bos_id])) :]


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """A hash of its content, without its name."""
    content = {**dataclasses.asdict(tokenizer), "name": ""}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- by name or from files


def load_tokenizer(name: str, *, bos_id: int | None = None, chat_template: str | None = None) -> Tokenizer:
    """A tokenizer by name, from a tokenizer.json, from a folder that holds one, or a data set's; bos_id and
    chat_template (jinja) replace its own. Raises RunError if there is none, it cannot be read, it names no bos token,
    an id is above 2³¹ - 1, or a package is missing."""
    tokenizer = Tokenizer(name=name, bos_id=0)
    if os.path.isfile(os.path.join(os.path.expanduser(name), "zarr.json")):
        of_dataset = load_dataset_tokenizer(os.path.expanduser(name))
        if of_dataset is None:
            raise RunError(f"the data set {name} names no tokenizer: {EXPECTED}")
        tokenizer = of_dataset
    elif name != BYTES:
        text, template, special = _loaded(name)
        bos_id = _bos_id(name, _backend(name, text), special) if bos_id is None else bos_id
        tokenizer = Tokenizer(name=name, bos_id=bos_id, json=text, chat_template=template, special_tokens=special)
    if bos_id is not None:
        tokenizer = dataclasses.replace(tokenizer, bos_id=bos_id)
    if chat_template is not None:
        tokenizer = dataclasses.replace(tokenizer, chat_template=chat_template)
    if tokenizer.vocab > LARGEST_ID + 1:
        why = "flat-tokens data sets keep one bit of 32 to tell where a sequence starts"
        raise RunError(f"the tokenizer {name} has the id {tokenizer.vocab - 1}, expected ids up to {LARGEST_ID}: {why}")
    return tokenizer


def _loaded(name: str) -> tuple[str, str, dict[str, str]]:
    """The text of the tokenizer.json, the chat template, and the special tokens by their names."""
    local = os.path.expanduser(name)
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        if not os.path.exists(local):
            raise RunError(f"there is no tokenizer {name}: {EXPECTED}")
    where, files = name, []
    if os.path.exists(local):
        where = os.path.abspath(local)
        where = os.path.dirname(where) if os.path.basename(where) == "tokenizer.json" else where
        files = [where]
    if os.path.isdir(where):
        files = [entry.path for entry in os.scandir(where) if entry.name.endswith(TOKENIZER_SUFFIXES)]
    try:
        for file in files:
            open_file(file, LARGEST_BYTES).close()
        if files == [where]:
            return read_text(where), "", {}
        with needs_package(f"the tokenizer {name}", "transformers"):
            return apart("load", where)
    except (OSError, ValueError) as error:
        raise RunError(f"the tokenizer {name} cannot be loaded ({error}): {EXPECTED}") from error


def _bos_id(name: str, backend: Any, special: dict[str, str]) -> int:
    """The input before a sequence: the bos token; else what the tokenizer itself puts before a text; else
    <|endoftext|>, by which some separate documents; else the end token."""
    before = backend.encode("", add_special_tokens=True).tokens[:1]
    for token in (special.get("bos_token"), *before, END_OF_TEXT, special.get("eos_token")):
        if token and backend.token_to_id(token) is not None:
            return backend.token_to_id(token)
    fix = "say bos_id=..., an id that is no part of texts"
    raise RunError(f"the tokenizer {name} names no token that stands before a text: {fix}")


@functools.lru_cache(maxsize=4)
def tried(name: str, text: str) -> None:
    """Builds a tokenizer in another process, since the package may abort. Raises RunError: it aborts, or raises."""
    try:
        apart("build", text)
    except Unfinished as error:
        raise RunError(f"the tokenizer {name} cannot be read ({error}): {EXPECTED}") from error


def _backend(name: str, text: str) -> Any:
    with needs_package(f"the tokenizer {name}", "tokenizers"):
        import tokenizers
    tried(name, text)
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    return backend


class PlainExceptions:
    """Turns what the package `tokenizers` raises, a bare Exception or Rust's panic, into a RunError; `{}`: why."""

    def __init__(self, message: str):
        self.message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is Exception or getattr(kind, "__name__", "") == "PanicException":  # a class that nothing exports
            raise RunError(self.message.format(str(error).strip().partition("\n")[0])) from error


# ---------------------------------------------------------------- training one


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` ids, trained on texts; the same texts give the same one.

    Id 0 is <|endoftext|>, its bos_id; 1 is <|im_start|>, 2 is <|im_end|>, its eos_token; 3 to 258 are bytes.
    """
    with needs_package("training a tokenizer", "tokenizers"):
        import tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with PlainExceptions("a tokenizer cannot be trained ({})"):
        backend.train_from_iterator(texts, trainer)
    text = backend.to_str()
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TURN}
    return Tokenizer(name=f"bpe_{vocab}", bos_id=0, json=text, special_tokens=special)


# ---------------------------------------------------------------- within a data set


def save_dataset_tokenizer(path: str | os.PathLike | zarr.Group, tokenizer: Tokenizer) -> None:
    """Puts the tokenizer into a data set, in place of the one that it had."""
    dataset = path if isinstance(path, zarr.Group) else open_group(absolute_path(path), mode="r+")
    about = {**dataclasses.asdict(tokenizer), "vocab": tokenizer.vocab}
    content = about.pop("json").encode()
    if content:
        stored = np.frombuffer(content, np.uint8)
        dataset.create_array("tokenizer_json", data=stored, chunks=stored.shape, overwrite=True)
        about["sha256"] = hashlib.sha256(content).hexdigest()
    dataset.attrs["tokenizer"] = about


def load_dataset_tokenizer(path: str | os.PathLike) -> Tokenizer | None:
    """The tokenizer that a data set was written with; None where it names none, as the synthetic one. Raises RunError:
    the data set is not there, or its tokenizer is damaged."""
    where = absolute_path(path)
    try:
        dataset = open_checked(where)
        about: Any = dataset.attrs.get("tokenizer")
        if about is None:
            return None
        content = b""
        if "sha256" in about:
            stored = open_member(dataset, "tokenizer_json", zarr.Array)
            check_chunks(stored)
            if stored.nbytes > LARGEST_BYTES:
                raise ValueError(f"tokenizer_json has {stored.nbytes:,} bytes, expected at most {LARGEST_BYTES:,}")
            content = np.asarray(stored[:]).tobytes()
        if content and hashlib.sha256(content).hexdigest() != about["sha256"]:
            why = "is not what was written (its sha256 differs)"
            raise RunError(f"tokenizer_json of {where} {why}: copy the data set again")
        fields = {field.name: about[field.name] for field in dataclasses.fields(Tokenizer) if field.name != "json"}
        return Tokenizer(**fields, json=content.decode())
    except read_errors(KeyError, TypeError, AttributeError, ImportError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"the tokenizer of the data set {where} cannot be read ({reason})") from error


# ---------------------------------------------------------------- chats


def _render(tokenizer: Tokenizer, messages: list[dict], **options: bool) -> tuple[str, list[tuple[int, int]]]:
    """The chat as the template writes it, and where the turns that it marks start and end, in characters."""
    if not tokenizer.chat_template:
        raise ChatError(f"the tokenizer {tokenizer.name} has no chat template")
    others: dict[str, Any] = {**options, **tokenizer.special_tokens}
    what = f"the chat template of {tokenizer.name}"
    try:
        with needs_package(what, "transformers"), needs_package(what, "jinja2"):
            text, turns = apart("render", tokenizer.chat_template, messages, others)
    except (TypeError, ValueError, RecursionError) as error:  # also of messages that are no JSON
        raise ChatError(f"the chat template does not take the messages ({error})") from error
    return text, [(start, stop) for start, stop in turns]


def render_chat(tokenizer: Tokenizer, messages: Sequence[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The chat as the template writes it, and where each of the assistant's turns starts and ends, in characters.

    A template may mark the turns by `{% generation %}`. Else a turn is what it adds to the chat before it, which ends
    with the header of an answer and must stay the same as the chat goes on.
    """
    messages = _checked_messages(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ChatError("no message is the assistant's, so there is nothing to learn")
    render = partial(_render, tokenizer)

    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        return render(messages, return_assistant_tokens_mask=True)
    text, _ = render(messages)
    turns = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            after, _ = render(messages[: turn + 1])
            if turn:  # the model answers to what stands before the answer
                before, _ = render(messages[:turn], add_generation_prompt=True)
            else:  # few templates take an empty chat
                before = after[: max(0, after.find((message.get("content") or "").strip()))]
            if not (after.startswith(before) and text.startswith(after)):
                what = f"the chat up to message {turn} differently from the same part of the whole chat"
                fix = "give a chat_template that marks what the assistant wrote with {% generation %}"
                raise ChatError(f"the chat template writes {what}: {fix}")
            turns.append((len(before), len(after)))
    return text, turns


def _checked_messages(messages: Sequence[dict]) -> list[dict]:
    def is_message(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and isinstance(value.get("role"), str)
            and (isinstance(value.get("content"), str) or bool(value.get("tool_calls")))
        )

    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise ChatError('expected messages, a list of {"role": ..., "content": ...}, both of them text')
    # transformers does the same, because many templates would print a null key as "None".
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
