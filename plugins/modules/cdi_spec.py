#!/usr/bin/python
"""Have nvidia-ctk write the CDI specification of the GPUs, and prove it before it replaces the one that is there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cdi_spec
short_description: Write the CDI specification of the GPUs for the driver that is loaded
description:
  - Generates the specification anew and proves it before it is written. It has to name as many GPUs as the driver
    shows, every host path in it has to be there, and every driver library in it has to be of the loaded driver. One
    that fails, or is empty, replaces nothing.
  - A specification that says the same is not written again.
  - Names other specifications below /etc/cdi and /var/run/cdi that are out of date. They serve every device this
    one lacks, and nobody renews them. They are left alone.
  - Takes a failed nvidia-cdi-refresh up again, which runs into its start limit while a driver is changed.
options:
  mode:
    description:
      - V(auto) does nothing where Docker is older than 26.1 or the toolkit older than 1.18, unless a generated
        specification is there already, which then has to be right.
      - V(required) fails where one cannot be written.
    type: str
    choices: [auto, required]
    default: auto
  path:
    description: The specification.
    type: path
    default: /var/run/cdi/nvidia.yaml
  timeout_s:
    description: Seconds one command may take; nvidia-smi may have to wake every GPU first.
    type: int
    default: 60
  root:
    description: A tree of files that stands in for the host, with the answers of its commands.
    type: path
    default: /
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Generates and proves, and writes nothing.
  diff_mode:
    support: full
    description: Shows the specification before and after.
"""

EXAMPLES = r"""
- name: Renew the CDI specification
  cdi_spec:
    mode: required
"""

RETURN = r"""
applicable:
  description: Whether this host gets a specification.
  returned: success
  type: bool
reason:
  description: Why not, or what was proved.
  returned: success
  type: str
foreign:
  description: Other specifications that are out of date, with what is wrong with each.
  returned: success
  type: dict
refreshed:
  description: Units of nvidia-cdi-refresh that had failed and were taken up again.
  returned: success
  type: list
  elements: str
"""

import os
import re
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fabric_probe import cdi, cdi_facts
from ansible.module_utils.host_probe import Probe
from ansible.module_utils.loaded_driver import loaded_driver

# Docker reads a CDI 0.7 specification from 26.1 on; nvidia-cdi-refresh came with toolkit 1.18 (NVIDIA/cloud-native-docs
# container-toolkit/cdi-support.md).
_DOCKER = (26, 1)
_TOOLKIT = (1, 18)
_REFRESH = ("nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path")
_GPU = re.compile(r"(?P<index>\d+)(:\d+)?|(?P<uuid>GPU-[0-9a-fA-F-]+)")
_MOST_NAMED = 3


def number(text):
    """Return the first two numbers of a version in a text, None without one."""
    match = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def gpus_of(devices):
    """Return how many GPUs the names of a specification's devices stand for, by index (``0``, ``0:1``) or by UUID."""
    matches = [match for match in map(_GPU.fullmatch, devices) if match]
    indices = {match["index"] for match in matches if match["index"]}
    return max(len(indices), len({match["uuid"] for match in matches if match["uuid"]}))


