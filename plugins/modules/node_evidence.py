#!/usr/bin/python
"""Ask a node for everything that explains a failure, and say which questions got no answer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_evidence
short_description: Collect what explains the state of a node
description:
  - Runs every given command with a limit on time and size and returns what they printed. A command that cannot be run
    is returned with the reason, so the rest is still kept; fails only when nothing at all could be had.
options:
  parts:
    description: Commands, each with C(name) and C(argv).
    type: list
    elements: dict
    required: true
  timeout_s:
    description: Seconds any one command may take.
    type: int
    default: 60
  limit_kib:
    description: KiB kept of one command's output, its end.
    type: int
    default: 4096
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
- name: Collect evidence
  node_evidence:
    parts:
      - {name: kernel.log, argv: [journalctl, --dmesg]}
"""

RETURN = r"""
parts:
  description: One row per part - C(name), C(text) (null when it could not be had) and C(reason).
  returned: success
  type: list
"""

import subprocess

from ansible.module_utils.basic import AnsibleModule

NOT_RUNNING = 3  # systemctl status of a unit that is not running: an answer, not a failure


def ask(name, argv, timeout_s, limit, run=subprocess.run):
    """Return one part: what the command printed, or why it printed nothing of use."""
    try:
        done = run(argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "text": None, "reason": f"no answer within {timeout_s} s"}
    except OSError as error:
        return {"name": name, "text": None, "reason": str(error)}
    if done.returncode not in (0, NOT_RUNNING):
        return {
            "name": name,
            "text": None,
            "reason": f"exit {done.returncode}: {done.stderr.strip() or done.stdout.strip()}",
        }
    cut = len(done.stdout) - limit
    text = done.stdout if cut <= 0 else f"[{cut} characters before this were left out]\n{done.stdout[-limit:]}"
    return {"name": name, "text": text, "reason": ""}


def main():
    """Ask for every part."""
    module = AnsibleModule(
        argument_spec={
            "parts": {"type": "list", "elements": "dict", "required": True},
            "timeout_s": {"type": "int", "default": 60},
            "limit_kib": {"type": "int", "default": 4096},
        },
        supports_check_mode=True,
    )
    params = module.params
    parts = [
        ask(part["name"], part["argv"], params["timeout_s"], params["limit_kib"] * 1024) for part in params["parts"]
    ]
    if all(part["text"] is None for part in parts):
        reasons = "; ".join(f"{part['name']}: {part['reason']}" for part in parts)
        module.fail_json(
            msg=f"no evidence could be had: {reasons}. Expected at least one part; look at the node by hand."
        )
    module.exit_json(changed=False, parts=parts)


if __name__ == "__main__":
    main()
