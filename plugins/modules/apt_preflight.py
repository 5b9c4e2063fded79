#!/usr/bin/python
"""Ask apt, in a place of its own, whether a change could be made at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_preflight
short_description: Prove that apt repositories are signed right and that every pinned version resolves
description:
  - Reads the given sources and preferences beside the host's own into a temporary place, so the host's sources do not
    change. A bad signature, an unreachable repository, a version nobody offers, a driver package of another branch and
    a kernel without headers stop here, before anything is drained.
  - What was proved is left in apt's package lists, so that the change itself needs no network. Where the repositories
    do not answer, the lists of an earlier proof count if every package they lead to has been fetched.
  - Another apt that holds the lock, and packages an interrupted dpkg left half done, are warned about by name; the role
    waits for the one and finishes the other.
  - Packages are resolved together, as the later transaction will, with the versions in O(pins) held to.
options:
  sources:
    description:
      - Files the role will write, each with C(path) and C(content). C(.sources) files, preferences and apt.conf parts
        are told by their folder; anything else is a key.
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
  timeout_s:
    description: Seconds each command may take.
    type: int
    default: 1200
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
    support: partial
    description: Shows versions before and after where O(announce) asks for it.
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
offline:
  description: Whether the repositories did not answer and what was fetched before is complete.
  returned: success
  type: bool
half_done:
  description: Packages an interrupted dpkg left, with their state.
  returned: success
  type: dict
"""

import glob
import os
import re
import shutil
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import run
from ansible.module_utils.package_lock import half_done, holder, told
from ansible.module_utils.preflight import announcement, drifted, of_another_branch, without_headers

_INST = re.compile(r"^Inst (?P<name>\S+)(?: \[[^]]*\])? \((?P<version>\S+)")
_COMPLAINT = re.compile(r"^(E|W): (?P<text>.+)$", re.MULTILINE)
# What a repository says that does not answer; a bad signature is none of it, and never gets past.
_UNREACHABLE = re.compile(
    r"^[EW]: .*(Failed to fetch|Temporary failure|Could not (connect|resolve)|Connection (failed|timed out|refused)|"
    r"Unable to connect|Network is unreachable|No route to host)",
    re.MULTILINE,
)
_UNTRUSTED = re.compile(
    r"GPG error|NO_PUBKEY|is not signed|not signed|EXPKEYSIG|BADSIG|Hash Sum mismatch|no longer signed"
)
_LISTS = "/var/lib/apt/lists"
_ARCHIVES = "/var/cache/apt/archives"


def resolved_versions(simulation):
    """Return ``{name: version}`` of what ``apt-get --simulate`` would install."""
    matches = (_INST.match(line) for line in simulation.splitlines())
    return {match["name"].partition(":")[0]: match["version"] for match in matches if match}


class Sandbox:
    """A folder with the host's sources and preferences plus ours, and apt options that keep every list inside it."""

    def __init__(self, folder, sources, etc="/etc/apt"):
        self.folder = folder
        parts, preferences = self._path("sources.list.d"), self._path("preferences.d")
        os.makedirs(self._path("lists", "partial"))
        ours = {os.path.basename(source["path"]) for source in sources}
        for name in ("sources.list.d", "preferences.d"):
            os.makedirs(self._path(name))
            for path in glob.glob(f"{etc}/{name}/*"):
                if os.path.basename(path) not in ours and os.path.isfile(path):
                    shutil.copy(path, self._path(name))
        kinds = {source["path"]: os.path.basename(os.path.dirname(source["path"])) for source in sources}
        keys = {}
        for source in sources:
            if kinds[source["path"]] not in ("sources.list.d", "preferences.d", "apt.conf.d"):
                keys[source["path"]] = self._path(os.path.basename(source["path"]))
                self._write(keys[source["path"]], source["content"])
        for source in sources:
            if kinds[source["path"]] in ("sources.list.d", "preferences.d"):
                content = source["content"]
                for on_host, here in keys.items():
                    content = content.replace(on_host, here)
                self._write(self._path(kinds[source["path"]], os.path.basename(source["path"])), content)
        self.lists = self._path("lists")
        self.options = [
            "-o", f"Dir::Etc::SourceParts={parts}",
            "-o", f"Dir::Etc::PreferencesParts={preferences}",
            "-o", "Dir::Cache::pkgcache=",
            "-o", "Dir::Cache::srcpkgcache=",
            "-o", "APT::Update::Error-Mode=any",
            "-o", "Acquire::Retries=2",
            # The lists lie in a folder of root's; the user apt drops to could not read them there.
            "-o", "APT::Sandbox::User=root",
        ]  # fmt: skip

    def apt_get(self):
        """Return the command that works on the lists in use."""
        return ["apt-get", "--quiet", *self.options, "-o", f"Dir::State::Lists={self.lists}"]

    def take_preferences(self, archives):
        """Let what these packages put into preferences.d count, in place of the file of that name on the host."""
        unpacked = self._path("unpacked")
        for archive in archives:
            run(["dpkg-deb", "--extract", archive, unpacked], 60)
        for path in glob.glob(f"{unpacked}/etc/apt/preferences.d/*"):
            shutil.copy(path, self._path("preferences.d"))

    def _path(self, *names):
        return os.path.join(self.folder, *names)

    def _write(self, path, content):
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)


