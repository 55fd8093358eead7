"""runtime/files.py: only plain files of a bounded size are opened, without waiting; yaml raises one kind of error."""

import os
import resource

import pytest
import yaml

from runtime.files import NotPlain, open_file, parse_yaml, read_text, write_whole


@pytest.mark.parametrize("make, kind", [
    (os.mkdir, "a folder"),
    (os.mkfifo, "a pipe"),
    (lambda path: path.symlink_to("/dev/zero"), "a device"),
    (lambda path: path.symlink_to(path.name), "a link to itself"),
    (lambda path: (path.touch(), os.truncate(path, 2**40)), "1,099,511,627,776 bytes"),
])  # fmt: skip
def test_what_is_refused(tmp_path, make, kind):
    """The message has the path and what it is; a link to a plain file is opened. A byte order mark is no text."""
    make(tmp_path / "there")
    with pytest.raises(NotPlain, match=f"it (is|has) {kind}.*'{tmp_path}/there'$"):
        read_text(tmp_path / "there")
    (tmp_path / "text").write_text("\ufeffü")
    (tmp_path / "link").symlink_to("text")
    assert read_text(tmp_path / "link") == "ü"
    with pytest.raises(NotPlain, match="a name holds no zero byte"):
        open_file(tmp_path / "te\0xt")
    with open_file(tmp_path / "link") as file:
        assert file.read(1) == b"\xef"


@pytest.mark.parametrize("name", ["/", ".", ""])
def test_a_folder_is_not_written_over(tmp_path, name):
    """The message names it, and nothing is left in it or beside it."""
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        write_whole(tmp_path / name, "text")
    assert not [*tmp_path.iterdir(), *tmp_path.parent.glob("*.part")]


def test_what_does_not_fit_is_not_half_written(tmp_path):
    """The message names the file; what it was stays, and nothing beside it."""
    (tmp_path / "page").write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/page'$"):
            write_whole(tmp_path / "page", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "page").read_text() == "before" and [*tmp_path.iterdir()] == [tmp_path / "page"]


TEN, TWO = ("[" + ", ".join([f"{mark}{{}}"] * n) + "]" for mark, n in (("*", 10), ("*", 2)))


def chain(values: str, length: int) -> str:
    """A text whose values each refer to the one before."""
    return "k0: &k0 x\n" + "".join(f"k{n}: &k{n} {values.replace('{}', f'k{n - 1}')}\n" for n in range(1, length))


@pytest.mark.parametrize("text", [
    "[" * 10**5, "[" * 10**4, "!!timestamp x", "!!bool x", "2001-99-99", "{[a]: 1}", "\x00", "a: [", "&a [*b]",
    chain(TEN, 9), chain(TWO, 40), chain("{<<: [*{}, *{}]}", 40), "a: " + "x" * 2**16,
])  # fmt: skip
def test_yaml_that_is_refused(text):
    """Length, depth, aliases that multiply, tags that do not fit, and what is no yaml: one kind of error."""
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["", "a: 1", "a: &a {b: 2}\nc: {<<: *a, d: [*a, *a]}", chain("[*{}]", 60)])
def test_yaml_that_is_read(text):
    """The result is the package's, with aliases too."""
    assert parse_yaml(text) == yaml.safe_load(text)