def problems(facts, gpus, driver):
    """Return what is wrong with a specification, in sentences; none when it is proved.

    Args:
        facts: As fabric_probe.cdi_facts returns them.
        gpus: How many GPUs the driver shows.
        driver: The version of the loaded driver.
    """
    wrong = []
    named = gpus_of(facts["devices"])
    if named != gpus or not named:
        wrong.append(f"it names {named} GPUs, the driver shows {gpus}")
    others = [version for version in facts["versions"] if version != driver]
    if others:
        wrong.append(f"it names libraries of {', '.join(others)}, {driver} is loaded")
    if facts["missing"]:
        more = len(facts["missing"]) - _MOST_NAMED
        told = ", ".join(facts["missing"][:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        wrong.append(f"it names what is not there: {told}")
    return wrong


def inapplicable(docker, toolkit):
    """Return why versions are too old for CDI; empty when they are not."""
    if docker is None or docker < _DOCKER:
        seen = "no Docker answers" if docker is None else f"Docker {docker[0]}.{docker[1]}"
        return f"{seen}, CDI needs {_DOCKER[0]}.{_DOCKER[1]}"
    if toolkit is None or toolkit < _TOOLKIT:
        seen = "no toolkit answers" if toolkit is None else f"toolkit {toolkit[0]}.{toolkit[1]}"
        return f"{seen}, CDI needs {_TOOLKIT[0]}.{_TOOLKIT[1]}"
    return ""


def same(left, right):
    """Whether two specifications say the same; nvidia-ctk sorts what it writes, and comments do not count."""
    return left is not None and _lines(left) == _lines(right)


def _lines(text):
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def foreign(probe, path, driver):
    """Return ``{path: what is wrong}`` of the other specifications that name another driver or missing files."""
    found = {}
    for row in cdi(probe):
        if os.path.realpath(probe.path(row["path"])) == os.path.realpath(probe.path(path)):
            continue
        wrong = [f"libraries of {version}" for version in row["versions"] if version != driver]
        wrong += [f"{row['missing'][0]} is missing"] if row["missing"] else []
        if wrong:
            found[row["path"]] = ", ".join(wrong)
    return found


def refresh(probe, check_mode):
    """Take failed units of nvidia-cdi-refresh up again; returns their names."""
    taken = []
    for unit in _REFRESH:
        answer = probe.command("systemctl", "show", "--value", "--property", "ActiveState", unit)
        if answer is None or answer[1].strip() != "failed":
            continue
        taken.append(unit)
        if not check_mode:
            probe.command("systemctl", "reset-failed", unit)
            if unit.endswith(".path"):
                probe.command("systemctl", "start", unit)
    return taken


def write(path, text):
    """Put a file in its place in one step, so that no reader meets half of it."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".nvidia-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class SpecError(Exception):
    """What keeps a specification from being written, and the next step."""


def generated(probe, driver):
    """Return a proved specification and in words what was proved.

    Raises:
        SpecError: nvidia-ctk could not make one, or made one that is wrong.
    """
    listed = probe.command("nvidia-smi", "-L")
    if listed is None or listed[0] != 0:
        said = "no answer" if listed is None else f"exit {listed[0]}: {(listed[1] + listed[2]).strip()[:200]}"
        raise SpecError(f"nvidia-smi -L: {said}; expected the GPUs that the specification has to name")
    gpus = sum(line.startswith("GPU ") for line in listed[1].splitlines())
    made = probe.command("nvidia-ctk", "cdi", "generate")
    if made is None or made[0] != 0:
        said = "no answer" if made is None else f"exit {made[0]}: {(made[2] or made[1]).strip()[:300]}"
        raise SpecError(f"nvidia-ctk cdi generate: {said}; expected a specification for driver {driver}")
    facts = cdi_facts(probe, made[1])
    wrong = problems(facts, gpus, driver)
    if wrong:
        raise SpecError(f"the specification nvidia-ctk made is wrong: {'; '.join(wrong)}")
    return made[1], f"{gpus} GPUs, driver {driver}, every path is there"


def main():
    """Parameters, observe, prove, write only a difference."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["auto", "required"], "default": "auto"},
            "path": {"type": "path", "default": "/var/run/cdi/nvidia.yaml"},
            "timeout_s": {"type": "int", "default": 60},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    path, required = module.params["path"], module.params["mode"] == "required"
    probe = Probe(root=module.params["root"], timeout_s=module.params["timeout_s"], budget_s=600)
    driver = loaded_driver(probe)
    told = probe.command("nvidia-ctk", "--version")
    toolkit = number(told[1]) if told and told[0] == 0 else None
    answer = probe.command("docker", "version", "--format", "{{.Server.Version}}")
    docker = number(answer[1]) if answer and answer[0] == 0 else None
    before = probe.text(path, limit=4 << 20)
    why_not = "no driver is loaded" if driver is None else inapplicable(docker, toolkit)
    cannot = driver is None or toolkit is None  # then none can be made, even where one is there
    result = {"foreign": foreign(probe, path, driver) if driver else {}, "refreshed": []}
    for name, wrong in result["foreign"].items():
        module.warn(f"{name} is out of date ({wrong}) and serves what {path} lacks: remove or renew it")
    if why_not and (cannot or before is None or required):
        if required and not module.check_mode:
            module.fail_json(
                msg=f"CDI is required (container_runtime_cdi) and {why_not}. Nothing was written; lock a newer Docker "
                "or toolkit, or set container_runtime_cdi to auto.",
                **result,
            )
        module.exit_json(changed=False, applicable=False, reason=why_not, **result)
    try:
        text, proved = generated(probe, driver)
    except SpecError as stop:
        if module.check_mode:  # the driver or the toolkit may be what this run is about to change
            module.exit_json(changed=True, applicable=True, reason=str(stop), **result)
        module.fail_json(
            msg=f"{stop}. {path} was left as it is. Run nvidia-smi and nvidia-ctk cdi generate on this host, then "
            "playbooks/provision.yml again.",
            **result,
        )
    changed = not same(before, text)
    if changed and not module.check_mode:
        write(str(probe.path(path)), text)
    result["refreshed"] = refresh(probe, module.check_mode)
    diff = {"before_header": path, "after_header": path, "before": before or "", "after": text} if changed else {}
    module.exit_json(changed=changed or bool(result["refreshed"]), applicable=True, reason=proved, diff=diff, **result)


if __name__ == "__main__":
    main()
