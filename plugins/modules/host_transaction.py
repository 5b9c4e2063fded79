#!/usr/bin/python
"""Keep, on the host, whose change it is under and where that change stands."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_transaction
short_description: Take a host for one run and record each step of its change
description:
  - A host that is changed has a state file with the run, the step it stands at, why it failed, how long its steps
    took, and a lease with owner, age and expiry. It is replaced whole, so it is never half written, and a step is
    recorded before it begins, so a run killed at any moment is taken up where it was.
  - Two runs refuse each other. The same O(run), or O(take_over) with the name of a dead one, goes on; a lease that
    nobody renewed in time is taken, and named.
  - The file is this project's bookkeeping and no configuration of the host, so the module never reports a change.
options:
  action:
    description:
      - V(begin) takes the lease, V(step) records that O(step) begins and renews it, V(fail) and V(commit) end the
        change and give it back, V(look) only reads.
    type: str
    choices: [begin, step, fail, commit, look]
    required: true
  dir:
    description: Folder of the state file, on a file system that survives a reboot.
    type: path
    default: /var/lib/kimi-runbook
  run:
    description: The run that asks.
    type: str
    required: true
  owner:
    description: Who runs it, for the one who finds the lease.
    type: str
    default: ""
  take_over:
    description: A dead run whose lease is taken although it has not expired.
    type: str
    default: ""
  ttl_s:
    description: Seconds without renewal after which the lease expires; longer than the longest step.
    type: int
    default: 7200
  step:
    description: The step that begins.
    type: str
    default: ""
  reason:
    description: Why the step failed.
    type: str
    default: ""
  end:
    description: How the change ended, for the history.
    type: str
    choices: [done, rolled_back]
    default: done
  lock_digest:
    description: Digest of the lock the host is brought to.
    type: str
    default: ""
  plan_digest:
    description: Digest of the plan that is applied.
    type: str
    default: ""
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reads and judges the lease, writes nothing.
  diff_mode:
    support: none
    description: Nothing of the host's configuration changes.
"""

EXAMPLES = r"""
- name: Take the host
  host_transaction:
    action: begin
    run: 20261130T144501Z-7f3a
    owner: ops@desk

- name: Record that the driver's step begins
  host_transaction:
    action: step
    step: gpu_driver
    run: 20261130T144501Z-7f3a
"""

RETURN = r"""
transaction:
  description: What stands on the host now; null where nothing does.
  returned: always
  type: dict
interrupted:
  description: Steps that an earlier run had begun and not ended, before this call.
  returned: always
  type: list
  elements: str
begun:
  description: Steps that an unfinished run had begun, before this call.
  returned: always
  type: list
  elements: str
note:
  description: Whose lease was taken, and why that was right; empty when there was none.
  returned: always
  type: str
"""

from ansible.module_utils import redaction
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.transaction_file import Refused, apply, moment, view

ANSWERS = ("open", "failed", "unreadable")


def main():
    """Ask the file, change it, answer."""
    text = {"type": "str", "default": ""}
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["begin", "step", "fail", "commit", "look"], "required": True},
            "dir": {"type": "path", "default": "/var/lib/kimi-runbook"},
            "run": {"type": "str", "required": True},
            "owner": text,
            "take_over": text,
            "ttl_s": {"type": "int", "default": 7200},
            "step": text,
            "reason": text,
            "end": {"type": "str", "choices": ["done", "rolled_back"], "default": "done"},
            "lock_digest": text,
            "plan_digest": text,
        },
        required_if=[("action", "step", ("step",))],
        supports_check_mode=True,
    )
    params = {**module.params, "reason": redaction.shapes(module.params["reason"])}
    try:
        before, after, note = apply(params["dir"], params["action"], params, check=module.check_mode)
    except Refused as refusal:
        module.fail_json(msg=f"{params['dir']}/transaction.json: {refusal}", refused=True)
    except OSError as error:
        module.fail_json(
            msg=f"{params['dir']}/transaction.json: {params['action']}: {error.strerror or error}; expected a folder "
            "that can be written. The state on disk is the one before. Make room or correct its rights, run again."
        )
    unfinished = before if before is not None and before["state"] in ANSWERS else None
    module.exit_json(
        changed=False,
        transaction=view(after, moment()),
        interrupted=unfinished["interrupted"] if unfinished else [],
        begun=unfinished["begun"] if unfinished else [],
        note=note,
    )


if __name__ == "__main__":
    main()
