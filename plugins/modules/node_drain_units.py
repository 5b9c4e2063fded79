#!/usr/bin/python
"""Take units out of service for a change and put them back to what they were."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_drain_units
short_description: Stop and disable units, and put them back to what they were
description:
  - With O(state=stopped) what each unit is now is written down on the host first, then the units are stopped and
    disabled, so that a reboot in between does not bring one back. What an earlier run wrote down is kept, so a run
    that takes up a killed one knows how things were before either.
  - With O(state=restored) the units are enabled and started as was written down, and the record is removed.
  - A unit that is not on the host is passed over.
options:
  units:
    description: Units to stop, in this order.
    type: list
    elements: str
    default: []
  state:
    description: What is wanted.
    type: str
    choices: [stopped, restored]
    required: true
  leave:
    description: Units that are not put back here, because somebody else starts them.
    type: list
    elements: str
    default: []
  record:
    description: File on the host that remembers what the units were; without it nothing is written down.
    type: path
  run_id:
    description: The run that asks, for the record.
    type: str
    default: ""
  timeout_s:
    description: Seconds one command of systemd may take; more than the longest stop of a unit.
    type: int
    default: 180
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says what would be stopped or put back.
  diff_mode:
    support: none
    description: Nothing to show.
"""

EXAMPLES = r"""
- name: Stop what uses the GPUs
  node_drain_units:
    state: stopped
    units: [kimi-engine.service, nvidia-dcgm.service]
    record: /var/lib/kimi-runbook/drained-units.json
    run_id: "{{ kimi_run.id }}"
"""

RETURN = r"""
acted:
  description: What was done, one command of systemctl per entry, in order.
  returned: success
  type: list
missing:
  description: Units of the record that are no longer on the host.
  returned: success
  type: list
"""

import os
import subprocess

from ansible.module_utils import command_run
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_record import SCHEMA_VERSION, read_record, write_record

_PROPERTIES = ("LoadState", "ActiveState", "UnitFileState")
_RUNS = ("active", "activating", "reloading", "deactivating")


def parse_states(output, units):
    """Return ``{unit: {property: value}}`` from ``systemctl show``, which answers unit by unit in the order asked."""
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in output.split("\n\n")]
    found = [block for block in blocks if block]
    return dict(zip(units, found))


def as_found(states):
    """Return what to write down of the units that are on the host: whether each runs and is enabled."""
    return {
        unit: {"active": state["ActiveState"] in _RUNS, "enabled": state["UnitFileState"] == "enabled"}
        for unit, state in states.items()
        if state["LoadState"] == "loaded"
    }


def to_stop(units, found):
    """Return the commands that stop and disable units, in order; empty where all is so."""
    stops = [["stop", unit] for unit in units if found.get(unit, {}).get("active")]
    return stops + [["disable", unit] for unit in units if found.get(unit, {}).get("enabled")]


def to_restore(recorded, found, leave):
    """Return the commands that put units back as recorded, the last stopped first; empty where all is so."""
    commands = []
    for unit, was in reversed(list(recorded.items())):
        if unit in leave or unit not in found:
            continue
        now = found[unit]
        if was["enabled"] and not now["enabled"]:
            commands.append(["enable", unit])
        if was["active"] and not now["active"]:
            commands.append(["start", unit])
    return commands


class Systemctl:
    """systemctl with a limit on its time, whose failures end the module with the reason."""

    def __init__(self, module):
        self._module = module

    def run(self, *words):
        """Run one command and return its output."""
        limit = self._module.params["timeout_s"]
        try:
            done = command_run.run(["systemctl", *words], limit)
        except subprocess.TimeoutExpired:
            self._module.fail_json(
                msg=f"systemctl {' '.join(words)}: no end after {limit} s, expected one. Read systemctl status and "
                "systemctl list-jobs on this host, then run again: what the units were before is remembered."
            )
        except OSError as error:
            self._module.fail_json(msg=f"systemctl: {error.strerror}, expected a host that runs systemd.")
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["no output"])[0]
            self._module.fail_json(
                msg=f"systemctl {' '.join(words)}: exit {done.returncode} ({said}), expected 0. Read journalctl -u "
                f"{words[-1]} on this host, then run again: what the units were before is remembered."
            )
        return done.stdout

    def found(self, units):
        """Return what the units are now, those on the host only."""
        if not units:
            return {}
        states = parse_states(self.run("show", f"--property={','.join(_PROPERTIES)}", "--", *units), units)
        if len(states) != len(units):
            self._module.fail_json(msg=f"systemctl show: answers for {len(states)} units, expected {len(units)}.")
        return as_found(states)


def main():
    """Ask, write down, stop; or read, put back, forget."""
    module = AnsibleModule(
        argument_spec={
            "units": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["stopped", "restored"], "required": True},
            "leave": {"type": "list", "elements": "str", "default": []},
            "record": {"type": "path"},
            "run_id": {"type": "str", "default": ""},
            "timeout_s": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    path, systemctl = module.params["record"], Systemctl(module)
    try:
        recorded = read_record(path).get("units", {}) if path else {}
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    missing = []
    if module.params["state"] == "stopped":
        units = list(dict.fromkeys(module.params["units"]))
        found = systemctl.found(units)
        commands = to_stop(units, found)
        wanted = {**found, **recorded}  # what an earlier run wrote down came before what is there now
        if path and wanted != recorded and not module.check_mode:
            write_record(path, {"schema_version": SCHEMA_VERSION, "run_id": module.params["run_id"], "units": wanted})
    else:
        found = systemctl.found(list(recorded))
        missing = [unit for unit in recorded if unit not in found]
        commands = to_restore(recorded, found, module.params["leave"])
    if not module.check_mode:
        for command in commands:
            systemctl.run(*command)
        if module.params["state"] == "restored" and path and os.path.exists(path):
            os.unlink(path)
    module.exit_json(changed=bool(commands), acted=[" ".join(words) for words in commands], missing=missing)


if __name__ == "__main__":
    main()
