"""Who holds a package manager's lock, and what an interrupted one left behind. Runs on the node."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from pathlib import Path

LOCKS = {
    "apt": (
        "/var/lib/dpkg/lock-frontend",
        "/var/lib/dpkg/lock",
        "/var/lib/apt/lists/lock",
        "/var/cache/apt/archives/lock",
    ),
    "dnf": ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock"),
}
"""Files the package managers lock while they change something (apt: apt-pkg/deb/debsystem.cc; rpm: rpmtsLock)."""

PID_FILES = {"apt": (), "dnf": ("/var/lib/dnf/rpmdb_lock.pid", "/var/cache/dnf/metadata_lock.pid", "/var/run/dnf.pid")}
"""Files with the number of the process that changes something (dnf/lock.py)."""

_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid
_STATUS = re.compile(r"^(?P<abbrev>\S{2,3})\s+(?P<name>\S+)$")


def holder(manager, root="/"):
    """Return ``{"path", "pid", "name"}`` of the process that holds a lock, or None; 0 is one outside a container."""
    for path in LOCKS[manager]:
        pid = _locked_by(_below(root, path))
        if pid is not None and pid != os.getpid():
            return {"path": path, "pid": pid, "name": _process(pid, root)}
    for path in PID_FILES[manager]:
        try:
            pid = int(_below(root, path).read_text(encoding="ascii").strip() or "0")
        except (OSError, ValueError):
            continue
        if pid and pid != os.getpid() and _below(root, f"/proc/{pid}").is_dir():
            return {"path": path, "pid": pid, "name": _process(pid, root)}
    return None


def wait(manager, timeout_s, root="/", sleep=time.sleep, clock=time.monotonic):
    """Wait until no lock is held; return the holder that did not let go in time, or None."""
    deadline = clock() + timeout_s
    while True:
        held = holder(manager, root)
        if held is None or clock() >= deadline:
            return held
        sleep(min(1.0, max(deadline - clock(), 0)))


def told(held):
    """Return a holder in words."""
    who = f"{held['name']} (pid {held['pid']})" if held["pid"] else "a process outside this container"
    return f"{who} holds {held['path']}"


def half_done(listing):
    """Return ``{name: status}`` of packages that dpkg did not finish.

    Args:
        listing: Lines ``${db:Status-Abbrev} ${Package}`` of dpkg-query. Second letter: n not, c configuration files,
            i installed are settled; H half-installed, U unpacked, F half-configured, W and t wait for triggers.
    """
    words = {
        "H": "half-installed",
        "U": "unpacked",
        "F": "half-configured",
        "W": "triggers awaited",
        "t": "triggers due",
    }
    found = {}
    for line in listing.splitlines():
        match = _STATUS.match(line.strip())
        if match and match["abbrev"][1] not in "nic":
            found[match["name"]] = words.get(match["abbrev"][1], match["abbrev"])
    return found


def journal(root="/"):
    """Return whether dpkg was stopped between two packages: its journal has entries it did not take over."""
    folder = _below(root, "/var/lib/dpkg/updates")
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def duplicates(listing, several=("kernel", "gpg-pubkey", "kmod-", "installonlypkg")):
    """Return names installed twice, which an interrupted rpm transaction leaves; the listing: name.arch a line."""
    seen, twice = set(), set()
    for name in listing.split():
        if name in seen and not name.startswith(tuple(several)):
            twice.add(name)
        seen.add(name)
    return sorted(twice)


def _locked_by(path):
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(pid, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _process(pid, root):
    try:
        return _below(root, f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "?"


def _below(root, absolute):
    return Path(root) / absolute.lstrip("/")