def complaints(output):
    """Return apt's own error and warning lines, joined, or the output's last line when it has none."""
    found = [match["text"] for match in _COMPLAINT.finditer(output)]
    return "; ".join(found) if found else (output.strip().splitlines() or ["no output"])[-1]


def unreachable(output):
    """Whether apt could not reach a repository, and nothing it did reach was signed wrong."""
    return bool(_UNREACHABLE.search(output)) and not _UNTRUSTED.search(output)


def publish(lists, target=_LISTS):
    """Put proved lists where apt looks for them; each appears whole, and lists of other sources stay."""
    for path in glob.glob(f"{lists}/*"):
        if os.path.isfile(path) and os.path.basename(path) != "lock":
            temporary = os.path.join(target, "partial", os.path.basename(path))
            os.makedirs(os.path.dirname(temporary), exist_ok=True)
            shutil.copy(path, temporary)
            os.replace(temporary, os.path.join(target, os.path.basename(path)))


class Preflight:
    """One proof: the host, what is asked, and how to stop with the reason."""

    def __init__(self, module):
        self.module = module
        self.params = module.params
        uris = ", ".join(
            line.partition(":")[2].strip()
            for source in self.params["sources"]
            for line in source["content"].splitlines()
            if line.startswith("URIs:")
        )
        self.where = f"apt repository {uris}" if uris else "apt"
        self.offline = ""  # why the repositories did not answer
        self.box = Sandbox(os.path.join(module.tmpdir, "apt-preflight"), self.params["sources"])

    def ask(self, *words, cwd=None):
        """Return ``(rc, output)`` of apt-get."""
        argv = [*self.box.apt_get(), *words]
        if cwd:
            argv = ["env", f"--chdir={cwd}", *argv]
        done = run(argv, self.params["timeout_s"])
        return done.returncode, done.stdout, done.stdout + done.stderr

    def refuse(self, said, expected, next_step="correct the lock or the mirror, then run again"):
        """Stop."""
        earlier = (
            f" The repositories do not answer ({self.offline}), and what was fetched before is not enough."
            if self.offline
            else ""
        )
        self.module.fail_json(
            msg=f"{self.where}: {said}; expected {expected}.{earlier} Nothing was changed; {next_step}."
        )

    def refresh(self):
        """Read every source; where they cannot be reached, fall back on the lists of an earlier proof."""
        rc, _, said = self.ask("update")
        if rc == 0:
            return
        if unreachable(said) and not self.params["download"]:
            self.offline = complaints(said)
            self.box.lists = _LISTS
            return
        self.refuse(
            complaints(said),
            "every source to answer and to be signed by its key",
            "repair the mirror or the key (key_file), then run again",
        )

    def pin(self):
        """Let the pinning packages count as if they were installed."""
        packages = self.params["pin_packages"]
        if not packages:
            return
        folder = os.path.join(self.box.folder, "pins")
        os.makedirs(folder)
        if self.offline:
            names = [name.partition("=")[0] for name in packages]
            archives = [path for name in names for path in glob.glob(f"{_ARCHIVES}/{name}_*.deb")]
        else:
            rc, _, said = self.ask("download", *packages, cwd=folder)
            if rc != 0:
                self.refuse(complaints(said), f"the pinning packages {' '.join(packages)}")
            archives = glob.glob(f"{folder}/*.deb")
            if self.params["download"] and not self.module.check_mode:
                for path in archives:  # the change installs the pin from apt's cache as well
                    shutil.copy(path, _ARCHIVES)
        if len(archives) < len(packages):
            self.refuse(f"{' '.join(packages)} is not in {_ARCHIVES}", "the pinning packages")
        self.box.take_preferences(archives)

    def resolve(self):
        """Return ``(versions, words)``: what the transaction would install, and apt-get's words for it."""
        install = [
            "install", "--yes", "--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages",
        ]  # fmt: skip
        rc, out, said = self.ask(*install, "--simulate", *self.params["packages"])
        if rc != 0:
            self.refuse(complaints(said), f"every package of the lock to resolve: {' '.join(self.params['packages'])}")
        return resolved_versions(out), install

    def fetch(self, install):
        """Fetch what is missing; return the new files."""
        before = set(os.listdir(_ARCHIVES))
        rc, _, said = self.ask(*install, "--download-only", *self.params["packages"])
        if rc != 0:
            self.refuse(complaints(said), "every package to be fetched")
        return sorted(name for name in set(os.listdir(_ARCHIVES)) - before if name.endswith(".deb"))


