"""NVLink: switches, the services that run the fabric, IMEX; and CDI specifications, which name driver files."""

from __future__ import annotations

import os
import re

from ansible.module_utils.gpu_probe import gpu_fabric
from ansible.module_utils.package_probe import installed
from ansible.module_utils.unit_probe import ask, main_pid, started_at

# Service to the names of packages it comes from, the newest name first. NVIDIA's CUDA repository has
# nvidia-fabricmanager since 580; before, Debian packages carried the branch and RPMs were nvidia-fabric-manager
# (gpu-driver-container, pull request 451).
SERVICES = {
    "nvidia-fabricmanager": r"nvidia-fabric-?manager(-\d+(-server)?)?",
    "nvlsm": r"nvlsm",
    "nvidia-imex": r"nvidia-imex(-\d+)?",
    "nvidia-persistenced": r"nvidia-persistenced|nvidia-compute-utils-\d+(-server)?",
}
_MOST_PATHS = 50
_OLDEST_BRANCH = 300  # a library's number below it is its own
_MOST_NODES = 64  # an NVL72 rack has 18 trays
_MOST_APART = 20  # of one node, so that a domain with no connection at all stays below 50 KiB
_KEY = re.compile(r'"?\b(?:hostPath|path)"?\s*:\s*"?(/[^"\s,}\]]+)')
_LIBRARY_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")
_DEVICE = re.compile(r'(?<![A-Za-z])name"?\s*:\s*"?([\w.:/-]+)')


def fabric(probe, loaded):
    """Return what the NVLink fabric of a host is made of; GPUs are asked only where the driver is loaded."""
    nodes = _imex_nodes(probe)
    return {
        "nvswitches": len(probe.names("/proc/driver/nvidia-nvswitch/devices")),
        "sw_mng": managed_switches(probe),
        "services": {name: _service(probe, name) for name in SERVICES},
        "gpus": gpu_fabric(probe) if loaded else None,
        "imex_channels": probe.names("/dev/nvidia-caps-imex-channels")[:64],
        "imex_nodes": nodes,
        "imex_domain": _imex_domain(probe) if nodes else None,
    }


def _imex_nodes(probe):
    """Return the addresses of the node list in their order; None without one."""
    text = probe.text("/etc/nvidia-imex/nodes_config.cfg")
    lines = None if text is None else map(str.strip, text.splitlines())
    return None if lines is None else [line for line in lines if line and not line.startswith("#")]


def _imex_domain(probe):
    """Return what the IMEX daemon says of its domain; None when none runs or it gave no usable answer.

    The daemon asks every other node, so it is given the time one of them takes not to answer. The layout, one entry for
    each node of the list, as seen in NVIDIA/DCGM (DcgmImexManager) and in published output of nvidia-imex-ctl -N -j.
    """
    if not main_pid(probe, "nvidia-imex.service"):
        return None
    told = probe.json_command("nvidia-imex-ctl", "-N", "-j", needed=True, timeout_s=2 * probe.timeout_s)
    if told is None:
        return None
    domain = imex_domain_of(told)
    if domain is None:
        probe.error("nvidia-imex-ctl -N", "its JSON names no nodes")
    return domain


def imex_domain_of(told):
    """Return what ``nvidia-imex-ctl -N -j`` printed as ``status`` and ``nodes``; None where it names no nodes."""
    nodes = told.get("nodes") if isinstance(told, dict) else None
    if not isinstance(nodes, dict) or not nodes or not all(isinstance(node, dict) for node in nodes.values()):
        return None
    return {"status": _word(told.get("status")), "nodes": [_imex_node(node) for node in nodes.values()][:_MOST_NODES]}


def _imex_node(node):
    """Return one node's state, version, and the nodes it is not connected to as ``address status``."""
    rows = node.get("connections")
    rows = [row for row in rows.values() if isinstance(row, dict)] if isinstance(rows, dict) else []
    apart = [f"{_word(row.get('host'))} {_word(row.get('status'))}" for row in rows if row.get("status") != "CONNECTED"]
    return {
        "host": _word(node.get("host")),
        "status": _word(node.get("status")),
        "version": _word(node.get("version")),
        "apart": apart[:_MOST_APART],
    }


def _word(value):
    """Return a word of an answer, None for anything else."""
    return value[:80] if isinstance(value, str) and value else None


def managed_switches(probe):
    """Return how many RDMA functions manage NVLink switches: their vital product data says SW_MNG (HGX B200, B300).

    Vital product data comes from the device itself, slowly, so it is read with a time limit; None when that passes.
    """
    paths = [f"/sys/class/infiniband/{name}/device/vpd" for name in probe.names("/sys/class/infiniband")]
    paths = [path for path in paths if probe.path(path).exists()]
    if not paths:
        return 0
    return probe.apart("vital product data", lambda: sum(b"SW_MNG" in _data(probe.path(path)) for path in paths))


def _data(path):
    try:
        with path.open("rb") as stream:
            return stream.read(32 << 10)
    except OSError:
        return b""  # a function without such data refuses to be read


def _service(probe, name):
    pattern = re.compile(SERVICES[name])
    rows = installed(probe) or ()
    package, version = next(((row[0], row[1]) for row in rows if pattern.fullmatch(row[0])), (None, None))
    unit = f"{name}.service"
    pid = main_pid(probe, unit)
    return {
        "package": package,
        "version": version,
        "active": ask(probe, ()).get(unit, {}).get("ActiveState", "unknown"),
        "started_at": started_at(probe, unit),
        "replaced": _replaced(probe, pid) if pid else None,
    }


def _replaced(probe, pid):
    """Return whether the file of a running program has been replaced on disk since it was started."""
    try:
        return os.readlink(probe.path(f"/proc/{pid}/exe")).endswith(" (deleted)")  # noqa: PTH115 - may not be a path
    except OSError:
        return None


def cdi(probe):
    """Return each CDI specification: versions in library paths, host paths that are missing, names of its devices.

    Both folders count: for a device's name /var/run/cdi wins, and /etc/cdi serves any name the other one lacks.
    """
    rows, seen = [], set()
    for folder in ("/etc/cdi", "/var/run/cdi", "/run/cdi"):
        for name in probe.names(folder):
            path = probe.path(f"{folder}/{name}")
            if not name.endswith((".yaml", ".json")) or os.path.realpath(path) in seen:
                continue
            seen.add(os.path.realpath(path))
            told = cdi_facts(probe, probe.text(f"{folder}/{name}", limit=4 << 20) or "")
            told["missing"], told["devices"] = told["missing"][:_MOST_PATHS], told["devices"][:_MOST_PATHS]
            rows.append({"path": f"{folder}/{name}", **told})
    return rows


def cdi_facts(probe, text):
    """Return what one CDI specification says: driver ``versions`` of libraries, ``missing`` host paths, ``devices``.

    A library that has a number of its own, as libnvidia-egl-gbm.so.1.1.2, says nothing of the driver.
    """
    paths = list(dict.fromkeys(_KEY.findall(text)))
    versions = {match[1] for match in map(_LIBRARY_VERSION.search, paths) if match}
    return {
        "versions": sorted(version for version in versions if int(version.partition(".")[0]) > _OLDEST_BRANCH),
        "missing": [one for one in paths if not os.path.lexists(probe.path(one))],
        "devices": list(dict.fromkeys(_DEVICE.findall(text))),
    }
