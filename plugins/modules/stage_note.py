#!/usr/bin/python
"""Write down on the host for which lock it was staged, and say whether it was for a given one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: stage_note
short_description: Remember for which lock a host was staged
description:
  - With O(run_id) notes that everything this lock needs of this host was fetched by that run; the notes of the locks
    before are kept, the newest O(keep) in all. Without, says whether that was done, and for which lock it was last.
  - A note says what was done and not that it is still there; that is proved by the role that fetches.
options:
  lock_digest:
    description: Digest of the lock.
    type: str
    required: true
  run_id:
    description: The run that staged; empty to ask.
    type: str
    default: ""
  needs:
    description: What the plan named when it was staged, for people who read the note.
    type: list
    elements: str
    default: []
  path:
    description: The note.
    type: path
    required: true
  keep:
    description: Locks that are remembered.
    type: int
    default: 5
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says whether a note would be written.
  diff_mode:
    support: none
    description: Nothing but the note changes.
"""

EXAMPLES = r"""
- name: Remember that this host is staged
  stage_note:
    lock_digest: "{{ kimi_plan.lock_digest }}"
    run_id: "{{ kimi_run.id }}"
    path: /var/lib/kimi-runbook/staged.json
"""

RETURN = r"""
staged:
  description: Whether the host was staged for this lock.
  returned: success
  type: bool
last:
  description: The newest note, C(lock_digest), C(run_id) and C(needs); empty where there is none.
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_record import SCHEMA_VERSION, read_record, write_record


def with_note(notes, note, keep):
    """Return the notes with one more, the newest last; the same notes when this lock was staged for the same before."""
    for known in notes:
        if known["lock_digest"] == note["lock_digest"] and known["needs"] == note["needs"]:
            return notes
    return [*(known for known in notes if known["lock_digest"] != note["lock_digest"]), note][-keep:]


def main():
    """Read the notes, add one when told to."""
    module = AnsibleModule(
        argument_spec={
            "lock_digest": {"type": "str", "required": True},
            "run_id": {"type": "str", "default": ""},
            "needs": {"type": "list", "elements": "str", "default": []},
            "path": {"type": "path", "required": True},
            "keep": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    path, digest, run_id = module.params["path"], module.params["lock_digest"], module.params["run_id"]
    try:
        notes = read_record(path).get("staged", [])
        note = {"lock_digest": digest, "run_id": run_id, "needs": module.params["needs"]}
        wanted = with_note(notes, note, module.params["keep"]) if run_id else notes
        if wanted != notes and not module.check_mode:
            write_record(path, {"schema_version": SCHEMA_VERSION, "staged": wanted})
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=wanted != notes,
        staged=any(known["lock_digest"] == digest for known in wanted),
        last=wanted[-1] if wanted else {},
    )


if __name__ == "__main__":
    main()
