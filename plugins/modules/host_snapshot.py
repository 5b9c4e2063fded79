#!/usr/bin/python
"""Answer, in one round trip, everything the runbook judges about a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_snapshot
short_description: Take one snapshot of a GPU host
description:
  - Reads, in one round trip, what the audit judges - packages, files, units, the driver on disk, loaded and in
    userspace, kernel modules, RDMA ports, the container runtime, the engine image and the running engine container.
  - Never changes anything; a question that gets no answer is listed under C(errors) and the rest is still answered.
options:
  packages:
    description: Package names to report beside every installed driver package.
    type: list
    elements: str
    default: []
  files:
    description: Files to report with their SHA-256 and mode.
    type: list
    elements: str
    default: []
  units:
    description: Systemd units to report.
    type: list
    elements: str
    default: []
  modules:
    description: Kernel modules to report.
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports whose listeners are reported.
    type: list
    elements: int
    default: []
  image:
    description: Image reference to look for, with its digest.
    type: str
    default: ""
  engine_container:
    description: Name of the engine's container.
    type: str
    default: ""
  container_files:
    description: Files to hash as the engine's container sees them.
    type: list
    elements: str
    default: []
  timeout_s:
    description: Seconds any one command may take.
    type: int
    default: 10
  root:
    description: Tree to read instead of the host's own, for tests.
    type: path
    default: /
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Only asks questions.
  diff_mode:
    support: none
    description: Nothing changes, so there is nothing to show.
"""

EXAMPLES = r"""
- name: Take the snapshot
  host_snapshot:
    packages: [nvidia-driver-cuda]
    units: [docker.service]
    image: registry.example/vllm/vllm-openai@sha256:0000
  register: __snapshot
"""

RETURN = r"""
snapshot:
  description: The snapshot, schema version 1; docs/architecture.md describes each key.
  returned: always
  type: dict
"""

import datetime
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.container_probe import engine_container, image, runtime
from ansible.module_utils.driver_probe import driver, gpus
from ansible.module_utils.host_probe import (
    SCHEMA_VERSION,
    Probe,
    addresses,
    boot,
    files,
    kernel_modules,
    listening,
    packages,
    rdma_devices,
    system,
    units,
)


def take(probe, wanted):
    """Return the whole snapshot for one set of questions."""
    return {
        "schema_version": SCHEMA_VERSION,
        "taken_at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "hostname": socket.gethostname(),
        "os": system(probe),
        "boot": boot(probe),
        "packages": packages(probe, wanted["packages"]),
        "files": files(probe, wanted["files"]),
        "units": units(probe, wanted["units"]),
        "driver": driver(probe),
        "gpus": gpus(probe),
        "modules": kernel_modules(probe, wanted["modules"]),
        "rdma_devices": rdma_devices(probe),
        "network": {"addresses": addresses(probe), "listening": listening(probe, set(wanted["ports"]))},
        "runtime": runtime(probe),
        "image": image(probe, wanted["image"]),
        "engine": {"container": engine_container(probe, wanted["engine_container"], wanted["container_files"])},
        "errors": probe.errors,
    }


def main():
    """Read the parameters, ask, answer."""
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "packages": strings,
            "files": strings,
            "units": strings,
            "modules": strings,
            "ports": {"type": "list", "elements": "int", "default": []},
            "image": {"type": "str", "default": ""},
            "engine_container": {"type": "str", "default": ""},
            "container_files": strings,
            "timeout_s": {"type": "int", "default": 10},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    probe = Probe(root=module.params["root"], timeout_s=module.params["timeout_s"])
    module.exit_json(changed=False, snapshot=take(probe, module.params))


if __name__ == "__main__":
    main()
