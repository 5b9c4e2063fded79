"""Running site.yml for people: progress from ansible-runner's event stream, the verdict at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_runbook.errors import RunbookError
from lab.commands import Purpose, stream
from lab.progress import Progress, human_seconds
from lab.settings import HOSTS, Places, near

LOCK_TEMPLATE = "inventories/lab/lock.template.yml"
LOCK = "inventories/lab/lock.yml"
INVENTORY = "inventories/lab/hosts.yml"
PLAYBOOK = "site.yml"
_FAILURES = ("runner_on_failed", "runner_on_unreachable", "runner_item_on_failed")


@dataclass(slots=True)
class Watcher:
    """Follows the events of one run: what is shown, which hosts were seen, what failed.

    Attributes:
        play: Name of the current play.
        task: Name of the current task.
        hosts: Hosts that answered any task so far.
        done: Hosts that answered the current task.
        tasks: Number of tasks begun.
        failures: Text of each failure, in full.
        changed: {host: changed tasks} from the recap.
        recap: {host: {counter: n}} from the recap; empty until it came.
    """

    play: str = ""
    task: str = ""
    tasks: int = 0
    hosts: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    recap: dict[str, dict[str, int]] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Take one event; return a line worth printing on its own (a play's name, a failure), or None."""
        kind, data = event.get("event"), event.get("event_data") or {}
        if kind == "playbook_on_play_start":
            self.play = str(data.get("play") or data.get("name") or "")
            return f"      {self.play}"
        if kind in ("playbook_on_task_start", "playbook_on_handler_task_start"):
            self.task, self.tasks, self.done = str(data.get("task") or data.get("name") or ""), self.tasks + 1, set()
            return None
        if kind == "playbook_on_stats":
            self.recap = recap_of(data)
            return None
        host = data.get("host")
        if host and str(kind).startswith("runner_on_"):
            if kind != "runner_on_start":
                self.done.add(str(host))
                self.hosts.add(str(host))
            if kind in _FAILURES and not data.get("ignore_errors"):
                self.failures.append(failure_text(data))
                return self.failures[-1]
        return None

    def note(self) -> str:
        """Return what is running, for the progress line: the task and how many hosts have answered it."""
        return f"{self.task[:70]} ({len(self.done)} of {len(HOSTS)} hosts)" if self.task else self.play


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of site.yml ended: exit status of ansible-playbook, and what the watcher saw."""

    status: int
    watcher: Watcher


def recap_of(data: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return {host: {counter: n}} of a recap event."""
    counters = ("ok", "changed", "failures", "dark", "rescued", "ignored", "skipped")
    hosts = {host for counter in counters for host in data.get(counter) or {}}
    return {
        host: {counter: int((data.get(counter) or {}).get(host, 0)) for counter in counters} for host in sorted(hosts)
    }


def failure_text(data: Mapping[str, Any]) -> str:
    """Return a failed task in full: host, task, message, and what the module printed."""
    result = data.get("res") or {}
    parts = [f"FAILED {data.get('host')}: {data.get('task')}"]
    texts = [str(result[key]).strip() for key in ("msg", "stderr", "stdout", "exception") if result.get(key)]
    parts += [text for text in dict.fromkeys(texts) if text != "(traceback unavailable)"]  # ansible-core without -vvv
    if len(parts) == 1:
        parts.append(json.dumps(result, indent=1, default=str))
    return "\n".join(parts)


def unseen(watcher: Watcher, expected: Iterable[str]) -> list[str]:
    """Return the expected hosts that answered no task: a run that skipped a host is not a success."""
    return sorted(set(expected) - watcher.hosts)


def lock_argv(project: Path) -> list[str]:
    """Return the command that resolves the lab's lock from its tracked template."""
    files = ["--template", str(project / LOCK_TEMPLATE), "--out", str(project / LOCK)]
    return [sys.executable, "-m", "kimi_runbook", "lock", "resolve", *files]


def resolve_lock(places: Places, log: Path) -> None:
    """Write the lab's lock from its template and what the lab offers.

    Raises:
        RunbookError: When the library refuses; its message is part of it.
    """
    library = str(places.project / "src")
    stream(
        lock_argv(places.project),
        Purpose("lock", "Fix what the message names."),
        log=log,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))},
    )


