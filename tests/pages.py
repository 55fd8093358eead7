"""README.md and docs/*.md, taken apart for the tests that do what they say; and copies of the repository to try it."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/recipes").glob("*.md"))]


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


def without_folders(message):
    """A message without folders, which differ from machine to machine."""
    return re.sub(r"(at |\()\S*?((?:kernels/)?\w+\.py:\d+)", r"\1\2", message).strip()


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
    """Writes a text to a file, since `@typed` reads its source, and imports it as a module."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cells_of_the_notebook(tag=None):
    """[(code, what it prints)] of docs/learn_sharding.ipynb; with a tag, of the cells that have it."""
    cells = [cell for cell in json.loads(text_of("learn_sharding.ipynb"))["cells"] if cell["cell_type"] == "code"]
    return [
        ("".join(cell["source"]), "".join("".join(output["text"]) for output in cell["outputs"]))
        for cell in cells
        if tag is None or tag in cell["metadata"].get("tags", ())
    ]


def _recipes():
    """What changes train.py, by title: the sections of docs/changing.md and the pages of docs/recipes/, taken apart."""
    titles = re.findall(r"^## (.*)$", text_of("changing.md"), re.M)
    found = {title: section("docs/changing.md", title) for title in titles}
    for path in sorted((ROOT / "docs/recipes").glob("*.md")):
        found[path.read_text().partition("\n")[0].removeprefix("# ")] = blocks(path.read_text())
    return {title: body for title, body in found.items() if "diff" in dict(body) and title != FAMILY}


FAMILY = "A family"  # a page that changes models/llama.py
RECIPES = _recipes()
MESH_OF_RECIPE = {"Another axis of the mesh": {"r": 2, "d": 4, "t": 2}}


def recipe(title, folder):
    """train.py changed as a recipe says."""
    folder.mkdir(exist_ok=True)
    text = folder / "train.py"
    shutil.copy(ROOT / "train.py", text)
    for language, body in RECIPES[title]:
        if language == "sh" and body.startswith("sed"):
            subprocess.run(body, shell=True, cwd=folder, check=True)
        elif language == "diff":
            text.write_text(changed(text.read_text(), body))
    return text.read_text()


def copy_of_the_repository(folder):
    """Links to its rooms and programs, and a copy of train.py to be changed."""
    rooms = [ROOT / name for name in ("shardlib", "ledger", "kernels", "models", "tools", "configs", "runtime")]
    for path in (*rooms, *ROOT.glob("*.py")):
        if path.name != "train.py":
            os.symlink(path, folder / path.name)
    shutil.copy(ROOT / "train.py", folder)


def run_in(folder, command, status=0):
    """Runs a command there, in which `python` is this one. Returns what it prints, on stderr if it should fail."""
    command = [sys.executable if word == "python" else word for word in command]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == status or "ledger.json" in " ".join(command), result.stderr[-3000:]
    return result.stderr if status else result.stdout


def executed(code, **names):
    exec(code, names)
    return names
