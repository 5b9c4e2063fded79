#!/usr/bin/python
"""Run the services of an NVLink fabric: of the driver's version, enabled, and started after the driver they serve."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_units
short_description: Enable and start the services of an NVLink fabric, and restart those that are older than the driver
description:
  - Refuses before anything is started when a package that must have the driver's version has another one than the
    driver that is loaded. The service would log that versions differ and end.
  - Starts in the given order what does not run. Restarts what runs a program that has been replaced on disk since, and
    everything when O(restart) says that its configuration changed. Stops are bounded - a unit that does not stop gets
    SIGKILL.
  - Refuses likewise when the host does not show the switches of O(kind), or ib_umad is not loaded beside NVLink 5
    switches. The fabric manager would take the legacy path, do nothing, and look healthy (NVIDIA/gpu-operator#2781).
options:
  kind:
    description: What fabric the host has to show before its services are started.
    type: str
    choices: [nvswitch, nvlink5, rack, none]
    default: none
  units:
    description: Units in the order in which they start.
    type: list
    elements: str
    required: true
  optional_units:
    description: Those of O(units) that another service starts where they do not exist, as nvlsm.
    type: list
    elements: str
    default: []
  older_units:
    description: Units that are restarted where they run a replaced program, and otherwise left alone.
    type: list
    elements: str
    default: []
  bound:
    description: Packages whose version must be that of the loaded driver.
    type: list
    elements: str
    default: []
  restart:
    description: Restart O(units) even when nothing else asks for it.
    type: bool
    default: false
  start_timeout_s:
    description: Seconds one unit may take to become active.
    type: int
    default: 120
  stop_timeout_s:
    description: Seconds one unit may take to stop before it is killed.
    type: int
    default: 60
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reports what would be done.
  diff_mode:
    support: none
    description: The message names what is done.
"""

EXAMPLES = r"""
- name: Run the fabric manager
  fabric_units:
    kind: nvswitch
    units: [nvidia-fabricmanager.service]
    bound: [nvidia-fabricmanager]
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be, as C(enable UNIT), C(start UNIT) and C(restart UNIT).
  returned: success
  type: list
  elements: str
killed:
  description: Units that did not stop in time and were killed.
  returned: success
  type: list
  elements: str
"""

import os

from ansible.module_utils import bounded_unit
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fabric_probe import managed_switches
from ansible.module_utils.host_probe import Probe
from ansible.module_utils.loaded_driver import loaded_driver
from ansible.module_utils.package_probe import installed


def unseen(kind, probe):
    """Return in words what of a kind of fabric the host does not show; empty when it shows all."""
    if kind == "nvswitch" and not probe.names("/proc/driver/nvidia-nvswitch/devices"):
        return "no NVSwitch in /proc/driver/nvidia-nvswitch/devices"
    if kind == "nvlink5":
        if not managed_switches(probe):
            return "no RDMA function whose vital product data says SW_MNG (mlx5_core and mlx5_ib loaded?)"
        if not probe.path("/sys/module/ib_umad").is_dir():
            return "ib_umad is not loaded"
    return ""


def upstream(version):
    """Return a package version without epoch and revision."""
    return version.rpartition(":")[2].rpartition("-")[0] or version


def unequal(bound, packages, driver):
    """Return in words what of the packages does not have the loaded driver's version; empty when all do."""
    if driver is None:
        return "no NVIDIA driver is loaded"
    wrong = [
        f"{name} is {packages.get(name, 'not installed')}"
        for name in bound
        if name not in packages or upstream(packages[name]) != driver
    ]
    return ", ".join(wrong)


def plan(units, seen, restart):
    """Return ``[(verb, unit)]``: what has to be done; empty when all is as wanted.

    Args:
        units: Units to run, in the order in which they start.
        seen: Unit to ``enabled``, ``active`` and ``replaced`` (its program is of before).
        restart: Whether their configuration changed.
    """
    actions = [("enable", unit) for unit in units if not seen[unit]["enabled"]]
    # Whoever starts after a unit that is started anew depends on it, so it is started anew too.
    anew = False
    for unit in units:
        state = seen[unit]
        anew = anew or (state["active"] and (restart or state["replaced"]))
        if not state["active"]:
            actions.append(("start", unit))
            anew = True
        elif anew:
            actions.append(("restart", unit))
    return actions


