"""Files of the run folder that a browser or a resumed run may be reading: there whole, or as they were."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file all or nothing, also where the machine fails meanwhile."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
