"""``kimi-runbook audit``: findings and plan from snapshots on file, no host needed.

Exit code 0: nothing above a warning; 1: something to change, or a reason to stop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from kimi_runbook.commands import FINE, NO, Commands
from kimi_runbook.findings import by_severity
from kimi_runbook.judge import judge_fleet
from kimi_runbook.lock import load_lock
from kimi_runbook.plan import build_plan, make_batches, render_findings_table
from kimi_runbook.reading import Fields, parse_json, read_text
from kimi_runbook.snapshot import Snapshot

_RUN_ID = "offline"  # a plan made from files belongs to no run


def register(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("audit", help="judge snapshots offline", description=__doc__)
    parser.add_argument(
        "snapshots",
        nargs="+",
        type=Path,
        metavar="SNAPSHOT",
        help="a snapshot, or a mapping of host to snapshot",
    )
    parser.add_argument("--expected", required=True, type=Path, help="what is expected of a host, or of each host")
    parser.add_argument("--lock", required=True, type=Path, help="the lock file")
    parser.add_argument("--batch", action="append", metavar="SIZE", help='batch size or share; default: 1, then "25%%"')
    parser.add_argument("--json", action="store_true", help="print findings and plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Judge, print, and say by the exit code whether anything stands above a warning."""
    lock = load_lock(arguments.lock)
    expected = _expected(arguments.expected)
    snapshots: dict[str, Snapshot | None] = dict.fromkeys(expected)
    for path in arguments.snapshots:
        snapshots.update(_snapshots(path))
    findings = by_severity(judge_fleet(snapshots, expected, lock))
    plan = build_plan(_RUN_ID, findings, lock, make_batches(list(snapshots), arguments.batch or [1, "25%"]))
    if arguments.json:
        document = {"findings": [finding.to_json() for finding in findings], "plan": plan.to_json()}
        print(json.dumps(document, indent=2))
    else:
        print(render_findings_table(snapshots, findings, lock), end="")
    return NO if any(finding.severity in ("stop", "change") for finding in findings) else FINE


def _expected(path: Path) -> dict[str, Mapping[str, object]]:
    data = Fields(parse_json(read_text(path), str(path)), str(path))
    if isinstance(data.raw("host"), str):
        return {data.text("host"): data.mapping()}
    return {host: data.fields(host).mapping() for host in data.names()}


def _snapshots(path: Path) -> dict[str, Snapshot]:
    data = Fields(parse_json(read_text(path), str(path)), str(path))
    if "schema_version" in data.names():
        snapshot = Snapshot.from_json(data.mapping(), str(path))
        return {snapshot.hostname: snapshot}
    return {host: Snapshot.from_json(data.fields(host).mapping(), f"{path}: {host}") for host in data.names()}
