"""Small JSON files on the node that must survive a killed run and a host that dies: whole, or not there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

SCHEMA_VERSION = 1


def read_record(path):
    """Return what a record says, or an empty dictionary where there is none; ValueError where it is no record."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: no record of schema_version {SCHEMA_VERSION}, expected one of this project. Move it away after a "
            "look at what it says, then run again."
        )
    return record


def write_record(path, value):
    """Write JSON so that a host that dies meanwhile has the old file or the new one, and never half of it."""
    folder = Path(path).parent
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".kimi-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    folder_handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_handle)  # the name, too, must survive
    finally:
        os.close(folder_handle)
