"""Ends the programs that write files, runs apart, with signals at random moments: nothing is lost, half or different.

    python -m tests.torture_tools                    # 240 signals, some minutes on two cores
    python -m tests.torture_tools kills=40 seed=1

A program is ended at random moments of its work and, half of the time, just after what it writes has appeared or grown.
After each signal its inputs are as they were, and nothing stands under the name of a folder that is written whole.
Started again with the same arguments it ends, with the bytes of one that was left alone.
"""

import gzip
import hashlib
import importlib
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.config import command_line
from runtime.data import documents
from runtime.terminal import RunError
from tests.torture import FINETUNE, STATUSES, Life, Run
from tools import tokenize_text

GOLDEN = Path(__file__).parent / "models/golden/llama"
ENDS = {0}.union(*STATUSES.values())
UUID = rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
SIGNALS = {signal.SIGKILL: 6, signal.SIGTERM: 2, signal.SIGINT: 2}


@dataclass(frozen=True)
class Job:
    """What is called: its module, its config, its arguments with {names}; and what of its end is compared."""

    module: str
    config: str
    arguments: str
    is_whole: bool = False  # all of it is there, or nothing


JOBS = {
    "weights in": Job("tools.convert", "Convert", f"{GOLDEN} {{to}}", is_whole=True),
    "weights out": Job("tools.convert", "Convert", "{inputs}/run {to}", is_whole=True),
    "adapters out": Job("tools.convert", "Convert", "{inputs}/lora {to} adapter=true", is_whole=True),
    "synthetic": Job("tools.make_dataset", "MakeDataset", "path={to} sequences=200"),
    # By default one in a hundred documents is held out: with some seeds none.
    "text": Job(
        "tools.tokenize_text",
        "TokenizeText",
        "input={inputs}/text.txt output={to} document_bytes=64 validation_fraction=0.2",
    ),
    # A text and records, compressed and not, of which some are bad: every kind of position in what is read.
    "records": Job(
        "tools.tokenize_text",
        "TokenizeText",
        "input='{inputs}/corpus/*' output={to} tokenizer=train_bpe bpe_vocab=300 validation_fraction=0.1 "
        "document_bytes=500 on_bad_record=skip",
    ),
    "curves": Job("tools.compare", "Compare", "{inputs}/run {inputs}/lora output={to}"),
    "answers": Job("tools.generate", "Generate", "{inputs}/run input={inputs}/prompts.txt tokens=2 rows=4 to={to}"),
    "vectors.npy": Job("tools.embed", "Embed", "{inputs}/run {inputs}/words.txt to={to} rows=4", is_whole=True),
    "scores": Job("tools.score", "Score", "{inputs}/run {inputs}/tasks.jsonl to={to}"),
}


@dataclass(frozen=True, kw_only=True)
class TortureTools:
    folder: str = "runs/torture_tools"  # emptied first; holds inputs, outputs and the log of each life
    seed: int = 0  # of the moments and the signals
    kills: int = 240  # signals
    only: tuple[str, ...] = tuple(JOBS)  # of JOBS


