#!/usr/bin/python
"""Note when a drained engine gives its first good answer again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_first_answer
short_description: Note the first good answer after a drain, and when the engine was started
description:
  - Where M(engine_drain) left a note of the last good answer, asks the engine until it answers well and adds that
    moment to the note, so that a run that takes up a killed one tells the same gap. Without a note nothing is asked.
  - A good answer is 200 from C(/health) and the model's name in C(/v1/models). No tokens are asked for.
  - Changes no configuration, so it never reports a change.
options:
  url:
    description: Address of the engine's API, without a path.
    type: str
    required: true
  model:
    description: Model name the engine lists when it answers well.
    type: str
    required: true
  unit:
    description: Systemd unit of this node's rank.
    type: str
    required: true
  mark:
    description: File on the host that remembers the last good answer.
    type: path
    required: true
  reboot:
    description: File on the host that remembers how long its reboot took.
    type: path
    required: true
  timeout_s:
    description: Seconds to ask at most.
    type: int
    default: 60
  poll_s:
    description: Seconds between two looks.
    type: float
    default: 0.5
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Asks nothing and notes nothing.
  diff_mode:
    support: none
    description: Nothing to show.
"""

EXAMPLES = r"""
- name: Note the first good answer
  engine_first_answer:
    url: http://192.0.2.11:8000
    model: kimi-k3
    unit: kimi-engine.service
    mark: /var/lib/kimi-runbook/service-gap.json
    reboot: /var/lib/kimi-runbook/reboot.json
"""

RETURN = r"""
mark:
  description: The note with C(first_answer_at), C(unit_started_at) and C(rebooted); empty where nothing was drained.
  returned: success
  type: dict
reboot_s:
  description: Seconds this host's reboot took; none where no run noted one.
  returned: success
  type: float
"""

import subprocess
import time

from ansible.module_utils import command_run
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.engine_answer import boot_of, wall_time_of, why_no_good_answer
from ansible.module_utils.host_record import read_record, write_record


def unit_started_at(unit):
    """Return the wall time at which the unit's process was started in this boot, None where systemd does not say."""
    try:
        done = command_run.run(["systemctl", "show", "--value", "--property=ExecMainStartTimestampMonotonic", unit], 10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return wall_time_of(int(text)) if text.isdigit() and int(text) > 0 else None


def main():
    """Read the note, ask until the answer is good, complete the note."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "unit": {"type": "str", "required": True},
            "mark": {"type": "path", "required": True},
            "reboot": {"type": "path", "required": True},
            "timeout_s": {"type": "int", "default": 60},
            "poll_s": {"type": "float", "default": 0.5},
        },
        supports_check_mode=True,
    )
    url, path, timeout_s = module.params["url"].rstrip("/"), module.params["mark"], module.params["timeout_s"]
    try:
        mark, reboot_s = read_record(path), read_record(module.params["reboot"]).get("reboot_s")
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    if not mark or "first_answer_at" in mark or module.check_mode:
        module.exit_json(changed=False, mark=mark if "first_answer_at" in mark else {}, reboot_s=reboot_s)
    started = time.monotonic()
    while True:
        why = why_no_good_answer(url, module.params["model"], 5)
        if not why:
            break
        if time.monotonic() - started > timeout_s:
            module.fail_json(
                msg=f"{url}: {why}, {timeout_s} s after readiness; expected 200 from /health and "
                f"{module.params['model']} in /v1/models. Next: ansible-playbook playbooks/diagnose.yml"
            )
        time.sleep(module.params["poll_s"])
    mark = {
        **mark,
        "first_answer_at": time.time(),
        "unit_started_at": unit_started_at(module.params["unit"]),
        "rebooted": boot_of() != mark["boot"],
    }
    write_record(path, mark)
    module.exit_json(changed=False, mark=mark, reboot_s=reboot_s)


if __name__ == "__main__":
    main()
