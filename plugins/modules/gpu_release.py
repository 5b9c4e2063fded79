#!/usr/bin/python
"""Free the GPUs of everything that keeps them open, in order, and put it back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_release
short_description: Stop what holds the GPUs in order, prove that nothing does, unload and load the modules
description:
  - V(stopped) stops the units in the given order, each with its limit. A stop that hangs is escalated to SIGKILL and
    the unit is asked again. What ran is remembered under /run, so that a run after a killed one still starts it.
  - V(released) proves that nothing holds the modules (each reference count is what its loaded dependents explain)
    and unloads them in order. Where something does, nothing is unloaded and the holders come back by name and number.
  - V(loaded) loads the modules in order and starts, in reverse, what was stopped.
options:
  state:
    description: What to reach.
    type: str
    choices: [stopped, released, loaded]
    required: true
  units:
    description: Units in the order they are stopped, each with C(unit) and C(limit_s).
    type: list
    elements: dict
    default: []
  unload:
    description: Modules in the order they are unloaded, dependents first.
    type: list
    elements: str
    default: []
  load:
    description:
      - Modules in the order they are loaded, each with C(module). C(optional) ones may be missing; C(needs_vendor)
        names the vendor of a PCI device they need; C(if_loaded_before) loads only what V(released) took out.
    type: list
    elements: dict
    default: []
  timeout_s:
    description: Seconds the devices get to be free after the last stop.
    type: int
    default: 30
  memory:
    description: File that remembers what was stopped and unloaded; gone after a boot, which starts everything itself.
    type: path
    default: /run/kimi-runbook/gpu-released.json
  root:
    description: Root of the tree to look at; other than / answers commands from files.
    type: path
    default: /
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says what would be stopped, unloaded or loaded.
  diff_mode:
    support: none
    description: There is no text to compare.
"""

EXAMPLES = r"""
- name: Take the modules out
  gpu_release:
    state: released
    unload: [nvidia_uvm, nvidia]
"""

