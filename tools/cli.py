"""The command `clearshard`, which `pip install .` makes: one name for training and for the programs beside it.

clearshard train --config-name=local_test_synthetic    # python -m train --config-name=local_test_synthetic
clearshard plan hardware=h200                          # python -m tools.plan hardware=h200
clearshard --version
"""

import importlib.metadata
import runpy
import sys
from pathlib import Path

from runtime.terminal import output_is_failing, print_line


def programs() -> dict[str, str]:
    """Each subcommand's module: those at the top, and all of tools/ that can be run."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    tools = {path.stem: f"tools.{path.stem}" for path in paths if "\nif __name__ ==" in path.read_text("utf-8")}
    return {"train": "train", "train_any": "train_any", **tools}


def main() -> None:
    """Runs `python -m` with the module that the first argument names; the other arguments are the module's own."""
    known, said = programs(), ""
    match sys.argv[1:]:
        case ["--version"]:
            said = f"clearshard {importlib.metadata.version('clearshard')}, jax {importlib.metadata.version('jax')}"
        case [] | ["--help" | "-h"]:
            said = f"usage: clearshard {{{','.join(known)}}} [arguments]\n       clearshard {{...}} --help | --version"
        case [name, *arguments] if name in known:
            sys.argv = [f"clearshard {name}", *arguments]
            sys.path.insert(0, "")  # like `python -m`: a trainer in this folder is the one that runs
            runpy.run_module(known[name], run_name="__main__", alter_sys=True)
        case [name, *_]:
            sys.exit(f"error: clearshard has no command {name}: expected one of {', '.join(known)}")
    if said:
        print_line(said)
        if output_is_failing():
            sys.exit(1)
