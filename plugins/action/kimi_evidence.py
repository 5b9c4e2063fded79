"""Ask a node for evidence and keep it on the controller: redacted, scanned, one file per part, hashed.

The module is run from here, and not by a task of its own, so that what a node says before redaction never is the result
of a task: results are printed, logged and kept as variables.
"""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from kimi_runbook.environment import SECRET, STEERING
from kimi_runbook.errors import RunbookError
from kimi_runbook.evidence import Part, Pseudonyms, Redactor, freeze, run_key
from kimi_runbook.evidence.exceptions import pattern

_ASKED = ("parts", "timeout_s", "limit_kib", "total_s", "total_kib")


def _part(row):
    """Return one row of the module as a part, its text unpacked."""
    text = None if row["data"] is None else zlib.decompress(base64.b64decode(row["data"])).decode("utf-8", "replace")
    return Part.from_json({**row, "text": text})


class ActionModule(ActionBase):
    """Arguments: run_dir, hide, and those of node_evidence. Returns ``dir``, ``kept``, ``missing``, ``skipped``."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Ask, redact, scan, write; say what there is and what there is not."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        question = {name: args[name] for name in _ASKED if name in args}
        question |= {"mark": pattern(), "env_shown": STEERING.pattern, "env_hidden": SECRET.pattern}
        answer = self._execute_module(module_name="node_evidence", module_args=question, task_vars=task_vars)
        if answer.get("failed") or answer.get("unreachable") or "parts" not in answer:
            # What a module printed instead of its result is not shown: nothing has redacted it.
            quiet = {key: answer[key] for key in ("failed", "unreachable", "msg", "rc") if key in answer}
            return {**result, "failed": True, "msg": "the node gave no evidence", **quiet}
        run_dir = Path(args["run_dir"])
        host = task_vars["inventory_hostname"]
        try:
            redactor = Redactor(
                Pseudonyms(run_key(run_dir.parent / ".pseudonyms" / run_dir.name)),
                hide=tuple(args.get("hide") or ()),
                hosts=tuple(task_vars.get("groups", {}).get("all", ())),
            )
            folder = run_dir / "evidence" / host
            frozen = freeze(folder, [_part(row) for row in answer["parts"]], redactor)
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        return {
            **result,
            "changed": False,
            "dir": str(folder),
            "kept": list(frozen.kept),
            "missing": dict(frozen.missing),
            "skipped": dict(frozen.skipped),
            "partial": {name: list(notes) for name, notes in frozen.notes.items()},
        }
