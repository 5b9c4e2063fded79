"""Refusals of the lock: every message names the file and the path of the key, as ``lock.yml: image.tag: ...``."""

from __future__ import annotations

from kimi_runbook.errors import RunbookError

RESOLVE = "Correct the lock's template, then run: kimi-runbook lock resolve --template TEMPLATE --out LOCK"
"""The next step where nothing more particular is known."""


def refused(source: str, path: str, observed: str, expected: str, next_step: str = RESOLVE) -> RunbookError:
    """Return the error about one key; ``path`` is dotted, empty for the whole file."""
    where = f"{source}: {path}" if path else source
    return RunbookError(where=where, observed=observed, expected=expected, next_step=next_step)


def dotted(error: RunbookError, source: str) -> RunbookError:
    """Return the same error with the place inside the file as a dotted path; errors about other places pass through."""
    place = error.where.removeprefix(f"{source}: ")
    if place == error.where:
        return error
    return refused(source, place.replace(": ", "."), error.observed, error.expected, error.next_step)
