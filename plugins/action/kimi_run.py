"""Begin a run on the controller: read the lock, open the run's directory."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import load_lock
from kimi_runbook.runs import new_run_id


class ActionModule(ActionBase):
    """Arguments: runs_dir, run_id (empty for a new one), lock_file (may be left out). Returns ``run`` and ``lock``."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Read the lock and write it beside what the run will leave behind."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        try:
            lock = load_lock(Path(args["lock_file"])) if args.get("lock_file") else None
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        run_id = args.get("run_id") or new_run_id()
        run_dir = Path(args["runs_dir"]).resolve() / run_id
        run_dir.mkdir(parents=True, exist_ok=True)
        run = {"id": run_id, "dir": str(run_dir)}
        if lock is None:
            return {**result, "changed": False, "run": run}
        (run_dir / "lock.json").write_text(json.dumps(lock.to_json(), indent=2) + "\n", encoding="utf-8")
        return {**result, "changed": False, "run": run, "lock": lock.to_json()}
