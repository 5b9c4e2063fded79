"""Addresses, links, listeners, and which process has which socket or GPU device open."""

from __future__ import annotations

import os
import re
import socket

from ansible.module_utils.host_probe import whole

_LISTEN = "0A"
_MOST_LINKS = 64
# Links that come and go with containers; a node can have thousands.
_PASSING = re.compile(r"^(lo|veth|cali|cilium|lxc|tap|tunl|flannel|nodelocaldns|kube-)")


def open_devices(probe):
    """Return ``(holders, sockets)`` from one walk over the open files of all processes.

    ``holders`` is ``[{"pid", "name", "device"}]`` of devices below /dev/nvidia*, one row per process and device;
    ``sockets`` maps a socket's inode to a process. What this process may not look at, or what has ended, is left out.
    """
    return probe.once("open", lambda: _walk(probe))


def _walk(probe):
    held, sockets = set(), {}
    base = str(probe.path("/proc"))
    for name in probe.names("/proc"):
        if not name.isdigit():
            continue
        folder = f"{base}/{name}/fd"
        try:
            entries = os.listdir(folder)  # noqa: PTH208 - called for every process; Path is slower
        except OSError:
            continue  # it has ended, or belongs to someone else
        for entry in entries:
            try:
                target = os.readlink(f"{folder}/{entry}")  # noqa: PTH115 - called ten thousand times; Path is slower
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                sockets[target[8:-1]] = int(name)
            elif target.startswith("/dev/nvidia"):
                held.add((int(name), target))
    rows = [
        {"pid": pid, "name": probe.line(f"/proc/{pid}/comm") or "?", "device": device} for pid, device in sorted(held)
    ]
    return rows, sockets


def _listen_address(text):
    if len(text) == 8:
        return socket.inet_ntop(socket.AF_INET, bytes.fromhex(text)[::-1])
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, 32, 8)]
    return socket.inet_ntop(socket.AF_INET6, b"".join(words))


def listening(probe, ports):
    """Return who listens on the given TCP ports: address, port, process id and name."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (probe.text(table, limit=8 << 20) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            try:
                address, port = _listen_address(fields[1].partition(":")[0]), int(fields[1].partition(":")[2], 16)
            except ValueError:
                probe.error(table, f"not a socket table: {line[:80]}")
                break
            if port in ports:
                rows.append({"address": address, "port": port, "inode": fields[9]})
    owners = open_devices(probe)[1] if rows else {}
    for row in rows:
        pid = owners.get(row.pop("inode"))
        row["pid"] = pid
        row["process"] = probe.line(f"/proc/{pid}/comm") if pid else None
    return rows


def addresses(probe):
    """Return ``{interface: [address, ...]}``, loopback and links of containers left out."""
    found = {}
    rows = probe.json_command("ip", "-json", "address", "show", needed=True)
    for link in rows if isinstance(rows, list) else []:
        name = link.get("ifname") if isinstance(link, dict) else None
        if isinstance(name, str) and not _PASSING.match(name):
            infos = link.get("addr_info") or []
            found[name] = [row["local"] for row in infos if row.get("scope") == "global" and row.get("local")]
    return dict(sorted(found.items())[:_MOST_LINKS])


def links(probe):
    """Return ``({interface: MTU}, {interface: Mbit/s or None})`` of the host's own links."""
    names = [name for name in probe.names("/sys/class/net") if not _PASSING.match(name)][:_MOST_LINKS]
    mtu = {name: probe.number(f"/sys/class/net/{name}/mtu") for name in names}
    speed = {name: whole(probe.line(f"/sys/class/net/{name}/speed")) for name in names}
    # A link that is down says -1, one without a speed of its own refuses to say.
    return mtu, {name: number if number is not None and number > 0 else None for name, number in speed.items()}
