#!/usr/bin/python
"""Ask apt, in a place of its own, whether a change could be made at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_preflight
short_description: Prove that apt repositories are signed right and that every pinned version resolves
description:
  - Reads the given sources beside the host's own into a temporary place, so neither the host's sources nor its
    package lists change. A bad signature, an unreachable repository and a version nobody offers stop here, before
    anything is drained.
  - Packages are resolved together, as the later transaction will, with the versions in O(pins) held to.
options:
  sources:
    description: Files the role will write, each with C(path) and C(content); what is no C(.sources) file is a key.
    type: list
    elements: dict
    required: true
  packages:
    description: What will be installed, as C(name) or C(name=version).
    type: list
    elements: str
    required: true
  pins:
    description: C(name=version) pairs that must come out at exactly that version.
    type: list
    elements: str
    default: []
  pin_packages:
    description:
      - Packages that pin others, as C(name) or C(name=version). Their preferences count in the resolution although
        they are not installed yet, because the role installs them first, in a transaction of its own.
    type: list
    elements: str
    default: []
  download:
    description: Also fetch the packages into apt's cache, so that the later transaction needs no network.
    type: bool
    default: false
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Everything but the download is a question.
  diff_mode:
    support: none
    description: Nothing the host reads changes.
"""

EXAMPLES = r"""
- name: Prove that the driver resolves
  apt_preflight:
    sources:
      - {path: /etc/apt/sources.list.d/cuda.sources, content: "Types: deb\n..."}
      - {path: /usr/share/keyrings/cuda.asc, content: "-----BEGIN PGP PUBLIC KEY BLOCK-----\n..."}
    packages: [nvidia-driver-cuda=580.178.04-1]
"""

RETURN = r"""
resolved:
  description: What the transaction would install, C(name) to C(version).
  returned: success
  type: dict
downloaded:
  description: Package files fetched into apt's cache.
  returned: success
  type: list
"""

import glob
import os
import re
import shutil

from ansible.module_utils.basic import AnsibleModule

_INST = re.compile(r"^Inst (?P<name>\S+)(?: \[[^]]*\])? \((?P<version>\S+)")
_COMPLAINT = re.compile(r"^(E|W): (?P<text>.+)$", re.MULTILINE)


def resolved_versions(simulation):
    """Return ``{name: version}`` of what ``apt-get --simulate`` would install."""
    matches = (_INST.match(line) for line in simulation.splitlines())
    return {match["name"].partition(":")[0]: match["version"] for match in matches if match}


def drifted(pins, resolved, installed):
    """Return the pins that come out at another version, as sentences; installed ones count where nothing changes."""
    wrong = []
    for pin in pins:
        name, _, version = pin.partition("=")
        found = resolved.get(name, installed.get(name))
        if found != version:
            wrong.append(f"{name} resolves to {found or 'nothing'}, expected {version}")
    return wrong


class Sandbox:
    """A folder with the host's sources plus ours, and apt options that keep every list inside it."""

    def __init__(self, folder, sources):
        self.folder = folder
        parts = os.path.join(folder, "sources.list.d")
        os.makedirs(parts)
        os.makedirs(os.path.join(folder, "lists", "partial"))
        ours = {os.path.basename(source["path"]) for source in sources}
        for path in glob.glob("/etc/apt/sources.list.d/*"):
            if os.path.basename(path) not in ours and os.path.isfile(path):
                shutil.copy(path, parts)
        keys = {}
        for source in sources:
            if not source["path"].endswith(".sources"):
                keys[source["path"]] = os.path.join(folder, os.path.basename(source["path"]))
                with open(keys[source["path"]], "w", encoding="utf-8") as file:
                    file.write(source["content"])
        for source in sources:
            if source["path"].endswith(".sources"):
                content = source["content"]
                for on_host, here in keys.items():
                    content = content.replace(on_host, here)
                with open(os.path.join(parts, os.path.basename(source["path"])), "w", encoding="utf-8") as file:
                    file.write(content)
        self.options = [
            "-o", f"Dir::Etc::SourceParts={parts}",
            "-o", f"Dir::State::Lists={os.path.join(folder, 'lists')}",
            "-o", "Dir::Cache::pkgcache=",
            "-o", "Dir::Cache::srcpkgcache=",
            "-o", "APT::Update::Error-Mode=any",
            "-o", "Acquire::Retries=2",
            # The lists lie in a folder of root's; the user apt drops to could not read them there.
            "-o", "APT::Sandbox::User=root",
        ]  # fmt: skip


