"""The command line: exit codes, and what people and programs read."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from judging import expected_data, lock_data, snapshot_data

from kimi_runbook import cli


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "lock.yml").write_text(yaml.safe_dump(lock_data()), encoding="utf-8")
    (tmp_path / "expected.json").write_text(json.dumps(expected_data()), encoding="utf-8")
    (tmp_path / "k3-a.json").write_text(json.dumps(snapshot_data()), encoding="utf-8")
    return tmp_path


def audit(files: Path, *more: str, snapshot: str = "k3-a.json") -> int:
    return cli.main(
        [
            "audit",
            str(files / snapshot),
            "--expected",
            str(files / "expected.json"),
            "--lock",
            str(files / "lock.yml"),
            *more,
        ]
    )


def test_audit_of_a_healthy_host(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(files) == 0
    assert "fleet: 1 hosts, 0 stops, 0 changes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "change", "code"),
    [
        ("driver", {"on_disk": "570.133.20"}, 1),
        ("os", {"id": "gentoo"}, 1),
        ("driver", {"standin": True}, 0),
    ],
)
def test_audit_exit_codes(
    files: Path, capsys: pytest.CaptureFixture[str], part: str, change: dict[str, Any], code: int
) -> None:
    data = snapshot_data()
    data[part] |= change
    (files / "k3-a.json").write_text(json.dumps(data), encoding="utf-8")
    assert audit(files, "--json") == code
    document = json.loads(capsys.readouterr().out)
    assert {"findings", "plan"} <= set(document) and document["findings"]
    assert document["plan"]["batches"] == [["k3-a"]]


def test_audit_of_a_fleet_in_one_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "fleet.json").write_text(json.dumps({"k3-a": snapshot_data()}), encoding="utf-8")
    expected = {"k3-a": expected_data(), "k3-b": expected_data() | {"host": "k3-b"}}
    (files / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
    assert audit(files, snapshot="fleet.json") == 1
    assert "host.unreachable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("k3-a.json", "{", "k3-a.json:1:2"),
        ("k3-a.json", '{"schema_version": 9}', "schema_version: 9; expected 1"),
        ("lock.yml", "a: [1\nb: 2\n", "lock.yml:2:2"),
        ("expected.json", "[]", "a list; expected a mapping"),
    ],
)
def test_unreadable_input(files: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str) -> None:
    (files / name).write_text(text, encoding="utf-8")
    assert audit(files) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_missing_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(files, snapshot="absent.json") == 2
    assert "no such file" in capsys.readouterr().err


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["audit"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("kimi-runbook audit: the following arguments are required: SNAPSHOT")
    assert told.endswith("see kimi-runbook audit --help\n")
    assert told.count("\n") == 1


def test_cancelled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    assert cli.main([]) == 130
    assert "cancelled" in capsys.readouterr().err


def test_module_runs(project_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kimi_runbook", "--help"],
        env={"PYTHONPATH": str(project_root / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "exit codes: 0 fine" in done.stdout
    assert {"audit", "lock"} <= set(done.stdout.split())
