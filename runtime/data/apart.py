"""Runs others' chat templates and tokenizers in a separate process: one that never ends, fills the memory or aborts
costs no more than a message.

    apart("render", template, messages, {"add_generation_prompt": True})     # ["<|im_start|>user…", []]
    apart("load", "google/gemma-3-1b-pt")      # the text of its tokenizer.json, its template, its special tokens
    apart("build", tokenizer_json)
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS, BYTES = 3, 2**27  # most processor time and memory of a call
LOADED, LOADED_SECONDS = 2**32, 120  # for importing packages and reading the files of a tokenizer
RENDERED, TIMES = 2**14, 16  # characters that a template may write, and how often those of the messages
MOST_IDS = 1000  # for three characters and what a tokenizer puts around them
NO_MEMORY = 3  # the status of the process
ROOT = Path(__file__).parents[2]


class Unfinished(ValueError):
    """The call raised an exception, or its process ended."""


class Apart:
    """Calls a function of this file in its process; arguments and result are JSON. Raises Unfinished."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def __call__(self, function: str, *arguments: Any) -> Any:
        request = json.dumps([function, *arguments]).encode()
        with self.lock:
            process = self.process = self.process or self._started()
            try:
                self.pipe.send_bytes(request)
                kind, result = json.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                self.process, status = None, process.wait()
                reasons = {-signal.SIGXCPU: "it takes too much time", NO_MEMORY: "it takes too much memory"}
                raise Unfinished(reasons.get(status, f"it ends its process with status {status}")) from None
        if kind == "raised":
            raise Unfinished(result)
        return result

    def _started(self) -> subprocess.Popen:
        self.pipe, theirs = Pipe()
        with theirs:
            number, null = theirs.fileno(), subprocess.DEVNULL
            command = [sys.executable, "-m", "runtime.data.apart", str(number)]
            return subprocess.Popen(command, cwd=ROOT, pass_fds=[number], stdin=null, stdout=null, stderr=null)


apart = Apart()


def render(template: str, messages: list[dict], others: dict[str, Any]) -> Any:
    """The chat as the template writes it, and its marked turns."""
    from transformers.utils.chat_template_utils import render_jinja_template

    limit(BYTES, SECONDS)
    rendered: Any = render_jinja_template([messages], chat_template=template, **others)
    (text,), turns = rendered
    most = RENDERED + TIMES * len(json.dumps(messages))
    if len(text) > most:
        raise ValueError(f"it writes {len(text)} characters, at most {most} are allowed")
    return text, turns[0] if turns else []


def load(where: str) -> tuple[str, str, dict[str, str]]:
    """The text of the tokenizer.json, the chat template and the special tokens, of a folder or a name on the hub."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
    import transformers
    from transformers.utils import cached_file

    file = cached_file(where, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    # A tokenizer.json says its ids itself; the class that is named beside it may have others.
    loader = transformers.PreTrainedTokenizerFast if file else transformers.AutoTokenizer
    loaded = loader.from_pretrained(where)
    if not loaded.is_fast:
        raise ValueError("it has no form that the package `tokenizers` reads")
    text = Path(file).read_text(encoding="utf-8") if file else loaded.backend_tokenizer.to_str()
    template = loaded.chat_template or ""
    template = template.get("default", "") if isinstance(template, dict) else template  # several, each with a name
    return text, template, {key: value for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}


def build(text: str) -> None:
    import tokenizers

    limit(BYTES + 64 * len(text), SECONDS + len(text) // 2**20)  # a megabyte takes 0.1 s
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_padding()
    for part in ("normalizer", "decoder"):
        if (most := most_for_one(json.loads(text).get(part))) > MOST_IDS:
            raise ValueError(f"its {part} may write {most} characters for one")
    for sample in ("", "a b"):
        ids = backend.encode(sample, add_special_tokens=True).ids
        if len(ids) > MOST_IDS:
            raise ValueError(f"it makes {len(ids)} ids of {len(sample)} characters")
        backend.decode(ids)


def most_for_one(part: Any) -> int:
    """To how many characters the replacements in a part of tokenizer.json may turn one, if each takes the last's."""
    inner = part if isinstance(part, list) else part.values() if isinstance(part, dict) else ()
    written = [part[key] for key in ("content", "prepend") if isinstance(part, dict) and isinstance(part.get(key), str)]
    return math.prod(max(len(text), 1) for text in written) * math.prod(map(most_for_one, inner))


def limit(size: int, seconds: int) -> None:
    """Limits what this process takes from now on."""
    limits = {resource.RLIMIT_CPU: int(time.process_time()) + seconds}
    if (statm := Path("/proc/self/statm")).exists():  # on Linux
        limits[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + size
    for kind, value in limits.items():
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main(number: int) -> None:
    pipe = Connection(number)
    functions: dict[str, Callable] = {"render": render, "load": load, "build": build}
    while True:
        try:
            function, *arguments = json.loads(pipe.recv_bytes())
        except EOFError:  # the other process has ended
            return
        limit(LOADED, LOADED_SECONDS)  # even if the previous call has left less; a function may allow itself less
        try:
            reply = "result", functions[function](*arguments)
        except MemoryError:
            sys.exit(NO_MEMORY)
        except BaseException as error:  # a template or the package's Rust may raise anything
            reply = "raised", f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        pipe.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
