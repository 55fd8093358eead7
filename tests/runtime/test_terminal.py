"""runtime/terminal.py: what is shown of texts that others wrote."""

import pytest

from runtime.terminal import RunError, print_error, print_line, shown


@pytest.mark.parametrize(
    "text, expected",
    [
        ("s3://me:secret@host/x and gs://bucket/y", "s3://me:***@host/x and gs://bucket/y"),
        ("a\x1b[31mred\x07\r\x9b2J", "a\ufffd[31mred\ufffd\ufffd\ufffd2J"),
        ("tab\tand\nline, é€𝄞", "tab\tand\nline, é€𝄞"),
        ("http://host:80/a@b", "http://host:80/a@b"),
    ],
)
def test_shown(text, expected, capsys):
    """Neither a password of a URL nor a control character is printed, by whatever prints."""
    assert shown(text) == expected
    print_line(text)
    print_error(RunError(text))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{expected}\n", f"error: {expected}\n")
