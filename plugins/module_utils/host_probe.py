"""Questions the host_snapshot module asks a host, each answered as plain JSON values.

Runs on the node with whatever Python the distribution ships (3.9 or newer) and nothing else. Every function takes a
:class:`Probe`, the only thing that touches the host, so a tree of files and canned command answers can stand in for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
from pathlib import Path

SCHEMA_VERSION = 1

# Packages reported whether or not somebody asked for them: a stray driver package is what breaks the next upgrade.
_DRIVER_PACKAGE = re.compile(r"^(lib)?nvidia|^libcuda\d|^cuda-drivers|^nvlsm$|^(kmod|dkms)-nvidia")

_LISTEN = "0A"


class Probe:
    """Reads files below ``root`` and runs commands with a time limit; keeps what could not be answered.

    Attributes:
        errors: One ``{"probe", "message"}`` per question that got no usable answer.
    """

    def __init__(self, root="/", timeout_s=10, run=subprocess.run):
        self.root = Path(root)
        self.timeout_s = timeout_s
        self.errors = []
        self._run = run

    def path(self, absolute):
        """Return where an absolute path of the host lies below the root."""
        return self.root / str(absolute).lstrip("/")

    def text(self, absolute):
        """Return a file's text, or None when it does not exist or cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self.errors.append({"probe": str(absolute), "message": str(error.strerror)})
            return None

    def glob(self, pattern):
        """Return the paths below the root that match, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def command(self, *argv):
        """Return ``(rc, stdout, stderr)``, or None when the program is missing or did not answer in time."""
        env = dict(os.environ, LC_ALL="C.UTF-8", LANGUAGE="C")
        try:
            done = self._run(argv, capture_output=True, text=True, timeout=self.timeout_s, env=env, errors="replace")
        except FileNotFoundError:
            return None
        except subprocess.TimeoutExpired:
            self.errors.append({"probe": argv[0], "message": f"no answer within {self.timeout_s} s"})
            return None
        except OSError as error:
            self.errors.append({"probe": argv[0], "message": str(error)})
            return None
        return done.returncode, done.stdout, done.stderr

    def json_command(self, *argv):
        """Return the JSON a command prints, or None when it failed or printed something else."""
        answer = self.command(*argv)
        if answer is None or answer[0] != 0:
            return None
        try:
            return json.loads(answer[1])
        except ValueError:
            self.errors.append({"probe": " ".join(argv[:2]), "message": "did not print JSON"})
            return None


def system(probe):
    """Return the distribution, the kernel and the architecture."""
    release = {}
    for line in (probe.text("/etc/os-release") or "").splitlines():
        name, separator, value = line.partition("=")
        if separator:
            release[name] = value.strip("\"'")
    uname = os.uname()
    return {
        "id": release.get("ID", "unknown"),
        "version_id": release.get("VERSION_ID", "unknown"),
        "pretty": release.get("PRETTY_NAME", "unknown"),
        "kernel": uname.release,
        "arch": uname.machine,
    }


def boot(probe):
    """Return what changes with a boot: the kernel's boot id and the start of process 1, in clock ticks."""
    stat = probe.text("/proc/1/stat") or ""
    fields = stat.rpartition(")")[2].split()
    return {
        "boot_id": (probe.text("/proc/sys/kernel/random/boot_id") or "").strip() or None,
        "pid1_started_ticks": int(fields[19]) if len(fields) > 19 else None,
    }


