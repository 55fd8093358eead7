"""The pages, README.md and docs/*.md, taken apart for the tests that hold what they say; and copies of the repository to try it in."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text):
    """(language, lines) of each fenced block."""
    return [(name, body) for name, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)]


def text_of(page):
    return (ROOT / "docs" / page).read_text()


def section(page, title):
    """The blocks of a section of a page."""
    return blocks(re.search(rf"^## {title}$(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.M | re.S)[1])


def of_language(language, page):
    """The page's blocks of a language."""
    return [body for name, body in blocks((ROOT / page).read_text()) if name == language]


def train_py():
    return (ROOT / "train.py").read_text()


def changed(text, diff):
    """A text with a diff applied, whose place is known by its lines."""
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    assert text.count(old) == 1, f"{text.count(old)} places for\n{diff}"
    return text.replace(old, new)


def module_of(path, text):
    """The module that a text is, from a file, since `@typed` reads its source."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def copy_of_the_repository(folder):
    """Links to its rooms, and a copy of train.py to be changed."""
    for name in ("shardlib", "ledger", "kernels", "tools", "configs", "runtime", "jax_extra.py"):
        os.symlink(ROOT / name, folder / name)
    shutil.copy(ROOT / "train.py", folder)


def run_in(folder, command):
    """Runs a command there; `python` is this one. Returns what it prints."""
    command = [sys.executable if word == "python" else word for word in command]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 or "ledger_diff" in " ".join(command), result.stderr[-3000:]
    return result.stdout


def executed(code, **names):
    exec(code, names)
    return names