RETURN = r"""
released:
  description: With V(released), whether the modules are out.
  returned: success
  type: bool
holders:
  description: What keeps the devices open, as C(name (pid N) on /dev/nvidia0).
  returned: success
  type: list
references:
  description: Modules whose reference count no loaded module explains, with the count left over.
  returned: success
  type: dict
stopped:
  description: Units that were stopped.
  returned: success
  type: list
escalated:
  description: Units whose stop hung and was ended by SIGKILL.
  returned: success
  type: list
unloaded:
  description: Modules that were unloaded.
  returned: success
  type: list
loaded:
  description: Modules that were loaded.
  returned: success
  type: list
started:
  description: Units that were started again.
  returned: success
  type: list
missing:
  description: Optional modules that could not be loaded, with the reason.
  returned: success
  type: dict
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_probe import Probe
from ansible.module_utils.network_probe import open_devices

_LIMIT_S = 20  # of a question
_KILL_LIMIT_S = 10
_LOAD_LIMIT_S = 120  # loading initialises every GPU
_RUNNING = ("active", "activating", "reloading", "deactivating")


class Host:
    """One host: its units, modules and open devices."""

    def __init__(self, root, timeout_s, sleep=time.sleep):
        self.probe = Probe(root, timeout_s=_LIMIT_S, budget_s=24 * 3600)
        self.timeout_s = timeout_s
        self.sleep = sleep

    def running(self, units):
        """Return those of the units that run, in the given order, from one question."""
        if not units:
            return []
        answer = self.probe.command("systemctl", "show", "--property=Id,ActiveState,LoadState", *units, needed=True)
        if answer is None:
            raise OSError(f"systemctl does not answer: {self._last_error()}")
        states = {}
        for block in answer[1].split("\n\n"):
            fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
            if fields.get("LoadState") == "loaded":
                states[fields.get("Id")] = fields.get("ActiveState")
        return [unit for unit in units if states.get(unit) in _RUNNING]

    def stop(self, unit, limit_s):
        """Stop one unit; return whether it had to be killed.

        Raises:
            OSError: It runs on even so.
        """
        answer = self.probe.command("systemctl", "stop", unit, timeout_s=limit_s)
        if answer is not None and not self.running([unit]):
            return False
        self.probe.command("systemctl", "kill", "--signal=SIGKILL", unit, timeout_s=_KILL_LIMIT_S)
        # The first stop is still queued where it hung; this one waits for the same end.
        self.probe.command("systemctl", "stop", unit, timeout_s=_KILL_LIMIT_S)
        if self.running([unit]):
            raise OSError(f"{unit} runs on after stop ({limit_s} s) and SIGKILL")
        return True

    def start(self, unit):
        """Start one unit; OSError when it does not run."""
        answer = self.probe.command("systemctl", "start", unit, timeout_s=_LOAD_LIMIT_S)
        if answer is None or answer[0] != 0:
            raise OSError(f"{unit} does not start: {answer[2].strip()[-300:] if answer else self._last_error()}")

    def loaded(self, modules):
        """Return those of the modules that are loaded, in the given order."""
        return [name for name in modules if self.probe.path(f"/sys/module/{name}/refcnt").exists()]

    def references(self, modules):
        """Return ``{module: count}`` of references that no loaded module explains."""
        left = {}
        for name in modules:
            count = self.probe.number(f"/sys/module/{name}/refcnt") or 0
            surplus = count - len(self.probe.names(f"/sys/module/{name}/holders"))
            if surplus > 0:
                left[name] = surplus
        return left

    def holders(self):
        """Return what has a device open, as sentences; asked anew each time."""
        rows, _ = open_devices(Probe(self.probe.root, timeout_s=_LIMIT_S))
        return [f"{row['name']} (pid {row['pid']}) on {row['device']}" for row in rows]

    def wait_free(self, modules, clock=time.monotonic):
        """Return what is left of holders and references once nothing is, or time is up."""
        deadline = clock() + self.timeout_s
        while True:
            holders, references = self.holders(), self.references(modules)
            if not (holders or references) or clock() >= deadline:
                return holders, references
            self.sleep(0.5)

    def modprobe(self, name):
        """Load one module with what it needs; return what modprobe said when it failed, else None."""
        return self._told("modprobe", name)

    def rmmod(self, name):
        """Unload one module and nothing it needs, as modprobe would; return what rmmod said if it failed."""
        return self._told("rmmod", name)

    def _told(self, *argv):
        answer = self.probe.command(*argv, timeout_s=_LOAD_LIMIT_S, needed=True)
        if answer is None:
            return self._last_error()
        return None if answer[0] == 0 else (answer[2] or answer[1]).strip()[-300:] or f"exit {answer[0]}"

    def has_vendor(self, vendor):
        """Return whether a PCI device of a vendor is there."""
        places = self.probe.names("/sys/bus/pci/devices")
        return any(self.probe.line(f"/sys/bus/pci/devices/{place}/vendor") == vendor for place in places)

    def _last_error(self):
        return self.probe.errors[-1]["message"] if self.probe.errors else "no answer"


class Memory:
    """What was stopped and unloaded, kept outside the process."""

    def __init__(self, path):
        self.path = path
        self.units, self.modules = [], []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                kept = json.load(file)
            self.units, self.modules = kept["units"], kept["modules"]

    def add(self, units=(), modules=()):
        """Remember more; written before anything is done, so that a killed run is made up for."""
        self.units = list(dict.fromkeys([*self.units, *units]))
        self.modules = list(dict.fromkeys([*self.modules, *modules]))
        os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
        with open(f"{self.path}.new", "w", encoding="utf-8") as file:
            json.dump({"units": self.units, "modules": self.modules}, file)
        os.replace(f"{self.path}.new", self.path)

    def forget(self):
        """Everything is back."""
        if os.path.exists(self.path):
            os.remove(self.path)


def stop_all(host, memory, units, check):
    """Stop what runs, in order."""
    limits = {one["unit"]: int(one.get("limit_s", 30)) for one in units}
    running = host.running(list(limits))
    if running and not check:
        memory.add(units=running)
    escalated = [unit for unit in running if not check and host.stop(unit, limits[unit])]
    return {"changed": bool(running), "stopped": running, "escalated": escalated}


def release(host, memory, modules, check):
    """Unload in order once nothing holds them."""
    loaded = host.loaded(modules)
    holders, references = host.wait_free(loaded) if loaded else ([], {})
    result = {"released": not (holders or references), "holders": holders, "references": references, "unloaded": []}
    if not loaded or not result["released"] or check:
        return {"changed": bool(loaded) and result["released"], **result}
    memory.add(modules=loaded)
    for name in loaded:
        said = host.rmmod(name)
        if said is None and host.loaded([name]):
            said = "rmmod reported success, and it is still there"
        if said is not None:
            result.update(released=False, holders=[*host.holders(), f"{name}: {said}"])
            break
        result["unloaded"].append(name)
    return {"changed": bool(result["unloaded"]), **result}


def load(host, memory, rows, units, check):
    """Load in order, then start what was stopped."""
    wanted, missing = [], {}
    for row in rows:
        name = row["module"]
        if row.get("needs_vendor") and not host.has_vendor(row["needs_vendor"]):
            continue
        if row.get("if_loaded_before") and name not in memory.modules:
            continue
        if not host.loaded([name]):
            wanted.append(row)
    loaded = []
    for row in wanted if not check else ():
        said = host.modprobe(row["module"])
        if said is None:
            loaded += host.loaded([row["module"]])  # one that is built in or an alias shows up under no such name
        elif row.get("optional"):
            missing[row["module"]] = said
        else:
            raise OSError(f"module {row['module']} does not load: {said}")
    order = [one["unit"] for one in units]
    kept = [unit for unit in memory.units if unit in order]
    running = host.running(kept)
    due = [unit for unit in sorted(kept, key=order.index, reverse=True) if unit not in running]
    if not check:
        for unit in due:
            host.start(unit)
        memory.forget()
    required = [row["module"] for row in wanted if not row.get("optional")]
    return {
        "changed": bool(loaded or due or (check and required)),
        "loaded": loaded,
        "started": due,
        "missing": missing,
    }


def main():
    """Do what the state asks for."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["stopped", "released", "loaded"], "required": True},
            "units": {"type": "list", "elements": "dict", "default": []},
            "unload": {"type": "list", "elements": "str", "default": []},
            "load": {"type": "list", "elements": "dict", "default": []},
            "timeout_s": {"type": "int", "default": 30},
            "memory": {"type": "path", "default": "/run/kimi-runbook/gpu-released.json"},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    params = module.params
    host = Host(params["root"], params["timeout_s"])
    memory = Memory(params["memory"])
    try:
        if params["state"] == "stopped":
            result = stop_all(host, memory, params["units"], module.check_mode)
        elif params["state"] == "released":
            result = release(host, memory, params["unload"], module.check_mode)
        else:
            result = load(host, memory, params["load"], params["units"], module.check_mode)
    except OSError as error:
        module.fail_json(
            msg=f"{error}; expected {params['state']}. The host stays drained; what was stopped is named in "
            f"{params['memory']}: see systemctl status and fuser -v /dev/nvidia*, then run provision again.",
            holders=host.holders(),
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
