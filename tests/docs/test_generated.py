"""What `make docs` writes into README.md and docs/ is there already."""

import json
import re
import sys

import pytest
from pages import cells_of_the_notebook, module_of

from docs import generate

BLOCKS = generate.blocks()  # those of keys and of a ledger are quick; the others take plans, seconds to a minute


def without_lines(text):
    """Line numbers of train.py drift with each change; nobody renews the pages for them."""
    return " ".join(re.sub(r"(train\.py:|line )\d+|(?<=│) +\d+ ", "train.py ", text).split())


@pytest.mark.parametrize(
    "page, name, arguments, text",
    [pytest.param(*block, marks=() if block[1] in ("keys", "ledger") else pytest.mark.slow) for block in BLOCKS],
    ids=lambda value: getattr(value, "stem", None),
)
def test_generating_changes_nothing(page, name, arguments, text, monkeypatch):
    """Each block is what its function says today, but for line numbers; if not: `make docs`."""
    monkeypatch.setenv("COLUMNS", "80")
    assert without_lines(generate.made(name, arguments, text)) == without_lines(text)


def test_every_kind_of_block_is_in_a_page():
    """Markers that nobody would renew, or a function for no page, are mistakes."""
    assert {name for _, name, _, _ in BLOCKS} == set(generate.FUNCTIONS)
    for page in generate.PAGES:
        text = page.read_text()
        assert text.count("<!-- generated:") == text.count("<!-- end -->") == len(generate.BLOCK.findall(text)), page


def test_the_notebook(tmp_path, monkeypatch, capsys):
    """Executed as one program its cells print what stands below them, and what they assert holds: results are
    numpy's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
    code, printed = zip(*cells_of_the_notebook())
    module_of(tmp_path / "notebook.py", "\n\n\n".join(code))
    assert without_lines(capsys.readouterr().out) == without_lines("".join(printed))


@pytest.mark.slow
def test_the_notebook_in_jupyter():
    """Executed by Jupyter, each cell prints what stands below it."""
    notebook = json.loads(generate.executed_notebook())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    printed = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]
    expected = [text for _, text in cells_of_the_notebook()]
    assert list(map(without_lines, printed)) == list(map(without_lines, expected))
