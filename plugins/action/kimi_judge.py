"""Judge every host's snapshot in one process, print one table, write findings and plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from kimi_runbook.errors import RunbookError
from kimi_runbook.findings import FLEET, left_behind, unsettled
from kimi_runbook.judge import examine_fleet
from kimi_runbook.lock import parse_lock
from kimi_runbook.plan import build_plan, render_findings_table
from kimi_runbook.snapshot_files import read_snapshot
from kimi_runbook.transaction.batching import batches
from kimi_runbook.transaction.state import is_unfinished


def _write(path, value):
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class ActionModule(ActionBase):
    """Arguments: run, lock, batches, settled_roles, hosts. Returns plan, findings, ``provision`` and ``fleet``.

    Fails on a stop. ``hosts`` names those to judge in the middle of their change, where what stands in their state
    files is this run's own; then nothing fails, and ``flaws`` says per host what is not as it must be.
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Compare, write, print; a stop code ends the run before anything is changed."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        hosts = list(args.get("hosts") or task_vars["ansible_play_hosts_all"])
        hostvars = task_vars["hostvars"]
        answering = set(task_vars["ansible_play_hosts"])
        raw = {host: dict(hostvars[host]["__host_snapshot_taken"]["snapshot"]) for host in hosts if host in answering}
        if args.get("hosts"):
            raw = {host: {**taken, "transaction": None} for host, taken in raw.items()}
        missing = {host: _why(hostvars[host]) for host in hosts if host not in raw}
        expected = {host: dict(hostvars[host]["kimi_expected"]) for host in raw}
        expected.update({host: {"host": host, "address": hostvars[host]["engine_address"]} for host in missing})
        lock = parse_lock(args["lock"], "the run's lock")
        read = {host: read_snapshot(raw[host], f"snapshot of {host}") for host in hosts if host in raw}
        snapshots = {host: read[host].snapshot if host in read else None for host in hosts}
        judged = examine_fleet(
            snapshots, expected, lock, missing=missing, flaws={host: one.flaws for host, one in read.items()}
        )
        findings = judged.findings
        plan = build_plan(args["run"]["id"], findings, lock, (hosts,))
        provision = [host for host in hosts if any(item.role != "engine" for item in plan.hosts[host])]
        fleet = _fleet(snapshots, hostvars)
        try:
            plan = replace(
                plan,
                batches=batches(
                    provision,
                    args["batches"],
                    replicas=fleet["replicas"],
                    domains=fleet["domains"],
                    serving=fleet["serving"],
                    min_up=int(args.get("min_up") or 0),
                    lenient=True,
                ),
            )
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error

        run_dir = Path(args["run"]["dir"])
        # A later look of the same run does not overwrite what was found and planned at first.
        look = len(list(run_dir.glob("findings*.json"))) + 1
        suffix = f"-{look}" if look > 1 else ""
        _write(run_dir / f"snapshots{suffix}.json", raw)
        _write(run_dir / f"expected{suffix}.json", expected)
        _write(run_dir / f"findings{suffix}.json", [finding.to_json() for finding in findings])
        _write(run_dir / f"plan{suffix}.json", plan.to_json())
        Display().display(
            render_findings_table(snapshots, findings, lock, judged.coverage)
            + f"\nWritten to {run_dir}/findings{suffix}.json and plan{suffix}.json"
        )

        if args.get("hosts"):
            return {**result, "changed": False, "plan": plan.to_json(), "flaws": _flaws(findings, args, hosts)}
        stops = [finding for finding in findings if finding.severity == "stop"] + left_behind(findings)
        if stops:
            raise AnsibleActionFail("\n".join(map(_sentence, stops)) + ("" if look > 1 else "\nNothing was changed."))
        unfinished = unsettled(findings, args["settled_roles"])
        if unfinished:
            raise AnsibleActionFail("Not settled after the change:\n" + "\n".join(map(_sentence, unfinished)))
        return {
            **result,
            "changed": False,
            "plan": plan.to_json(),
            "findings": [finding.to_json() for finding in findings],
            "provision": [host for batch in plan.batches for host in batch],
            "fleet": fleet,
        }


def _flaws(findings, args, hosts):
    """Return host to the sentences about what stops it or is left to do there; what is the fleet's is every host's."""
    found = [finding for finding in findings if finding.severity == "stop"] + left_behind(findings)
    found += unsettled(findings, args["settled_roles"])
    flaws = {}
    for finding in found:
        for host in hosts if finding.host == FLEET else [finding.host]:
            flaws.setdefault(host, []).append(_sentence(finding))
    return flaws


def _fleet(snapshots, hostvars):
    """Return the engines' nodes, which of them serve now, and the NVLink domains: what batches must respect."""
    replicas = []
    for host in snapshots:
        nodes = [str(node) for node in hostvars[host].get("kimi_replica") or [host]]
        if host in nodes and nodes not in replicas:
            replicas.append(nodes)
    return {
        "replicas": replicas,
        "serving": [nodes for nodes in replicas if all(_serves(snapshots.get(node)) for node in nodes)],
        "domains": {
            host: str(hostvars[host]["nvlink_domain"]) for host in snapshots if hostvars[host].get("nvlink_domain")
        },
    }


def _serves(snapshot):
    container = snapshot and snapshot.container
    return bool(container and container.running and not is_unfinished(snapshot.transaction))


def _why(variables):
    """Return why a host has no snapshot: the failure of its snapshot task, or that it was not reached."""
    taken = variables.get("__host_snapshot_taken") or {}
    return str(taken["msg"]) if taken.get("failed") and not taken.get("unreachable") else "unreachable"


def _sentence(finding):
    return f"{finding.host}: {finding.code}: {finding.observed}, expected {finding.expected}. {finding.next_step}"