def packages(probe, wanted):
    """Return ``{name: {"version", "held"} | None}`` for the wanted names and every driver package installed."""
    found = dict.fromkeys(wanted)
    answer = probe.command("dpkg-query", "--show", "--showformat", "${Package}\t${db:Status-Abbrev}\t${Version}\n")
    if answer is not None:
        for line in answer[1].splitlines():
            name, status, version = line.split("\t")
            if status[1:2] == "i" and (name in found or _DRIVER_PACKAGE.search(name)):
                found[name] = {"version": version, "held": status[0] == "h"}
        return found
    answer = probe.command("rpm", "--query", "--all", "--queryformat", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
    if answer is not None:
        locked = probe.text("/etc/dnf/plugins/versionlock.list") or ""
        for line in answer[1].splitlines():
            name, version = line.split("\t")
            if name in found or _DRIVER_PACKAGE.search(name):
                found[name] = {"version": version, "held": f"{name}-" in locked}
    return found


def files(probe, wanted):
    """Return ``{path: {"sha256", "mode"} | None}``; None for a file that is not there."""
    found = {}
    for name in wanted:
        path = probe.path(name)
        try:
            content = path.read_bytes()
            found[name] = {"sha256": hashlib.sha256(content).hexdigest(), "mode": f"{path.stat().st_mode & 0o7777:04o}"}
        except OSError:
            found[name] = None
    return found


def units(probe, wanted):
    """Return ``{unit: {"load", "active", "enabled"}}`` from one question to systemd."""
    found = {name: {"load": "unknown", "active": "unknown", "enabled": "unknown"} for name in wanted}
    if not wanted:
        return found
    answer = probe.command("systemctl", "show", "--property", "LoadState,ActiveState,UnitFileState", *wanted)
    if answer is None:
        return found
    blocks = answer[1].strip().split("\n\n")
    for name, block in zip(wanted, blocks):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        found[name] = {
            "load": values.get("LoadState", "unknown"),
            "active": values.get("ActiveState", "unknown"),
            "enabled": values.get("UnitFileState") or "not-found",
        }
    return found


def kernel_modules(probe, wanted):
    """Return ``{module: {"loaded", "version", "refcnt"}}`` as /sys/module has them."""
    found = {}
    for name in wanted:
        base = f"/sys/module/{name.replace('-', '_')}"
        refcnt = (probe.text(f"{base}/refcnt") or "").strip()
        found[name] = {
            "loaded": probe.path(base).is_dir(),
            "version": (probe.text(f"{base}/version") or "").strip() or None,
            "refcnt": int(refcnt) if refcnt.isdigit() else None,
        }
    return found


def rdma_devices(probe):
    """Return one row per RDMA port: state and link layer as the kernel names them."""
    rows = []
    for port in probe.glob("/sys/class/infiniband/*/ports/*"):
        name = port.parent.parent.name
        base = f"/sys/class/infiniband/{name}/ports/{port.name}"
        rows.append(
            {
                "name": name,
                "port": int(port.name),
                "state": (probe.text(f"{base}/state") or "").rpartition(":")[2].strip() or None,
                "link_layer": (probe.text(f"{base}/link_layer") or "").strip() or None,
            }
        )
    return rows


def _socket_owners(probe, inodes):
    owners = {}
    if not inodes:
        return owners
    for entry in probe.glob("/proc/[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            owners[target[8:-1]] = int(entry.parent.parent.name)
    return owners


def _listen_address(text):
    if len(text) == 8:
        return socket.inet_ntop(socket.AF_INET, bytes.fromhex(text)[::-1])
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, 32, 8)]
    return socket.inet_ntop(socket.AF_INET6, b"".join(words))


def listening(probe, ports):
    """Return who listens on the given TCP ports: address, port, process id and name."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (probe.text(table) or "").splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == _LISTEN and int(port, 16) in ports:
                rows.append({"address": _listen_address(address), "port": int(port, 16), "inode": fields[9]})
    owners = _socket_owners(probe, {row["inode"] for row in rows})
    for row in rows:
        pid = owners.get(row.pop("inode"))
        row["pid"] = pid
        row["process"] = (probe.text(f"/proc/{pid}/comm") or "").strip() if pid else None
    return rows


def addresses(probe):
    """Return ``{interface: [address, ...]}``, loopback left out."""
    found = {}
    for link in probe.json_command("ip", "-json", "address", "show") or []:
        if link.get("ifname") != "lo":
            found[link["ifname"]] = [row["local"] for row in link.get("addr_info", []) if row.get("scope") == "global"]
    return found
