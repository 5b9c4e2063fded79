"""The judge: snapshots, what is expected and the lock in; findings out. Pure, so it needs no host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kimi_runbook.errors import RunbookError
from kimi_runbook.evidence.scan import scan_text
from kimi_runbook.expected import Expected
from kimi_runbook.findings import Finding, make_finding
from kimi_runbook.fleet import fleet_findings
from kimi_runbook.lock import Lock
from kimi_runbook.rules import (
    Case,
    Unknown,
    driver,
    driver_parts,
    engine,
    fabric,
    gpus,
    host,
    image,
    network,
    pins,
    service,
    system,
    transaction,
)
from kimi_runbook.rules import state as settings
from kimi_runbook.snapshot import Snapshot
from kimi_runbook.snapshot_files import Flaw

__all__ = ["CHECKS", "Coverage", "Finding", "Judgement", "examine_fleet", "judge_fleet", "judge_host"]

CHECKS = tuple(
    check
    for module in (
        *(host, image, driver, driver_parts, pins, settings, engine),
        *(gpus, fabric, network, service, system, transaction),
    )
    for check in module.CHECKS
)
"""Every question asked of a host, in the order in which findings are given."""

UNREACHABLE = "unreachable"
"""Why a host has no snapshot, unless its reason says otherwise."""

UNREADABLE = "unreadable: "
"""How the reason begins of a host whose snapshot is there and cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of one host was judged.

    Attributes:
        seen: Whether there is a snapshot.
        planned: Checks that are asked of every host.
        unknown: Names of the checks that had no answer, or only part of one; all of them without a snapshot.
    """

    seen: bool
    planned: int = len(CHECKS)
    unknown: tuple[str, ...] = ()

    @property
    def run(self) -> int:
        """Checks that had everything they needed."""
        return self.planned - len(self.unknown)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"seen": self.seen, "planned": self.planned, "run": self.run, "unknown": list(self.unknown)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the judge says of a fleet: its findings, and per host how much was judged."""

    findings: tuple[Finding, ...]
    coverage: Mapping[str, Coverage]


def judge_host(
    snapshot: Snapshot | None, expected: Mapping[str, object], lock: Lock, *, missing: str = UNREACHABLE
) -> tuple[Finding, ...]:
    """Judge one host.

    Args:
        snapshot: What was seen; None when there is no snapshot.
        expected: The JSON form of Expected.
        lock: The lock; ``expected`` must have been made from it.
        missing: Why there is no snapshot: ``unreachable``, or the text of what failed on the host; a text that begins
            with UNREADABLE is about the snapshot itself.

    Raises:
        RunbookError: expected is malformed, or names another driver or image than the lock.
    """
    wanted = _wanted(expected, lock)
    return _examine(None if snapshot is None else Case(snapshot, wanted, lock), wanted, missing)[0]


def judge_fleet(
    snapshots: Mapping[str, Snapshot | None],
    expected: Mapping[str, Mapping[str, object]],
    lock: Lock,
    *,
    missing: Mapping[str, str] = {},
) -> tuple[Finding, ...]:
    """Judge every host of ``expected`` and ``snapshots``, and the fleet; see examine_fleet."""
    return examine_fleet(snapshots, expected, lock, missing=missing).findings


