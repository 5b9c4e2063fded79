"""Keep a host's change in two places: in its own state file, by the module, and in the run's outcome on the controller.

Both are written before what they announce begins, so neither needs anybody alive to be true.
"""

from __future__ import annotations

import getpass
import socket
import time
from pathlib import Path

from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from kimi_runbook.errors import RunbookError
from kimi_runbook.plan import Plan
from kimi_runbook.reading import parse_yaml, read_text
from kimi_runbook.transaction.outcome import Outcome
from kimi_runbook.transaction.outcome_file import change_outcome
from kimi_runbook.transaction.steps import due, entries

_MODULE = ("action", "dir", "step", "reason", "end", "take_over", "ttl_s")


class ActionModule(ActionBase):
    """Arguments: those of the module, but ``run`` is kimi_run; on begin ``plan`` and the ``roles`` that are played.

    Returns the module's answer, on begin with ``due``, the steps this host takes, ``entries``, what each plays, and
    ``handlers``, those of the roles whose step an earlier run did not end.
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Ask the host, then note it on the controller."""
        result = super().run(tmp, task_vars)
        args, host = self._task.args, task_vars["inventory_hostname"]
        question = {name: args[name] for name in _MODULE if name in args}
        question |= {"run": args["run"]["id"], "owner": f"{getpass.getuser()}@{socket.gethostname()}"}
        try:
            plan = Plan.from_json(args["plan"]) if "plan" in args else None
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        if plan:
            question |= {"lock_digest": plan.lock_digest, "plan_digest": plan.digest()}
        answer = self._execute_module(module_name="host_transaction", module_args=question, task_vars=task_vars)
        result.update(answer)
        if answer.get("unreachable"):
            return result
        try:
            if answer.get("failed"):
                self._note(args, host, {"state": "failed", "reason": str(answer.get("msg", ""))}, refused=True)
                return result
            if plan:
                planned = {item.role for item in plan.hosts.get(host, ())}
                result["due"] = list(due(planned, args["roles"], answer["interrupted"], answer["begun"]))
                result["entries"] = entries()
                result["handlers"] = {
                    name: _handlers(result["entries"][name]["role"])
                    for name in result["due"]
                    if name in answer["interrupted"]
                }
            if answer["note"]:
                Display().display(f"{host}: {answer['note']}")
            self._note(args, host, _changes(args, answer))
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        return result

    def _note(self, args, host, changes, *, refused=False):
        """Write one host's part of the outcome; nothing in check mode, where nothing happens."""
        if self._task.check_mode or args["action"] == "look":
            return
        now = round(time.time())

        def change(outcome):
            outcome = outcome or Outcome(run_id=args["run"]["id"])
            one = outcome.hosts.get(host)
            if refused and (one is None or one.state == "not_begun"):
                changes["state"] = "not_begun"
            began = one.began if one and one.began else now
            return outcome.with_host(host, began=began, seconds=now - began, **changes)

        change_outcome(Path(args["run"]["dir"]), change)


def _handlers(role):
    """Return the names of a role's handlers: a killed run takes its notifications with it."""
    for folder in constants.DEFAULT_ROLES_PATH:
        path = Path(folder) / role / "handlers/main.yml"
        if path.is_file():
            tasks = parse_yaml(read_text(path), str(path)) or []
            return [str(task["name"]) for task in tasks if "name" in task]
    return []


def _changes(args, answer):
    """Return what an action changes in the outcome of its host."""
    now = answer["transaction"] or {"step": "", "begun": [], "interrupted": []}
    # A drain that has begun and not ended may have been refused.
    drained = "drain" in now["begun"] and "drain" not in now["interrupted"]
    if args["action"] == "commit":
        return {"state": args.get("end", "done"), "step": now["step"], "drained": False}
    if args["action"] == "fail":
        return {"state": "failed", "step": now["step"], "drained": drained, "reason": args.get("reason", "")}
    return {"state": "open", "step": now["step"], "drained": drained}
