#!/usr/bin/python
"""Rebuild an initramfs that would load another driver, or old parameters, at the next boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: initramfs_current
short_description: Rebuild the initramfs where it holds another NVIDIA driver or is older than a file that belongs in it
description:
  - Looks into the initramfs of the running and of the next kernel. One that holds another version of the module, or
    is older than one of the given files, is rebuilt with C(update-initramfs) or C(dracut) and looked into again.
  - Decided by what is there and not by what a task changed, so a run that was killed in between is made up for.
  - A host without an initramfs, such as a container, has nothing to rebuild.
options:
  version:
    description: The driver version that may be inside.
    type: str
    required: true
  newer_than:
    description: Files whose content ends up in the initramfs; those that do not exist are left out.
    type: list
    elements: str
    default: []
  timeout_s:
    description: Seconds one rebuild may take.
    type: int
    default: 1200
  root:
    description: Root of the tree to look at.
    type: path
    default: /
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reports what would be rebuilt.
  diff_mode:
    support: none
    description: An initramfs has no text.
"""

EXAMPLES = r"""
- name: Let the next boot start with this driver
  initramfs_current:
    version: 580.178.04
    newer_than: [/etc/modprobe.d/kimi-nvidia.conf]
"""

RETURN = r"""
rebuilt:
  description: Why each was rebuilt, kernel to reason.
  returned: success
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_probe import Probe, release
from ansible.module_utils.initramfs_probe import initramfs
from ansible.module_utils.kernel_probe import next_kernel

_LOOK_LIMIT_S = 120


def image_of(probe, kernel):
    """Return the path of a kernel's initramfs on the host, or None."""
    names = (f"/boot/initrd.img-{kernel}", f"/boot/initramfs-{kernel}.img")
    return next((name for name in names if probe.path(name).is_file()), None)


def outdated(probe, kernels, version, files):
    """Return ``{kernel: reason}`` of the images that have to be rebuilt.

    Raises:
        ValueError: An image could not be looked into.
    """
    reasons = {}
    rows = initramfs(probe, kernels)
    known = {row["kernel"]: row["versions"] for row in rows or ()}
    for kernel in kernels:
        path = image_of(probe, kernel)
        if path is None:
            continue
        if kernel not in known:
            problem = next((error["message"] for error in probe.errors if error["probe"] == path), "no answer")
            raise ValueError(f"{path}: {problem}")
        others = [one for one in known[kernel] if one != version]
        changed = os.stat(probe.path(path)).st_mtime
        newer = [name for name in files if probe.path(name).exists() and os.stat(probe.path(name)).st_mtime > changed]
        if others:
            reasons[kernel] = f"holds driver {', '.join(others)}"
        elif newer:
            reasons[kernel] = f"older than {', '.join(newer)}"
    return reasons


def tool(probe, kernel):
    """Return the command that rebuilds one image, by the tool whose image it is."""
    path = image_of(probe, kernel)
    if path.startswith("/boot/initramfs-"):
        return ["dracut", "--force", path, kernel]
    return ["update-initramfs", "-u", "-k", kernel]


def main():
    """Look, rebuild, look again."""
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "newer_than": {"type": "list", "elements": "str", "default": []},
            "timeout_s": {"type": "int", "default": 1200},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    params = module.params

    def look():
        probe = Probe(params["root"], timeout_s=_LOOK_LIMIT_S, budget_s=params["timeout_s"] + 2 * _LOOK_LIMIT_S)
        kernels = list(dict.fromkeys(name for name in (release(probe), next_kernel(probe)) if name))
        try:
            return probe, outdated(probe, kernels, params["version"], params["newer_than"])
        except (OSError, ValueError) as error:
            module.fail_json(
                msg=f"initramfs: {error}; expected an image that can be read. Nothing was rebuilt; look at it with "
                "lsinitramfs or lsinitrd on this host."
            )

    probe, reasons = look()
    if not reasons or module.check_mode:
        module.exit_json(changed=bool(reasons), rebuilt=reasons)
    for kernel in reasons:
        argv = tool(probe, kernel)
        answer = probe.command(*argv, timeout_s=params["timeout_s"], needed=True)
        if answer is None or answer[0] != 0:
            said = "; ".join(error["message"] for error in probe.errors) if answer is None else answer[1] + answer[2]
            module.fail_json(
                msg=f"initramfs of kernel {kernel} ({reasons[kernel]}): {' '.join(argv)} failed: {said.strip()[-500:]} "
                "The driver on disk is changed and the old image is still there: do not reboot before it is rebuilt."
            )
    _, left = look()
    if left:
        module.fail_json(
            msg=f"initramfs: {'; '.join(f'{kernel} {why}' for kernel, why in left.items())} after a rebuild; expected "
            f"driver {params['version']} or none. Look for another copy of the module: modinfo -n nvidia on this host."
        )
    module.exit_json(changed=True, rebuilt=reasons)


if __name__ == "__main__":
    main()