def examine_fleet(
    snapshots: Mapping[str, Snapshot | None],
    expected: Mapping[str, Mapping[str, object]],
    lock: Lock,
    *,
    missing: Mapping[str, str] = {},
    flaws: Mapping[str, Sequence[Flaw]] = {},
) -> Judgement:
    """Judge every host of ``expected`` and ``snapshots``, then the fleet, and count what was judged.

    Args:
        snapshots: Host to what was seen there, None without a snapshot.
        expected: Host to the JSON form of Expected.
        lock: The lock.
        missing: Host to why it has no snapshot: ``unreachable``, which also stands where nothing is said, or the text
            of what failed there. Hosts with a snapshot are not looked up.
        flaws: Host to the parts of its snapshot that were left out when it was read.

    Raises:
        RunbookError: a snapshot of a host nothing is expected of; or as judge_host.
    """
    strangers = sorted(name for name, seen in snapshots.items() if seen is not None and name not in expected)
    if strangers:
        raise RunbookError(
            where=", ".join(strangers),
            observed="a snapshot of a host nothing is expected of",
            expected=f"snapshots of {', '.join(sorted(expected)) or 'no host'}",
            next_step="Add the host to what is expected, or leave its snapshot out.",
        )
    findings: list[Finding] = []
    coverage: dict[str, Coverage] = {}
    cases: list[Case] = []
    for name in dict.fromkeys([*snapshots, *expected]):
        snapshot, wanted = snapshots.get(name), _wanted(expected.get(name, {"host": name}), lock)
        case = None if snapshot is None else Case(snapshot, wanted, lock, _skipped(flaws.get(name, ())))
        found, coverage[name] = _examine(case, wanted, missing.get(name, UNREACHABLE))
        findings += (*found, *_flawed(name, flaws.get(name, ())))
        if case is not None:
            cases.append(case)
    return Judgement(findings=(*findings, *fleet_findings(cases)), coverage=coverage)


def _wanted(expected: Mapping[str, object], lock: Lock) -> Expected:
    wanted = Expected.from_json(expected)
    _refuse_other_lock(wanted, lock)
    return wanted


def _skipped(flaws: Sequence[Flaw]) -> frozenset[str]:
    return frozenset(flaw.section for flaw in flaws if flaw.message)


def _examine(case: Case | None, wanted: Expected, missing: str) -> tuple[tuple[Finding, ...], Coverage]:
    if case is None:
        coverage = Coverage(seen=False, unknown=tuple(check.name for check in CHECKS))
        return (_no_snapshot(wanted.host, missing),), coverage
    findings: list[Finding] = []
    unknown: dict[str, str] = {}
    for check in CHECKS:
        for outcome in check.judge(case):
            if isinstance(outcome, Unknown):
                unknown.setdefault(check.name, outcome.what)
            else:
                findings.append(outcome)
    if unknown and case.complete:
        findings.append(
            case.finding(
                "snapshot.unknown",
                observed=f"{len(unknown)} check{'s' if len(unknown) > 1 else ''} without an answer: "
                + ", ".join(dict.fromkeys(unknown.values())),
                expected="an answer to every question",
            )
        )
    return tuple(findings), Coverage(seen=True, unknown=tuple(unknown))


def _no_snapshot(host: str, missing: str) -> Finding:
    code, observed = "host.unreachable", "no answer"
    if missing.startswith(UNREADABLE):
        code, observed = "snapshot.unreadable", _shown(missing.removeprefix(UNREADABLE))
    elif missing != UNREACHABLE:
        code, observed = "snapshot.failed", _shown(missing) or "failed without a message"
    return make_finding(code, host=host, observed=observed, expected="a snapshot")


def _shown(message: str) -> str:
    """Return a message that nothing has redacted in one line, or a word in its place where it holds a secret."""
    found = scan_text(message, "message")
    return f"a message that is not shown: it holds a {found[0].rule}" if found else " ".join(message.split())


def _flawed(host: str, flaws: Sequence[Flaw]) -> Iterator[Finding]:
    """Say what was left out of a snapshot: what is needed stops, the rest was not judged."""
    for flaw in flaws:
        if not flaw.message:
            continue
        code = "snapshot.section_unreadable" if flaw.needed else "snapshot.section_skipped"
        observed = _shown(flaw.message)
        yield make_finding(code, host=host, observed=observed, expected="a readable part", subject=flaw.section)
    newer = [flaw.section for flaw in flaws if not flaw.message]
    if newer:
        yield make_finding(
            "snapshot.newer", host=host, observed=f"keys {', '.join(newer[:5])}", expected="keys this version knows"
        )


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
