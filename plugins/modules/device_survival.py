#!/usr/bin/python
"""Prove that a container keeps its GPUs when systemd reads its units again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: device_survival
short_description: Start a container as the service does, reload systemd, and use its GPUs again
description:
  - With hooks instead of CDI, any C(systemctl daemon-reload) on the host takes the GPUs from running containers
    ("Failed to initialize NVML, Unknown Error", NVIDIA/nvidia-container-toolkit#48). This starts a container with the
    devices and options the service uses, asks in it, reloads, asks again, and removes it.
  - Run it only on a drained host.
options:
  image:
    description: Image that is on the host; nothing is pulled.
    type: str
    required: true
  devices:
    description: Devices as C(docker run --device) takes them.
    type: list
    elements: str
    default: []
  docker_args:
    description: Further C(docker run) options of the service.
    type: list
    elements: str
    default: []
  probe:
    description: What is asked in the container.
    type: list
    elements: str
    default: [nvidia-smi, -L]
  name:
    description: Name of the container.
    type: str
    default: kimi-device-survival
  timeout_s:
    description: Seconds one command may take.
    type: int
    default: 120
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: none
    description: Skipped, since it starts a container.
  diff_mode:
    support: none
    description: Nothing is left changed.
"""

EXAMPLES = r"""
- name: Prove that the devices survive
  device_survival:
    image: vllm/vllm-openai@sha256:...
    devices: [nvidia.com/gpu=all]
"""

RETURN = r"""
answer:
  description: What was answered in the container, before and after alike.
  returned: success
  type: str
"""

import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run


class LostError(Exception):
    """The test came out wrong; the text says at which step."""


def step(argv, timeout_s, what, command=run):
    """Run one command; returns what it printed. Raises LostError when it fails or does not answer."""
    try:
        done = command(argv, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise LostError(f"{what}: no answer within {timeout_s} s") from error
    except OSError as error:
        raise LostError(f"{what}: {error}") from error
    if done.returncode != 0:
        raise LostError(f"{what}: exit {done.returncode}: {(done.stdout + done.stderr).strip()[:300]}")
    return done.stdout.strip()


def survive(params, command=run):
    """Do the test; returns what the container answered. Raises LostError.

    The container is removed at the start, where an earlier test was broken off, and at the end, however it ends.
    """
    name, limit = params["name"], params["timeout_s"]
    devices = [word for device in params["devices"] for word in ("--device", device)]
    start = ["docker", "run", "--detach", "--pull", "never", "--name", name, *devices, *params["docker_args"]]
    remove = ["docker", "rm", "--force", name]
    ask = ["docker", "exec", name, *params["probe"]]
    _gone(remove, limit, command)
    try:
        step([*start, "--entrypoint", "sleep", params["image"], "infinity"], limit, "start of the container", command)
        before = step(ask, limit, "before daemon-reload", command)
        step(["systemctl", "daemon-reload"], limit, "systemctl daemon-reload", command)
        after = step(ask, limit, "after daemon-reload", command)
    finally:
        _gone(remove, limit, command)
    if before != after:
        raise LostError(f"after daemon-reload the container answers {after[:200]!r}, before it {before[:200]!r}")
    return after


def _gone(remove, limit, command):
    try:
        command(remove, limit)
    except (OSError, subprocess.TimeoutExpired):
        return  # a Docker that does not answer is named by the step that needs it


def main():
    """Run the test."""
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "required": True},
            "devices": {"type": "list", "elements": "str", "default": []},
            "docker_args": {"type": "list", "elements": "str", "default": []},
            "probe": {"type": "list", "elements": "str", "default": ["nvidia-smi", "-L"]},
            "name": {"type": "str", "default": "kimi-device-survival"},
            "timeout_s": {"type": "int", "default": 120},
        },
    )
    try:
        answer = survive(module.params)
    except LostError as lost:
        module.fail_json(
            msg=f"GPUs in a container started as the service is: {lost}; expected the same answer before and after "
            "systemctl daemon-reload (NVIDIA/nvidia-container-toolkit#48). Next: give the service its GPUs by CDI "
            "(engine_devices: nvidia.com/gpu=all, features.cdi in container_runtime_daemon), then run "
            "playbooks/provision.yml again."
        )
    module.exit_json(changed=False, answer=answer)


if __name__ == "__main__":
    main()
