"""What a refusal says, by its parts: the place, the key or value, what was expected, and the fix."""

import re

import pytest

from runtime.terminal import RunError


def says(parts, text) -> bool:
    """Whether a text has these parts, ` … ` between them, in this order; a line break is a blank."""
    pattern = ".*".join(map(re.escape, " ".join(parts.split()).split(" … ")))
    return re.search(pattern, " ".join(text.split())) is not None


def assert_refuses(parts, function, *args, error=RunError, **kwargs):
    """Asserts that the call raises this error, with these parts in its text."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert says(parts, str(caught.value)), caught.value
