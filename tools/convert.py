"""Turns published weights into a checkpoint, or a checkpoint into published weights, depending on what it finds.

    python -m tools.convert from=meta-llama/Llama-3.2-1B to=weights/llama      # a folder that a run can start from
    python -m tools.convert from=smollm2.Q8_0.gguf to=weights/smollm2
    python -m tools.convert from=runs/my_run to=published dtype=bfloat16       # a folder that transformers loads
    python -m tools.convert from=runs/my_lora to=adapter adapter=true          # a folder that PEFT loads

What comes in may be a folder of safetensors, a name on the Hugging Face hub, a GGUF file or Meta's *.pth. It becomes
checkpoints/0000000000 in float32, config.yaml with the model's keys, and the tokenizer. What goes out may be a run,
whose newest checkpoint is taken, or a checkpoint; adapters are merged into the weights. docs/models.md lists the
families.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from models.foreign import gguf_tokenizer
from models.huggingface import Source, export, export_adapters, open_weights, read_json, require_same_program
from models.layers import learned_positions
from runtime.checkpoints.store import open_store
from runtime.checkpoints.writing import write_copy
from runtime.config import command_line
from runtime.config.rebuild import as_tree
from runtime.data.sources import RECORD, keep_tokenizer, kept_tokenizer
from runtime.data.tokenizers import Tokenizer, load_tokenizer
from runtime.files import read_bytes
from runtime.terminal import RunError, print_error, print_line, run_errors

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "chat_template*", "generation_config.json",
)  # fmt: skip
THREADS = 4  # read and write parts of one tensor


@dataclass(frozen=True, kw_only=True)
class Convert:
    WORDS: ClassVar = ("from", "to")

    from_: str  # what is converted: a folder, a file, or a name on the Hugging Face hub
    to: str  # a new folder
    dtype: Literal["float32", "bfloat16"] | None = None  # type of the published weights; null: as they were, or float32
    allow_program_change: bool = False  # says that a run's model is that of models/, although its program was changed
    adapter: bool = False  # for a run with lora.rank: writes only its adapters, in float32, as PEFT does


def main(config: Convert) -> None:
    to = Path(os.path.expanduser(config.to))
    if "://" in config.to:
        raise RunError(f"to={config.to} is a URL: give a new folder of this machine")
    if os.path.lexists(to) and (not os.path.isdir(to) or os.listdir(to)):
        raise RunError(f"to={config.to} is not empty: give a new folder")
    if config.adapter and config.dtype is not None:
        raise RunError("dtype is that of published weights: adapters are written in float32. Leave it out")
    with ThreadPoolExecutor(THREADS) as pool:
        source = open_weights(config.from_, pool)
        if source.family is not None and not config.allow_program_change:
            require_same_program(source, None, "allow_program_change=true", is_published=True)
        kind = (source.config or {}).get("model_type", name_of(source))
        with written_whole(to) as folder:
            if config.adapter:
                export_adapters(source, folder)
            elif source.is_published:
                if config.dtype is not None:
                    raise RunError("dtype is that of published weights: a checkpoint is in float32. Leave it out")
                bring_in(source, folder, pool)
            else:
                known = source.config or {}
                dtype = config.dtype or known.get("dtype") or known.get("torch_dtype") or "float32"
                export(source, folder, dtype, pool, fields_of(source) if source.config is None else None)
                writes = getattr(source.family, "KIND", "") == "decoder"
                copy_tokenizer(source.folder, folder, begins=writes and source.config is None)
                kind = read_json(folder / "config.json")["model_type"]
                if capacity := getattr(source.model, "capacity", None):
                    text = f"model.capacity = {capacity}: this may drop tokens, the published model drops none"
                    print_error(text, "note")
    count = sum(math.prod(x.shape) for name, x in source.checkpoint.arrays.items() if name.startswith("weights/"))
    what = f"adapters of {kind}" if config.adapter else f"{kind}, {count:,} parameters"
    print_line(f"{source.checkpoint.path} -> {to}: {what}")


@contextlib.contextmanager
def written_whole(to: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `to` at the end: a refused or killed command leaves no part of `to`."""
    partial = Path(f"{os.path.realpath(to)}.partial")
    with run_errors(f"{to} cannot be written"):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            partial.rename(os.path.realpath(to))  # `to` may be a link to an empty folder
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def name_of(source: Source) -> str:
    return "of no family" if source.family is None else source.family.__name__.rpartition(".")[2]


