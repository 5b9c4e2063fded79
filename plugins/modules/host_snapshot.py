#!/usr/bin/python
"""Answer, in one round trip, everything the runbook judges about a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_snapshot
short_description: Take one snapshot of a GPU host
description:
  - Reads, in one round trip, what the audit judges - packages, holds and updaters, files, units, kernels, the driver on
    disk, in the initramfs, loaded and in userspace, GPUs, the NVLink fabric, CDI specifications, the kernel log, RDMA
    ports, network, clock, the container runtime, the engine image with what it brings, the running engine, the weights.
  - Never changes anything; a question that gets no answer is listed under C(errors) and the rest is still answered.
    In the answer null says that something could not be told, an empty list that it was looked for and not there.
  - Every command has a time limit, after which it is killed with everything it started; nvidia-smi, which first wakes
    every GPU, gets three times as long, nvidia-imex-ctl, which asks other hosts, twice.
  - What looks like a secret is not shown. The answer stays below 256 KiB; C(cut) counts what was left out of a list.
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
  engine_unit:
    description: Systemd unit of the engine, whose steering variables are reported.
    type: str
    default: ""
  weights_path:
    description: Folder of the model's files to count, with the revision and the checksums recorded beside them.
    type: str
    default: ""
  transaction_dir:
    description: Folder of the state file that a run which changes the host keeps there.
    type: path
    default: /var/lib/kimi-runbook
  initramfs:
    description: Whether to look for the driver inside the initramfs of the running and the next kernel, which costs the
      decompression of each, about a second of CPU.
    type: bool
    default: true
  timeout_s:
    description: Seconds any one command may take.
    type: int
    default: 10
  budget_s:
    description: Seconds the whole snapshot may take; what was not asked by then is listed under C(errors).
    type: int
    default: 90
  root:
    description: Tree to read instead of the host's own, for tests. Commands are then answered from its C(.commands)
      folder, by the rule in command_run.py, and never by the machine it lies on.
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
  description: The snapshot, schema version 1; kimi_runbook/snapshot.py and its parts describe each key.
  returned: always
  type: dict
"""

import datetime
import json
import signal

from ansible.module_utils import redaction
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.container_probe import daemon_settings, engine, image, runtime
from ansible.module_utils.driver_probe import driver
from ansible.module_utils.fabric_probe import SERVICES, cdi, fabric
from ansible.module_utils.gpu_probe import accelerators, gpus
from ansible.module_utils.host_probe import (
    SCHEMA_VERSION,
    Probe,
    boot,
    files,
    hostname,
    kernel_modules,
    system,
)
from ansible.module_utils.image_probe import stack
from ansible.module_utils.kernel_log_probe import kernel_log
from ansible.module_utils.kernel_probe import iommu, kernel
from ansible.module_utils.network_probe import addresses, links, listening, open_devices
from ansible.module_utils.package_probe import holds, packages, pins
from ansible.module_utils.rdma_probe import rdma, rdma_devices
from ansible.module_utils.transaction_file import moment as present
from ansible.module_utils.transaction_file import read as read_transaction
from ansible.module_utils.transaction_file import view as transaction
from ansible.module_utils.unit_probe import CLOCKS, UPDATERS, ask, clock, memlock, moment, units, updaters
from ansible.module_utils.weights_probe import weights

SIZE_LIMIT = 240 << 10  # bytes of JSON; Ansible's own words beside it keep the whole below 256 KiB
_MOST_HOLDERS = 200
_LATE_S = 5  # how long after the budget a question that hangs in the kernel is broken off


class OutOfTimeError(Exception):
    """The budget has passed while a question was being answered."""


