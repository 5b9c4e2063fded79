"""``kimi-runbook audit``: findings and plan from snapshots on file, no host needed.

Without --expected each host is held to the lock alone: driver, companions, toolkit, image; what roles would write is
then not known and not judged. Exit code 0: nothing above a warning; 1: something to change, or a reason to stop; 2: no
snapshot could be read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_runbook.audit_junit import audit_junit
from kimi_runbook.commands import FINE, NO, Commands
from kimi_runbook.errors import RunbookError
from kimi_runbook.findings import by_severity
from kimi_runbook.host_verdict import host_verdict
from kimi_runbook.judge import UNREADABLE, examine_fleet
from kimi_runbook.lock import Lock, load_lock
from kimi_runbook.plan import build_plan, make_batches, render_findings_table
from kimi_runbook.reading import Fields, data_file, parse_json, read_text
from kimi_runbook.snapshot import Snapshot
from kimi_runbook.snapshot_files import Flaw, Reading, load_snapshots

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
    parser.add_argument(
        "--expected", type=Path, help="what is expected of a host, or of each host; default: the lock's"
    )
    parser.add_argument("--lock", required=True, type=Path, help="the lock file")
    parser.add_argument("--batch", action="append", metavar="SIZE", help='batch size or share; default: 1, then "25%%"')
    parser.add_argument("--json", action="store_true", help="print findings, verdicts, coverage and plan as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the findings as JUnit XML as well")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Judge, print, and say by the exit code whether anything stands above a warning."""
    lock = load_lock(arguments.lock)
    given = _expected(arguments.expected) if arguments.expected else {}
    snapshots: dict[str, Snapshot | None] = dict.fromkeys(given)
    missing: dict[str, str] = {}
    flaws: dict[str, Sequence[Flaw]] = {}
    for host, found in _read_all(arguments.snapshots).items():
        if isinstance(found, Reading):
            snapshots[host], flaws[host] = found.snapshot, found.flaws
        else:
            snapshots.setdefault(host)
            missing[host] = f"{UNREADABLE}{found}"
    expected = given or {host: _by_lock(host, seen, lock) for host, seen in snapshots.items()}
    judged = examine_fleet(snapshots, expected, lock, missing=missing, flaws=flaws)
    findings = by_severity(judged.findings)
    plan = build_plan(_RUN_ID, findings, lock, make_batches(list(snapshots), arguments.batch or [1, "25%"]))
    if arguments.junit:
        _write(arguments.junit, audit_junit(findings, judged.coverage))
    if arguments.json:
        document = {
            "findings": [finding.to_json() for finding in findings],
            "verdicts": {
                host: host_verdict(finding for finding in findings if finding.host == host).to_json()
                for host in snapshots
            },
            "coverage": {host: one.to_json() for host, one in judged.coverage.items()},
            "plan": plan.to_json(),
        }
        print(json.dumps(document, indent=2))
    else:
        print(render_findings_table(snapshots, findings, lock, judged.coverage), end="")
    return NO if any(finding.severity in ("stop", "change") for finding in findings) else FINE


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunbookError(
            where=str(path),
            observed=f"cannot be written ({error.strerror or error})",
            expected="a place for the JUnit file",
            next_step="Check the folder of --junit and its permissions.",
        ) from error


def _expected(path: Path) -> dict[str, Mapping[str, object]]:
    data = Fields(parse_json(read_text(path), str(path)), str(path))
    if isinstance(data.raw("host"), str):
        return {data.text("host"): data.mapping()}
    return {host: data.fields(host).mapping() for host in data.names()}


def _read_all(paths: Sequence[Path]) -> dict[str, Reading | str]:
    """Return host to its snapshot, or to why it cannot be read; a file nothing can be read from goes by its own name.

    Raises:
        RunbookError: nothing could be read from any file, then the first file's reason; or a host comes twice.
    """
    found: dict[str, Reading | str] = {}
    errors: list[RunbookError] = []
    for path in paths:
        try:
            loaded = load_snapshots(path)
        except RunbookError as error:
            errors.append(error)
            found.setdefault(path.stem, str(error))
            continue
        _refuse_twice(path, found, loaded)
        found.update(loaded)
    if errors and not any(isinstance(one, Reading) for one in found.values()):
        raise errors[0]
    return found


def _refuse_twice(path: Path, found: Mapping[str, Reading | str], loaded: Mapping[str, Reading | str]) -> None:
    twice = sorted(host for host in loaded if isinstance(found.get(host), Reading))
    if twice:
        raise RunbookError(
            where=str(path),
            observed=f"a second snapshot of {', '.join(twice)}",
            expected="one snapshot per host",
            next_step="Name one file per host.",
        )


def _by_lock(host: str, snapshot: Snapshot | None, lock: Lock) -> dict[str, object]:
    """Return what a lock alone asks of a host. Packages the snapshot did not ask for are left out: they are unknown."""
    seen = snapshot.packages if snapshot is not None else {}
    toolkit = snapshot is not None and snapshot.runtime.toolkit is not None and lock.image.cuda is not None
    told = {*seen, *(lock.toolkit.packages if toolkit else ())}
    wanted = dict.fromkeys(lock.toolkit.packages, ("container_runtime", lock.toolkit.version))
    wanted |= {name: ("gpu_driver", version) for name, version in lock.driver.companions.items()}
    os_ = snapshot.os if snapshot is not None else None
    expected: dict[str, object] = {
        "host": host,
        "driver": {"version": lock.driver.version, "activation": lock.driver.activation},
        "image": {
            "reference": lock.image.reference,
            "architectures": list(lock.image.manifests),
            "bytes_needed": int(lock.image.size_bytes * data_file("platform.yml").number("image_space_factor")),
        },
        "packages": [
            {"role": role, "name": name, "version": version} for name, (role, version) in wanted.items() if name in told
        ],
    }
    locked = (lock.os or "").partition(" ")
    if locked[0]:
        expected["supported_os"] = [{"id": locked[0], "versions": [locked[2]]}]
    elif os_ is not None and os_.id:
        expected["supported_os"] = [{"id": os_.id, "versions": [os_.version_id or ""]}]
    return expected