def bring_in(source: Source, to: Path, pool: ThreadPoolExecutor) -> None:
    """Writes a folder that initial_weights, tools and this program take."""
    described = {"family": name_of(source), "model": as_tree(source.model)}
    attributes = {"skipped_steps": 0, "config": described, "published": source.config}
    write_copy(source.checkpoint.arrays, open_store(to / "checkpoints", 600), "0000000000", attributes, pool)
    (to / "config.yaml").write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
    copy_tokenizer(source.folder, to)
    if (to / "tokenizer.json").exists():
        keep_tokenizer(to, load_tokenizer(str(to)))


def copy_tokenizer(folder: Path, to: Path, begins: bool = False) -> None:
    """Copies the tokenizer's files, or writes them from a GGUF file or from a run's record of the tokenizer.

    Args:
      begins: a record's tokenizer puts bos_id before each text, as the run's sequences have it.
    """
    if folder.suffix == ".gguf":
        contents = gguf_tokenizer(folder)
        if contents is None:
            return print_error(f"the tokenizer in {folder} is of a kind that is not converted", "note")
        return write_tokenizer(to, *contents)
    for file in [file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.name != RECORD]:
        (to / file.name).write_bytes(read_bytes(file))
    tokenizer = kept_tokenizer(folder)
    if tokenizer is not None and tokenizer.json and not (to / "tokenizer.json").exists():
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
        about |= {"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
        write_tokenizer(to, *(beginning(tokenizer, about) if begins else (tokenizer.json, about)))


def beginning(tokenizer: Tokenizer, about: dict) -> tuple[str, dict]:
    """The files' contents for a tokenizer that puts bos_id before each text and chat."""
    from tokenizers import processors

    backend, bos = type(tokenizer.backend).from_str(tokenizer.json), tokenizer.bos_id
    if (token := backend.id_to_token(bos)) is None or bos in backend.encode("", add_special_tokens=True).ids[:1]:
        return tokenizer.json, about
    first = processors.TemplateProcessing(f"{token} $A", f"{token} $A $B", [(token, bos)])
    others = [backend.post_processor] if backend.post_processor else []
    backend.post_processor = processors.Sequence([*others, first])
    if template := about.get("chat_template"):
        about = {**about, "chat_template": f"{{{{ {json.dumps(token)} }}}}{template}"}
    return backend.to_str(), about


def write_tokenizer(to: Path, text: str, about: dict) -> None:
    (to / "tokenizer.json").write_text(text, encoding="utf-8")
    (to / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def fields_of(source: Source) -> dict[str, int | None]:
    """Fields of config.json for a run from random weights: the length of its rows, unless the model has positions; the
    token that T5's decoder reads first; and the ids that begin and end a text, null if its tokenizer is unknown."""
    rows = source.checkpoint.attributes["config"].get("training", {}).get("tokens", {})
    fields: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if getattr(source.family, "KIND", "") == "decoder" and "len" in rows and learned_positions(source.model) is None:
        fields["max_position_embeddings"] = rows["len"]
    if getattr(source.family, "KIND", "") == "both":
        fields["decoder_start_token_id"] = source.decoder_start
    tokenizer = kept_tokenizer(source.folder)
    if tokenizer is None:
        return fields
    return fields | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.id_of("eos_token")}


if __name__ == "__main__":
    command_line.run(main, Convert)