class Sections:
    """Answers one section after the other; one that breaks or hangs leaves an error and the others whole."""

    def __init__(self, probe):
        self._probe = probe
        self._asking = False

    def guard(self, budget_s):
        """Break off, from now on, whatever is being asked when the budget has passed."""
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, budget_s + _LATE_S, _LATE_S)

    def release(self):
        """End the guard."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_):
        if self._asking:
            raise OutOfTimeError

    def ask(self, name, question, otherwise=None):
        """Return what a question answers, or ``otherwise`` when it breaks."""
        try:
            self._asking = True
            answer = question()
            self._asking = False
            return answer
        except OutOfTimeError:
            self._probe.error(name, "broken off: the time for the whole snapshot is used up")
        except Exception as error:
            self._probe.error(name, f"{type(error).__name__}: {error}")
        finally:
            self._asking = False
        return otherwise


def take(probe, wanted, sections=None):
    """Return the whole snapshot for one set of questions."""
    part = (sections or Sections(probe)).ask
    unit = wanted.get("engine_unit") or ""
    folder = wanted.get("transaction_dir") or "/var/lib/kimi-runbook"
    asked = [*wanted["units"], *(f"{name}.service" for name in SERVICES), *UPDATERS, *CLOCKS, "docker.service", unit]
    part("units", lambda: ask(probe, [name for name in asked if name]))
    the_driver = part("driver", lambda: driver(probe, wanted.get("initramfs", True)), {})
    loaded = the_driver.get("loaded") is not None
    the_engine = part("engine", lambda: engine(probe, wanted["engine_container"], wanted["container_files"], unit), {})
    the_image = part("image", lambda: image(probe, wanted["image"]))
    engine_pid = ((the_engine or {}).get("container") or {}).get("pid")
    if the_image is not None:
        the_image["stack"] = part("image stack", lambda: stack(probe, wanted["image"], engine_pid))
    log = part("kernel log", lambda: kernel_log(probe), {"readable": False, "lines": [], "cut": 0})
    left = part("transaction", lambda: standing(probe, folder))
    held = part("holders", lambda: open_devices(probe)[0])
    mtu, speed = part("links", lambda: links(probe), ({}, {}))
    snapshot = {
        "schema_version": SCHEMA_VERSION,
        "taken_at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "hostname": hostname(probe),
        "os": part("os", lambda: system(probe), {}),
        "boot": part("boot", lambda: {**boot(probe), "booted_at": moment(probe, 0)}, {}),
        "kernel": part("kernel", lambda: kernel(probe), {}),
        "packages": part("packages", lambda: packages(probe, wanted["packages"]), {}),
        "files": part("files", lambda: files(probe, wanted["files"]), {}),
        "units": part("units", lambda: units(probe, wanted["units"]), {}),
        "driver": the_driver,
        "gpus": part("gpus", lambda: gpus(probe), []) if loaded else [],
        "accelerators": part("accelerators", lambda: accelerators(probe)),
        "fabric": part("fabric", lambda: fabric(probe, loaded), {}),
        "cdi": part("cdi", lambda: cdi(probe)),
        "kernel_log": {"readable": log["readable"], "lines": log["lines"]},
        "modules": part("modules", lambda: kernel_modules(probe, wanted["modules"]), {}),
        "rdma_devices": part("rdma_devices", lambda: rdma_devices(probe), []),
        "rdma": part("rdma", lambda: rdma(probe), {}),
        "memlock": part("memlock", lambda: memlock(probe, daemon_settings(probe)[0], engine_pid), {}),
        "iommu": part("iommu", lambda: iommu(probe), {}),
        "network": {
            "addresses": part("addresses", lambda: addresses(probe), {}),
            "listening": part("listening", lambda: listening(probe, set(wanted["ports"])), []),
            "mtu": mtu,
            "speed": speed,
        },
        "clock": part("clock", lambda: clock(probe), {}),
        "updaters": part("updaters", lambda: updaters(probe)),
        "runtime": part("runtime", lambda: runtime(probe), {}),
        "image": the_image,
        "engine": the_engine,
        "weights": part("weights", lambda: weights(probe, wanted.get("weights_path"))),
        "holds": part("holds", lambda: holds(probe)),
        "pins": part("pins", lambda: pins(probe)),
        "holders": None if held is None else held[:_MOST_HOLDERS],
        "transaction": None,
        "cut": {},
        "errors": probe.errors,
    }
    for name, count in (("kernel_log.lines", log["cut"]), ("holders", len(held or ()) - _MOST_HOLDERS)):
        if count > 0:
            snapshot["cut"][name] = count
    shown = redaction.shapes(snapshot)
    # By hand: the names of runs look random, and are what a person must be told.
    shown["transaction"] = left
    return fitted(shown)


def standing(probe, folder):
    """Return what the state file says of the last change, its reason redacted."""
    seen = transaction(read_transaction(str(probe.path(folder))), present())
    return seen and {**seen, "reason": redaction.shapes(seen["reason"])}


# Lists that may be shortened, the most expendable first; a path's parts are separated by dots.
_SHORTENED = (
    "weights.checksums",
    "kernel_log.lines",
    "image.stack.libraries",
    "holders",
    "image.stack.python",
    "cdi",
    "driver.dkms",
    "errors",
    "pins",
    "holds",
    "network.listening",
)


def fitted(snapshot, limit=SIZE_LIMIT):
    """Return the snapshot below a size in bytes of JSON: lists lose their older half, ``cut`` counts what went.

    Checksums go altogether, since half of them would prove nothing.
    """
    for path in _SHORTENED:
        while len(json.dumps(snapshot)) > limit:
            *parents, last = path.split(".")
            owner = snapshot
            for name in parents:
                owner = (owner or {}).get(name)
            rows = (owner or {}).get(last)
            if not rows:
                break
            kept = None if isinstance(rows, dict) else rows[(len(rows) + 1) // 2 :]
            snapshot["cut"][path] = snapshot["cut"].get(path, 0) + len(rows) - len(kept or ())
            owner[last] = kept
    return snapshot


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
            "engine_unit": {"type": "str", "default": ""},
            "weights_path": {"type": "str", "default": ""},
            "transaction_dir": {"type": "path", "default": "/var/lib/kimi-runbook"},
            "initramfs": {"type": "bool", "default": True},
            "timeout_s": {"type": "int", "default": 10},
            "budget_s": {"type": "int", "default": 90},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    params = module.params
    probe = Probe(root=params["root"], timeout_s=params["timeout_s"], budget_s=params["budget_s"])
    sections = Sections(probe)
    sections.guard(params["budget_s"])
    snapshot = take(probe, params, sections)
    sections.release()
    module.exit_json(changed=False, snapshot=snapshot)


if __name__ == "__main__":
    main()
