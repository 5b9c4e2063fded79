#!/usr/bin/python
"""Ask dnf, in a place of its own, whether a change could be made at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dnf_preflight
short_description: Prove that dnf repositories answer and that every pinned version resolves
description:
  - Works in a temporary root with copies of the host's package database, repositories, module state and version lock,
    with the given files over them, so nothing of the host changes. The cache of metadata and packages is its own.
  - The stream is switched, the version lock written and the transaction resolved there as the role will do it. A
    repository that does not answer, a version nobody offers, a package of another branch and a kernel without headers
    stop here, before anything is drained.
options:
  sources:
    description: Files the role will write, each with C(path) and C(content); what is no C(.repo) file is a key.
    type: list
    elements: dict
    required: true
  packages:
    description: What will be installed, as C(name) or C(name-epoch:version-release).
    type: list
    elements: str
    required: true
  pins:
    description: C(name=epoch:version-release) pairs that must come out at exactly that version.
    type: list
    elements: str
    default: []
  module_name:
    description: The module whose stream decides the branch.
    type: str
    default: nvidia-driver
  stream:
    description: Its stream; empty where there are no modules.
    type: str
    default: ""
  stream_packages:
    description: Packages that go when the stream changes.
    type: list
    elements: str
    default: []
  locks:
    description: Lines of the version lock that will be in force.
    type: list
    elements: str
    default: []
  branch:
    description: Driver branch that every driver package has to come from; empty looks at none.
    type: str
    default: ""
  headers:
    description: Require the headers of the running and the next kernel, as a module that is built on the host does.
    type: bool
    default: false
  announce:
    description: Report what would be installed as a change, with a difference; for the check mode of a change.
    type: bool
    default: false
  download:
    description: Also fetch the packages into dnf's cache, so that the later transaction needs no network.
    type: bool
    default: false
  installroot:
    description: Root of the system that is asked about.
    type: path
    default: /
  options:
    description: Further options of dnf.
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
    description: Everything but the download is a question.
  diff_mode:
    support: partial
    description: Shows versions before and after where O(announce) asks for it.
"""

EXAMPLES = r"""
- name: Prove that the driver resolves
  dnf_preflight:
    sources:
      - {path: /etc/yum.repos.d/cuda.repo, content: "[cuda]\n..."}
    packages: ["nvidia-driver-cuda-3:580.178.04-1.el9"]
    stream: 580-open
"""

RETURN = r"""
resolved:
  description: What the transaction would install, C(name) to C(version).
  returned: success
  type: dict
downloaded:
  description: Package files fetched into dnf's cache.
  returned: success
  type: list
offline:
  description: Whether the repositories did not answer and what was fetched before is complete.
  returned: success
  type: bool
"""

import glob
import os
import re
import shutil
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run
from ansible.module_utils.dnf_text import complaints, enabled_stream, transaction
from ansible.module_utils.package_lock import holder, told
from ansible.module_utils.preflight import announcement, drifted, of_another_branch, without_headers

_DATABASES = ("var/lib/rpm", "usr/lib/sysimage/rpm")
_COPIES = ("etc/dnf", "etc/yum.repos.d", "etc/os-release", "usr/lib/os-release", "etc/yum/vars")
_CACHE = "var/cache/dnf"


