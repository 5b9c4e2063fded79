"""The table people read first: 100 columns, the worst on top, and what was not judged counted."""

from __future__ import annotations

from judging import a_lock, expected_data, snapshot_data, spoil

from kimi_runbook.judge import Coverage, examine_fleet, judge_host
from kimi_runbook.plan import render_findings_table
from kimi_runbook.snapshot import Snapshot

LONG_NAME = "k3-c-with-a-very-long-name"


def test_table() -> None:
    data = snapshot_data()
    for path, value in {
        "driver|on_disk": "570.133.20",
        "driver|loaded": "570.133.20",
        "driver|standin": True,
        "files|/etc/nccl.conf": None,
        "errors": [{"probe": "nvidia-smi", "message": "grün \x1b[31m" + "very long " * 30}],
    }.items():
        spoil(data, path, value)
    sick = Snapshot.from_json(data)
    healthy = Snapshot.from_json({**snapshot_data(), "hostname": "k3-b"})
    findings = [*judge_host(None, {"host": LONG_NAME}, a_lock()), *judge_host(sick, expected_data(), a_lock())]
    table = render_findings_table({"k3-b": healthy, "k3-a": sick, LONG_NAME: None}, findings, a_lock())
    lines = table.splitlines()
    assert table.isascii() and "\x1b" not in table and max(map(len, lines)) <= 100
    heading, *rows = (line.split() for line in lines[:4])
    assert heading == ["HOST", "DRIVER", "disk/loaded/target", "RUNTIME", "IMAGE", "NCCL", "ENGINE", "VERDICT"]
    assert rows == [
        ["k3-c-with-a-very-long..", "-", "-", "-", "-", "-", "STOP", "(1)"],
        ["k3-a", "570.133.20/=/580.178.04", "20.10.24", "present", "change", "running", "install+boot"],
        ["k3-b", "580.178.04/=/=", "20.10.24", "present", "ok", "running", "ok"],
    ]
    severities = [line.split()[0] for line in lines[5:-3] if not line.startswith(" ")]
    assert severities == ["stop", "change", "change", "change", "warn", "info"]
    assert lines[-2] == "coverage: 2/3 hosts seen"
    assert lines[-1] == "fleet: 3 hosts, 1 stops, 3 changes on 1 hosts, 1 warnings (simulated GPUs)"


def test_the_widest_row_fits_and_keeps_its_verdict() -> None:
    data = snapshot_data()
    data["driver"] |= {"on_disk": "580.167.08", "loaded": "570.133.20"}
    data["runtime"]["docker_version"] = "20.10.24+dfsg1-1"
    name = "h" * 40
    findings = judge_host(Snapshot.from_json(data), {**expected_data(), "host": name}, a_lock())
    lines = render_findings_table({name: Snapshot.from_json(data)}, findings, a_lock()).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].split()[1] == "580.167.08/570.133.20/580.178.04" and lines[1].endswith("  install+boot")


def test_table_of_a_bare_host_and_of_a_stopped_engine() -> None:
    bare = Snapshot.from_json({"schema_version": 1, "hostname": "bare"})
    stopped = snapshot_data()
    stopped["engine"]["container"]["pid"] = None
    lines = render_findings_table({"bare": bare, "k3-a": Snapshot.from_json(stopped)}, []).splitlines()
    assert lines[1].split() == ["bare", "none/=/-", "none", "absent", "ok", "absent", "ok"]
    assert lines[2].split()[5] == "stopped"


def test_coverage_counts_hosts_and_checks_and_names_what_is_unknown() -> None:
    snapshots = {"k3-a": Snapshot.from_json(snapshot_data())}
    expected = {"k3-a": expected_data(), "k3-b": {**expected_data(), "host": "k3-b"}}
    judged = examine_fleet(snapshots, expected, a_lock())
    seen = judged.coverage["k3-a"]
    assert not judged.coverage["k3-b"].seen and judged.coverage["k3-b"].run == 0
    assert 0 < seen.run < seen.planned and "system.clock" in seen.unknown
    table = render_findings_table({**snapshots, "k3-b": None}, judged.findings, a_lock(), judged.coverage)
    told = " ".join(table.partition("coverage: ")[2].split())
    assert told.startswith(f"1/2 hosts seen, {seen.run}/{seen.planned} checks had an answer; unknown: ")
    assert f"and {len(seen.unknown) - 6} more checks" in told
    everything = {"k3-a": Coverage(seen=True)}
    table = render_findings_table(snapshots, [], a_lock(), everything)
    assert f"{everything['k3-a'].planned}/{everything['k3-a'].planned} checks had an answer\n" in table
