#!/usr/bin/python
"""Own some settings of Docker's daemon.json and leave every other one alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_daemon_config
short_description: Merge settings into Docker's daemon.json
description:
  - Sets the given keys and keeps every other one; a list keeps what a site added to it.
  - A file that means the same is not written, whatever its
    layout, so Docker is restarted only for a real difference.
  - Where the installed Docker can check a configuration (23.0 and newer), the merged file is checked before it
    replaces the old one, which is kept beside it.
  - A key that Docker's unit also sets by an option is refused, since Docker would not start with both.
  - With O(drained_units), nothing is written while one of them runs, because Docker has to restart for a change.
options:
  settings:
    description: Top-level keys to own, with their values.
    type: dict
    required: true
  path:
    description: The file.
    type: path
    default: /etc/docker/daemon.json
  drained_units:
    description: Units that must not run when the file changes.
    type: list
    elements: str
    default: []
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Reports what would change.
  diff_mode:
    support: full
    description: Shows the file before and after.
"""

EXAMPLES = r"""
- name: Trust the mirror
  docker_daemon_config:
    settings:
      insecure-registries: ["mirror.example:5000"]
  notify: Restart Docker
"""

RETURN = r"""
backup_file:
  description: Where the old file was kept.
  returned: when a file was replaced
  type: str
"""

import json
import os
import re
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run

_ASK_S = 30

# Options of dockerd to the keys they exclude (dockerd(8); "the following directives are specified both as a flag and in
# the configuration file", NVIDIA/nvidia-container-toolkit#631).
_OPTIONS = {
    "-H": "hosts",
    "--host": "hosts",
    "--add-runtime": "runtimes",
    "--default-runtime": "default-runtime",
    "--data-root": "data-root",
    "--exec-opt": "exec-opts",
    "--storage-driver": "storage-driver",
    "--log-driver": "log-driver",
    "--insecure-registry": "insecure-registries",
    "--registry-mirror": "registry-mirrors",
    "--default-ulimit": "default-ulimits",
}


def merge(text, settings):
    """Return the daemon's settings with ours set; ``text`` is the present file's content.

    Raises ValueError where the present content is no JSON object.
    """
    present = json.loads(text) if text.strip() else {}
    if not isinstance(present, dict):
        raise ValueError("not a JSON object")
    return present, union(present, settings)


def union(present, ours):
    """Return both merged: keys of objects one by one, lists with what is missing added, anything else as ours says."""
    if isinstance(present, dict) and isinstance(ours, dict):
        merged = {key: union(present[key], value) if key in present else value for key, value in ours.items()}
        return {**present, **merged}
    if isinstance(present, list) and isinstance(ours, list):
        return present + [item for item in ours if item not in present]
    return ours


def render(values):
    """Return the file's content for these settings."""
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def excluded(settings, command_line):
    """Return the keys of the settings that Docker's command line sets too, each with the option that does."""
    found = {}
    for word in re.findall(r"-\S+", command_line):
        key = _OPTIONS.get(word.partition("=")[0])
        if key in settings:
            found[key] = word.partition("=")[0]
    return found


def said(argv):
    """Return ``(exit status, output)`` of a command; the status is None when there was no answer."""
    try:
        done = run(argv, _ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def refuse_invalid(module, settings, content):
    """Stop when the merged settings would keep Docker from starting, as far as the installed one can tell."""
    both = excluded(settings, said(["systemctl", "show", "--property", "ExecStart", "docker.service"])[1])
    if both:
        told = ", ".join(f"{key} ({option} of docker.service)" for key, option in both.items())
        module.fail_json(
            msg=f"{told}: set in two places, expected one; Docker would refuse to start. {module.params['path']} was "
            "left as it is; remove the option from the unit (systemctl edit docker), or the key from "
            "container_runtime_daemon."
        )
    dockerd = module.get_bin_path("dockerd")
    if dockerd is None or "--validate" not in said([dockerd, "--help"])[1]:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=module.tmpdir, encoding="utf-8") as candidate:
        candidate.write(content)
        candidate.flush()
        code, answer = said([dockerd, "--validate", "--config-file", candidate.name])
    if code != 0:
        module.fail_json(
            msg=f"dockerd refuses the merged configuration: {answer}; expected 'configuration OK'. "
            f"{module.params['path']} was left as it is; correct container_runtime_daemon in the inventory."
        )


def refuse_undrained(module):
    """Stop while a unit runs that a restart of Docker would end."""
    running = [
        unit
        for unit in module.params["drained_units"]
        if said(["systemctl", "show", "--value", "--property", "ActiveState", unit])[1]
        in ("active", "activating", "reloading", "deactivating")
    ]
    if running:
        module.fail_json(
            msg=f"{', '.join(running)} runs, expected it stopped before Docker restarts for a new "
            f"{module.params['path']}, which was left as it is. Drain the host first: playbooks/provision.yml does, or "
            f"systemctl stop {' '.join(running)}."
        )


def main():
    """Read, merge, write only a real difference."""
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True},
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "drained_units": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    before = ""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before = file.read()
    try:
        present, wanted = merge(before, module.params["settings"])
    except ValueError as error:
        module.fail_json(
            msg=f"{path}: {error}; expected one JSON object. Nothing was changed; repair or move the file, run again."
        )
    if present == wanted:
        module.exit_json(changed=False)
    after = render(wanted)
    refuse_invalid(module, wanted, after)
    if not module.check_mode:
        refuse_undrained(module)
    result = {"changed": True, "diff": {"before_header": path, "after_header": path, "before": before, "after": after}}
    if not module.check_mode:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        if before:
            result["backup_file"] = module.backup_local(path)
        temporary = os.path.join(module.tmpdir, "daemon.json")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(after)
        module.atomic_move(temporary, path)
        module.set_mode_if_different(path, "0644", False)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
