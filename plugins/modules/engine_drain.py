#!/usr/bin/python
"""Await that the engine has no request left, and remember when it last answered."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_drain
short_description: Await the end of the engine's requests, with a deadline
description:
  - Reads from the engine's C(/metrics) how many requests run and wait until there are none. Where nobody listens there
    is nothing to await. At the deadline the requests that are left are counted and either stop the run or are cut.
  - Then notes on the host when the engine last gave a good answer, so that the service gap can be told when it answers
    again. The note survives a reboot and a killed run, and a note of a gap that still lasts is kept.
  - Stops nothing itself and changes no configuration, so it never reports a change.
options:
  url:
    description: Address of the engine's API, without a path.
    type: str
    required: true
  model:
    description: Model name the engine lists when it answers well.
    type: str
    required: true
  deadline_s:
    description: Seconds the requests get.
    type: int
    required: true
  on_deadline:
    description: What follows when requests are left at the deadline, V(stop) the run or V(cut) them.
    type: str
    choices: [stop, cut]
    default: stop
  poll_s:
    description: Seconds between two looks.
    type: float
    default: 1.0
  answer_timeout_s:
    description: Seconds one answer of the engine may take.
    type: float
    default: 5.0
  mark:
    description: File on the host that remembers the last good answer.
    type: path
    required: true
  run_id:
    description: The run that drains, for the note.
    type: str
    required: true
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Looks once, waits for nothing and notes nothing.
  diff_mode:
    support: none
    description: Nothing to show.
"""

EXAMPLES = r"""
- name: Await the end of the running requests
  engine_drain:
    url: http://192.0.2.11:8000
    model: kimi-k3
    deadline_s: 600
    mark: /var/lib/kimi-runbook/service-gap.json
    run_id: "{{ kimi_run.id }}"
"""

RETURN = r"""
engine:
  description: Whether an engine listens.
  returned: success
  type: bool
left:
  description: Requests that run or wait still and will be cut; none where the engine does not say.
  returned: success
  type: int
waited_s:
  description: Seconds the wait took.
  returned: success
  type: float
last_answer_at:
  description: Wall time in seconds of the last good answer; none where the engine gave none.
  returned: success
  type: float
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.engine_answer import boot_of, get, refused, requests_in_flight, why_no_good_answer
from ansible.module_utils.host_record import SCHEMA_VERSION, write_record


def look(url, timeout_s):
    """Return whether anybody listens, how many requests are in flight (None: not told), and what was said instead."""
    try:
        status, body = get(f"{url}/metrics", timeout_s)
    except OSError as error:
        return not refused(error), None, str(getattr(error, "reason", error))
    if status != 200:
        return True, None, f"HTTP {status}"
    left = requests_in_flight(body)
    return True, left, "" if left is not None else "no vllm:num_requests_running"


def await_idle(url, deadline_s, poll_s, timeout_s, once):
    """Look until nothing is left, nobody listens or the time is up; return the last look and the seconds it took."""
    started = time.monotonic()
    while True:
        listens, left, said = look(url, timeout_s)
        waited = round(time.monotonic() - started, 1)
        if once or not listens or left == 0 or waited >= deadline_s:
            return listens, left, said, waited
        time.sleep(min(poll_s, max(deadline_s - waited, 0.05)))


def main():
    """Wait, apply the policy, note the last good answer."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "deadline_s": {"type": "int", "required": True},
            "on_deadline": {"type": "str", "choices": ["stop", "cut"], "default": "stop"},
            "poll_s": {"type": "float", "default": 1.0},
            "answer_timeout_s": {"type": "float", "default": 5.0},
            "mark": {"type": "path", "required": True},
            "run_id": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    url, deadline_s = module.params["url"].rstrip("/"), module.params["deadline_s"]
    timeout_s = module.params["answer_timeout_s"]
    listens, left, said, waited = await_idle(
        url, deadline_s, module.params["poll_s"], timeout_s, once=module.check_mode
    )
    if listens and left != 0 and module.params["on_deadline"] == "stop" and not module.check_mode:
        observed = f"{left} requests run or wait" if left is not None else f"GET /metrics: {said}"
        module.fail_json(
            msg=f"{url}: {observed} after {waited} s, expected none within {deadline_s} s (node_drain_deadline_s). "
            "The engine was not stopped; wait and run again, or cut them with -e node_drain_on_deadline=cut.",
            left=left,
            waited_s=waited,
        )
    last_answer_at = None
    if listens and not module.check_mode and not why_no_good_answer(url, module.params["model"], timeout_s):
        last_answer_at = time.time()
        mark = {
            "schema_version": SCHEMA_VERSION,
            "run_id": module.params["run_id"],
            "last_answer_at": last_answer_at,
            "boot": boot_of(),
            "requests_cut": left,
            "awaited_s": waited,
        }
        try:
            write_record(module.params["mark"], mark)
        except OSError as error:
            module.fail_json(
                msg=f"{module.params['mark']}: {error.strerror}, expected a file that can be written. The engine was "
                "not stopped; make room or correct the folder, then run again."
            )
    module.exit_json(
        changed=False, engine=listens, left=left if listens else 0, waited_s=waited, last_answer_at=last_answer_at
    )


if __name__ == "__main__":
    main()
