#!/usr/bin/python
"""Tell a rank that was started together with the others from one that started alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_start_mark
short_description: Remember and recognise the start of all ranks of an engine
description:
  - A rank that restarts alone - after a crash, a reboot or a restart of Docker - cannot join the others again, yet its
    unit looks healthy. Given O(start_id), the module notes the unit's present start under /run, which is empty after a
    reboot. Without, it says whether the unit still runs as it was started then.
  - Touches neither the unit nor any configuration, so it never reports a change.
options:
  unit:
    description: Systemd unit of this node's rank.
    type: str
    required: true
  start_id:
    description: What all ranks were started by, the same on each; empty to ask.
    type: str
    default: ""
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Asks only.
  diff_mode:
    support: none
    description: Nothing to show.
"""

EXAMPLES = r"""
- name: Ask whether this rank was started together with the others
  engine_start_mark:
    unit: kimi-engine.service
"""

RETURN = r"""
active:
  description: Whether the unit runs.
  returned: always
  type: bool
joint:
  description: Whether the unit runs as it was started when the mark was made.
  returned: always
  type: bool
start_id:
  description: What the marked start was part of; empty where there is no mark.
  returned: always
  type: str
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule

FOLDER = "/run/kimi-runbook"


def judge(mark, state, invocation):
    """Return ``active``, ``joint`` and ``start_id`` from the mark and what systemd says of the unit."""
    active = state == "active"
    joint = active and bool(invocation) and mark.get("invocation") == invocation
    return {"active": active, "joint": joint, "start_id": mark.get("start_id", "")}


def main():
    """Ask systemd, read the mark, and write it when told to."""
    module = AnsibleModule(
        argument_spec={"unit": {"type": "str", "required": True}, "start_id": {"type": "str", "default": ""}},
        supports_check_mode=True,
    )
    unit, start_id = module.params["unit"], module.params["start_id"]

    def show(prop):
        return module.run_command(["systemctl", "show", "--value", "--property", prop, unit], check_rc=True)[1].strip()

    path = os.path.join(FOLDER, f"{unit}.start.json")
    invocation = show("InvocationID")
    mark = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            mark = json.load(file)
    if start_id and not module.check_mode:
        mark = {"start_id": start_id, "invocation": invocation}
        os.makedirs(FOLDER, mode=0o755, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(mark, file)
    module.exit_json(changed=False, **judge(mark, show("ActiveState"), invocation))


if __name__ == "__main__":
    main()
