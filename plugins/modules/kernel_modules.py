#!/usr/bin/python
"""Load kernel modules that are not loaded now, in their order, and explain a refusal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_modules
short_description: Load kernel modules in their order
description:
  - Loads what is not loaded at this moment, whatever an earlier look said; a driver may have been reloaded since.
  - A refusal is reported with what the kernel log says of it. nvidia_peermem beside the kernel's own mlx5, or built
    before the OFED that runs, is named as such.
options:
  modules:
    description: Modules, in the order in which they are loaded.
    type: list
    elements: str
    required: true
  timeout_s:
    description: Seconds one module may take.
    type: int
    default: 60
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reports what would be loaded.
  diff_mode:
    support: none
    description: Nothing but the loaded modules changes.
"""

EXAMPLES = r"""
- name: Load the RDMA modules
  kernel_modules:
    modules: [mlx5_core, mlx5_ib, ib_uverbs]
"""

RETURN = r"""
loaded:
  description: Modules that were loaded, or in check mode would be.
  returned: success
  type: list
  elements: str
"""

import re
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run
from ansible.module_utils.host_probe import Probe

_OTHER_BUILD = re.compile(r"disagrees about version of symbol|Unknown symbol|Exec format error", re.IGNORECASE)
_LOG_S = 10


def missing(modules, probe):
    """Return the modules that are not loaded, in their order."""
    return [name for name in modules if not probe.path(f"/sys/module/{name.replace('-', '_')}").is_dir()]


def kernel_said(log, name):
    """Return what the kernel log says of a module, its last lines first found; empty when nothing."""
    spelled = re.compile(rf"\b{re.sub('[-_]', '[-_]', name)}:")
    lines = [line.strip() for line in log.splitlines() if spelled.search(line)]
    return " | ".join(lines[-3:])


def explained(name, said, log):
    """Return why a module was refused and what to do, in one text.

    Args:
        name: The module.
        said: What modprobe printed.
        log: The kernel log's last lines.
    """
    kernel = kernel_said(log, name)
    reason = f"{name} was not loaded: {said.strip() or 'modprobe said nothing'}"
    reason += f"; the kernel log: {kernel}" if kernel else ""
    if name.replace("-", "_") == "nvidia_peermem":
        if _OTHER_BUILD.search(f"{said}\n{kernel}"):
            return (
                f"{reason}. Expected a module built against the OFED that runs: the GPU driver was built before it "
                "(NVIDIA/gpu-operator#2868). Next: dkms build the driver again on this host (dkms remove and install "
                "nvidia for the running kernel), then run playbooks/provision.yml."
            )
        if "Invalid argument" in said:
            return (
                f"{reason}. Expected DOCA-OFED's modules, whose ib_core nvidia_peermem registers with; the kernel's "
                "own lack it. Next: set rdma_peermem to never, since dma-buf needs none, or install DOCA-OFED and "
                "build the GPU driver again."
            )
    return (
        f"{reason}. Expected it to load. Next: modinfo {name} and dmesg on this host; take it out of "
        "rdma_modules where the host has no such hardware."
    )


def load(name, timeout_s, command=run):
    """Load one module; returns ``(whether it was, what was said)``."""
    try:
        done = command(["modprobe", name], timeout_s)
    except subprocess.TimeoutExpired:
        return False, f"modprobe did not end within {timeout_s} s"
    except OSError as error:
        return False, str(error)
    return done.returncode == 0, (done.stderr or done.stdout).strip()


def kernel_log(command=run):
    """Return the kernel log's last lines; empty where it cannot be read."""
    for argv in (["journalctl", "--dmesg", "--lines", "200", "--output", "cat", "--no-pager"], ["dmesg"]):
        try:
            done = command(argv, _LOG_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout
    return ""


def main():
    """Parameters, observe, plan, act."""
    module = AnsibleModule(
        argument_spec={
            "modules": {"type": "list", "elements": "str", "required": True},
            "timeout_s": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    todo = missing(module.params["modules"], Probe())
    for name in () if module.check_mode else todo:
        done, said = load(name, module.params["timeout_s"])
        if not done:
            module.fail_json(msg=explained(name, said, kernel_log()))
    module.exit_json(changed=bool(todo), loaded=todo)


if __name__ == "__main__":
    main()
