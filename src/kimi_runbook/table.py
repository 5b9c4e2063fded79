"""The audit's table: one row per host, then the findings, the heaviest first. Plain ASCII, 120 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from kimi_runbook.findings import ACTIONS, SEVERITIES, Finding, by_severity
from kimi_runbook.lock import Lock
from kimi_runbook.snapshot import Snapshot

WIDTH = 120
_HEADINGS = ("HOST", "DRIVER disk/loaded/target", "RUNTIME", "IMAGE", "NCCL/UCX", "ENGINE", "VERDICT")
_LIMITS = (20, 35, 14, 12, 12, 9, 40)


def render_findings_table(
    snapshots: Mapping[str, Snapshot | None], findings: Iterable[Finding], lock: Lock | None = None
) -> str:
    """Return the table as text, ending with a line about the whole fleet.

    Args:
        snapshots: Host to what was seen; None for a host that was not reached.
        findings: The judge's findings.
        lock: Gives the driver's target; without it the column says ``-``.
    """
    ordered = by_severity(findings)
    rows = [_row(host, snapshot, ordered, lock) for host, snapshot in snapshots.items()]
    lines = _grid([_HEADINGS, *rows])
    if ordered:
        lines.append("")
    for finding in ordered:
        lines += _finding_lines(finding)
    lines += ["", _summary(snapshots, ordered)]
    return "\n".join(_ascii(line) for line in lines) + "\n"


def _row(host: str, snapshot: Snapshot | None, findings: Sequence[Finding], lock: Lock | None) -> tuple[str, ...]:
    own = [finding for finding in findings if finding.host == host]
    if snapshot is None:
        return (host, "-", "-", "-", "-", "-", _verdict(own))
    driver, container = snapshot.driver, snapshot.container
    versions = "/".join((driver.on_disk or "none", driver.loaded or "none", lock.driver.version if lock else "-"))
    engine_codes = {finding.code for finding in own}
    engine = "stopped" if container and not container.running else "running" if container else "absent"
    if any(code.startswith("engine.") and code != "engine.restarted" for code in engine_codes) and engine == "running":
        engine = "differs"
    return (
        host,
        versions,
        snapshot.runtime.docker_version or "none",
        "present" if snapshot.image and snapshot.image.present else "absent",
        _state(own, "interconnect"),
        engine,
        _verdict(own),
    )


def _state(findings: Sequence[Finding], role: str) -> str:
    severities = [finding.severity for finding in findings if finding.role == role]
    return min(severities, key=SEVERITIES.index) if severities else "ok"


def _verdict(findings: Sequence[Finding]) -> str:
    stops = sum(finding.severity == "stop" for finding in findings)
    if stops:
        return f"STOP ({stops})"
    due = {finding.action for finding in findings}
    actions = [action for action in ACTIONS if action in due]
    if actions:
        return " ".join(actions)
    return "warn" if any(finding.severity == "warn" for finding in findings) else "ok"


def _grid(rows: Sequence[tuple[str, ...]]) -> list[str]:
    cut = [tuple(_fit(cell, limit) for cell, limit in zip(row, _LIMITS, strict=True)) for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(_LIMITS))]
    lines = []
    for row in cut:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(_fit(line.rstrip(), WIDTH))
    return lines


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."


def _finding_lines(finding: Finding) -> list[str]:
    head = f"{finding.severity:<6} {finding.host}  {finding.code} [{finding.role}]"
    body = f"{finding.observed}; expected {finding.expected} ({finding.source}). {finding.next_step}"
    return [
        _fit(head, WIDTH),
        *textwrap.wrap(body, WIDTH, initial_indent="       ", subsequent_indent="       ", break_on_hyphens=False),
    ]


def _summary(snapshots: Mapping[str, Snapshot | None], findings: Sequence[Finding]) -> str:
    count = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    simulated = any(snapshot is not None and snapshot.driver.standin for snapshot in snapshots.values())
    changed = len({finding.host for finding in findings if finding.action})
    return (
        f"fleet: {len(snapshots)} hosts, {count['stop']} stops, {count['change']} changes on {changed} hosts, "
        f"{count['warn']} warnings" + (" (simulated GPUs)" if simulated else "")
    )


def _ascii(line: str) -> str:
    return line.encode("ascii", "replace").decode("ascii")
