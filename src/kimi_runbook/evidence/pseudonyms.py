"""Stand-ins for what must not be written: the same value has the same stand-in in every file of a run."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from kimi_runbook.errors import RunbookError

KEY_BYTES = 32
_DIGITS = 8  # 32 bits: two of 300 values share a stand-in once in 100,000 runs


class Pseudonyms:
    """Stand-ins derived with a run's random key, which is not written into the run, so that none can be reversed."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, kind: str, value: str) -> str:
        """Return the stand-in of a value, e.g. ``[secret-1a2b3c4d]``; the digits depend on the value alone."""
        digest = hmac.new(self._key, value.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        return f"[{kind}-{digest[:_DIGITS]}]"


def run_key(path: Path) -> bytes:
    """Return the key kept in a file that only its owner can read; made with random bytes when it is not there.

    Several processes may ask at once, one per host: the first key made is everybody's.

    Raises:
        RunbookError: the file is no key, or cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise RunbookError(
            where=str(path),
            observed=f"the key for pseudonyms cannot be kept ({error.strerror})",
            expected="a folder beside the run that can be written to",
            next_step="Check its permissions, or set runs_dir.",
        ) from error
    if len(key) != KEY_BYTES:
        raise RunbookError(
            where=str(path),
            observed=f"{len(key)} bytes",
            expected=f"a key of {KEY_BYTES} bytes",
            next_step="Remove the file; evidence of this run gets new pseudonyms.",
        )
    return key


def _make(path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)  # readable by its owner alone
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    try:
        os.link(name, path)  # fails where another process was first, and never leaves half a key
    except FileExistsError:
        return
    finally:
        Path(name).unlink()