class Sandbox:
    """A root of its own with what dnf decides by, and the command that works in it."""

    def __init__(self, folder, installroot, sources, locks, options):
        self.folder = folder
        self.host = installroot
        for name in (*_DATABASES, *_COPIES):
            source = os.path.join(installroot, name)
            if os.path.isdir(source) and not os.path.islink(source):
                shutil.copytree(source, self.path(name), ignore=shutil.ignore_patterns(".rpm.lock"))
            elif os.path.isfile(source):
                os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
                shutil.copy(source, self.path(name))
        for name in (_CACHE, "etc/yum.repos.d", "etc/dnf/modules.d"):
            os.makedirs(os.path.join(installroot, name) if name == _CACHE else self.path(name), exist_ok=True)
        os.makedirs(os.path.dirname(self.path(_CACHE)), exist_ok=True)
        os.symlink(os.path.join(os.path.abspath(installroot), _CACHE), self.path(_CACHE))
        self._write(sources)
        plugins = self._lock(locks)
        self.dnf = [
            "dnf", f"--installroot={folder}", f"--setopt=reposdir={self.path('etc/yum.repos.d')}",
            f"--setopt=pluginconfpath={plugins}", "--setopt=keepcache=1", "--setopt=*.skip_if_unavailable=0",
            "--setopt=install_weak_deps=0", "--color=never", *options,
        ]  # fmt: skip

    def path(self, name):
        """Return where a path of the host lies in here."""
        return os.path.join(self.folder, name)

    def _write(self, sources):
        keys = {}
        for source in sources:
            if not source["path"].endswith(".repo"):
                keys[source["path"]] = self.path(os.path.basename(source["path"]))
                with open(keys[source["path"]], "w", encoding="utf-8") as file:
                    file.write(source["content"])
        for source in sources:
            if source["path"].endswith(".repo"):
                content = source["content"]
                for on_host, here in keys.items():
                    content = content.replace(on_host, here)
                with open(
                    self.path(f"etc/yum.repos.d/{os.path.basename(source['path'])}"), "w", encoding="utf-8"
                ) as file:
                    file.write(content)

    def _lock(self, locks):
        """Write the version lock in force after the change; return the folder of the plugins' configuration."""
        folder = self.path("etc/dnf/plugins")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "versionlock.list")
        kept = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                kept = file.read().splitlines()
        ours = {_name(line) for line in locks}
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join([line for line in kept if _name(line) not in ours] + list(locks)) + "\n")
        with open(os.path.join(folder, "versionlock.conf"), "w", encoding="utf-8") as file:
            file.write(f"[main]\nenabled = 1\nlocklist = {path}\n")
        return folder

    def leave_stream(self, name, stream, packages, timeout_s):
        """Take out of the copied database what the change of stream takes off the host."""
        path = self.path(f"etc/dnf/modules.d/{name}.module")
        current = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                current = enabled_stream(file.read(), name)
        if current is None or current == stream:
            return
        os.remove(path)
        there = set(
            run(["rpm", f"--root={self.folder}", "-qa", "--queryformat", "%{NAME}\n"], timeout_s).stdout.split()
        )
        gone = [package for package in packages if package in there]
        if gone:
            run(
                [
                    "rpm",
                    f"--root={self.folder}",
                    "--erase",
                    "--justdb",
                    "--nodeps",
                    "--noscripts",
                    "--notriggers",
                    *gone,
                ],
                timeout_s,
            )


def _name(line):
    match = re.match(r"^(?P<name>.+?)-(\d+:)?[^-]+-[^-]+$", line.strip())
    return match["name"] if match and line[:1] not in "#!" else line


def main():
    """Build the sandbox, refresh, switch, resolve, compare, and fetch when asked to."""
    module = AnsibleModule(
        argument_spec={
            "sources": {"type": "list", "elements": "dict", "required": True},
            "packages": {"type": "list", "elements": "str", "required": True},
            "pins": {"type": "list", "elements": "str", "default": []},
            "module_name": {"type": "str", "default": "nvidia-driver"},
            "stream": {"type": "str", "default": ""},
            "stream_packages": {"type": "list", "elements": "str", "default": []},
            "locks": {"type": "list", "elements": "str", "default": []},
            "branch": {"type": "str", "default": ""},
            "headers": {"type": "bool", "default": False},
            "announce": {"type": "bool", "default": False},
            "download": {"type": "bool", "default": False},
            "installroot": {"type": "path", "default": "/"},
            "options": {"type": "list", "elements": "str", "default": []},
            "timeout_s": {"type": "int", "default": 1200},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**preflight(module, module.params))
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=f"dnf: {error}; expected an answer of dnf and rpm. Nothing was changed.")


