#!/usr/bin/python
"""Make the package manager usable: no other one at work, nothing left half done."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_repair
short_description: Wait for another package manager, and finish what an interrupted one left half done
description:
  - Waits for the locks of apt or dnf; one that is not let go in time stops with the name and number of its holder.
  - Finishes what dpkg was interrupted in (C(dpkg --configure -a)). Packages that need their archive again are
    returned, since only a transaction that names them can finish those.
  - An interrupted rpm transaction leaves packages installed twice; which of the two is right is a person's question, so
    they are named and the run stops.
options:
  manager:
    description: The host's package manager.
    type: str
    choices: [apt, dnf]
    required: true
  lock_timeout_s:
    description: Seconds to wait for another package manager to end.
    type: int
    default: 120
  timeout_s:
    description: Seconds the repair may take.
    type: int
    default: 1200
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says what is half done and changes nothing.
  diff_mode:
    support: none
    description: There is no text to compare.
"""

EXAMPLES = r"""
- name: Finish what an interrupted run left
  package_repair:
    manager: apt
"""

RETURN = r"""
half_done:
  description: What was found, package to state.
  returned: success
  type: dict
left:
  description: What needs its archive again, package to state.
  returned: success
  type: dict
"""

import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run
from ansible.module_utils.package_lock import duplicates, half_done, journal, told, wait

_ASK_DPKG = ["dpkg-query", "--show", "--showformat", "${db:Status-Abbrev} ${Package}\n"]
_ASK_RPM = ["rpm", "--query", "--all", "--queryformat", "%{NAME}.%{ARCH}\n"]
_ASK_LIMIT_S = 60
# The files of a package a person changed stay as they are, and nothing is asked.
_REPAIR = ["dpkg", "--force-confdef", "--force-confold", "--configure", "--pending"]


def repair_dpkg(module, command=run):
    """Return what was half done and what is left of it; finish it unless only asked."""
    found = half_done(command(_ASK_DPKG, _ASK_LIMIT_S).stdout)
    if not found and not journal():
        return {}, {}, False
    if module.check_mode:
        return found, found, True
    try:
        done = command(_REPAIR, module.params["timeout_s"])
        said = (done.stdout + done.stderr).strip()[-500:]
    except subprocess.TimeoutExpired:
        said = f"no end within {module.params['timeout_s']} s"
    left = half_done(command(_ASK_DPKG, _ASK_LIMIT_S).stdout)
    stuck = {name: state for name, state in left.items() if state != "half-installed"}
    if stuck or journal():
        module.fail_json(
            msg=f"dpkg was interrupted and could not be finished: {words(stuck) or 'its journal is not empty'}; dpkg "
            f"--configure -a said: {said}. Expected every package installed or half-installed. Run it by hand on this "
            "host, then run again."
        )
    return found, left, True


def words(packages):
    """Return packages and states in words."""
    return ", ".join(f"{name} ({state})" for name, state in sorted(packages.items()))


def main():
    """Wait, look, finish."""
    module = AnsibleModule(
        argument_spec={
            "manager": {"type": "str", "choices": ["apt", "dnf"], "required": True},
            "lock_timeout_s": {"type": "int", "default": 120},
            "timeout_s": {"type": "int", "default": 1200},
        },
        supports_check_mode=True,
    )
    manager = module.params["manager"]
    try:
        held = None if module.check_mode else wait(manager, module.params["lock_timeout_s"])
        if held:
            module.fail_json(
                msg=f"{told(held)} after {module.params['lock_timeout_s']} s; expected no other package manager. "
                "Nothing was changed; let it end or stop it, and stop timers such as apt-daily, then run again."
            )
        if manager == "apt":
            found, left, changed = repair_dpkg(module)
            module.exit_json(changed=changed, half_done=found, left=left)
        twice = duplicates(run(_ASK_RPM, _ASK_LIMIT_S).stdout)
        if twice:
            module.fail_json(
                msg=f"rpm: installed twice: {', '.join(twice)}; expected one of each. An interrupted transaction "
                "leaves this. Read dnf history and dnf check --duplicates there, finish it, then run again."
            )
        module.exit_json(changed=False, half_done={}, left={})
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=f"{manager}: {error}; expected its package list. Nothing was changed.")


if __name__ == "__main__":
    main()
