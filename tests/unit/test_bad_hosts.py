"""Hosts whose tools hang, print garbage, half an answer or another language: findings, no traceback, never ok."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.cli import main
from kimi_runbook.findings import Finding
from kimi_runbook.judge import examine_fleet
from kimi_runbook.snapshot import Snapshot
from kimi_runbook.table import WIDTH, render_findings_table
from tests.hosts.__main__ import write
from tests.hosts.build import build
from tests.hosts.described import Host, load_host
from tests.hosts.snapshots import snapshot
from tests.hosts.wanted import expected_of, lock_of, questions_of

# In words as a host set to another language says them; commands are run in the C locale, and not all of them heed it.
FRENCH = "Erreur : impossible d'accéder à « /dev/nvidiactl » : périphérique occupé\nÉtat : inconnu\n"
CHINESE = "错误 无法连接到守护进程 权限被拒绝\n状态 未知\n"
NOISE = random.Random(11)  # noqa: S311 - the same garbage every time
GARBAGE = "".join(chr(NOISE.randrange(1, 0x2FFF)) for _ in range(3000)) + "\n\t\n=\n:\n{[\n"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What becomes of one command's answer: its text, and the exit status where that changes."""

    name: str
    text: Callable[[str], str]
    rc: str | None = None


FAULTS = (
    Fault(name="hangs", text=lambda _: "", rc="timeout"),
    Fault(name="denied", text=lambda _: "", rc="denied"),
    Fault(name="crashes", text=lambda told: told[:40], rc="139"),
    Fault(name="garbage", text=lambda _: GARBAGE),
    Fault(name="french", text=lambda _: FRENCH),
    Fault(name="chinese", text=lambda _: CHINESE),
    Fault(name="french-and-fails", text=lambda _: FRENCH, rc="1"),
    Fault(name="empty", text=lambda _: ""),
    Fault(name="cut-in-the-middle", text=lambda told: told[: len(told) // 2]),
    Fault(name="wrong-json", text=lambda _: '[{"State": 7, "Config": [], "nodes": 3, "Args": {"a": 1}}]'),
)
HOSTS = ("hgx-h200-ib", "gb300-tray")
# What this host's verdict does not hang on, so that nothing is said: ibv_devinfo tells the MTU alone; OFED matters
# where nvidia_peermem is asked for, room where the image or weights are still to come, Secure Boot where a driver is,
# and without output dkms has no modules. Each is unknown on a host where it does matter: test_judge_rules.py.
QUIET = ("ibv_devinfo", "ofed_info -s", "df ", "mokutil --sb-state")
QUIET_WHEN_EMPTY = "dkms status"


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The healthy hosts' trees, each written once."""
    folder = tmp_path_factory.mktemp("healthy")
    return {name: build(load_host(name), folder) for name in HOSTS}


def commands(tree: Path) -> list[str]:
    """Return the commands a tree answers."""
    found = {path.name.removesuffix(".rc").removesuffix(".stderr") for path in (tree / ".commands").iterdir()}
    return sorted(found)


@contextmanager
def spoilt(tree: Path, names: list[str], fault: Fault) -> Iterator[None]:
    """Spoil these answers of a tree, and put them back."""
    folder = tree / ".commands"
    kept = folder.with_name(".kept")
    shutil.copytree(folder, kept)
    for name in names:
        path = folder / name
        told = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(fault.text(told), encoding="utf-8")
        if fault.rc is not None:
            (folder / f"{name}.rc").write_text(fault.rc, encoding="utf-8")
    try:
        yield
    finally:
        shutil.rmtree(folder)
        kept.rename(folder)


def audited(host: Host, tree: Path) -> tuple[dict[str, Any], tuple[Finding, ...], tuple[str, ...]]:
    """Return a host's snapshot, what the audit says of it, and the checks without an answer; print it as well."""
    taken = snapshot(tree, questions_of(host))
    seen = {host.name: Snapshot.from_json(json.loads(json.dumps(taken)))}
    asked = {host.name: expected_of(host) | {"host": host.name}}
    judged = examine_fleet(seen, asked, lock_of(host))
    table = render_findings_table(seen, judged.findings, lock_of(host), judged.coverage)
    assert table.isascii() and max(map(len, table.splitlines())) <= WIDTH
    assert "Traceback" not in table
    return taken, judged.findings, judged.coverage[host.name].unknown


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
@pytest.mark.parametrize("name", HOSTS)
def test_one_command_that_goes_wrong_is_told_and_never_ok(trees: Mapping[str, Path], name: str, fault: Fault) -> None:
    host, tree = load_host(name), trees[name]
    healthy, _, _ = audited(host, tree)
    silent = []
    for command in commands(tree) if name == HOSTS[0] else ["nvidia-imex-ctl -N -j"]:
        with spoilt(tree, [command], fault):
            taken, findings, unknown = audited(host, tree)
            told = {key for key in healthy if taken[key] != healthy[key]} - {"taken_at"}
            quiet = command.startswith(QUIET) or (command == QUIET_WHEN_EMPTY and fault.name == "empty")
            if told and not findings and not unknown and not quiet:
                silent.append((command, sorted(told)))
    assert silent == []


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
@pytest.mark.parametrize("name", HOSTS)
def test_a_host_on_which_every_command_goes_wrong(trees: Mapping[str, Path], name: str, fault: Fault) -> None:
    host, tree = load_host(name), trees[name]
    with spoilt(tree, commands(tree), fault):
        taken, findings, unknown = audited(host, tree)
        assert taken["errors"] and all(error["probe"] and error["message"] for error in taken["errors"])
        assert unknown and {"stop", "change"} & {finding.severity for finding in findings}
        assert [finding.code for finding in findings].count("snapshot.probe_failed") == len(taken["errors"])


@pytest.mark.parametrize("part", range(1, 20))
def test_a_snapshot_cut_off_in_the_middle_stops_and_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: int
) -> None:
    host = load_host("hgx-h200-ib")
    write("h200", [host], tmp_path, tmp_path / "trees")
    file = tmp_path / "h200" / f"{host.name}.json"
    text = file.read_text(encoding="utf-8")
    (tmp_path / "h200" / "whole.json").write_text(text.replace(f'"{host.name}"', '"whole"'), encoding="utf-8")
    file.write_text(text[: len(text) * part // 20], encoding="utf-8")
    seen = [str(path) for path in (tmp_path / "h200").glob("*.json")]
    assert main(["audit", *seen, "--lock", str(tmp_path / "h200.lock.yml"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = [(one["code"], one["severity"]) for one in document["findings"] if one["host"] == host.name]
    assert found == [("snapshot.unreadable", "stop")]
    assert document["verdicts"][host.name]["name"] == "stop"


def newer(value: Any, depth: int = 0) -> Any:
    """Return a snapshot as a later version might write it: every record has a field nobody knows yet."""
    if isinstance(value, list):
        return [newer(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    grown = {key: newer(item, depth + 1) for key, item in value.items()}
    records = depth == 1 or {"index", "path", "port", "host", "version", "name", "pid"} & set(value)
    named = {"files", "packages", "modules", "units", "cut"}  # keyed by names, not records of fields
    return grown | {"later": {"a": [1]}} if records and depth and not named & {str(depth)} else grown


@pytest.mark.parametrize("name", HOSTS)
def test_fields_of_a_newer_version_change_nothing(trees: Mapping[str, Path], name: str) -> None:
    host, tree = load_host(name), trees[name]
    taken, findings, _ = audited(host, tree)
    by_name = {key: taken[key] for key in ("files", "packages", "modules", "units", "cut")}
    later = newer(taken) | by_name
    asked = {host.name: expected_of(host) | {"host": host.name}}
    judged = examine_fleet({host.name: Snapshot.from_json(later)}, asked, lock_of(host))
    assert (judged.findings, judged.coverage[host.name].unknown) == (findings, ())
    assert findings == ()
