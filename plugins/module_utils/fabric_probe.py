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
_KEY = re.compile(r'"?\b(?:hostPath|path)"?\s*:\s*"?(/[^"\s,}\]]+)')
_LIBRARY_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")
_DEVICE = re.compile(r'(?<![A-Za-z])name"?\s*:\s*"?([\w.:/-]+)')


def fabric(probe, loaded):
    """Return what the NVLink fabric of a host is made of; GPUs are asked only where the driver is loaded."""
    nodes = probe.text("/etc/nvidia-imex/nodes_config.cfg")
    return {
        "nvswitches": len(probe.names("/proc/driver/nvidia-nvswitch/devices")),
        "sw_mng": _managed_switches(probe),
        "services": {name: _service(probe, name) for name in SERVICES},
        "gpus": gpu_fabric(probe) if loaded else None,
        "imex_channels": probe.names("/dev/nvidia-caps-imex-channels")[:64],
        "imex_nodes": None if nodes is None else [line for line in map(str.strip, nodes.splitlines()) if _said(line)],
    }


def _said(line):
    return line and not line.startswith("#")


def _managed_switches(probe):
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
            text = probe.text(f"{folder}/{name}", limit=4 << 20) or ""
            paths = list(dict.fromkeys(_KEY.findall(text)))
            versions = {match[1] for match in map(_LIBRARY_VERSION.search, paths) if match}
            rows.append(
                {
                    "path": f"{folder}/{name}",
                    "versions": sorted(versions),
                    "missing": [one for one in paths if not os.path.lexists(probe.path(one))][:_MOST_PATHS],
                    "devices": list(dict.fromkeys(_DEVICE.findall(text)))[:_MOST_PATHS],
                }
            )
    return rows
