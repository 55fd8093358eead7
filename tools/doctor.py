"""Whether this machine can do a run, how fast its parts are, and the command that repairs what is wrong.

    python -m tools.doctor                                                    # for the job to try first
    python -m tools.doctor --config-name=c4_a100x8_1b                         # for that run: its mesh, its run folder
    python -m tools.doctor mesh.d=2 mesh.t=4 paths.root_working_dir=s3://bucket/runs

Looks at versions, the packages that the run's keys ask for, devices, a matrix product, the collectives over each axis
of the mesh, the data, and the store of checkpoints. Exits with 1 when something that the run needs is missing or
broken; a version that is not the tested one is only said.
"""

# Nothing but Python's own here: it must run where packages are missing. tools/doctor_measure.py needs them.
import platform
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = "requirements-cpu.txt"
NOT_NEEDED = {"graphviz", "graphviz-pure", "plotly", "narwhals"}  # a run only says that it goes on without

Row = tuple[str, str, str]  # a part, what was found, and the command that repairs it: empty where all is well


class Report:
    """Prints rows as they come, one process for all but each its own wrong ones, and knows what is wrong."""

    def __init__(self):
        self.wrong: list[str] = []

    def add(self, rows: Iterable[Row], *, is_leader: bool = True) -> None:
        for part, found, fix in rows:
            if fix:
                self.wrong.append(part)
            if is_leader or fix:
                text = [f"{'WRONG' if fix else 'ok':6} {part:25} {found}", f"{'':33}fix: {fix}"][: 1 + bool(fix)]
                for line in text:
                    print(textwrap.fill(line, 120, subsequent_indent=" " * 33, break_on_hyphens=False), flush=True)

    def verdict(self) -> str:
        """'' when nothing is wrong."""
        return f"missing or broken: {', '.join(self.wrong)}; the fix of each is below it" if self.wrong else ""


def pins_of(file: str) -> dict[str, str]:
    """The version of each package in a file of requirements: {'jax': '0.10.2'}."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def packages(names: Iterable[str], file: str) -> Iterator[Row]:
    """A row for each of the packages that is missing or not as tested, and one for all others."""
    pins, as_tested = pins_of(file), []
    for name in names:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed, which this run needs", f"pip install {name}=={pins[name]}"
            continue
        if found == pins[name]:
            as_tested.append(name)
        else:
            yield name, f"{found}, not the tested {pins[name]}: it may work", ""
    if as_tested:
        yield "packages", f"{len(as_tested)} of {file} at the tested versions", ""


def needed() -> Iterator[Row]:
    """Python, and what every run needs."""
    python = f"{platform.python_version()}, {sys.executable}"
    yield "python", python, "" if sys.version_info >= (3, 11) else "python3.11 -m venv .venv, and the packages in it"
    yield from packages((name for name in pins_of(NEEDED) if name not in NOT_NEEDED), NEEDED)


def asked_for(config: Any) -> Iterator[Row]:
    """What this run does not start without."""
    from runtime.tracking.trackers import PACKAGES

    urls = [config.paths.root_working_dir, *(source.filespec for source in (config.flat_tokens, *config.mixture))]
    if any(url and url.startswith("s3://") for url in urls):
        yield from packages(["s3fs"], "requirements-s3.txt")
    yield from packages([PACKAGES[name][0] for name in config.tracking.to], "requirements-trackers.txt")
    if config.hf_dataset.path:
        own = config.hf_dataset.tokenizer != "bytes_utf8"
        yield from packages(["datasets", *["tokenizers", "transformers"] * own], "requirements-text.txt")


def main(config: Any) -> None:
    from runtime.terminal import RunError
    from tools.doctor_measure import measured

    report, first = Report(), [*needed(), *asked_for(config)]
    for rows, is_leader in measured(config):
        report.add([*first, *rows], is_leader=is_leader)
        first = []
    if verdict := report.verdict():
        raise RunError(verdict)
    if is_leader:
        print("\nNothing that this run needs is missing or broken.")


def run() -> None:
    """Looks at the packages first, since the configuration needs them."""
    report = Report()
    if any(fix for *_, fix in needed()):
        report.add(needed())
        sys.exit(f"error: {report.verdict()}; the rest is looked at when they are there")
    try:
        import tools.doctor_measure  # noqa: F401  all that a run imports
        from runtime import program
        from runtime.config import command_line

        trainer = program.of_command_line(sys.argv[1:])
    except (ImportError, RuntimeError) as error:  # JAX and jaxlib that do not go together, a library of the system
        report.add(needed())
        sys.exit(f"error: what is installed cannot be imported: {error}; fix: pip install -r {NEEDED}")
    command_line.run(main, program.with_keys(program.ProgramKey, trainer))


if __name__ == "__main__":
    run()
