#!/usr/bin/python
"""Keep on the host all that apt will need in the window, and put it where apt looks when the time comes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_stage
short_description: Stage packages and lists, so that the window runs without the repositories
description:
  - C(fetch) keeps the package files of a resolved transaction (M(apt_preflight)), those of the versions that are
    installed now, as far as a repository or apt's cache still has them, and the lists all of it was resolved with.
  - C(check) says whether the stage holds exactly what is wanted, whole.
  - C(use) puts lists and packages where apt looks, so that the transaction resolves as it did when it was staged. It
    changes no source and no preference.
options:
  action:
    description: What to do.
    type: str
    choices: [fetch, check, use]
    required: true
  wanted:
    description: What the transaction asks for, as C(name) or C(name=version); the stage counts for exactly this.
    type: list
    elements: str
    required: true
  sources:
    description: Files the roles will write, each with C(path) and C(content); the stage counts for exactly these.
    type: list
    elements: dict
    required: true
  packages:
    description: Name to version of every package of the transaction, as M(apt_preflight) resolved it. For C(fetch).
    type: dict
    default: {}
  first:
    description:
      - Packages, as C(name) or C(name=version), that are installed in a transaction of their own before the others
        (pins). For C(fetch).
    type: list
    elements: str
    default: []
  folder:
    description: The stage.
    type: path
    default: /var/lib/kimi-runbook/stage/apt
  timeout_s:
    description: Seconds one call of apt may take.
    type: int
    default: 1800
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: C(fetch) says whether the stage is short of something, C(use) whether it could be used.
  diff_mode:
    support: none
    description: Nothing the host reads changes but apt's caches.
"""

EXAMPLES = r"""
- name: Keep the packages
  apt_stage:
    action: fetch
    wanted: [nvidia-driver-cuda=580.178.04-1]
    sources: "{{ sources }}"
    packages: "{{ preflight.resolved }}"
"""

RETURN = r"""
usable:
  description: Whether the stage holds what is wanted, whole.
  returned: success
  type: bool
reason:
  description: Why not.
  returned: success
  type: str
current:
  description: Whether the host still has the packages it had when the stage was made.
  returned: success
  type: bool
fetched:
  description: Package files that were added.
  returned: success
  type: list
rollback_missing:
  description: Installed packages, as C(name=version), of which no repository and no cache has the file any more.
  returned: success
  type: list
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse

from ansible.module_utils import apt_sandbox
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import TooMuchOutputError, run

SCHEMA_VERSION = 1
# As apt-get download --print-uris says it: 'URI' file size SHA256:hex
_URI = re.compile(r"^'[^']*' (?P<file>\S+) \d+ (?P<kind>SHA256|SHA512):(?P<sum>[0-9a-f]+)$", re.MULTILINE)
LISTS = "/var/lib/apt/lists"
ARCHIVES = "/var/cache/apt/archives"


class StageError(Exception):
    """Why something could not be staged or used."""


def asked_digest(wanted, sources):
    """Return one digest for what is asked for and from where."""
    files = sorted((source["path"], source["content"]) for source in sources)
    return hashlib.sha256(json.dumps([sorted(wanted), files]).encode()).hexdigest()


def checksum(path, kind="sha256"):
    """Return a file's checksum."""
    digest = hashlib.new(kind.lower())
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def file_of(names, name, version):
    """Return the file of a package among names, as apt writes them: ``name_version_architecture.deb``, : as %3a."""
    for quoted in (version.replace(":", "%3a"), urllib.parse.quote(version, safe="+~"), version):
        found = [entry for entry in names if entry.startswith(f"{name}_{quoted}_") and entry.endswith(".deb")]
        if found:
            return found[0]
    return None