def main(config: TortureTools) -> None:
    folder, draw, counts = Path(config.folder).absolute(), random.Random(config.seed), Counter[str]()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "inputs").mkdir(parents=True)
    make_inputs(folder / "inputs", draw)
    documents.BLOCK_BYTES, tokenize_text.RECORD_S = 2048, 0.02  # so that what is written is recorded many times
    for name in config.only:  # imported once; a life is a fork
        importlib.import_module(JOBS[name].module)
    inputs = digest(folder / "inputs")
    for name in config.only:
        torture(name, JOBS[name], folder, draw, config.kills // len(config.only), counts)
        if digest(folder / "inputs") != inputs:
            raise RunError(f"{name}: what it reads is not what it was")
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(f"nothing was lost: {counts['outputs']} outputs are bit for bit those of programs left alone")


def make_inputs(folder: Path, draw: random.Random) -> None:
    """A run with a tokenizer, its adapters, texts and tasks."""
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(4000)]
    lines = [" ".join(words[start : start + 8]) for start in range(0, len(words), 8)]
    (folder / "text.txt").write_text("\n".join(lines))
    write_corpus(folder / "corpus", lines)
    (folder / "prompts.txt").write_text("\n".join(lines[:24]))
    (folder / "words.txt").write_text("\n".join(words[:24]))
    (folder / "tasks.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines[:24]))
    data = f"flat_tokens.filespec={folder}/data.zarr"
    job = Job("tools.tokenize_text", "TokenizeText", f"input={folder}/text.txt output={folder}/data.zarr")
    live(job, [*job.arguments.split(), "document_bytes=64", "validation_fraction=0.2"], folder / "data.log").end()
    short = [data, "flat_tokens.sequence_packing=true", "training.steps=5", "training.steps_for_lr=5"]
    short.append(f"paths.root_working_dir={folder}")  # the last one says where a Run looks
    Run.keys = (*Run.keys, "model.vocab=264")
    Run(folder, "run", *short).live().end()
    Run.program, Run.keys = "train_any", (FINETUNE[0], "lora.rank=2", f"initial_weights={folder}/run")
    Run(folder, "lora", *short).live().end()


def write_corpus(folder: Path, lines: list[str]) -> None:
    """What the job "records" reads."""
    folder.mkdir()
    records = [f'{{"text": "{line}"}}\n' for line in lines]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(["no json\n", *records, "no json\n"]).encode()))
    (folder / "b.txt").write_text("\n".join(lines))
    (folder / "c.jsonl").write_text("".join(records))


def live(job: Job, arguments: list[str], log: Path) -> Life:
    module = importlib.import_module(job.module)
    return Life(module.main, getattr(module, job.config), arguments, log, {})


def torture(name: str, job: Job, folder: Path, draw: random.Random, kills: int, counts: Counter) -> None:
    """Ends the job so many times, in as many outputs as it takes."""
    named, number, killed = name.replace(" ", "_"), 0, 0
    whole, began = folder / f"whole-{named}", time.monotonic()
    live(job, written_to(job, folder, whole), folder / f"{named}.log").end()
    whole_s, expected = time.monotonic() - began, digest(whole)
    while killed < kills:
        to, lives = folder / f"{number}-{named}", 0
        number += 1
        while True:
            log, lives = folder / f"{number}-{named}.{lives}.log", lives + 1
            life = live(job, written_to(job, folder, to), log)
            if killed < kills and lives < 8:
                # Those after the first one may be ended sooner, since part of the work is done.
                end_at_a_moment(life, to, draw, whole_s)
            else:
                life.end()
            # pydantic's Rust makes an error of its own of an interrupt that comes while it builds a schema.
            is_interrupt = life.status == 1 and log.read_text().rstrip().endswith("KeyboardInterrupt:")
            if life.status not in ENDS and not is_interrupt:
                raise RunError(f"{name} ended with status {life.status}: {log}")
            if not life.status:
                break
            killed, _ = killed + 1, counts.update([name, "signals"])
            if job.is_whole and to.exists():
                break  # ended after the last step of its work: what is there must be all of it
        if digest(to) != expected:
            raise RunError(f"{name}: {to} is not what a program left alone writes, {whole}")
        counts["outputs"] += 1
        shutil.rmtree(to) if to.is_dir() else to.unlink()


def written_to(job: Job, folder: Path, to: Path) -> list[str]:
    return [argument.format(inputs=folder / "inputs", to=to) for argument in job.arguments.split()]


def end_at_a_moment(life: Life, to: Path, draw: random.Random, whole_s: float) -> None:
    if draw.random() < 0.5:
        wait_for(life, lambda: to.exists() or Path(f"{to}.partial").exists(), draw.uniform(0, whole_s))
        time.sleep(draw.choice([0, draw.uniform(0, 0.05)]))
    else:
        wait_for(life, lambda: False, draw.uniform(0, whole_s))
    life.send(draw.choices(list(SIGNALS), SIGNALS.values())[0])


def wait_for(life: Life, condition: Callable[[], bool], longest_s: float) -> None:
    end = time.monotonic() + longest_s
    life.wait_for(lambda: condition() or time.monotonic() > end)


def digest(path: Path) -> str:
    """The digest of a file, or of a folder's files and their names; the random ids of plotly's plots are left out."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path)}\0".encode() + re.sub(UUID, b"", file.read_bytes()))
    return content.hexdigest()


if __name__ == "__main__":
    command_line.run(main, TortureTools)
