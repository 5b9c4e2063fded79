"""Tell the service gap of every replica that was drained: one line each, and service_gap.json in the run's folder."""

from __future__ import annotations

from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from kimi_runbook.errors import RunbookError
from kimi_runbook.transaction.service_gap import measure, write


class ActionModule(ActionBase):
    """Arguments: run. Reads of every host what it remembers, its replica, and when the engine became ready."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Measure, write, print; nothing where no replica was drained."""
        result = super().run(tmp, task_vars)
        hostvars = task_vars["hostvars"]
        answers = {host: hostvars[host]["__service_gap_answer"] for host in task_vars["ansible_play_hosts"]}
        try:
            gaps = [
                measure(host, answer["mark"], _ready_at(hostvars[host]), _reboots(hostvars[host], answers))
                for host, answer in answers.items()
                if answer["mark"]
            ]
            if gaps:
                write(Path(self._task.args["run"]["dir"]), gaps)
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        for gap in gaps:
            Display().display(str(gap))
        return {**result, "changed": False, "gaps": [gap.to_json() for gap in gaps]}


def _ready_at(variables):
    """Return when the engine became ready, None where this run neither started it nor saw it become so."""
    ready = variables["__engine_ready"]
    seen = variables["__engine_restart"] or ready["became_ready"]
    return ready["ready_at"] if seen else None


def _reboots(variables, answers):
    """Return how long each host of the replica took to reboot, those of this play."""
    return [answers[node]["reboot_s"] for node in variables["kimi_replica"] if node in answers]
