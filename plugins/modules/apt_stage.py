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
import shutil
import subprocess
import time
import urllib.parse

from ansible.module_utils import apt_sandbox
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import TooMuchOutputError, run

SCHEMA_VERSION = 1
LISTS = "/var/lib/apt/lists"
ARCHIVES = "/var/cache/apt/archives"


class StageError(Exception):
    """Why something could not be staged or used."""


def asked_digest(wanted, sources):
    """Return one digest for what is asked for and from where."""
    files = sorted((source["path"], source["content"]) for source in sources)
    return hashlib.sha256(json.dumps([sorted(wanted), files]).encode()).hexdigest()


def sha256(path):
    """Return a file's SHA-256."""
    digest = hashlib.sha256()
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
        """Return why the stage cannot be used for what is asked; empty when it can.

        Sizes are compared and not sums: apt itself compares every package with the sum in the signed list.
        """
        note = self.note()
        if not note:
            return "nothing was staged"
        if note["asked"] != asked:
            return "other packages or sources were staged"
        for name, size in {**note["archives"], **note["lists"]}.items():
            place = os.path.join(self.archives if name in note["archives"] else self.lists, name)
            if not os.path.isfile(place) or os.path.getsize(place) != size:
                return f"{place} is gone or of another size"
        return ""

    def apt(self, sources, *words, cwd=None):
        """Run apt-get with the stage's own lists; StageError with apt's words."""
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

    def fetch(self, params):
        """Bring lists and packages, old ones too; return ``(files added, what a rollback lacks)``."""
        os.makedirs(self.archives, mode=0o755, exist_ok=True)
        before = set(os.listdir(self.archives))
        # What was staged for something else is no stage any more, also when this run is killed halfway.
        if os.path.exists(self.note_path):
            os.unlink(self.note_path)
        self.apt(params["sources"], "update")
        wanted = sorted(params["packages"].items())
        short = [pair for pair in wanted if not self.adopt(*pair)]
        if short:
            self.download(params["sources"], short)
        lacking = [pair for pair in wanted if not file_of(os.listdir(self.archives), *pair)]
        if lacking:
            raise StageError(f"apt-get download brought no file of {'='.join(lacking[0])}")
        first = self.fetch_first(params)
        previous, missing = {}, []
        for name, version in sorted(installed(self.timeout_s).items()):
            if name not in params["packages"] or version == params["packages"][name]:
                continue
            if not self.adopt(name, version):
                try:
                    self.download(params["sources"], [(name, version)])
                except StageError:
                    missing.append(f"{name}={version}")
                    continue
            previous[name] = version
        self.write_note(params, first, previous, missing)
        return sorted(set(os.listdir(self.archives)) - before), missing

    def fetch_first(self, params):
        """Bring the packages that go in before the others, at the version apt would choose; return their files."""
        if not params["first"]:
            return []
        aside = os.path.join(self.folder, "first")
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(aside)
        self.apt(params["sources"], "download", *params["first"], cwd=aside)
        files = sorted(os.listdir(aside))
        for name in files:
            os.replace(os.path.join(aside, name), os.path.join(self.archives, name))
        os.rmdir(aside)
        return files

    def adopt(self, name, version):
        """Take a package's file from apt's own cache when it is there; return whether the stage has it."""
        if file_of(os.listdir(self.archives), name, version):
            return True
        cached = file_of(os.listdir(ARCHIVES) if os.path.isdir(ARCHIVES) else [], name, version)
        if cached:
            place(os.path.join(ARCHIVES, cached), os.path.join(self.archives, cached))
        return bool(cached)

    def download(self, sources, pairs):
        """Fetch package files by exact version; apt proves them by its signed lists."""
        self.apt(sources, "download", *(f"{name}={version}" for name, version in pairs), cwd=self.archives)

    def write_note(self, params, first, previous, missing):
        """Say what is staged, last of all."""
        pairs = [*params["packages"].items(), *previous.items()]
        files = {*first, *(file_of(os.listdir(self.archives), *pair) for pair in pairs)}
        lists = [name for name in os.listdir(self.lists) if os.path.isfile(os.path.join(self.lists, name))]
        note = {
            "schema_version": SCHEMA_VERSION,
            "asked": asked_digest(params["wanted"], params["sources"]),
            "installed": installed_digest(installed(self.timeout_s)),
            "packages": params["packages"],
            "previous": previous,
            "rollback_missing": missing,
            "archives": {name: os.path.getsize(os.path.join(self.archives, name)) for name in sorted(files)},
            "lists": {
                name: os.path.getsize(os.path.join(self.lists, name)) for name in sorted(lists) if name != "lock"
            },
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


def place(source, target):
    """Copy a file with its times unless the same one is there; return whether it was not."""
    same_size = os.path.isfile(target) and os.path.getsize(target) == os.path.getsize(source)
    if same_size and (os.path.getmtime(target) == os.path.getmtime(source) or sha256(target) == sha256(source)):
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
        result["changed"] = True
        if not check_mode:
            result["fetched"], result["rollback_missing"] = stage.fetch(params)
            result.update(usable=True, reason="", current=True)
    if params["action"] == "use" and not reason and not check_mode:
        result["changed"] = bool(stage.use())
    return result


if __name__ == "__main__":
    main()