def run_site(places: Places, progress: Progress, environment: Mapping[str, str]) -> Outcome:
    """Run site.yml on the lab's inventory, showing plays, tasks and failures as they come."""
    import ansible_runner  # noqa: PLC0415 - takes a second to import, and `status` and `down` do without

    watcher = Watcher()
    private = places.state / "runner"
    private.mkdir(parents=True, exist_ok=True)
    with progress.step(PLAYBOOK) as step:

        def on_event(event: dict[str, Any]) -> bool:
            text = watcher.take(event)
            if text is not None:
                progress.line(text)
            step.update(watcher.tasks, unit="tasks", note=watcher.note())
            return True  # ansible-runner keeps an event's file only when told so

        result = ansible_runner.interface.run(
            private_data_dir=str(private),
            project_dir=str(places.project),  # ansible.cfg there applies
            playbook=PLAYBOOK,
            inventory=str(places.project / INVENTORY),
            ident=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
            envvars=runner_environment(places, environment),
            event_handler=on_event,
            suppress_env_files=True,
            quiet=True,
            rotate_artifacts=5,
        )
        if result.status == "canceled":
            raise KeyboardInterrupt
        step.outcome = f"{watcher.tasks} tasks, {sum(c['changed'] for c in watcher.recap.values())} changed"
        if result.rc != 0:
            step.outcome = f"failed after {watcher.tasks} tasks"
    return Outcome(int(result.rc), watcher)


def runner_environment(places: Places, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the variables ansible-playbook gets on top of the caller's own."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    library = [str(places.project / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        "PATH": os.pathsep.join(filter(None, path)),
        "PYTHONPATH": os.pathsep.join(filter(None, library)),
        "ANSIBLE_CONFIG": str(places.project / "ansible.cfg"),
        **extra,
    }


def newest_record(runs: Path, since: float) -> Path | None:
    """Return the newest ``record.json`` below the runs that was written after a moment (seconds since the epoch)."""
    records = [path for path in runs.glob("*/record.json") if path.stat().st_mtime >= since]
    return max(records, key=lambda path: path.stat().st_mtime, default=None)


def closing_lines(record: Mapping[str, Any], report: Path, elapsed_s: float) -> list[str]:
    """Return the last lines of a run: the verdict, that GPUs are simulated, the report, the next command."""
    verdict = record.get("verdict") or {}
    reasons = verdict.get("reasons") or []
    lines = [f"verdict: {verdict.get('name', 'none')} (simulated GPUs), after {human_seconds(elapsed_s)}"]
    lines += [f"  {reason}" for reason in reasons if verdict.get("name") != "accept"]
    lines += [f"report:  {near(report)}"]
    playbook = near(Path(sys.executable).with_name("ansible-playbook"))
    following = f"{playbook} playbooks/audit.yml" if verdict.get("name") == "accept" else "make lab"
    return [*lines, f"next:    {following}"]


def finish(places: Places, outcome: Outcome, started: float) -> list[str]:
    """Return the closing lines of a run that accepted the service.

    Raises:
        RunbookError: When the playbook failed, a host was never seen, or no record says ``accept``.
    """
    log = places.state / "runner" / "artifacts"
    if outcome.status != 0:
        count = len(outcome.watcher.failures)
        raise RunbookError(
            where=PLAYBOOK,
            observed=f"exit {outcome.status}, {count} failed task(s), printed above",
            expected="exit 0",
            next_step=f"Events and output are in {log}; `make lab` continues where this run stands.",
        )
    missing = unseen(outcome.watcher, [machine.name for machine in HOSTS])
    if missing:
        raise RunbookError(
            where=PLAYBOOK,
            observed=f"no task ran on {', '.join(missing)}",
            expected=f"tasks on {', '.join(machine.name for machine in HOSTS)}",
            next_step=f"Look at {INVENTORY} and at the events in {log}.",
        )
    record = newest_record(places.project / "runs", started)
    if record is None:
        raise RunbookError(
            where=PLAYBOOK,
            observed="no record.json from this run under runs/",
            expected="the record that the acceptance writes",
            next_step=f"Look at the events in {log}.",
        )
    content = json.loads(record.read_text())
    lines = closing_lines(content, record.with_name("report.html"), time.time() - started)
    if (content.get("verdict") or {}).get("name") != "accept":
        raise RunbookError(
            where=str(record),
            observed="; ".join(lines[:-1]),
            expected="verdict accept",
            next_step="Read the report.",
        )
    return lines