def use_preferences_of(module, sandbox, apt_get, packages, environment):
    """Let the pinning packages' preferences count in the sandbox, in place of those an older one left on the host."""
    unpacked = os.path.join(sandbox.folder, "pins")
    preferences = os.path.join(sandbox.folder, "preferences.d")
    os.makedirs(unpacked)
    os.makedirs(preferences)
    rc, out, err = module.run_command([*apt_get, "download", *packages], environ_update=environment, cwd=unpacked)
    if rc != 0:
        return complaints(out + err)
    for archive in glob.glob(os.path.join(unpacked, "*.deb")):
        module.run_command(
            [module.get_bin_path("dpkg-deb", required=True), "--extract", archive, unpacked], check_rc=True
        )
    pinned = glob.glob(os.path.join(unpacked, "etc/apt/preferences.d/*"))
    names = {os.path.basename(path) for path in pinned}
    on_host = [path for path in glob.glob("/etc/apt/preferences.d/*") if os.path.basename(path) not in names]
    for path in pinned + on_host:
        if os.path.isfile(path):
            shutil.copy(path, preferences)
    sandbox.options += ["-o", f"Dir::Etc::PreferencesParts={preferences}"]
    return ""


def complaints(output):
    """Return apt's own error and warning lines, joined, or the output's last line when it has none."""
    found = [match["text"] for match in _COMPLAINT.finditer(output)]
    return "; ".join(found) if found else (output.strip().splitlines() or ["no output"])[-1]


def main():
    """Build the sandbox, update, resolve, compare, and fetch when asked to."""
    module = AnsibleModule(
        argument_spec={
            "sources": {"type": "list", "elements": "dict", "required": True},
            "packages": {"type": "list", "elements": "str", "required": True},
            "pins": {"type": "list", "elements": "str", "default": []},
            "pin_packages": {"type": "list", "elements": "str", "default": []},
            "download": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    uris = ", ".join(
        line.partition(":")[2].strip()
        for source in params["sources"]
        for line in source["content"].splitlines()
        if line.startswith("URIs:")
    )
    sandbox = Sandbox(os.path.join(module.tmpdir, "apt-preflight"), params["sources"])
    apt_get = [module.get_bin_path("apt-get", required=True), "--quiet", *sandbox.options]
    environment = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}

    rc, out, err = module.run_command([*apt_get, "update"], environ_update=environment)
    if rc != 0:
        module.fail_json(
            msg=f"apt: {complaints(out + err)}; expected every source to answer and to be signed by its key; those of "
            f"the inventory are {uris}. Nothing was changed; repair the mirror or the key (key_file), then run again."
        )
    if params["pin_packages"]:
        complaint = use_preferences_of(module, sandbox, apt_get, params["pin_packages"], environment)
        if complaint:
            module.fail_json(
                msg=f"apt repository {uris}: {complaint}; expected the pinning packages "
                f"{' '.join(params['pin_packages'])}. Nothing was changed; correct the lock or the mirror, run again."
            )
        apt_get = [module.get_bin_path("apt-get", required=True), "--quiet", *sandbox.options]
    install = [
        *apt_get, "install", "--yes", "--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages",
    ]  # fmt: skip
    rc, out, err = module.run_command([*install, "--simulate", *params["packages"]], environ_update=environment)
    if rc != 0:
        module.fail_json(
            msg=f"apt repository {uris}: {complaints(out + err)}; expected every package of the lock to resolve: "
            f"{' '.join(params['packages'])}. Nothing was changed; correct the lock or the mirror, then run again."
        )
    resolved = resolved_versions(out)
    rc, listing, err = module.run_command(
        ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"], check_rc=True
    )
    installed = dict(line.split(" ", 1) for line in listing.splitlines())
    wrong = drifted(params["pins"], resolved, installed)
    if wrong:
        module.fail_json(
            msg=f"apt repository {uris}: {'; '.join(wrong)}. Nothing was changed; something else pins these packages: "
            "read apt-cache policy and /etc/apt/preferences.d on this host."
        )
    downloaded = []
    if params["download"] and resolved and not module.check_mode:
        archives = "/var/cache/apt/archives"
        before = set(os.listdir(archives))
        rc, out, err = module.run_command(
            [*install, "--download-only", *params["packages"]], environ_update=environment
        )
        if rc != 0:
            module.fail_json(
                msg=f"apt repository {uris}: {complaints(out + err)}; expected every package to be fetched."
            )
        downloaded = sorted(name for name in set(os.listdir(archives)) - before if name.endswith(".deb"))
    module.exit_json(changed=bool(downloaded), resolved=resolved, downloaded=downloaded)


if __name__ == "__main__":
    main()
