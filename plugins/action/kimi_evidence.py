"""Keep evidence on the controller: one file per part, secrets blotted out, a manifest with SHA-256."""

from __future__ import annotations

from pathlib import Path

from ansible.plugins.action import ActionBase

from kimi_runbook.evidence import freeze


class ActionModule(ActionBase):
    """Arguments: dir, parts (``name``, ``text`` or None, ``reason``). Returns ``kept`` and ``missing``."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Write what there is and name what there is not."""
        result = super().run(tmp, task_vars)
        kept, missing = freeze(Path(self._task.args["dir"]), self._task.args["parts"])
        return {**result, "changed": False, "dir": self._task.args["dir"], "kept": kept, "missing": missing}
