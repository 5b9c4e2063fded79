"""The outcome on disk: one file below the run's folder, changed under a lock, since hosts report side by side."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

from kimi_runbook.reading import Fields, parse_json, read_text
from kimi_runbook.transaction.outcome import Outcome

NAME = "outcome.json"


def load_outcome(run_dir: Path) -> Outcome | None:
    """Return the outcome of a run's folder, None where it has none; RunbookError when the file is not one."""
    path = run_dir / NAME
    if not path.exists():
        return None
    return Outcome.from_json(Fields(parse_json(read_text(path), str(path)), str(path)).mapping(), str(path))


def change_outcome(run_dir: Path, change: Callable[[Outcome | None], Outcome]) -> Outcome:
    """Read, change and replace the file as one; returns what it holds now."""
    with (run_dir / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        changed = change(load_outcome(run_dir))
        beside = run_dir / f".{NAME}.{os.getpid()}"
        beside.write_text(json.dumps(changed.to_json(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(run_dir / NAME)
    return changed
