#!/usr/bin/python
"""Await the engine's readiness and notice at once when this node's rank gives up."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_wait
short_description: Await an engine's health endpoint with an eye on this node's unit
description:
  - Returns when the health endpoint of the head answers 200, or when the round is over with C(ready) false. Fails as
    soon as this node's unit has failed, or was restarted by systemd, or when the time is up - with the first error
    this start printed, because the last line of an engine's log is almost never the cause.
options:
  url:
    description: Health endpoint of the head.
    type: str
    required: true
  unit:
    description: Systemd unit of this node's rank.
    type: str
    required: true
  timeout_s:
    description: Seconds to wait at most, all rounds together.
    type: int
    required: true
  round_s:
    description: Seconds this round may take.
    type: int
    required: true
  elapsed_s:
    description: Seconds the rounds before this one took.
    type: int
    default: 0
  unit_start:
    description: Start of the unit the first round saw, from its result; empty in the first round.
    type: str
    default: ""
  poll_s:
    description: Seconds between two looks.
    type: float
    default: 1.0
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
- name: Await readiness
  engine_wait:
    url: http://192.0.2.11:8000/health
    unit: kimi-engine.service
    timeout_s: 5400
    round_s: 30
"""

RETURN = r"""
ready:
  description: Whether the engine is ready.
  returned: success
  type: bool
unit_start:
  description: Start of the unit that was waited for, for the next round.
  returned: success
  type: str
waited_s:
  description: Seconds from the first look to readiness.
  returned: success
  type: float
ready_at:
  description: Wall time in seconds of the look that found it ready; none while it is not.
  returned: success
  type: float
became_ready:
  description: Whether an earlier look of this wait found it not ready, so that C(ready_at) is when it became ready.
  returned: success
  type: bool
"""

import re
import time
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

# How the engine writes an error (facts: vLLM prefixes every record, a bare traceback has no prefix).
_ERROR = re.compile(r"\bERROR\b|^\w*(Error|Exception): |Traceback \(most recent call last\)|docker: Error")


_TRACEBACK = re.compile(r"^(?P<prefix>.*?)Traceback \(most recent call last\)")


def first_error(log):
    """Return the first error a log reports, a traceback by its exception, or the last line of a log without any."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    at = next((number for number, line in enumerate(lines) if _ERROR.search(line)), None)
    if at is None:
        return lines[-1] if lines else "no output"
    # A record such as "WorkerProc failed to start." only announces the traceback that follows it.
    for number, line in enumerate(lines[at : at + 3], start=at):
        traceback = _TRACEBACK.match(line)
        if traceback:
            return _exception(lines[number + 1 :], len(traceback["prefix"])) or line
    return lines[at]


def _exception(lines, prefix):
    """Return the exception that ends a traceback, with its first line of text where that stands on the next line."""
    for number, line in enumerate(lines):
        text = line[prefix:]
        if text and not text[0].isspace():
            following = lines[number + 1][prefix:].strip() if number + 1 < len(lines) else ""
            return f"{text} {following}".strip() if text.endswith(":") else text
    return ""


def healthy(url):
    """Return whether the endpoint answers 200 now, and what it answered otherwise."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 (the URL comes from the inventory)
            return answer.status == 200, f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        return False, f"HTTP {error.code}"
    except OSError as error:
        return False, str(getattr(error, "reason", error))


class Unit:
    """One systemd unit, asked through systemctl and the journal."""

    def __init__(self, module, name, invocation):
        self._module = module
        self.name = name
        self.invocation = invocation or self.show("InvocationID")

    def show(self, prop):
        """Return one property of the unit."""
        return self._module.run_command(["systemctl", "show", "--value", "--property", prop, self.name], check_rc=True)[
            1
        ].strip()

    def log(self):
        """Return what the unit printed since the start this wait belongs to."""
        match = [f"_SYSTEMD_INVOCATION_ID={self.invocation}"] if self.invocation else ["--unit", self.name]
        return self._module.run_command(["journalctl", "--output", "cat", "--no-pager", *match])[1]


def main():
    """Look, until ready, failed or out of time."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "unit": {"type": "str", "required": True},
            "timeout_s": {"type": "int", "required": True},
            "round_s": {"type": "int", "required": True},
            "elapsed_s": {"type": "int", "default": 0},
            "unit_start": {"type": "str", "default": ""},
            "poll_s": {"type": "float", "default": 1.0},
        },
        supports_check_mode=True,
    )
    url, timeout_s = module.params["url"], module.params["timeout_s"]
    unit = Unit(module, module.params["unit"], module.params["unit_start"])
    started = time.monotonic() - module.params["elapsed_s"]
    round_ends = time.monotonic() + module.params["round_s"]
    became_ready = module.params["elapsed_s"] > 0
    while True:
        ready, answer = healthy(url)
        waited = round(time.monotonic() - started, 1)
        state = unit.show("ActiveState")
        restarted = unit.show("InvocationID") != unit.invocation
        if state not in ("active", "activating") or restarted:
            what = "was restarted by systemd" if restarted else f"is {state}"
            module.fail_json(
                msg=f"{unit.name} {what} after {waited} s, expected it to run until ready. "
                f"First error of this start: {first_error(unit.log())}\n"
                f"Next: ansible-playbook playbooks/diagnose.yml, or journalctl -u {unit.name} on this host."
            )
        if ready:
            module.exit_json(
                changed=False,
                ready=True,
                waited_s=waited,
                unit_start=unit.invocation,
                ready_at=time.time(),
                became_ready=became_ready,
            )
        if waited > timeout_s:
            module.fail_json(
                msg=f"{url}: {answer} after {waited} s, expected 200 within {timeout_s} s (engine_ready_timeout_s); "
                f"{unit.name} is {state}. Last line: {(unit.log().strip().splitlines() or ['no output'])[-1]}\n"
                "Next: ansible-playbook playbooks/diagnose.yml"
            )
        if time.monotonic() > round_ends:
            module.exit_json(
                changed=False,
                ready=False,
                waited_s=waited,
                unit_start=unit.invocation,
                ready_at=None,
                became_ready=False,
            )
        became_ready = True
        time.sleep(module.params["poll_s"])


if __name__ == "__main__":
    main()
