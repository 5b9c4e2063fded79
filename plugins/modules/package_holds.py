#!/usr/bin/python
"""Hold packages where they are, or lift holds, all of them in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_holds
short_description: Hold packages or lift holds with apt's selections or dnf's version lock
description:
  - Of the given packages those that are installed are held, in one call whatever their number. A name that is not
    installed is no error, so the holds can be put back after an installation that failed.
  - With dnf a hold is a line of the versionlock plugin's list. Lines about other names stay; one about a given name
    that is not installed goes.
options:
  manager:
    description: The host's package manager.
    type: str
    choices: [apt, dnf]
    required: true
  packages:
    description: Package names.
    type: list
    elements: str
    default: []
  state:
    description: V(held) or V(released).
    type: str
    choices: [held, released]
    default: held
  locks:
    description:
      - With dnf, lines to hold instead of the packages' installed versions, as C(name-epoch:version-release.*). They
        may name what is not installed yet, which is how a version is pinned before its transaction. Lines of the same
        names are replaced. With V(released), lines about the names in O(packages) are taken out.
    type: list
    elements: str
    default: []
  list_file:
    description: The version lock's list.
    type: path
    default: /etc/dnf/plugins/versionlock.list
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reports what would change.
  diff_mode:
    support: full
    description: Shows the holds before and after.
"""

EXAMPLES = r"""
- name: Hold the driver
  package_holds:
    manager: apt
    packages: [nvidia-driver-cuda, nvidia-kernel-open-dkms]
"""

RETURN = r"""
packages:
  description: Packages whose hold changed.
  returned: success
  type: list
"""

import os
import re
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run

_ASK_DPKG = ["dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}\t${Package}\n"]
_ASK_RPM = ["rpm", "--query", "--all", "--queryformat", "%{NAME}\t%{EPOCHNUM}:%{VERSION}-%{RELEASE}\n"]
_LIMIT_S = 60
_HEAD = "# kimi-runbook: held with the locked driver"
_NAME = re.compile(r"^(?P<name>.+?)-(\d+:)?[^-]+-[^-]+$")


def selections(listing):
    """Return ``{name: held}`` of installed packages from dpkg-query's lines."""
    rows = (line.split("\t") for line in listing.splitlines() if "\t" in line)
    # Not only what is complete: a package left half done by an interrupted run is held as well.
    return {name: abbrev[0] == "h" for abbrev, name in rows if abbrev[1] not in "nc"}


def to_change(installed, packages, state):
    """Return the packages whose hold differs from the wanted state, in the given order."""
    wanted = state == "held"
    return [name for name in dict.fromkeys(packages) if name in installed and installed[name] != wanted]


def name_of(line):
    """Return the package name of a lock's line; exclusions and comments have none."""
    match = None if line[:1] in "#!" else _NAME.match(line.strip())
    return match["name"] if match else None


def merged(text, lines, names):
    """Return the list's text with these lines in place of all others about the same names, and about ``names``."""
    gone = {name_of(line) for line in lines} | set(names)
    kept = [
        line for line in text.splitlines() if line != _HEAD and (name_of(line) is None or name_of(line) not in gone)
    ]
    while kept and not kept[-1].strip():
        kept.pop()
    return "\n".join([*kept, *([_HEAD, *lines] if lines else [])]) + ("\n" if kept or lines else "")


def installed_locks(listing, packages):
    """Return the lines that hold installed packages where they are; one per installed version of a name."""
    rows = (line.split("\t") for line in listing.splitlines() if "\t" in line)
    return [f"{name}-{version}.*" for name, version in rows if name in packages]


def with_dpkg(module, command=run):
    """Set the selections that differ, in one call."""
    installed = selections(command(_ASK_DPKG, _LIMIT_S).stdout)
    changing = to_change(installed, module.params["packages"], module.params["state"])
    result = {"changed": bool(changing), "packages": changing, "diff": difference(changing, module.params["state"])}
    if changing and not module.check_mode:
        word = {"held": "hold", "released": "unhold"}[module.params["state"]]
        done = command(["apt-mark", word, *changing], _LIMIT_S)
        after = selections(command(_ASK_DPKG, _LIMIT_S).stdout)
        left = to_change(after, changing, module.params["state"])
        if left:
            module.fail_json(
                msg=f"apt-mark {word}: {', '.join(left)} did not change ({done.stderr.strip()[-300:]}); expected "
                f"{module.params['state']}. Run it by hand on this host, then run again."
            )
    module.exit_json(**result)


def with_dnf(module, command=run):
    """Write the lines that differ."""
    path, packages, state = (module.params[key] for key in ("list_file", "packages", "state"))
    before = ""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before = file.read()
    lines = []
    if state == "held":
        lines = list(module.params["locks"])
        named = {name_of(line) for line in lines}
        rest = [name for name in packages if name not in named]
        lines += installed_locks(command(_ASK_RPM, _LIMIT_S).stdout, rest) if rest else []
    after = merged(before, lines, packages)
    if sorted(before.split("\n")) == sorted(after.split("\n")):
        after = before  # the same locks in another order
    changed = before != after
    if changed and not module.check_mode:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        temporary = os.path.join(module.tmpdir, "versionlock.list")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(after)
        module.atomic_move(temporary, path)
        module.set_mode_if_different(path, "0644", False)
    old, new = set(before.splitlines()), set(after.splitlines())
    names = sorted({name_of(line) for line in old ^ new} - {None})
    module.exit_json(
        changed=changed,
        packages=names,
        diff={"before_header": path, "after_header": path, "before": before, "after": after},
    )


def difference(changing, state):
    """Return the holds that change, before and after."""
    other = {"held": "released", "released": "held"}[state]
    return {
        "before": "".join(f"{name}: {other}\n" for name in changing),
        "after": "".join(f"{name}: {state}\n" for name in changing),
    }


def main():
    """Ask what is held, change what differs."""
    module = AnsibleModule(
        argument_spec={
            "manager": {"type": "str", "choices": ["apt", "dnf"], "required": True},
            "packages": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "locks": {"type": "list", "elements": "str", "default": []},
            "list_file": {"type": "path", "default": "/etc/dnf/plugins/versionlock.list"},
        },
        supports_check_mode=True,
    )
    try:
        if module.params["manager"] == "apt":
            with_dpkg(module)
        with_dnf(module)
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=f"holds: {error}; expected the installed packages of {module.params['manager']}.")


if __name__ == "__main__":
    main()