def observe(unit):
    """Return how a unit stands."""
    told = bounded_unit.show(unit)
    pid = told.get("MainPID", "0")
    return {
        "load": told["LoadState"],
        "enabled": told.get("UnitFileState", "") not in ("disabled", "masked", ""),
        "active": told.get("ActiveState") == "active",
        "replaced": pid != "0" and _replaced(pid),
    }


def _replaced(pid):
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith(" (deleted)")
    except OSError:
        return False  # it ended meanwhile, which the start finds


def act(actions, start_timeout_s, stop_timeout_s):
    """Do what was planned, stops in the reverse order of the starts; returns the units that had to be killed."""
    killed = []
    for verb, unit in reversed(actions):
        if verb == "restart" and bounded_unit.stop(unit, stop_timeout_s):
            killed.append(unit)
    for verb, unit in actions:
        if verb == "enable":
            bounded_unit.enable(unit)
        else:
            bounded_unit.start(unit, start_timeout_s)
    return killed


def main():
    """Parameters, observe, plan, act."""
    module = AnsibleModule(
        argument_spec={
            "kind": {"type": "str", "choices": ["nvswitch", "nvlink5", "rack", "none"], "default": "none"},
            "units": {"type": "list", "elements": "str", "required": True},
            "optional_units": {"type": "list", "elements": "str", "default": []},
            "older_units": {"type": "list", "elements": "str", "default": []},
            "bound": {"type": "list", "elements": "str", "default": []},
            "restart": {"type": "bool", "default": False},
            "start_timeout_s": {"type": "int", "default": 120},
            "stop_timeout_s": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    params = module.params
    probe = Probe()
    hidden = unseen(params["kind"], probe) if params["units"] else ""
    if hidden and not module.check_mode:
        module.fail_json(
            msg=f"{hidden}; expected the switches of a host with {params['kind']}. No fabric service was "
            "started: the fabric "
            "manager would do nothing and look healthy (NVIDIA/gpu-operator#2781). Run the rdma role (playbooks/"
            "provision.yml), look at lspci, and correct the lock's platform where the host is another one."
        )
    driver = loaded_driver(probe)
    packages = {name: version for name, version, _ in installed(probe) or ()}
    wrong = unequal(params["bound"], packages, driver) if params["bound"] else ""
    if wrong and not module.check_mode:
        module.fail_json(
            msg=f"{wrong}; expected the version of the loaded driver, {driver or 'one that is loaded'}. A "
            "fabric service of "
            "another version ends at its start (NVIDIA/gpu-operator#544), so none was started. Correct "
            "driver.companions "
            "of the lock, or load the driver on disk (reboot), then run playbooks/provision.yml again."
        )
    try:
        seen = {unit: observe(unit) for unit in [*params["units"], *params["older_units"]]}
        absent = [unit for unit in params["units"] if seen[unit]["load"] == "not-found"]
        units = [unit for unit in params["units"] if unit not in absent or unit not in params["optional_units"]]
        missing = [unit for unit in absent if unit in units]
        if missing and not module.check_mode:
            module.fail_json(
                msg=f"{', '.join(missing)}: no such unit, expected the one of its package. Nothing was started; "
                "see which "
                "files the package has (dpkg -L, rpm -ql) and correct the lock."
            )
        actions = plan(units, seen, params["restart"])
        taken = {unit for _, unit in actions}
        actions += [
            ("restart", unit)
            for unit in params["older_units"]
            if unit not in taken and seen[unit]["active"] and seen[unit]["replaced"]
        ]
        killed = [] if module.check_mode else act(actions, params["start_timeout_s"], params["stop_timeout_s"])
    except bounded_unit.UnitError as error:
        module.fail_json(
            msg=f"{error}\nNext: journalctl -u of that unit on this host; CUDA programs fail with error 802 until the "
            "fabric is up. Then run playbooks/provision.yml again."
        )
    if killed:
        module.warn(f"{', '.join(killed)} did not stop within {params['stop_timeout_s']} s and got SIGKILL")
    module.exit_json(changed=bool(actions), actions=[f"{verb} {unit}" for verb, unit in actions], killed=killed)


if __name__ == "__main__":
    main()
