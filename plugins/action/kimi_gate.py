"""Decide, on the controller, whether a planned change may begin: once for the run, and again before each batch."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from kimi_runbook.errors import RunbookError
from kimi_runbook.plan import Plan
from kimi_runbook.snapshot_files import read_snapshot
from kimi_runbook.transaction.approval import load_approved, refuse_other
from kimi_runbook.transaction.batching import batches
from kimi_runbook.transaction.outcome import Outcome, unsettled_before
from kimi_runbook.transaction.outcome_file import change_outcome, load_outcome
from kimi_runbook.transaction.state import describe, foreign, refuse_foreign
from kimi_runbook.transaction.steps import due
from kimi_runbook.transaction.window import estimate, parse_window, refuse_outside

_ASK_EVERY_S = 5


class ActionModule(ActionBase):
    """Arguments: phase (``run`` or ``batch``), run, plan, fleet, roles and the inventory's conditions.

    ``batch`` also takes the batch's hosts. Fails where a condition does not hold; the hosts are then as they were.
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Check every condition of the phase; the first that does not hold ends the run."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        try:
            plan = Plan.from_json(args["plan"])
            told = self._gate_run(plan, task_vars) if args["phase"] == "run" else self._gate_batch(plan, task_vars)
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        if told:
            Display().display("\n".join(told))
        return {**result, "changed": False, "told": told}

    def _gate_run(self, plan, task_vars):
        args = self._task.args
        if args.get("approved_plan"):
            refuse_other(load_approved(Path(args["approved_plan"])), plan, args["approved_plan"])
        batches(
            [host for batch in plan.batches for host in batch],
            args["sizes"],
            replicas=args["fleet"]["replicas"],
            domains=args["fleet"]["domains"],
            serving=args["fleet"]["serving"],
            min_up=int(args["min_up"]),
        )
        hosts = [host for batch in plan.batches for host in batch]
        standing = _standing(hosts, task_vars["hostvars"])
        held = foreign(standing, args["run"]["id"], args.get("take_over") or "")
        refuse_foreign(held)
        told = [f"{describe(one)}: its run is taken for dead" for one in held]
        now = datetime.now().astimezone()
        for number, batch in enumerate(plan.batches, 1):
            needed = self._estimate(plan, batch, standing, task_vars)
            told.append(f"batch {number}: {', '.join(batch)}: {needed}")
            if number == 1 and not self._task.check_mode:
                refuse_outside(self._window(now), now, needed, where="batch 1")
        if not self._task.check_mode:
            begun = Outcome.of(args["run"]["id"], plan.digest(), plan.lock_digest, plan.batches)
            change_outcome(Path(args["run"]["dir"]), lambda _: begun)
        return told

    def _gate_batch(self, plan, task_vars):
        args, batch = self._task.args, list(self._task.args["batch"])
        number = next((n for n, one in enumerate(plan.batches, 1) if set(one) & set(batch)), 0)
        where = f"batch {number} ({', '.join(batch)})"
        if self._task.check_mode:
            return []
        outcome = load_outcome(Path(args["run"]["dir"]))
        # An unreachable host does not count as failed where Ansible decides whether to go on.
        left = unsettled_before(outcome, batch) if outcome else ()
        if left:
            raise RunbookError(
                where=where,
                observed=f"{', '.join(left)} of an earlier batch did not end well",
                expected="every host of the earlier batches done",
                next_step="This batch was not begun. See the table of outcomes for what to do.",
            )
        now = datetime.now().astimezone()
        needed = self._estimate(plan, batch, _standing(batch, task_vars["hostvars"]), task_vars)
        refuse_outside(self._window(now), now, needed, where=where)
        return self._capacity(where, batch, task_vars)

    def _capacity(self, where, batch, task_vars):
        """Ask the replicas that this batch leaves alone whether they serve; those that just changed included."""
        args = self._task.args
        min_up, deadline = int(args["min_up"]), time.monotonic() + int(args["wait_s"])
        if min_up <= 0:
            return []
        others = [nodes for nodes in args["fleet"]["replicas"] if not set(nodes) & set(batch)]
        while True:
            healthy = [nodes for nodes in others if self._healthy(nodes[0], task_vars)]
            if len(healthy) >= min_up:
                return [f"{where}: {len(healthy)} other replicas answer, provision_min_up is {min_up}"]
            if time.monotonic() >= deadline:
                break
            time.sleep(_ASK_EVERY_S)
        silent = [nodes[0] for nodes in others if nodes not in healthy]
        raise RunbookError(
            where=where,
            observed=f"{len(healthy)} other replicas answer /health"
            + (f"; not those of {', '.join(silent)}" if silent else ""),
            expected=f"provision_min_up {min_up}",
            next_step="This batch was not begun. Start what was changed with playbooks/serve.yml, then run again.",
        )

    def _healthy(self, head, task_vars):
        address = task_vars["hostvars"][head]["engine_address"]
        answer = self._execute_module(
            module_name="ansible.builtin.uri",
            module_args={"url": f"http://{address}:{self._task.args['port']}/health", "timeout": 5},
            task_vars=task_vars,
        )
        return answer.get("status") == 200

    def _window(self, now):
        args = self._task.args
        return parse_window(str(args.get("window_start") or ""), str(args.get("window_end") or ""), now)

    def _estimate(self, plan, batch, standing, task_vars):
        everywhere = _standing(task_vars["hostvars"], task_vars["hostvars"])
        measured = {host: facts.durations for host, facts in everywhere.items() if facts}
        steps = {}
        for host in batch:
            facts = standing.get(host)
            planned = {item.role for item in plan.hosts[host]}
            left = (facts.interrupted, facts.begun) if facts and facts.state != "done" else ((), ())
            steps[host] = due(planned, self._task.args["roles"], *left)
        return estimate(steps, measured)


def _standing(hosts, hostvars):
    """Return host to what its snapshot says of its transaction; hosts without a snapshot are left out."""
    found = {}
    for host in hosts:
        taken = (hostvars[host].get("__host_snapshot_taken") or {}).get("snapshot")
        if taken:
            found[host] = read_snapshot(dict(taken), f"snapshot of {host}").snapshot.transaction
    return found