class Stage:
    """One folder: ``archives``, ``lists``, ``etc`` and the note."""

    def __init__(self, folder, timeout_s):
        self.folder = folder
        self.archives = os.path.join(folder, "archives")
        self.lists = os.path.join(folder, "lists")
        self.note_path = os.path.join(folder, "note.json")
        self.timeout_s = timeout_s

    def note(self):
        """Return the note, empty where there is none of this schema."""
        try:
            with open(self.note_path, encoding="utf-8") as file:
                note = json.load(file)
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) and note.get("schema_version") == SCHEMA_VERSION else {}

    def shortfall(self, asked):
        """Return why the stage cannot be used for what is asked, by names and sizes; empty when it can."""
        note = self.note()
        if not note:
            return "nothing was staged"
        if note["asked"] != asked:
            return "other packages or sources were staged"
        for folder, files in ((self.archives, note["archives"]), (self.lists, note["lists"])):
            for name, told in files.items():
                path = os.path.join(folder, name)
                if not os.path.isfile(path) or os.path.getsize(path) != told["size"]:
                    return f"{path} is gone or of another size"
        return ""

    def spoiled(self):
        """Return which file has another content than when it was staged; empty when none has.

        apt compares a file in its cache with the lists by size alone, so the sums have to be compared here.
        """
        note = self.note()
        for folder, files in ((self.archives, note["archives"]), (self.lists, note["lists"])):
            for name, told in files.items():
                if checksum(os.path.join(folder, name)) != told["sha256"]:
                    return f"{os.path.join(folder, name)} has another content than when it was staged"
        return ""

    def apt(self, sources, *words, cwd=None):
        """Run apt-get with the stage's own lists and return its output; StageError with apt's words."""
        parts = apt_sandbox.write_sources(os.path.join(self.folder, "etc"), sources)
        argv = ["apt-get", "--quiet", *apt_sandbox.options(parts, self.lists), *words]
        if cwd:  # apt-get download writes where it stands
            argv = ["env", f"--chdir={cwd}", *argv]
        try:
            done = run(argv, self.timeout_s)
        except (OSError, TooMuchOutputError) as error:
            raise StageError(f"{' '.join(words[:2])}: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise StageError(f"apt-get {words[0]}: no end after {self.timeout_s} s") from error
        if done.returncode != 0:
            raise StageError(apt_sandbox.complaints(done.stdout + done.stderr))
        return done.stdout

    def fetch(self, params):
        """Bring lists and packages, old ones too; return ``(files added, what a rollback lacks)``."""
        os.makedirs(self.archives, mode=0o755, exist_ok=True)
        before = set(os.listdir(self.archives))
        before_note = self.note()
        # What was staged for something else is no stage any more, also when this run is killed halfway.
        if os.path.exists(self.note_path):
            os.unlink(self.note_path)
        self.apt(params["sources"], "update")
        wanted = [f"{name}={version}" for name, version in sorted(params["packages"].items())]
        files = set(self.bring(params["sources"], [*wanted, *params["first"]]))
        previous, missing = self.carried(before_note, params["packages"]), []
        files.update(file_of(os.listdir(self.archives), *pair) for pair in previous.items())
        for name, version in sorted(installed(self.timeout_s).items()):
            if name not in params["packages"] or version == params["packages"][name]:
                continue
            kept = self.bring_old(params["sources"], name, version)
            if kept:
                previous[name] = version
                files.update(kept)
            else:
                missing.append(f"{name}={version}")
        self.write_note(params, files, previous, missing)
        return sorted(files - before), missing

    def carried(self, note, packages):
        """Return the old versions an earlier stage kept and this one does not replace: a rollback may want them."""
        here = os.listdir(self.archives)
        kept = {**note.get("packages", {}), **note.get("previous", {})}
        return {
            name: version
            for name, version in kept.items()
            if version != packages.get(name) and file_of(here, name, version)
        }

    def bring(self, sources, words):
        """Have the files of some packages, each with the sum of apt's signed lists; return their names."""
        if not words:
            return []
        sums = {match["file"]: match for match in _URI.finditer(self.apt(sources, "download", "--print-uris", *words))}
        absent = [name for name, match in sums.items() if not self.adopt(name, match["kind"], match["sum"])]
        if absent or len(sums) < len(set(words)):
            # Asked for one by one it would be a start of apt each; what is there already is not fetched again.
            self.apt(sources, "download", *words, cwd=self.archives)
        for name, match in sums.items():
            path = os.path.join(self.archives, name)
            if not os.path.isfile(path) or checksum(path, match["kind"]) != match["sum"]:
                raise StageError(f"apt-get download brought no {name} with the sum of the signed list")
        return list(sums)

    def adopt(self, name, kind, expected):
        """Whether the stage has a file, its own or the one of apt's cache, with the right sum."""
        own, cached = os.path.join(self.archives, name), os.path.join(ARCHIVES, name)
        if os.path.isfile(own):
            if checksum(own, kind) == expected:
                return True
            os.unlink(own)
        if os.path.isfile(cached) and checksum(cached, kind) == expected:
            place(cached, own)
            return True
        return False

    def bring_old(self, sources, name, version):
        """Have the file of an installed version, from a repository or, where none has it, from apt's cache."""
        try:
            return self.bring(sources, [f"{name}={version}"])
        except StageError:
            for folder in (self.archives, ARCHIVES):
                found = file_of(os.listdir(folder) if os.path.isdir(folder) else [], name, version)
                if found and self.readable(os.path.join(folder, found)):
                    if folder != self.archives:
                        place(os.path.join(folder, found), os.path.join(self.archives, found))
                    return [found]
        return []

    def readable(self, path):
        """Whether a package that no list has a sum for can be read to its end."""
        return run(["dpkg-deb", "--ctrl-tarfile", path], self.timeout_s).returncode == 0 and (
            run(["dpkg-deb", "--contents", path], self.timeout_s, limit=64 << 20).returncode == 0
        )

    def write_note(self, params, files, previous, missing):
        """Say what is staged, last of all."""
        lists = [name for name in os.listdir(self.lists) if name != "lock"]
        note = {
            "schema_version": SCHEMA_VERSION,
            "asked": asked_digest(params["wanted"], params["sources"]),
            "installed": installed_digest(installed(self.timeout_s)),
            "packages": params["packages"],
            "previous": previous,
            "rollback_missing": missing,
            "archives": described(self.archives, files),
            "lists": described(self.lists, lists),
            "staged_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        for name in set(os.listdir(self.archives)) - files:
            if name.endswith(".deb"):
                os.unlink(os.path.join(self.archives, name))
        temporary = f"{self.note_path}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(note, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.note_path)

    def use(self):
        """Put lists and packages where apt looks; return the files that were not there."""
        note, added = self.note(), []
        for names, source, target in ((note["archives"], self.archives, ARCHIVES), (note["lists"], self.lists, LISTS)):
            os.makedirs(target, mode=0o755, exist_ok=True)
            for name in names:
                if place(os.path.join(source, name), os.path.join(target, name)):
                    added.append(name)
        return added


def described(folder, names):
    """Return size and SHA-256 of some files, those that are no files left out."""
    paths = {name: os.path.join(folder, name) for name in sorted(names)}
    return {
        name: {"size": os.path.getsize(path), "sha256": checksum(path)}
        for name, path in paths.items()
        if os.path.isfile(path)
    }


def place(source, target):
    """Copy a file with its times unless the same one is there; return whether it was not."""
    same_size = os.path.isfile(target) and os.path.getsize(target) == os.path.getsize(source)
    if same_size and (os.path.getmtime(target) == os.path.getmtime(source) or checksum(target) == checksum(source)):
        return False
    temporary = f"{target}.kimi-new"
    shutil.copy2(source, temporary)
    os.replace(temporary, target)
    return True


def installed(timeout_s):
    """Return name to version of the packages that are installed."""
    done = run(["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package} ${Version}\n"], timeout_s)
    rows = (line.split(" ") for line in done.stdout.splitlines())
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}


def installed_digest(packages):
    """Return one digest for all installed packages: what a transaction needs depends on what is there."""
    return hashlib.sha256(json.dumps(sorted(packages.items())).encode()).hexdigest()


def main():
    """Check, then fetch or use."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["fetch", "check", "use"], "required": True},
            "wanted": {"type": "list", "elements": "str", "required": True},
            "sources": {"type": "list", "elements": "dict", "required": True},
            "packages": {"type": "dict", "default": {}},
            "first": {"type": "list", "elements": "str", "default": []},
            "folder": {"type": "path", "default": "/var/lib/kimi-runbook/stage/apt"},
            "timeout_s": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**act(module.params, check_mode=module.check_mode))
    except (StageError, OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(
            msg=f"apt stage {module.params['folder']}: {error}; expected every package of the lock to be fetched. "
            "Nothing that serves was changed; correct the mirror or free space, then run again."
        )


def act(params, *, check_mode=False):
    """Return the module's result."""
    stage = Stage(params["folder"], params["timeout_s"])
    reason = stage.shortfall(asked_digest(params["wanted"], params["sources"]))
    current = stage.note().get("installed") == installed_digest(installed(params["timeout_s"]))
    result = {
        "changed": False,
        "usable": not reason,
        "reason": reason,
        "current": current,
        "fetched": [],
        "rollback_missing": stage.note().get("rollback_missing", []),
    }
    if params["action"] == "fetch" and (reason or not current):
        if check_mode:
            result["changed"] = bool(params["packages"])
        else:
            result["fetched"], result["rollback_missing"] = stage.fetch(params)
            result.update(changed=bool(result["fetched"]), usable=True, reason="", current=True)
    if params["action"] == "use" and not reason:
        spoiled = stage.spoiled()
        result.update(usable=not spoiled, reason=spoiled)
        if not spoiled and not check_mode:
            result["changed"] = bool(stage.use())
    return result


if __name__ == "__main__":
    main()
