import os
import sys
from pathlib import Path

import pytest

from kimi_runbook.errors import RunbookError
from lab.settings import places
from lab.site import (
    Outcome,
    Watcher,
    closing_lines,
    failure_text,
    finish,
    lock_argv,
    newest_record,
    recap_of,
    runner_environment,
    unseen,
)


def event(kind: str, **data: object) -> dict[str, object]:
    return {"event": kind, "event_data": data}


def watched(*events: dict[str, object]) -> tuple[Watcher, list[str]]:
    watcher = Watcher()
    lines = [line for line in (watcher.take(item) for item in events) if line is not None]
    return watcher, lines


def test_watcher_counts_hosts_per_task() -> None:
    watcher, lines = watched(
        event("playbook_on_play_start", play="Audit"),
        event("playbook_on_task_start", task="Take a snapshot"),
        event("runner_on_start", host="k3-a"),
        event("runner_on_ok", host="k3-a", res={}),
        event("runner_on_start", host="k3-b"),
    )
    assert watcher.note() == "Take a snapshot (1 of 2 hosts)"
    assert unseen(watcher, ["k3-a", "k3-b"]) == ["k3-b"]
    assert lines == ["      Audit"]


def test_watcher_tells_failures_in_full_but_not_ignored_ones() -> None:
    watcher, lines = watched(
        event("runner_on_failed", host="k3-a", task="t", res={"msg": "no", "stderr": "disk full"}, ignore_errors=None),
        event("runner_on_failed", host="k3-a", task="t", res={"msg": "fine"}, ignore_errors=True),
        event("runner_on_unreachable", host="k3-b", task="t", res={"msg": "no route"}),
    )
    assert watcher.failures == lines == ["FAILED k3-a: t\nno\ndisk full", "FAILED k3-b: t\nno route"]


def test_failure_without_a_message_shows_the_result() -> None:
    assert '"rc": 3' in failure_text({"host": "h", "task": "t", "res": {"rc": 3}})


def test_recap() -> None:
    recap = recap_of({"ok": {"k3-a": 5}, "changed": {"k3-a": 2}, "dark": {"k3-b": 1}})
    assert recap["k3-a"]["changed"] == 2
    assert (recap["k3-b"]["dark"], recap["k3-b"]["ok"]) == (1, 0)


def test_lock_argv_uses_the_same_python(tmp_path: Path) -> None:
    argv = lock_argv(tmp_path)
    assert argv[:5] == [sys.executable, "-m", "kimi_runbook", "lock", "resolve"]
    assert argv[5:] == [
        "--template",
        f"{tmp_path}/inventories/lab/lock.template.yml",
        "--out",
        f"{tmp_path}/inventories/lab/lock.yml",
    ]


def test_runner_environment_finds_this_python_and_the_configuration(tmp_path: Path) -> None:
    found = runner_environment(places(tmp_path, {}, is_root=True), {"DOCKER_HOST": "unix:///x"})
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert found["ANSIBLE_CONFIG"] == str(tmp_path / "ansible.cfg")
    assert found["DOCKER_HOST"] == "unix:///x"


def test_newest_record_of_this_run(tmp_path: Path) -> None:
    for name, when in (("old", 10), ("new", 30), ("newer", 40)):
        record = tmp_path / name / "record.json"
        record.parent.mkdir()
        record.write_text("{}")
        os.utime(record, (when, when))
    assert newest_record(tmp_path, 20) == tmp_path / "newer" / "record.json"
    assert newest_record(tmp_path, 50) is None


def test_closing_lines_name_verdict_and_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = closing_lines({"verdict": {"name": "accept", "reasons": ["x"]}}, Path("runs/1/report.md"), 72)
    assert lines == [
        "verdict: accept (simulated GPUs), after 1:12",
        "report:  runs/1/report.md",
        f"next:    {Path(sys.executable).with_name('ansible-playbook')} playbooks/audit.yml",
    ]


def both_seen() -> Watcher:
    return Watcher(hosts={"k3-a", "k3-b"})


@pytest.mark.parametrize(
    ("outcome", "record", "words"),
    [
        pytest.param(Outcome(2, Watcher(failures=["x"])), None, "exit 2, 1 failed task(s)", id="playbook-failed"),
        pytest.param(Outcome(0, Watcher(hosts={"k3-a"})), None, "no task ran on k3-b", id="host-never-seen"),
        pytest.param(Outcome(0, both_seen()), None, "no record.json", id="nothing-recorded"),
        pytest.param(
            Outcome(0, both_seen()), '{"verdict": {"name": "tune"}}', "expected verdict accept", id="not-accepted"
        ),
    ],
)
def test_finish_never_calls_it_a_success(tmp_path: Path, outcome: Outcome, record: str | None, words: str) -> None:
    if record is not None:
        (tmp_path / "runs" / "1").mkdir(parents=True)
        (tmp_path / "runs" / "1" / "record.json").write_text(record)
    with pytest.raises(RunbookError, match=words.replace("(", r"\(").replace(")", r"\)")):
        finish(places(tmp_path, {}, is_root=True), outcome, started=0)
