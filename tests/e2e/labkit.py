"""Runs the lab's commands and, through ansible-runner, playbooks; keeps what their events say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "inventories/lab/hosts.yml"
Shell = Callable[[str, str], str]
HOSTS = frozenset({"k3-a", "k3-b"})
_CONTROLLER_ACTIONS = "add_host assert include_tasks set_fact validate_argument_spec kimi_judge kimi_run"
ON_CONTROLLER = {f"{prefix}{action}" for action in _CONTROLLER_ACTIONS.split() for prefix in ("", "ansible.builtin.")}
"""Actions that connect to no host."""


@dataclass
class Outcome:
    """What a playbook did, from its events.

    Attributes:
        rc: Exit status.
        changed: Host to the names of the tasks that changed something, in order.
        failed: Host to the messages of the tasks that failed.
        unreachable: Hosts that did not answer.
        ignored: Names of tasks whose failure was ignored; there must be none.
        seen: Hosts with at least one task result.
        asked: Host and task of every task that connected to a host, in order.
        stdout: Everything printed.
    """

    rc: int = -1
    changed: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    stdout: str = field(default="", repr=False)

    @property
    def messages(self) -> str:
        """Every failure message, joined."""
        return "\n".join(message for messages in self.failed.values() for message in messages)

    def take(self, event: Mapping[str, Any]) -> bool:
        """Add one event; true, so that ansible-runner keeps it."""
        data = event.get("event_data", {})
        host, task = data.get("host"), str(data.get("task"))
        result = data.get("res", {})
        if event["event"] in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            self.seen.add(host)
            if data.get("task_action") not in ON_CONTROLLER:
                self.asked.append((host, task))
        if event["event"] in ("runner_on_ok", "runner_on_failed") and result.get("changed"):
            self.changed.setdefault(host, []).append(task)
        if event["event"] == "runner_on_failed":
            if data.get("ignore_errors"):
                self.ignored.append(task)
            else:
                self.failed.setdefault(host, []).append(_message(result))
        if event["event"] == "runner_on_unreachable":
            self.unreachable.add(host)
        self.stdout += event.get("stdout", "") + "\n"
        return True


def _message(result: Mapping[str, Any]) -> str:
    looped = [str(item.get("msg", "")) for item in result.get("results", []) if item.get("failed")]
    return "\n".join([str(result.get("msg", "")), str(result.get("stderr", "")), *looped])


# The lab's inventory asks for the peer-loss drill, a minute of observation, tool calls and six streams; most tests are
# about something else.
QUICK = {
    "acceptance_peer_loss_drill": False,
    "acceptance_observe_s": 0,
    "acceptance_abilities": {"tools": "off"},
    "acceptance_concurrency": 2,
    "acceptance_peak_concurrency": 2,
}
AS_INVENTORIED = dict.fromkeys(QUICK)


def play(playbook: str, tmp_path: Path, *, check: bool = False, limit: str | None = None, **extra: Any) -> Outcome:
    """Run one playbook on the lab's inventory with extra variables; ``QUICK`` but for those given, None for none."""
    outcome = Outcome()
    (tmp_path / "runner").mkdir(exist_ok=True)
    variables = tmp_path / "extra-vars.json"
    given = {name: value for name, value in {**QUICK, **extra}.items() if value is not None}
    variables.write_text(json.dumps({"runs_dir": str(tmp_path / "runs"), **given}), encoding="utf-8")
    command = [f"--extra-vars=@{variables}"] + (["--check"] if check else [])
    runner = ansible_runner.run(
        private_data_dir=str(tmp_path / "runner"),
        project_dir=str(ROOT),
        playbook=playbook,
        inventory=str(INVENTORY),
        cmdline=" ".join(command),
        limit=limit,
        envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "_ANSIBLE_TEMPLAR_UNTRUSTED_TEMPLATE_BEHAVIOR": "error"},
        event_handler=outcome.take,
        quiet=True,
        suppress_env_files=True,
    )
    outcome.rc = runner.rc
    assert outcome.ignored == [], "a failure was ignored"
    return outcome


def newest_record(tmp_path: Path) -> dict[str, Any]:
    """Return the record of the newest run below this test's runs directory."""
    records = sorted((tmp_path / "runs").glob("*/record.json"))
    assert records, "the run left no record.json"
    return dict(json.loads(records[-1].read_text(encoding="utf-8")))


def lab(*arguments: str) -> None:
    """Run the lab's command line; its output shows only when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "lab", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"lab {' '.join(arguments)} exited {done.returncode}:\n{done.stdout}{done.stderr}"
