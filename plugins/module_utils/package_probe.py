"""Installed packages, and what steers their versions: holds, version locks, preference files, module streams."""

from __future__ import annotations

import fnmatch
import re

from ansible.module_utils.host_probe import files, whole

# Packages reported whether or not somebody asked for them: a stray driver package is what breaks the next upgrade.
_DRIVER_PACKAGE = re.compile(
    r"^(lib)?nvidia|^libcuda\d|^cuda-(drivers|toolkit|compat|keyring)|^libnvsdm|^nvlsm$|^(kmod|dkms)-nvidia"
    r"|^linux-(objects|signatures|modules)-nvidia|^(doca|mlnx)-ofed|^(mlnx-ofa_kernel|rdma-core|doca-host)$"
)

_MOST = 200
_FILES = (
    "/etc/apt/preferences",
    "/etc/dnf/dnf.conf",
    "/etc/dnf/plugins/versionlock.list",
    "/etc/dnf/versionlock.toml",
    "/etc/dnf/modules.d/nvidia-driver.module",
)


def packages(probe, wanted):
    """Return ``{name: {"version", "held"} | None}`` for the wanted names and every driver package installed."""
    rows = installed(probe)
    found = dict.fromkeys(wanted)
    for name, version, held in rows or ():
        if name in found or _DRIVER_PACKAGE.search(name):
            found[name] = {"version": version, "held": held}
    return found


def installed(probe):
    """Return ``[(name, version, held)]`` of every installed package; None when no package manager answers."""
    return probe.once("packages", lambda: _listed(probe))


def _listed(probe):
    rows = _dpkg(probe) or _rpm(probe)
    if rows is None:
        probe.error("packages", "neither dpkg-query nor rpm lists them")
    return rows


def _dpkg(probe):
    answer = probe.command("dpkg-query", "--show", "--showformat", "${Package}\t${db:Status-Abbrev}\t${Version}\n")
    if answer is None:
        return None
    rows = [line.split("\t") for line in answer[1].splitlines()]
    kept = [(row[0], row[2], row[1][0] == "h") for row in rows if len(row) == 3 and row[1][1:2] == "i"]
    if answer[1].strip() and not kept:
        probe.error("dpkg-query", "printed no package list")
    return kept


def _rpm(probe):
    # NVIDIA's driver packages carry epoch 3, and a lock names it: without it none would be the locked one.
    form = "%{NAME}\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\n"
    answer = probe.command("rpm", "--query", "--all", "--queryformat", form)
    if answer is None:
        return None
    locked = locks(probe)
    rows = [line.split("\t") for line in answer[1].splitlines()]
    kept = [(row[0], row[1], any(matches(*row, lock) for lock in locked)) for row in rows if len(row) == 2]
    if answer[1].strip() and not kept:
        probe.error("rpm", "printed no package list")
    return kept


def locks(probe):
    """Return the patterns of dnf's versionlock plugin (DNF 4's list file, DNF 5's TOML), exclusions left out."""
    old = probe.text("/etc/dnf/plugins/versionlock.list") or ""
    rows = [line.strip() for line in old.splitlines() if line.strip() and line.strip()[0] not in "#!"]
    new = probe.text("/etc/dnf/versionlock.toml") or ""
    return rows + re.findall(r'^\s*name\s*=\s*"([^"]+)"', new, re.MULTILINE)


def matches(name, version, lock):
    """Return whether a versionlock entry (``name-epoch:version-release.arch``, globs allowed) is about a package."""
    pattern = re.sub(r"(^|-)\d+:", r"\1", lock)
    if name == pattern or (pattern.startswith(f"{name}-") and pattern[len(name) + 1 : len(name) + 2].isdigit()):
        return True
    bare = version.rpartition(":")[2]
    return any(fnmatch.fnmatchcase(one, pattern) for one in (name, f"{name}-{bare}", f"{name}-{bare}.any"))


def holds(probe):
    """Return the packages held, or the patterns of a version lock, sorted; None when no package manager answered."""
    rows = installed(probe)
    if rows is None:
        return None
    return sorted({name for name, _, held in rows if held} | set(locks(probe)))[:_MOST]


def pins(probe):
    """Return ``[{"path", "sha256", "entries"}]`` of the files that steer versions.

    ``entries`` holds what a file says of NVIDIA's packages: ``{"package", "pin", "priority"}``.
    """
    # apt reads files without an extension or ending in .pref.
    apt = [f"/etc/apt/preferences.d/{name}" for name in probe.names("/etc/apt/preferences.d")]
    read = files(
        probe, [*_FILES, *(name for name in apt if "." not in name.rpartition("/")[2] or name.endswith(".pref"))]
    )
    return [
        {"path": path, "sha256": told["sha256"], "entries": _entries(probe, path)}
        for path, told in read.items()
        if told
    ][:_MOST]


_ABOUT = re.compile(r"nvidia|cuda|nvlsm|nvsdm", re.IGNORECASE)
_MOST_ENTRIES = 20


def _entries(probe, path):
    """Return the pins of one file: of apt's preferences, of the stream dnf was told to take."""
    text = probe.text(path, limit=256 << 10) or ""
    if path.endswith(".module"):
        found = re.search(r"^stream\s*=\s*(\S+)", text, re.MULTILINE)
        return [{"package": "nvidia-driver", "pin": f"stream {found[1][:80]}", "priority": None}] if found else []
    if "/apt/" not in path:
        return []
    stanzas = [_stanza(part) for part in re.split(r"\n[ \t]*\n", text)]
    rows = [
        {"package": one["package"], "pin": one["pin"], "priority": whole(one.get("pin-priority"))}
        for one in stanzas
        if _ABOUT.search(one.get("package", "")) and one.get("pin")
    ]
    return rows[:_MOST_ENTRIES]


def _stanza(text):
    """Return the fields of one stanza, names in lower case; a line that begins with # is a comment."""
    lines = [line.partition(":") for line in text.splitlines() if not line.startswith("#")]
    return {name.strip().lower(): " ".join(value.split())[:200] for name, colon, value in lines if colon}