def main():
    """Build the sandbox, update, resolve, compare, and fetch when asked to."""
    module = AnsibleModule(
        argument_spec={
            "sources": {"type": "list", "elements": "dict", "required": True},
            "packages": {"type": "list", "elements": "str", "required": True},
            "pins": {"type": "list", "elements": "str", "default": []},
            "pin_packages": {"type": "list", "elements": "str", "default": []},
            "branch": {"type": "str", "default": ""},
            "headers": {"type": "bool", "default": False},
            "announce": {"type": "bool", "default": False},
            "timeout_s": {"type": "int", "default": 1200},
            "download": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**preflight(module, module.params))
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=f"apt: {error}; expected an answer of apt and dpkg. Nothing was changed.")


def preflight(module, params):
    """Return the result; stops with the reason where there is none."""
    lacking = without_headers() if params["headers"] else []
    if lacking:
        module.fail_json(
            msg=f"no headers of kernel {', '.join(lacking)}; expected those of the running and of the next kernel, "
            "since dkms builds for both. Nothing was changed; install "
            f"{' '.join(f'linux-headers-{kernel}' for kernel in lacking)}."
        )
    proof = Preflight(module)
    held = holder("apt")
    if held:
        module.warn(f"{told(held)}; the change waits for it")
    rows = run(["dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}\t${Package}\t${Version}\n"], 60).stdout
    table = [line.split("\t") for line in rows.splitlines() if line.count("\t") == 2]
    unfinished = half_done("".join(f"{abbrev.strip()} {name}\n" for abbrev, name, _ in table))
    if unfinished:
        module.warn(f"dpkg was interrupted, half done: {', '.join(sorted(unfinished))}; the change finishes it")
    installed = {name: version for abbrev, name, version in table if abbrev[1:2] != "n"}

    proof.refresh()
    proof.pin()
    resolved, install = proof.resolve()
    wrong = drifted(params["pins"], resolved, installed)
    wrong += of_another_branch(resolved, params["branch"]) if params["branch"] else []
    if wrong:
        proof.refuse(
            "; ".join(wrong),
            "the versions of the lock",
            "something else pins these packages: read apt-cache policy and /etc/apt/preferences.d on this host",
        )
    downloaded = []
    if proof.offline and resolved:
        rc, missing, said = proof.ask(*install, "--print-uris", *params["packages"])
        absent = [line.split()[1] for line in missing.splitlines() if line.startswith("'") and len(line.split()) > 1]
        if rc != 0 or absent:
            proof.refuse(f"not in {_ARCHIVES}: {', '.join(absent) or complaints(said)}", "every package to be fetched")
    elif params["download"] and resolved and not module.check_mode:
        downloaded = proof.fetch(install)
    if not proof.offline and not module.check_mode:
        publish(proof.box.lists)
    result = {
        "changed": bool(downloaded) or (params["announce"] and bool(resolved)),
        "resolved": resolved,
        "downloaded": downloaded,
        "offline": bool(proof.offline),
        "half_done": unfinished,
    }
    return {**result, **({"diff": announcement(resolved, installed)} if params["announce"] else {})}


if __name__ == "__main__":
    main()
