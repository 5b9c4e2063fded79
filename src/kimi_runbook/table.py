"""The audit's table: one row per host, the findings, the heaviest first, and coverage. Plain ASCII, 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from kimi_runbook.findings import SEVERITIES, Finding, by_severity
from kimi_runbook.host_verdict import VERDICTS, host_verdict
from kimi_runbook.judge import Coverage
from kimi_runbook.lock import Lock
from kimi_runbook.snapshot import Snapshot

WIDTH = 100
_HEADINGS = ("HOST", "DRIVER disk/loaded/target", "RUNTIME", "IMAGE", "NCCL", "ENGINE", "VERDICT")
_LIMITS = (28, 32, 8, 7, 6, 7, 12)
_HOST_AT_LEAST = 16  # what is left to the first column where the others need theirs: exactly the width
_SAME = "="  # in the driver's column: as the version before it
_WORST_UNKNOWN = 6  # checks named in the line about coverage


def render_findings_table(
    snapshots: Mapping[str, Snapshot | None],
    findings: Iterable[Finding],
    lock: Lock | None = None,
    coverage: Mapping[str, Coverage] | None = None,
) -> str:
    """Return the table as text, ending with lines about coverage and about the whole fleet.

    Args:
        snapshots: Host to what was seen; None for a host that was not reached.
        findings: The judge's findings.
        lock: Gives the driver's target; without it the column says ``-``.
        coverage: Host to how much of it was judged; without it the line about coverage counts hosts only.
    """
    ordered = by_severity(findings)
    lines = _grid(
        [_HEADINGS, *(_row(host, snapshots[host], ordered, lock) for host in _worst_first(snapshots, ordered))]
    )
    if ordered:
        lines.append("")
    for finding in ordered:
        lines += _finding_lines(finding)
    lines += ["", *_wrapped(_coverage(snapshots, coverage or {})), _summary(snapshots, ordered)]
    return "\n".join(_ascii(line) for line in lines) + "\n"


def _worst_first(hosts: Iterable[str], findings: Sequence[Finding]) -> list[str]:
    """Return the hosts by verdict, the heaviest first, in their given order within a verdict."""
    return sorted(hosts, key=lambda host: VERDICTS.index(host_verdict(_own(host, findings)).name))


def _own(host: str, findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.host == host]


def _row(host: str, snapshot: Snapshot | None, findings: Sequence[Finding], lock: Lock | None) -> tuple[str, ...]:
    own = _own(host, findings)
    if snapshot is None:
        return (host, "-", "-", "-", "-", "-", _verdict(own))
    container = snapshot.container
    engine_codes = {finding.code for finding in own}
    engine = "stopped" if container and not container.running else "running" if container else "absent"
    if any(code.startswith("engine.") and code != "engine.restarted" for code in engine_codes) and engine == "running":
        engine = "differs"
    absent = not (snapshot.image and snapshot.image.present) or "image.absent" in engine_codes
    image = "absent" if absent else "present"
    if "runtime.silent" in engine_codes:  # nobody could tell
        image, engine = "unknown", "unknown"
    return (
        host,
        _driver(snapshot, lock),
        "silent" if image == "unknown" else (snapshot.runtime.docker_version or "none").partition("+")[0],
        image,
        _state(own, "interconnect"),
        engine,
        _verdict(own),
    )


def _driver(snapshot: Snapshot, lock: Lock | None) -> str:
    versions = [
        snapshot.driver.on_disk or "none",
        snapshot.driver.loaded or "none",
        lock.driver.version if lock else "-",
    ]
    shown = [versions[0]]
    for before, version in pairwise(versions):
        shown.append(_SAME if version == before else version)
    return "/".join(shown)


def _state(findings: Sequence[Finding], role: str) -> str:
    severities = [finding.severity for finding in findings if finding.role == role]
    return min(severities, key=SEVERITIES.index) if severities else "ok"


def _verdict(findings: Sequence[Finding]) -> str:
    verdict = host_verdict(findings)
    if verdict.name == "stop":
        return f"STOP ({sum(finding.severity == 'stop' for finding in findings)})"
    if verdict.name != "reboot" and "reboot" in verdict.actions:
        return f"{verdict.name}+boot"
    warned = verdict.name == "ok" and any(finding.severity == "warn" for finding in findings)
    return "ok (warn)" if warned else verdict.name


def _grid(rows: Sequence[tuple[str, ...]]) -> list[str]:
    cut = [tuple(_fit(cell, limit) for cell, limit in zip(row, _LIMITS, strict=True)) for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(_LIMITS))]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    widths[0] = min(widths[0], max(_HOST_AT_LEAST, widths[0] - over))
    lines = []
    for host, *others in cut:
        row = (_fit(host, widths[0]), *others)
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(_fit(line.rstrip(), WIDTH))
    return lines


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."


def _finding_lines(finding: Finding) -> list[str]:
    head = f"{finding.severity:<6} {finding.host}  {finding.code} [{finding.role}]"
    body = f"{finding.observed}; expected {finding.expected} ({finding.source}). {finding.next_step}"
    return [_fit(head, WIDTH), *_wrapped(body, indent="       ")]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False)


def _coverage(snapshots: Mapping[str, Snapshot | None], coverage: Mapping[str, Coverage]) -> str:
    """Say how many hosts were seen and how many checks had an answer; what had none is not counted as fine."""
    seen = sum(snapshot is not None for snapshot in snapshots.values())
    told = f"coverage: {seen}/{len(snapshots)} hosts seen"
    judged = [one for one in coverage.values() if one.seen]
    if not judged:
        return told
    run, planned = sum(one.run for one in judged), sum(one.planned for one in judged)
    told += f", {run}/{planned} checks had an answer"
    unknown = Counter(name for one in judged for name in one.unknown)
    named = ", ".join(f"{name} on {count}" for name, count in unknown.most_common(_WORST_UNKNOWN))
    more = len(unknown) - _WORST_UNKNOWN
    if named:
        told += f"; unknown: {named}" + (f" and {more} more checks" if more > 0 else "")
    return told


def _summary(snapshots: Mapping[str, Snapshot | None], findings: Sequence[Finding]) -> str:
    count = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    simulated = any(snapshot is not None and snapshot.driver.standin for snapshot in snapshots.values())
    changed = len({finding.host for finding in findings if finding.action})
    return (
        f"fleet: {len(snapshots)} hosts, {count['stop']} stops, {count['change']} changes on {changed} hosts, "
        f"{count['warn']} warnings" + (" (simulated GPUs)" if simulated else "")
    )


def _ascii(line: str) -> str:
    """Return the line with every character that a terminal could act on or that is not ASCII replaced by ``?``."""
    return "".join(char if " " <= char <= "~" else "?" for char in line)
