"""What is installed, against the tested versions, as findings: the part of tools.doctor that needs no package."""

import platform
import re
import sys
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
LEAST_PYTHON = (3, 11)

# In requirements-cpu.txt, but a run only says that it goes on without.
NOT_NEEDED = {"graphviz", "graphviz-pure", "plotly", "narwhals"}

# What each is for, the packages, and the file with the tested versions. Which of them a run asks for: asked_for of
# doctor_measure.
OPTIONAL = (
    ("s3:// URLs", ("s3fs",), "requirements-s3.txt"),
    ("tracking.tensorboard", ("tensorboardX",), "requirements-trackers.txt"),
    ("tracking.wandb", ("wandb",), "requirements-trackers.txt"),
    ("tracking.clearml", ("clearml",), "requirements-trackers.txt"),
    ("tracking.trackio", ("trackio",), "requirements-trackers.txt"),
    ("tokenizers", ("tokenizers",), "requirements-text.txt"),
    ("chat templates", ("transformers",), "requirements-text.txt"),
    ("parquet and .zst input", ("pyarrow", "zstandard"), "requirements-text.txt"),
    ("hf_dataset", ("datasets",), "requirements-text.txt"),
    ("curves of report.html", ("plotly",), "requirements-cpu.txt"),
    ("TPUs, and plans for them", ("libtpu",), "requirements-plan.txt"),
    ("NVIDIA GPUs, and plans", ("jax-cuda13-plugin", "jax-cuda13-pjrt"), "requirements-plan.txt"),
)

GOOD, OPTION, OTHER, BROKEN = "ok", "–", "note", "WRONG"


@dataclass(frozen=True)
class Finding:
    """A row: what was looked at, what was found, and the command that repairs it where that is needed."""

    status: str
    part: str
    found: str
    fix: str = ""

    def lines(self) -> list[str]:
        """As text of at most WIDTH columns."""
        begin, indent = f"{self.status:6} {self.part:25} ", " " * 33
        rows = textwrap.wrap(self.found, WIDTH, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)
        if self.fix:
            fix = f"fix: {self.fix}"
            rows += textwrap.wrap(
                fix, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
            )
        return rows


def tested(file: str) -> dict[str, str]:
    """The version of each package in a file of requirements: {'jax': '0.10.2'}."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def installed(package: str) -> str | None:
    """Its version; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def needed_parts() -> Iterator[Finding]:
    """Python and the packages that training needs, against the tested ones."""
    python = platform.python_version()
    if sys.version_info[:2] < LEAST_PYTHON:
        yield Finding(
            BROKEN, "python", f"{python}: expected 3.11 or newer", "python3.11 -m venv .venv, and the packages in it"
        )
    else:
        yield Finding(GOOD, "python", f"{python}, {sys.executable}")
    pins = {name: pin for name, pin in tested("requirements-cpu.txt").items() if name not in NOT_NEEDED}
    as_tested = 0
    for name, pin in pins.items():
        found, package = installed(name), f"{name}=={pin}"
        if found == pin:
            as_tested += 1
        elif found is None:
            yield Finding(BROKEN, name, "not installed", f"pip install {package}")
        else:
            yield Finding(OTHER, name, f"{found}, not the tested {pin}: it may work", f"pip install {package}")
    yield Finding(GOOD, "packages", f"{as_tested} of {len(pins)} that training needs at the tested versions")


def optional_parts(asked_for: Collection[str] = ()) -> Iterator[Finding]:
    """Packages that only some runs need; what this one asks for, by the names in OPTIONAL, must be there."""
    for purpose, names, file in OPTIONAL:
        pins = tested(file)
        versions = {name: installed(name) for name in names}
        missing = [name for name in names if versions[name] is None]
        others = [f"{name} {versions[name]}" for name in names if versions[name] not in (None, pins[name])]
        fix = "pip install " + " ".join(f"{name}=={pins[name]}" for name in names)
        if file == "requirements-plan.txt":  # with the libraries of a device that is here, or for plans without any
            extra = "tpu" if names == ("libtpu",) else "cuda13"
            jax = tested("requirements-cpu.txt")["jax"]
            fix = (
                f'on a machine that has them: pip install "jax[{extra}]=={jax}"; for plans: pip install --no-deps -r '
                f'{file}'
            )
        if missing and purpose in asked_for:
            yield Finding(BROKEN, purpose, f"{' and '.join(missing)} not installed, which this run needs", fix)
        elif missing:
            yield Finding(OPTION, purpose, f"{' and '.join(missing)} not installed (optional)", fix)
        elif others:
            yield Finding(OTHER, purpose, f"{', '.join(others)}: not the tested version", fix)
        else:
            yield Finding(GOOD, purpose, ", ".join(f"{name} {version}" for name, version in versions.items()))
