"""Small file helpers: write whole files or none, digests of inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, mode: int = 0o644) -> bool:
    """Write a file whole or not at all; return whether its content changed.

    A file that already holds the content is left alone apart from its mode.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_bytes() == data:
        if path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)
        return False
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def digest_of(*parts: str | bytes) -> str:
    """Return the SHA-256 (hex) over the parts, each with its length, so that no two lists read the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def remove_others(keep: Path, prefix: str = "") -> None:
    """Remove the directories beside ``keep`` whose names begin with ``prefix``: what it has replaced in a cache."""
    for path in keep.parent.iterdir():
        if path.is_dir() and path != keep and path.name.startswith(prefix):
            shutil.rmtree(path)
