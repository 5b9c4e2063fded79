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
from yamllint import linter
from yamllint.config import YamlLintConfig

from kimi_runbook import cli
from kimi_runbook.commands import lock as lock_command
from kimi_runbook.lock import load_lock
from kimi_runbook.registry import Manifest


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
    assert set(document) == {"findings", "plan"} and document["findings"]
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
        ("lock.yml", "a: [", "lock.yml:1:5"),
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


def test_lock_resolve_writes_a_lock_that_loads(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def fetch(repository: str, reference: str, *, insecure: bool) -> Manifest:
        asked.append(insecure)
        return Manifest(
            digest="sha256:" + "d" * 64,
            media_type="application/vnd.oci.image.index.v1+json",
            manifests={"amd64": "sha256:" + "e" * 64},
            sizes={"amd64": 5},
        )

    monkeypatch.setattr(lock_command, "fetch_manifest", fetch)
    data = lock_data()
    for key in ("digest", "manifests", "size_bytes"):
        del data["image"][key]
    (files / "template.yml").write_text(yaml.safe_dump(data), encoding="utf-8")
    out = files / "new" / "lock.yml"
    arguments = ["lock", "resolve", "--template", str(files / "template.yml"), "--out", str(out)]
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--insecure"]) == 0
    assert asked == [False, True]
    capsys.readouterr()
    assert cli.main(["lock", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["image"]["digest"] == "sha256:" + "d" * 64 and shown["image"]["insecure"] is True
    assert [path.name for path in out.parent.iterdir()] == ["lock.yml"]


def test_a_written_lock_passes_the_projects_yamllint(
    files: Path, monkeypatch: pytest.MonkeyPatch, project_root: Path
) -> None:
    data = lock_data()
    manifest = Manifest(
        digest=data["image"]["digest"],
        media_type="application/vnd.oci.image.index.v1+json",
        manifests=data["image"]["manifests"],
        sizes={"amd64": data["image"]["size_bytes"]},
    )
    monkeypatch.setattr(lock_command, "fetch_manifest", lambda *_, **__: manifest)
    out = files / "written.yml"
    assert cli.main(["lock", "resolve", "--template", str(files / "lock.yml"), "--out", str(out)]) == 0
    config = YamlLintConfig(file=str(project_root / ".yamllint"))
    text = out.read_text(encoding="utf-8")
    assert [str(problem) for problem in linter.run(text, config)] == []
    assert "  packages:\n    - nvidia-container-toolkit\n" in text
    assert load_lock(out).to_json() == data


def test_lock_resolve_leaves_nothing_when_it_fails(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = lock_data()
    data["image"]["repository"] = "127.0.0.1:1/x"
    (files / "template.yml").write_text(yaml.safe_dump(data), encoding="utf-8")
    out = files / "out.yml"
    arguments = ["lock", "resolve", "--template", str(files / "template.yml"), "--out", str(out), "--insecure"]
    assert cli.main(arguments) == 2
    assert "registry unreachable" in capsys.readouterr().err
    assert not out.exists()


def test_lock_show_and_diff(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock, other = str(files / "lock.yml"), files / "other.yml"
    assert cli.main(["lock", "show", lock]) == 0
    assert "driver.version: 580.178.04\n" in capsys.readouterr().out
    assert cli.main(["lock", "diff", lock, lock]) == 0
    data = lock_data()
    data["driver"] |= {"version": "580.167.08", "package_version": "580.167.08-1"}
    other.write_text(yaml.safe_dump(data), encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["lock", "diff", lock, str(other)]) == 1
    assert "driver.version: 580.178.04 -> 580.167.08\n" in capsys.readouterr().out
    assert cli.main(["lock", "diff", lock, str(other), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["changes"]) == 2


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["audit"])
    assert caught.value.code == 2
    assert "usage: kimi-runbook audit" in capsys.readouterr().err


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
