#!/usr/bin/python
"""Await the registration of every GPU with its NVLink fabric."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_wait
short_description: Await Completed and Success in the Fabric block of every GPU
description:
  - Asks nvidia-smi until every GPU's Fabric block says State Completed and Status Success, and with O(domain) names a
    ClusterUUID and a CliqueId that are not zero. Fails at the deadline with what each GPU says. Until then CUDA fails
    with
    error 802, system not yet initialized.
options:
  timeout_s:
    description: Seconds to wait.
    type: int
    default: 300
  poll_s:
    description: Seconds between two looks.
    type: float
    default: 5.0
  gpus:
    description: GPUs the host has to show; 0 takes any number but none.
    type: int
    default: 0
  domain:
    description: Whether the GPUs have to belong to an NVLink domain over several hosts.
    type: bool
    default: false
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
- name: Await the fabric
  fabric_wait:
    timeout_s: 300
"""

RETURN = r"""
waited_s:
  description: Seconds until the fabric was ready.
  returned: success
  type: float
gpus:
  description: The Fabric block of every GPU.
  returned: success
  type: list
  elements: dict
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_probe import gpu_fabric, smi
from ansible.module_utils.host_probe import Probe

_ABSENT = ("", "0", "none", "00000000-0000-0000-0000-000000000000")


def not_ready(rows, gpus, domain):
    """Return in words what is not ready; empty when the fabric is.

    Args:
        rows: The Fabric blocks, ``state``, ``status``, ``cluster_uuid`` and ``clique_id`` of each; None without an
        answer.
        gpus: How many there have to be; 0 for any number but none.
        domain: Whether a ClusterUUID and a CliqueId are needed.
    """
    if not rows:
        return "nvidia-smi shows no GPU with a Fabric block"
    if gpus and len(rows) != gpus:
        return f"{len(rows)} GPUs have a Fabric block, {gpus} are there to have one"
    wrong = []
    for row in rows:
        state, status = row["state"] or "unknown", row["status"] or "unknown"
        if (state.lower(), status.lower()) != ("completed", "success"):
            wrong.append(f"GPU {row['index']} {state}/{status}")
        elif domain and any((row[key] or "").lower() in _ABSENT for key in ("cluster_uuid", "clique_id")):
            wrong.append(f"GPU {row['index']} ClusterUUID {row['cluster_uuid']}, CliqueId {row['clique_id']}")
    return ", ".join(wrong)


def look():
    """Return ``(Fabric blocks, number of GPUs, what nvidia-smi complained of)``."""
    probe = Probe()
    rows = gpu_fabric(probe)
    asked = smi(probe)
    complaint = "; ".join(f"{one['probe']}: {one['message']}" for one in probe.errors) or asked["message"]
    return rows, len(asked["gpus"]), complaint


def main():
    """Look until ready or out of time."""
    module = AnsibleModule(
        argument_spec={
            "timeout_s": {"type": "int", "default": 300},
            "poll_s": {"type": "float", "default": 5.0},
            "gpus": {"type": "int", "default": 0},
            "domain": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    started = time.monotonic()
    while True:
        rows, count, complaint = look()
        wrong = not_ready(rows, params["gpus"] or count, params["domain"])
        waited = round(time.monotonic() - started, 1)
        if not wrong:
            module.exit_json(changed=False, waited_s=waited, gpus=rows)
        if waited >= params["timeout_s"]:
            module.fail_json(
                msg=f"NVLink fabric after {waited} s: {wrong}{f' ({complaint})' if complaint else ''}; expected "
                f"Completed/Success on every GPU within {params['timeout_s']} s (fabric_services_timeout_s). "
                "Until then CUDA "
                "programs fail with error 802, system not yet initialized.\nNext: journalctl -u "
                "nvidia-fabricmanager and "
                "nvidia-smi -q (Fabric) on this host; on HGX B200 and B300 also lsmod for ib_umad, on NVL72 the switch "
                "controller (NMX)."
            )
        time.sleep(min(params["poll_s"], max(0.05, params["timeout_s"] - waited)))


if __name__ == "__main__":
    main()
