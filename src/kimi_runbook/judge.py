"""The judge: snapshots, what is expected and the lock in; findings out. Pure, so it needs no host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kimi_runbook.errors import RunbookError
from kimi_runbook.expected import Expected
from kimi_runbook.findings import Finding, make_finding
from kimi_runbook.lock import Lock
from kimi_runbook.rules import Case, driver, engine, host, image, state
from kimi_runbook.snapshot import Snapshot

__all__ = ["Finding", "judge_fleet", "judge_host"]

_RULES = (host.judge, image.judge, driver.judge, state.judge, engine.judge)


UNREACHABLE = "unreachable"
"""Why a host has no snapshot, unless its reason says otherwise."""


def judge_host(
    snapshot: Snapshot | None, expected: Mapping[str, object], lock: Lock, *, missing: str = UNREACHABLE
) -> tuple[Finding, ...]:
    """Judge one host.

    Args:
        snapshot: What was seen; None when there is no snapshot.
        expected: The JSON form of Expected.
        lock: The lock; ``expected`` must have been made from it.
        missing: Why there is no snapshot: ``unreachable``, or the text of what failed on the host.

    Raises:
        RunbookError: expected is malformed, or names another driver or image than the lock.
    """
    wanted = Expected.from_json(expected)
    _refuse_other_lock(wanted, lock)
    if snapshot is None:
        code, observed = ("host.unreachable", "no answer")
        if missing != UNREACHABLE:
            code, observed = "snapshot.failed", " ".join(missing.split()) or "failed without a message"
        return (make_finding(code, host=wanted.host, observed=observed, expected="a snapshot"),)
    return tuple(_judge(Case(snapshot, wanted, lock)))


def judge_fleet(
    snapshots: Mapping[str, Snapshot | None],
    expected: Mapping[str, Mapping[str, object]],
    lock: Lock,
    *,
    missing: Mapping[str, str] = {},
) -> tuple[Finding, ...]:
    """Judge every host of ``expected`` and ``snapshots``.

    Args:
        snapshots: Host to what was seen there, None without a snapshot.
        expected: Host to the JSON form of Expected.
        lock: The lock.
        missing: Host to why it has no snapshot: ``unreachable``, which also stands where nothing is said, or the text
            of what failed there. Hosts with a snapshot are not looked up.
    """
    strangers = sorted(name for name, seen in snapshots.items() if seen is not None and name not in expected)
    if strangers:
        raise RunbookError(
            where=", ".join(strangers),
            observed="a snapshot of a host nothing is expected of",
            expected=f"snapshots of {', '.join(sorted(expected)) or 'no host'}",
            next_step="Add the host to what is expected, or leave its snapshot out.",
        )
    return tuple(
        finding
        for name in dict.fromkeys([*snapshots, *expected])
        for finding in judge_host(
            snapshots.get(name), expected.get(name, {"host": name}), lock, missing=missing.get(name, UNREACHABLE)
        )
    )


def _judge(case: Case) -> Iterator[Finding]:
    for rule in _RULES:
        yield from rule(case)


def _refuse_other_lock(wanted: Expected, lock: Lock) -> None:
    pairs = [("driver: version", wanted.driver_version, lock.driver.version)]
    if wanted.image is not None:
        pairs.append(("image: reference", wanted.image.digest, lock.image.digest))
    for key, asked, locked in pairs:
        if asked is not None and asked != locked:
            raise RunbookError(
                where=f"expected of {wanted.host}: {key}",
                observed=asked,
                expected=f"{locked}, as the lock has it",
                next_step="Make both from the same lock.",
            )
