#!/usr/bin/python
"""Ask a node for everything that explains a failure, and say which questions got no answer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_evidence
short_description: Collect what explains the state of a node
description:
  - Asks for every part in order of importance, each within a limit on time and size, all within limits for the whole,
    and returns what was found. A part that cannot be had is returned with the reason, and one that was cut or ended at
    its limit is labelled, so the rest is still kept.
  - What it returns is not redacted. The action plugin C(kimi_evidence) runs it and writes only what may be written.
options:
  parts:
    description:
      - Rows with C(name) and one of C(argv) (a command), C(file) (a path or glob), C(url) (a page on this host) or
        C(processes) (a regular expression for command lines).
      - Each may have C(priority) (1 first, 5 unless given), C(timeout_s), C(limit_kib), C(format), C(needs) (programs
        and files without which there is nothing to ask), C(stderr) (whether it belongs to the text) and C(exit)
        (further exit codes that are an answer).
    type: list
    elements: dict
    required: true
  timeout_s:
    description: Seconds any one part may take.
    type: int
    default: 60
  limit_kib:
    description: KiB kept of one part.
    type: int
    default: 4096
  total_s:
    description: Seconds all parts together may take.
    type: int
    default: 300
  total_kib:
    description: KiB kept of all parts together.
    type: int
    default: 32768
  mark:
    description: Regular expression of the lines that tell of a failure; the first stays when a part is cut.
    type: str
    default: ""
  env_shown:
    description: Regular expression of the variables of processes that may be shown; it has to match the whole name.
    type: str
    default: "(?!)"
  env_hidden:
    description: Regular expression of names that are never shown.
    type: str
    default: ""
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
      - {name: kernel.log, argv: [journalctl, --dmesg], priority: 2, limit_kib: 8192}
      - {name: nccl.conf, file: /etc/nccl.conf}
"""

RETURN = r"""
parts:
  description:
    - One row per part in the order of the question - C(name), C(format), C(data) (base64 of the zlib-compressed text,
      null when it could not be had), C(reason) (why), C(notes) (in what way it is partial) and C(skipped) (whether
      there was nothing to ask on this host).
  returned: success
  type: list
"""

import base64
import signal
import time
import zlib

from ansible.module_utils import evidence_probe as probe
from ansible.module_utils.basic import AnsibleModule

LEAST_S = 1  # with less time left a part is not begun
DEFAULT_PRIORITY = 5


def ask(part, timeout_s, keeper, variables=("(?!)", "")):
    """Return one part: what was found, or why nothing was.

    Args:
        part: One row of the question.
        timeout_s: Seconds it may take.
        keeper: Takes what is found.
        variables: Regular expressions of the variables of processes that may and may not be shown.
    """
    row = {"name": part["name"], "format": part.get("format") or "text", "text": None, "reason": "", "notes": []}
    row["skipped"] = False
    absent = [need for need in part.get("needs") or [] if not probe.available(need)]
    if absent:
        return dict(row, skipped=True, reason=f"not on this host: {', '.join(absent)}")
    begun = time.monotonic()
    try:
        notes, said = _find(part, timeout_s, keeper, variables)
    except (OSError, ValueError) as error:
        seconds = time.monotonic() - begun
        late = f" (after {seconds:.0f} s)" if seconds >= timeout_s else ""
        return dict(row, reason=f"{getattr(error, 'strerror', None) or error}{late}")
    if not keeper.total:
        return dict(row, reason="; ".join(notes) or said or "nothing printed")
    return dict(row, text=keeper.text(), notes=keeper.notes() + notes)


def _find(part, timeout_s, keeper, variables):
    """Feed the keeper from the part's source; return notes on what went wrong, and what standard error said."""
    if part.get("file"):
        probe.read_file(part["file"], keeper)
        return [], ""
    if part.get("url"):
        probe.read_page(part["url"], timeout_s, keeper)
        return [], ""
    if part.get("processes"):
        probe.read_processes(part["processes"], *variables, keeper)
        return [], ""
    rc, stderr = probe.run_command(part["argv"], timeout_s, keeper, bool(part.get("stderr")))
    if rc is None:
        return [f"ended at its limit of {timeout_s:.0f} s"], ""
    said = " ".join(stderr.split())[:500]
    if rc in (0, *(part.get("exit") or [])):
        return [], said
    return [f"exit {rc}: {said}".rstrip(": ")], said


def collect(params, clock=time.monotonic, asking=ask):
    """Return all parts in the order of the question, asked in order of importance within the limits of the whole."""
    begun, room = clock(), params["total_kib"] * 1024
    rows = {}
    for part in sorted(params["parts"], key=lambda row: int(row.get("priority") or DEFAULT_PRIORITY)):
        left = params["total_s"] - (clock() - begun)
        limit = min(int(part.get("limit_kib") or params["limit_kib"]) * 1024, room)
        if left < LEAST_S or limit <= 0:
            spent = f"{params['total_s']} s" if left < LEAST_S else f"{params['total_kib']} KiB"
            rows[part["name"]] = {
                "name": part["name"],
                "format": part.get("format") or "text",
                "text": None,
                "reason": f"not asked: all parts together may take {spent}, which more important ones did",
                "notes": [],
                "skipped": False,
            }
            continue
        keeper = probe.Keeper(limit, params["mark"] or None)
        timeout_s = min(float(part.get("timeout_s") or params["timeout_s"]), left)
        row = asking(part, timeout_s, keeper, (params["env_shown"], params["env_hidden"] or "(?!)"))
        rows[part["name"]] = row
        room -= len((row["text"] or "").encode("utf-8", errors="replace"))
    return [rows[part["name"]] for part in params["parts"]]


def packed(row):
    """Return a row with its text compressed: logs shrink to a tenth on the wire."""
    text = row.pop("text")
    data = None if text is None else base64.b64encode(zlib.compress(text.encode("utf-8", errors="replace"))).decode()
    return dict(row, data=data)


def main():
    """Ask for every part."""
    module = AnsibleModule(
        argument_spec={
            "parts": {"type": "list", "elements": "dict", "required": True},
            "timeout_s": {"type": "int", "default": 60},
            "limit_kib": {"type": "int", "default": 4096},
            "total_s": {"type": "int", "default": 300},
            "total_kib": {"type": "int", "default": 32768},
            "mark": {"type": "str", "default": ""},
            "env_shown": {"type": "str", "default": "(?!)"},
            "env_hidden": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, probe.end_all)
    names = [part.get("name") for part in module.params["parts"]]
    if None in names or len(set(names)) != len(names):
        module.fail_json(msg=f"parts are named {names}; expected one name for each. Correct evidence_extra_parts.")
    module.exit_json(changed=False, parts=[packed(row) for row in collect(module.params)])


if __name__ == "__main__":
    main()