def preflight(module, params):
    """Return the result; stops with the reason where there is none."""
    addresses = ", ".join(
        line.partition("=")[2] for source in params["sources"] for line in source["content"].splitlines()
        if line.startswith("baseurl=")
    )  # fmt: skip
    where = f"dnf repository {addresses or 'of the host'}"
    timeout_s = params["timeout_s"]
    lacking = without_headers(params["installroot"]) if params["headers"] else []
    if lacking:
        module.fail_json(
            msg=f"no headers of kernel {', '.join(lacking)}; expected those of the running and of the next kernel, "
            "since dkms builds for both. Nothing was changed; install "
            f"{' '.join(f'kernel-devel-{kernel}' for kernel in lacking)}."
        )
    held = holder("dnf", params["installroot"])
    if held:
        module.warn(f"{told(held)}; the change waits for it")
    box = Sandbox(
        os.path.join(module.tmpdir, "dnf-preflight"), params["installroot"], params["sources"], params["locks"],
        params["options"],
    )  # fmt: skip
    refreshed = run([*box.dnf, "makecache", "--refresh"], timeout_s)
    offline = refreshed.returncode != 0
    dnf = [*box.dnf, "--cacheonly"] if offline else box.dnf
    unanswered = complaints(refreshed.stdout + refreshed.stderr) if offline else ""

    def refuse(said, expected):
        earlier = (
            f" The repositories do not answer ({unanswered}), and what was fetched before is not enough."
            if offline
            else ""
        )
        module.fail_json(
            msg=f"{where}: {said}; expected {expected}.{earlier} Nothing was changed; correct the lock or the "
            "mirror, then run again."
        )

    if params["stream"]:
        box.leave_stream(params["module_name"], params["stream"], params["stream_packages"], timeout_s)
        done = run([*dnf, "--assumeyes", "module", "enable", f"{params['module_name']}:{params['stream']}"], timeout_s)
        if done.returncode != 0:
            refuse(complaints(done.stdout + done.stderr), f"stream {params['stream']} of {params['module_name']}")
    done = run([*dnf, "--assumeno", "--allowerasing", "install", *params["packages"]], timeout_s)
    said = done.stdout + done.stderr
    resolved = transaction(done.stdout)
    if done.returncode != 0 and not resolved:
        refuse(complaints(said), f"every package of the lock to resolve: {' '.join(params['packages'])}")
    listing = run(
        [
            "rpm",
            f"--root={box.folder}",
            "-qa",
            "--queryformat",
            "%{NAME} %|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\n",
        ],
        timeout_s,
    ).stdout
    installed = dict(line.split(" ", 1) for line in listing.splitlines() if " " in line)
    wrong = drifted(params["pins"], resolved, installed)
    wrong += of_another_branch(resolved, params["branch"]) if params["branch"] else []
    if wrong:
        refuse("; ".join(wrong), "the versions of the lock: read dnf versionlock list and dnf module list on this host")
    archives = f"{params['installroot']}/{_CACHE}/*/packages/*.rpm"
    before = set(glob.glob(archives))
    if resolved and ((params["download"] and not module.check_mode) or offline):
        fetch = [*dnf, "--assumeyes", "--allowerasing", "--downloadonly", "install", *params["packages"]]
        done = run(fetch, timeout_s)
        if done.returncode != 0:
            refuse(complaints(done.stdout + done.stderr), "every package to be fetched and signed by its key")
    downloaded = sorted(os.path.basename(path) for path in set(glob.glob(archives)) - before)
    result = {
        "changed": bool(downloaded) or (params["announce"] and bool(resolved)),
        "resolved": resolved,
        "downloaded": downloaded,
        "offline": offline,
    }
    return {**result, **({"diff": announcement(resolved, installed)} if params["announce"] else {})}


if __name__ == "__main__":
    main()
