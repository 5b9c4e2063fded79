"""``kimi-runbook audit`` over files from anywhere: findings for what is wrong with them, never a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from judging import expected_data, lock_data, snapshot_data
from whole_host import OLD, b300, platform_lock

from kimi_runbook import cli
from kimi_runbook.errors import RunbookError
from kimi_runbook.judge import examine_fleet
from kimi_runbook.snapshot_files import load_snapshots, read_snapshot

CODES = ("snapshot.unreadable", "snapshot.section_unreadable", "snapshot.section_skipped", "snapshot.newer")
"""The codes this file's tests reach."""


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "lock.yml").write_text(yaml.safe_dump(platform_lock().to_json()), encoding="utf-8")
    write(tmp_path / "k3-a.json", b300())
    return tmp_path


def audit(site: Path, *snapshots: str, more: tuple[str, ...] = ()) -> int:
    return cli.main(["audit", *(str(site / name) for name in snapshots), "--lock", str(site / "lock.yml"), *more])


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_lock_alone_is_enough(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(site, "k3-a.json", more=("--json",)) == 0
    document = printed(capsys)
    assert document["findings"] == [] and document["verdicts"]["k3-a"] == {"name": "ok", "actions": [], "codes": []}
    assert document["coverage"]["k3-a"]["unknown"] == []
    assert document["plan"]["hosts"] == {"k3-a": []}


def test_a_lock_alone_misses_the_toolkit(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The snapshot tells of the toolkit's packages whether or not somebody asked for them by name."""
    data = b300()
    del data["runtime"]["toolkit"]["libnvidia-container1"]
    write(site / "k3-a.json", data)
    assert audit(site, "k3-a.json", more=("--json",)) == 1
    document = printed(capsys)
    assert [(one["code"], one["observed"]) for one in document["findings"]] == [
        ("package.missing", "libnvidia-container1 not installed")
    ]


@pytest.mark.parametrize(
    ("section", "code", "checks"),
    [
        ("rdma_devices", "snapshot.section_skipped", {"network.rdma_ports", "network.memlock", "network.iommu"}),
        ("gpus", "snapshot.section_unreadable", {"gpus.memory_errors", "gpus.users"}),
    ],
)
def test_a_part_that_was_cut_off(
    site: Path, capsys: pytest.CaptureFixture[str], section: str, code: str, checks: set[str]
) -> None:
    """A part that is not there says nothing: no port is missing, and its checks count as unknown."""
    data = b300()
    del data[section]
    data["engine"]["container"]["env"]["NCCL_NET"] = "IB"
    write(site / "k3-a.json", data)
    audit(site, "k3-a.json", more=("--json",))
    document = printed(capsys)
    assert {one["code"] for one in document["findings"]} == {code, "snapshot.unknown"}
    assert checks <= set(document["coverage"]["k3-a"]["unknown"])


def test_a_lock_alone_finds_an_old_driver(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = b300()
    data["driver"] |= {"on_disk": OLD, "loaded": OLD}
    data["packages"]["nvidia-container-toolkit"] = {"version": "1.19.0-1"}
    write(site / "k3-a.json", data)
    assert audit(site, "k3-a.json", more=("--json",)) == 1
    document = printed(capsys)
    assert [finding["code"] for finding in document["findings"]] == [
        "driver.install",
        "driver.reboot",
        "package.version",
    ]
    assert document["verdicts"]["k3-a"]["name"] == "install"
    assert [item["action"] for item in document["plan"]["hosts"]["k3-a"]] == ["install", "install", "reboot"]


def test_one_file_cut_off_among_others(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(site / "k3-b.json", json.dumps(b300())[:700])
    assert audit(site, "k3-a.json", "k3-b.json", more=("--json",)) == 1
    document = printed(capsys)
    (finding,) = document["findings"]
    assert (finding["host"], finding["code"], finding["severity"]) == ("k3-b", "snapshot.unreadable", "stop")
    assert "k3-b.json:1:" in finding["observed"]
    assert document["verdicts"]["k3-b"]["name"] == "stop"


PARTS = [
    ("driver", "yes", "snapshot.section_unreadable", "stop"),
    ("packages", ["a"], "snapshot.section_unreadable", "stop"),
    ("gpus", {"a": 1}, "snapshot.section_unreadable", "stop"),
    ("clock", 7, "snapshot.section_skipped", "ok"),
    ("kernel_log", {"readable": "perhaps"}, "snapshot.section_skipped", "ok"),
    ("quantum_links", {"a": 1}, "snapshot.newer", "ok"),
]


@pytest.mark.parametrize("part", [pytest.param(part, id=part[0]) for part in PARTS])
def test_a_part_that_makes_no_sense(
    site: Path, capsys: pytest.CaptureFixture[str], part: tuple[str, Any, str, str]
) -> None:
    section, value, code, verdict = part
    write(site / "k3-a.json", b300() | {section: value})
    audit(site, "k3-a.json", more=("--json",))
    document = printed(capsys)
    (finding,) = [finding for finding in document["findings"] if finding["code"] == code]
    assert section in finding["observed"]
    assert document["verdicts"]["k3-a"]["name"] == verdict


def test_newer_fields_inside_a_section_are_let_be(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = b300()
    data["driver"]["entangled"] = data["clock"]["drift_ns"] = {"a": 1}
    write(site / "k3-a.json", data)
    assert audit(site, "k3-a.json", more=("--json",)) == 0
    assert printed(capsys)["findings"] == []


def test_a_mapping_with_one_bad_host(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(site / "fleet.json", {"k3-a": b300(), "k3-b": {"schema_version": 7}, "k3-c": [1]})
    assert audit(site, "fleet.json", more=("--json",)) == 1
    found = {finding["host"]: finding["code"] for finding in printed(capsys)["findings"]}
    assert found == {"k3-b": "snapshot.unreadable", "k3-c": "snapshot.unreadable"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1}'])
def test_nothing_readable_is_wrong_usage(site: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    write(site / "bad.json", text)
    assert audit(site, "bad.json") in ((1, 2) if text == '{"a": 1}' else (2,))
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out


def test_two_snapshots_of_one_host_are_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(site / "again.json", b300())
    assert audit(site, "k3-a.json", "again.json") == 2
    assert "a second snapshot of k3-a" in capsys.readouterr().err


def test_junit_into_a_folder_that_is_not_there(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(site, "k3-a.json", more=("--junit", "/nowhere/x.xml")) == 2
    assert "/nowhere/x.xml: cannot be written" in capsys.readouterr().err


def test_junit(site: Path) -> None:
    data = b300() | {"hostname": "k3-b", "clock": {"synchronized": False}, "iommu": {}}
    data["driver"]["loaded"] = "570.133.20\x1b[31m"
    write(site / "k3-b.json", data)
    out = site / "audit.xml"
    assert audit(site, "k3-a.json", "k3-b.json", more=("--junit", str(out))) == 1
    suites = {suite.get("name"): suite for suite in ET.fromstring(out.read_text(encoding="utf-8"))}  # noqa: S314 - own
    healthy = [case.get("name") for case in suites["k3-a"]]
    assert healthy == ["as locked"] and suites["k3-a"].get("failures") == "0"
    cases = {case.get("name"): case for case in suites["k3-b"]}
    failure = cases["driver.reboot"].find("failure")
    assert failure is not None and failure.text == "docs/checks/driver.md#driverreboot"
    assert "k3-b: 580.178.04 is on disk" in (failure.get("message") or "")
    assert cases["clock.unsynchronized"].find("failure") is None
    assert cases["network.iommu"].find("skipped") is not None
    assert (suites["k3-b"].get("failures"), suites["k3-b"].get("skipped")) == ("1", "1")


def garbage(rng: random.Random) -> Any:
    return rng.choice(
        [None, True, -1, 10**30, 1.5, "", "\x00\ud800", "x" * 3000, [], [1, "a", None], {}, {"a": {"b": []}}]
    )


def test_any_garbage_anywhere_gives_findings_and_no_traceback() -> None:
    rng = random.Random(20261130)  # noqa: S311 - a repeatable walk, nothing secret
    lock, asked = platform_lock(), {"k3-a": expected_data()}
    for _ in range(400):
        data = b300()
        for _ in range(rng.randint(1, 4)):
            at: Any = data
            path = [key for key in data if key not in ("schema_version", "hostname")]
            key: Any = rng.choice(path)
            while isinstance(at[key], dict | list) and at[key] and rng.random() < 0.7:
                at = at[key]
                key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            at[key] = garbage(rng)
        reading = read_snapshot(data)
        judged = examine_fleet({"k3-a": reading.snapshot}, asked, lock, flaws={"k3-a": reading.flaws})
        empty = [finding.code for finding in judged.findings if not (finding.observed and finding.expected)]
        assert empty == []


def test_an_older_snapshot_is_judged_as_before(tmp_path: Path) -> None:
    (reading,) = load_snapshots(Path(write(tmp_path / "a.json", snapshot_data()))).values()
    assert not isinstance(reading, str) and reading.flaws == ()
    judged = examine_fleet({"k3-a": reading.snapshot}, {"k3-a": expected_data()}, platform_lock("lab"))
    assert judged.findings == () and judged.coverage["k3-a"].unknown


def test_a_snapshot_of_another_schema_is_none() -> None:
    with pytest.raises(RunbookError, match="schema_version: 2; expected 1"):
        read_snapshot(b300() | {"schema_version": 2})
    assert lock_data()["schema_version"] == 1
