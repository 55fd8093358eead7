"""Another attempt at what an object store did not do: for which errors, and when.

for pause_s in pauses(600): ...
"""

import random
import time
from collections.abc import Iterator

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
# Errors that another attempt does not change; the second with their fix, and by name, since packages are optional.
FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
REFUSED = {
    "NoCredentialsError": "write ~/.aws/credentials, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ParamValidationError": "write the URL as s3://bucket/folder",
    "NotImplementedError": "take a directory, or an object store that can be written",
    "TypeError": "take a directory, or an object store that can be written",
}


def is_final(error: BaseException) -> bool:
    return isinstance(error, FINAL) or type(error).__name__ in REFUSED


def pauses(timeout_s: float) -> Iterator[float]:
    """Growing pauses between attempts, until `timeout_s` is over; drawn, so that many hosts do not come back at the
    same time."""
    end, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while time.monotonic() + pause_s <= end:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
