#!/usr/bin/python
"""Await the IMEX domain of an NVL72 tray."""

from __future__ import annotations

DOCUMENTATION = r"""
module: imex_wait
short_description: Await READY of this host's IMEX daemon, or of its whole domain
description:
  - Asks C(nvidia-imex-ctl -N -j) until this host's node is READY, or with O(domain) until every node is and all are
    connected. Convergence takes the better part of a minute after a start (aws/aws-parallelcluster#6996).
  - Fails at the deadline with the state of each node that is not ready.
options:
  address:
    description: This host's address in the node list.
    type: str
    required: true
  domain:
    description: Wait for every node of the domain, not for this one alone.
    type: bool
    default: false
  timeout_s:
    description: Seconds to wait.
    type: int
    default: 180
  poll_s:
    description: Seconds between two looks.
    type: float
    default: 5.0
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Only asks questions.
  diff_mode:
    support: none
    description: Nothing changes.
"""

EXAMPLES = r"""
- name: Await this tray
  imex_wait:
    address: 192.0.2.11
"""

RETURN = r"""
waited_s:
  description: Seconds until it was ready.
  returned: success
  type: float
status:
  description: The domain's status, C(UP), C(DEGRADED) or C(DOWN).
  returned: success
  type: str
"""

import json
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run
from ansible.module_utils.fabric_probe import imex_domain_of

_ASK_S = 30  # the daemon asks every other node, and one that is gone takes its time


def ask(command=run):
    """Return ``(the domain or None, why there is none)``; the domain as fabric_probe reads it."""
    try:
        done = command(["nvidia-imex-ctl", "-N", "-j"], _ASK_S)
        told = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-imex-ctl -N -j: {error}"
    if told is None:
        return None, f"nvidia-imex-ctl -N -j exits {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
    domain = imex_domain_of(told)
    return domain, "" if domain else "nvidia-imex-ctl -N -j names no nodes"


def not_ready(domain, address, whole):
    """Return in words what is not ready; empty when this node, or with ``whole`` every one, is READY and connected."""
    nodes = {node["host"]: node for node in domain["nodes"]}
    if address not in nodes:
        return f"the domain has {', '.join(str(host) for host in nodes) or 'no node'}, not {address}"
    counted = list(nodes.values()) if whole else [nodes[address]]
    wrong = [f"{node['host']} {node['status'] or 'unknown'}" for node in counted if node["status"] != "READY"]
    if whole:
        wrong += [f"{node['host']} - {peer}" for node in counted if node["status"] == "READY" for peer in node["apart"]]
    return ", ".join(wrong)


def main():
    """Look until ready or out of time."""
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "domain": {"type": "bool", "default": False},
            "timeout_s": {"type": "int", "default": 180},
            "poll_s": {"type": "float", "default": 5.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    started = time.monotonic()
    while True:
        domain, why = ask()
        wrong = why or not_ready(domain, params["address"], params["domain"])
        waited = round(time.monotonic() - started, 1)
        if not wrong:
            module.exit_json(changed=False, waited_s=waited, status=domain["status"])
        if waited >= params["timeout_s"]:
            module.fail_json(
                msg=f"IMEX after {waited} s: {wrong}; expected READY within {params['timeout_s']} s "
                "(fabric_services_imex_timeout_s). After an unclean stop the daemon waits for the nodes that "
                "had imported "
                "memory (/var/run/nvidia-imex/persist.dat), and node lists that differ keep it from starting.\nNext: "
                "nvidia-imex-ctl -N and journalctl -u nvidia-imex on this host; compare "
                "/etc/nvidia-imex/nodes_config.cfg over the domain."
            )
        time.sleep(min(params["poll_s"], max(0.05, params["timeout_s"] - waited)))


if __name__ == "__main__":
    main()
