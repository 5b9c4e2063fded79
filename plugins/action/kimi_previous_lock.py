"""Find the lock to go back to, and say what that changes."""

from __future__ import annotations

from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import load_lock
from kimi_runbook.lock.difference import changes
from kimi_runbook.transaction.previous_lock import find_previous_lock, named_lock


class ActionModule(ActionBase):
    """Arguments: lock_file (the present one), runs_dir, rollback_lock (empty to look for it). Returns ``previous``."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Read the present lock, find the other, print the difference."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        try:
            present = load_lock(Path(args["lock_file"]))
            if args.get("rollback_lock"):
                previous = named_lock(Path(args["rollback_lock"]), present)
            else:
                previous = find_previous_lock(Path(args["runs_dir"]).resolve(), present)
        except RunbookError as error:
            raise AnsibleActionFail(f"{error} Nothing was changed.") from error
        Display().display(
            "\n".join([f"Back to {previous.file}", *(f"  {change}" for change in changes(present, previous.lock))])
        )
        return {**result, "changed": False, "previous": previous.to_json()}
