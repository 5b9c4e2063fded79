"""A site of fake hosts: a tree of files each, read by the real snapshot and changed by stand-in roles.

Each stand-in role wants one file that holds the lock's driver version. So wishes, findings, plan, batches, leases,
audit and outcome are the real ones, and only what a role does to a host is small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PLAYED = (
    *("gpu_driver", "container_runtime", "rdma", "fabric_services", "engine_image", "model_weights"),
    "interconnect",
)
OLD, NEW = "570.133.20", "580.178.04"

_ROLE = """\
- name: main | Fail where the test says so
  ansible.builtin.fail:
    msg: "{role} cannot: the test says so"
  when: frame_fail.get(inventory_hostname) == '{role}'

- name: main | Lose the host where the test says so
  ansible.builtin.command:
    argv: ["true"]
  changed_when: false
  vars:
    ansible_connection: ssh
    ansible_ssh_args: -o BatchMode=yes -o ConnectTimeout=1
    ansible_port: 1
    ansible_host: 127.0.0.1
  when: frame_lose.get(inventory_hostname) == '{role}'

- name: main | Write what is wanted
  ansible.builtin.copy:
    content: "{{{{ 'no' if frame_break == '{role} ' ~ kimi_lock.driver.version else kimi_lock.driver.version }}}}\\n"
    dest: "{{{{ frame_home }}}}/tree/etc/frame/{role}"
    mode: "0644"
  notify: Let {role} take effect

- name: main | Say that it was here
  ansible.builtin.shell: echo {role} {{{{ kimi_snapshot.hostname | length > 0 }}}} >> {{{{ frame_home }}}}/journal
  changed_when: true
"""
_HANDLER = """\
- name: Let {role} take effect
  ansible.builtin.shell: echo {role}-handler >> {{{{ frame_home }}}}/journal
  changed_when: true
"""
_DRAIN = """\
- name: drain | Take it out
  ansible.builtin.shell: touch {{ frame_home }}/drained && echo drain >> {{ frame_home }}/journal
  changed_when: true
"""
_RESTORE = """\
- name: restore | Give it back
  ansible.builtin.shell: rm -f {{ frame_home }}/drained && echo restore >> {{ frame_home }}/journal
  changed_when: true
"""
_PREVIOUS = """\
- name: Find the previous lock
  ansible.builtin.set_fact:
    kimi_previous_lock:
      file: "{{ frame_previous_lock }}"
      lock: "{{ lookup('ansible.builtin.file', frame_previous_lock) | from_json }}"
