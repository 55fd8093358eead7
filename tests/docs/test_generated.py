"""What `make docs` writes into README.md and docs/ is there already."""

import re

import pytest

from docs import generate

# The others take a plan, or several, each: seconds to a minute.
QUICK = ("families", "letters", "shapes", "small_job", "hosts", "ledger")
BLOCKS = generate.blocks()


def without_lines(text):
    """Line numbers of train.py drift with each change; nobody renews the pages for them."""
    return " ".join(re.sub(r"train\.py:\d+|(?<=│) +\d+ ", "train.py ", text).split())


@pytest.mark.parametrize(
    "page, name, arguments, text",
    [pytest.param(*block, marks=() if block[1] in QUICK else pytest.mark.slow) for block in BLOCKS],
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
