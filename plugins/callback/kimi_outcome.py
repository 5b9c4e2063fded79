"""Print, last of all, how a run that changed hosts ended on each of them, and what the whole run cost in tasks."""

from __future__ import annotations

DOCUMENTATION = r"""
name: kimi_outcome
type: aggregate
short_description: Table of outcomes after the recap
description:
  - A play that stops has no task left that could print. The table is made from outcome.json of the run, which is kept
    current before every step; only hosts that stopped answering are added here, since no task of theirs can say so.
requirements:
  - enabled in ansible.cfg
"""

from pathlib import Path

from ansible.plugins.callback import CallbackBase

from kimi_runbook.errors import RunbookError
from kimi_runbook.transaction.outcome import render
from kimi_runbook.transaction.outcome_file import NAME, change_outcome, load_outcome


class CallbackModule(CallbackBase):
    """Listens for the run's folder and for hosts that stop answering."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "kimi_outcome"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self):
        super().__init__()
        self._run_dir = None
        self._lost = {}
        self._tasks = 0
        self._on_hosts = 0

    def v2_playbook_on_task_start(self, task, is_conditional):
        """Count, and learn the run's folder from the tasks that are given it."""
        self._tasks += 1

    def v2_runner_on_start(self, host, task):
        """Count."""
        self._on_hosts += 1

    def v2_runner_on_ok(self, result):
        """Learn the run's folder."""
        told = result._result  # the one way a callback sees a result
        if result._task.action == "kimi_run" and isinstance(told.get("run"), dict):
            self._run_dir = Path(told["run"]["dir"])

    def v2_runner_on_unreachable(self, result):
        """Remember who stopped answering, and what was said."""
        self._lost[result._host.get_name()] = str(result._result.get("msg", "")).strip()

    def v2_playbook_on_stats(self, stats):
        """Print the table, where this run changed hosts."""
        try:
            if self._run_dir and (self._run_dir / NAME).exists():
                self._display.display(render(self._current()))
                self._display.display(f"written to {self._run_dir / NAME}")
        except (RunbookError, OSError) as error:
            self._display.warning(f"outcome: {error}")
        self._display.display(f"cost: {self._tasks} tasks, run {self._on_hosts} times")

    def _current(self):
        def add(outcome):
            for host, said in self._lost.items():
                if host in outcome.hosts and outcome.hosts[host].state == "open":
                    outcome = outcome.with_host(host, state="unreachable", reason=said)
            return outcome

        return change_outcome(self._run_dir, add) if self._lost else load_outcome(self._run_dir)