"""


@dataclass(frozen=True, slots=True)
class Run:
    """How one run of the playbook ended."""

    code: int
    output: str


class Site:
    """Fake hosts below one folder.

    Attributes:
        hosts: Inventory name to its variables.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, Mapping[str, Any]], **site: Any) -> None:
        self.folder = folder
        self.hosts = hosts
        folder.mkdir(parents=True, exist_ok=True)
        self._write_roles()
        for name in hosts:
            self._write_host(name)
        for name, version in (("lock.json", NEW), ("previous.json", OLD)):
            (folder / name).write_text(json.dumps(lock(version)), encoding="utf-8")
        (folder / "site.json").write_text(json.dumps(self._variables() | site), encoding="utf-8")
        (folder / "hosts.json").write_text(json.dumps(self._inventory()), encoding="utf-8")

    def provision(self, *arguments: str, kill_after: int = 0, **extra: Any) -> Run:
        """Run the real playbook; with ``kill_after`` the controller is killed after that many tasks."""
        python = Path(sys.executable)
        command = [str(python.parent / "ansible-playbook"), str(ROOT / "playbooks/provision.yml")]
        command += ["-i", str(self.folder / "hosts.json"), "-e", f"@{self.folder / 'site.json'}"]
        command += ["-e", json.dumps(extra), *arguments]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": f"{self.folder / 'roles'}:{ROOT / 'roles'}",
            "ANSIBLE_CALLBACK_PLUGINS": f"{ROOT / 'plugins/callback'}:{ROOT / 'tests/frame/callbacks'}",
            "ANSIBLE_CALLBACKS_ENABLED": "kimi_outcome,kill_after",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp"),
            "FRAME_KILL_AFTER": str(kill_after),
            "FRAME_TASKS": str(self.folder / "tasks"),
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        return Run(done.returncode, done.stdout + done.stderr)

    def tasks(self) -> list[str]:
        """Return the names of the last run's tasks, or of the one after which it was killed."""
        return (self.folder / "tasks").read_text(encoding="utf-8").splitlines()

    def last_run(self) -> str:
        """Return the id of the newest run."""
        return max(path.name for path in (self.folder / "runs").iterdir() if not path.name.startswith("."))

    def outcome(self) -> dict[str, Any]:
        """Return the newest run's outcome."""
        text = (self.folder / "runs" / self.last_run() / "outcome.json").read_text(encoding="utf-8")
        read: dict[str, Any] = json.loads(text)
        return read

    def ends(self) -> dict[str, str]:
        """Return host to its state in the newest run's outcome."""
        return {host: one["state"] for host, one in self.outcome()["hosts"].items()}

    def state(self, host: str) -> dict[str, Any] | None:
        """Return what the host's state file holds."""
        path = self.home(host) / "state" / "transaction.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def journal(self, host: str) -> list[str]:
        """Return what the stand-in roles did on a host, in order."""
        path = self.home(host) / "journal"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def versions(self, host: str) -> set[str]:
        """Return what the files of all roles hold."""
        return {path.read_text(encoding="utf-8").strip() for path in (self.home(host) / "tree/etc/frame").iterdir()}

    def drained(self, host: str) -> bool:
        """Whether the host is out of service."""
        return (self.home(host) / "drained").exists()

    def home(self, host: str) -> Path:
        """Return the folder of one host."""
        return self.folder / host

    def put(self, host: str, role: str, version: str) -> None:
        """Put a role's file into some state."""
        (self.home(host) / "tree/etc/frame" / role).write_text(f"{version}\n", encoding="utf-8")

    def _write_host(self, name: str) -> None:
        tree, state = self.home(name) / "tree", self.home(name) / "state"
        for folder in (tree / "etc/frame", tree / "proc/sys/kernel", state):
            folder.mkdir(parents=True, exist_ok=True)
        (tree / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n', encoding="utf-8")
        (tree / "etc/hostname").write_text(f"{name}\n", encoding="utf-8")
        for role in PLAYED:
            self.put(name, role, OLD)
        # The snapshot looks below the tree, the module that writes the state file does not.
        seen = tree / str(state).lstrip("/")
        seen.parent.mkdir(parents=True, exist_ok=True)
        if not seen.exists():
            seen.symlink_to(state)

    def _write_roles(self) -> None:
        for role in PLAYED:
            self._role(
                role, {"tasks/main.yml": _ROLE.format(role=role), "handlers/main.yml": _HANDLER.format(role=role)}
            )
        self._role("node_drain", {"tasks/drain.yml": _DRAIN, "tasks/restore.yml": _RESTORE, "tasks/main.yml": "[]\n"})
        self._role("previous_lock", {"tasks/main.yml": _PREVIOUS})
        for role in ("node_stage", "engine"):
            self._role(role, {"tasks/main.yml": "[]\n"})

    def _role(self, name: str, files: Mapping[str, str]) -> None:
        for path, text in {"tasks/expect.yml": "[]\n", **files}.items():
            target = self.folder / "roles" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

    def _variables(self) -> dict[str, Any]:
        paths = {role: f"/etc/frame/{role}" for role in PLAYED}
        wish = "{{ kimi_lock.driver.version }}\n"
        return {
            "lock_file": str(self.folder / "lock.json"),
            "runs_dir": str(self.folder / "runs"),
            "host_snapshot_root": "{{ frame_home }}/tree",
            "host_snapshot_initramfs": False,
            "host_transaction_dir": "{{ frame_home }}/state",
            "host_transaction_roles": ["node_drain", *PLAYED],
            "provision_batches": [1, 1],
            "frame_home": f"{self.folder}/{{{{ inventory_hostname }}}}",
            "frame_previous_lock": str(self.folder / "previous.json"),
            "frame_fail": {},
            "frame_lose": {},
            "frame_break": "",
            "engine_port": 8000,
            "engine_master_port": 29501,
            "engine_container": "frame-engine",
            "engine_unit": "frame-engine.service",
            "engine_model_dir": "/srv/model",
            "engine_image_reference": "",
            "__interconnect_paths": [],
            "__host_snapshot_questions": {"packages": [], "files": list(paths.values()), "units": [], "modules": []},
            "__host_snapshot_parts": {
                role: {"files": [{"path": path, "mode": "0644", "content": wish}]} for role, path in paths.items()
            },
        }

    def _inventory(self) -> dict[str, Any]:
        common = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ansible_become": False,
            "engine_address": "127.0.0.1",
        }
        rows = {
            name: {"engine_nodes": [name], "ansible_remote_tmp": str(self.home(name) / "tmp"), **values}
            for name, values in self.hosts.items()
        }
        return {"all": {"vars": common, "children": {"gpu_nodes": {"hosts": rows}}}}


def lock(version: str) -> dict[str, Any]:
    """Return the lab's lock at another driver, with an image nobody pulls."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "inventories/lab/lock.template.yml").read_text(encoding="utf-8"))
    digest = "sha256:" + "a" * 64
    data["driver"] |= {"branch": version.partition(".")[0], "version": version, "package_version": f"{version}-1"}
    data["image"] |= {"digest": digest, "manifests": {"amd64": digest, "arm64": digest}, "size_bytes": 1}
    return data
