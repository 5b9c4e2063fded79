"""Kills the controller, with no chance to clean up, when its Nth task has begun and anything happens after that.

The next thing that happens is the first host's result, while other hosts are still at the task, or the next task. With
N of 0 nobody is killed and the number of tasks is written down.
"""

from __future__ import annotations

DOCUMENTATION = r"""
name: kill_after
type: aggregate
short_description: Kill the controller after a task
description:
  - For tests only.
options: {}
"""

import os
import signal
from pathlib import Path

from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    """Counts tasks as they begin."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "kill_after"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self):
        super().__init__()
        self._last = int(os.environ["FRAME_KILL_AFTER"])
        self._names = []

    def _next(self):
        if self._last and len(self._names) >= self._last:
            Path(os.environ["FRAME_TASKS"]).write_text(f"{self._names[-1]}\n", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

    def v2_playbook_on_task_start(self, task, is_conditional):
        """Count, unless the one before was the last."""
        self._next()
        self._names.append(task.get_name())

    def v2_playbook_on_handler_task_start(self, task):
        """Count a handler as a task."""
        self.v2_playbook_on_task_start(task, False)

    def v2_runner_on_ok(self, result):
        """Let the first result of the last task be the end."""
        self._next()

    def v2_runner_on_skipped(self, result):
        """Let the first result of the last task be the end."""
        self._next()

    def v2_playbook_on_stats(self, stats):
        """Write the tasks down."""
        Path(os.environ["FRAME_TASKS"]).write_text("\n".join(self._names) + "\n", encoding="utf-8")
