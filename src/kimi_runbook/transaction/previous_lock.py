"""The lock to go back to: the one a person names, or that of the newest run that brought its hosts to another lock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import Lock, load_lock

OUTCOME, LOCK = "outcome.json", "lock.json"
_DONE = "done"
_MOST_TOLD = 5  # runs whose reasons are told when none fits
_NEXT = "Name the lock: -e rollback_lock=FILE."


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousLock:
    """A lock to go back to: its file, its content, and the run it was applied by (empty where a person named it)."""

    file: str
    run_id: str
    lock: Lock

    @property
    def digest(self) -> str:
        """The lock's digest."""
        return self.lock.digest()

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, the lock as its file holds it."""
        return {"file": self.file, "digest": self.digest, "run_id": self.run_id, "lock": self.lock.to_json()}


def named_lock(file: Path, present: Lock) -> PreviousLock:
    """Return the lock a person named; RunbookError when it cannot be read or is the present one."""
    lock = load_lock(file)
    if lock.digest() == present.digest():
        raise RunbookError(
            where=str(file),
            observed="the present lock",
            expected="another one to go back to",
            next_step="Name another, or run playbooks/provision.yml.",
        )
    return PreviousLock(file=str(file.resolve()), run_id="", lock=lock)


def find_previous_lock(runs_dir: Path, present: Lock) -> PreviousLock:
    """Return the lock of the newest run that provisioned all its hosts and had another lock than the present.

    Runs that cannot be read, or that ended otherwise, are passed over; why, is told when none is left.

    Raises:
        RunbookError: There is no such run.
    """
    reasons: list[str] = []
    for folder in _newest_first(runs_dir):
        try:
            _require_done(folder)
            lock = load_lock(folder / LOCK)
            _require_the_one_applied(folder, lock)
        except RunbookError as error:
            reasons.append(f"{folder.name}: {error.observed}")
            continue
        if lock.digest() != present.digest():
            file = (folder / LOCK).resolve()
            return PreviousLock(file=str(file), run_id=folder.name, lock=lock)
        reasons.append(f"{folder.name}: the present lock")
    more = f"; and {len(reasons) - _MOST_TOLD} more" if len(reasons) > _MOST_TOLD else ""
    raise RunbookError(
        where=str(runs_dir),
        observed="; ".join(reasons[:_MOST_TOLD]) + more if reasons else "no run that provisioned hosts",
        expected="a run that brought its hosts to another lock than the present",
        next_step=_NEXT,
    )


def _newest_first(runs_dir: Path) -> Iterator[Path]:
    """Yield the folders of runs that provisioned or meant to; their names sort by time."""
    if runs_dir.is_dir():
        yield from sorted((path.parent for path in runs_dir.glob(f"*/{OUTCOME}")), key=lambda p: p.name, reverse=True)


def _require_done(folder: Path) -> None:
    """Raise RunbookError unless the outcome says of at least one host, and of all it names, that it was provisioned."""
    hosts = _outcome(folder).get("hosts")
    states = {str(name): _state(host) for name, host in hosts.items()} if isinstance(hosts, Mapping) else {}
    unfinished = [f"{name} is {state}" for name, state in states.items() if state != _DONE]
    if unfinished or not states:
        raise _unfit(folder, ", ".join(unfinished) or "names no host")


def _require_the_one_applied(folder: Path, lock: Lock) -> None:
    """Raise RunbookError when the folder's lock is not the one the outcome is about; an outcome may not say."""
    applied = _outcome(folder).get("lock_digest")
    if applied and applied != lock.digest():
        raise _unfit(folder, f"its {LOCK} is not the lock it was run with")


def _outcome(folder: Path) -> Mapping[str, object]:
    try:
        outcome = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        outcome = None
    if not isinstance(outcome, Mapping):
        raise _unfit(folder, f"{OUTCOME} cannot be read")
    return outcome


def _state(host: object) -> str:
    return str(host.get("state", "unknown")) if isinstance(host, Mapping) else "unknown"


def _unfit(folder: Path, observed: str) -> RunbookError:
    return RunbookError(where=str(folder), observed=observed, expected="a finished run", next_step=_NEXT)
