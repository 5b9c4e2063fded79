#!/usr/bin/python
"""Enable exactly one stream of a dnf module, and take the packages of another one out first."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dnf_module_stream
short_description: Enable one stream of a dnf module
description:
  - The stream that is enabled is read first; where it is the wanted one nothing is run.
  - An enabled stream is sticky. Changing it takes a reset, the removal of the packages of the old one, and enabling
    the new one; that the new one exists is asked before anything is removed.
options:
  name:
    description: The module.
    type: str
    required: true
  stream:
    description: The stream to enable.
    type: str
    required: true
  remove:
    description: Packages to remove when the stream changes; those that are not installed are left out.
    type: list
    elements: str
    default: []
  installroot:
    description: Root of the system to change.
    type: path
    default: /
  options:
    description: Further options of dnf, such as C(--setopt=reposdir=...).
    type: list
    elements: str
    default: []
  timeout_s:
    description: Seconds each command may take.
    type: int
    default: 1200
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reports what would change.
  diff_mode:
    support: full
    description: Shows the stream before and after.
"""

EXAMPLES = r"""
- name: Follow the open modules of one branch
  dnf_module_stream:
    name: nvidia-driver
    stream: 580-open
    remove: [nvidia-driver-cuda, kmod-nvidia-open-dkms]
"""

RETURN = r"""
before:
  description: The stream that was enabled, empty for none.
  returned: success
  type: str
removed:
  description: Packages that were removed.
  returned: success
  type: list
"""

import os
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run
from ansible.module_utils.dnf_text import complaints, enabled_stream


def current_stream(root, name):
    """Return the enabled stream, or None."""
    path = os.path.join(root, "etc/dnf/modules.d", f"{name}.module")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return enabled_stream(file.read(), name)


def main():
    """Read, then reset, remove and enable where it differs."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "stream": {"type": "str", "required": True},
            "remove": {"type": "list", "elements": "str", "default": []},
            "installroot": {"type": "path", "default": "/"},
            "options": {"type": "list", "elements": "str", "default": []},
            "timeout_s": {"type": "int", "default": 1200},
        },
        supports_check_mode=True,
    )
    root, name, stream = (module.params[key] for key in ("installroot", "name", "stream"))
    before = current_stream(root, name)
    result = {
        "before": before or "",
        "removed": [],
        "diff": {"before": f"{name}:{before or 'none'}\n", "after": f"{name}:{stream}\n"},
    }
    if before == stream:
        module.exit_json(changed=False, **result)
    if module.check_mode:
        module.exit_json(changed=True, **result)
    dnf = ["dnf", "--assumeyes", *module.params["options"], *([] if root == "/" else [f"--installroot={root}"])]

    def asked(*words):
        try:
            done = run([*dnf, *words], module.params["timeout_s"])
        except (OSError, subprocess.TimeoutExpired) as error:
            module.fail_json(msg=f"dnf {' '.join(words)}: {error}. Run it by hand on this host, then run again.")
        return done.returncode, done.stdout + done.stderr

    rc, said = asked("module", "list", f"{name}:{stream}")
    if rc != 0:
        module.fail_json(
            msg=f"module {name}: stream {stream} is offered by no repository ({complaints(said)}); expected the lock's "
            f"branch. {before or 'No stream'} is enabled as before; correct the lock or the mirror, then run again."
        )
    if before:
        rc, said = asked("module", "reset", name)
        if rc != 0:
            module.fail_json(msg=f"module {name}: reset of {before}: {complaints(said)}. Nothing was changed.")
    installed = _installed(root, module.params["remove"])
    if before and installed:
        rc, said = asked("remove", *installed)
        if rc != 0:
            module.fail_json(
                msg=f"module {name}: stream {before} is reset, and its packages cannot be removed: {complaints(said)}. "
                "Remove them by hand on this host, then run again."
            )
        result["removed"] = installed
    rc, said = asked("module", "enable", f"{name}:{stream}")
    if rc != 0 or current_stream(root, name) != stream:
        module.fail_json(
            msg=f"module {name}: {current_stream(root, name) or 'no stream'} is enabled, expected {stream}: "
            f"{complaints(said)}. Run dnf module enable {name}:{stream} on this host, then run again."
        )
    module.exit_json(changed=True, **result)


def _installed(root, names):
    if not names:
        return []
    done = run(["rpm", f"--root={root}", "--query", "--all", "--queryformat", "%{NAME}\n"], 60)
    there = set(done.stdout.split())
    return [name for name in names if name in there]


if __name__ == "__main__":
    main()
