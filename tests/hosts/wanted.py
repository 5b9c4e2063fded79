"""Lock, expectation and questions for a fake host: what its inventory would ask for, at one driver for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_runbook.lock import Lock, parse_lock
from tests.hosts.derived import REPOSITORY
from tests.hosts.described import Host

DRIVER = "580.178.04"
NVLSM = "2025.06.11-1"
DIGEST = "sha256:" + "a" * 64

# Distribution to how its packages of NVIDIA's repository end, and to the packages asked for: the one with the kernel
# module first. Sources: package table of the NVIDIA Driver Installation Guide; data/lock_rules.yml.
_PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ubuntu": ("-1ubuntu1", ("nvidia-dkms-580-open", "libnvidia-compute-580")),
    "debian": ("-1", ("nvidia-kernel-open-dkms", "nvidia-driver-cuda")),
    "rhel 9": ("-1.el9", ("kmod-nvidia-open-dkms", "nvidia-driver-cuda")),
    "rhel 10": ("-1.el10", ("kmod-nvidia-open-dkms", "nvidia-driver-cuda")),
}
_COMPANIONS: Mapping[str, Mapping[str, str | None]] = {
    "nvswitch": {"nvidia-fabricmanager": None},
    "nvlink5": {"nvidia-fabricmanager": None, "nvlsm": NVLSM},
    "rack": {"nvidia-imex": None},
    "none": {},
}
_FABRIC_OF = {"h200": "nvswitch", "h200_nvl": "none", "b200": "nvlink5", "b300": "nvlink5", "gb300": "rack"}
_SUPPORTED = [
    {"id": "ubuntu", "versions": ["22.04", "24.04"]},
    {"id": "debian", "versions": ["12", "13"]},
    {"id": "rhel", "versions": ["9", "10"]},
]


def lock_name(host: Host) -> str:
    """Return the name of a host's lock: one for each platform, distribution and way to activate a driver."""
    ending, _ = _packages(host)
    distribution = host.values["os"]["id"] + (ending.partition(".el")[2])
    return "_".join([host.wanted["platform"], distribution, *([] if _activation(host) == "reboot" else ["reload"])])


def lock_of(host: Host) -> Lock:
    """Return the lock a host is judged by: its platform, one driver, one image."""
    return parse_lock(lock_data(host), f"lock of {host.name}")


def lock_data(host: Host) -> dict[str, Any]:
    """Return the lock in its JSON form."""
    ending, _ = _packages(host)
    companions = _COMPANIONS[_FABRIC_OF[host.wanted["platform"]]]
    return {
        "schema_version": 1,
        "platform": host.wanted["platform"],
        "os": None,
        "kernel": None,
        "driver": {
            "branch": "580",
            "version": DRIVER,
            "package_version": _whole(ending),
            "flavour": "open",
            "activation": _activation(host),
            "companions": {name: version or f"{DRIVER}{ending}" for name, version in companions.items()},
        },
        "toolkit": {
            "version": "1.20.0-1",
            "packages": [
                *("nvidia-container-toolkit", "nvidia-container-toolkit-base"),
                *("libnvidia-container-tools", "libnvidia-container1"),
            ],
        },
        "container_runtime": {"package": "docker-ce", "version": None},
        "image": {
            "repository": REPOSITORY,
            "tag": "v0.32.0",
            "digest": DIGEST,
            "manifests": {"amd64": "sha256:" + "b" * 64, "arm64": "sha256:" + "c" * 64},
            "engine": {"name": "vllm", "version": "0.32.0"},
            "size_bytes": 12_000_000_000,
            "cuda": "13.0",
            "insecure": False,
        },
        "model": {"name": "moonshotai/Kimi-K3", "revision": "4f1c2d3e4f5061728394a5b6c7d8e9f001122334"},
        "recipe_facts_version": "2026-08-15",
    }


def _whole(ending: str) -> str:
    """Return a driver package's version; NVIDIA's RPMs carry epoch 3."""
    return f"{'3:' if '.el' in ending else ''}{DRIVER}{ending}"


def expected_of(host: Host) -> dict[str, Any]:
    """Return what is asked of a host, in the JSON form of Expected."""
    ending, names = _packages(host)
    module, *others = host.wanted.get("packages", names)
    expected: dict[str, Any] = {
        "host": host.values["hostname"],
        "address": next(iter(host.values["network"]["interfaces"].values()))["address"],
        "supported_os": _SUPPORTED,
        "packages": [
            {"role": "gpu_driver", "name": module, "version": _whole(ending), "held": True},
            *({"role": "gpu_driver", "name": name, "version": _whole(ending), "held": False} for name in others),
            {"role": "container_runtime", "name": "nvidia-container-toolkit", "version": "1.20.0-1", "held": False},
        ],
        "units": [{"role": "container_runtime", "name": "docker.service", "enabled": True, "active": True}],
        "modules": [{"role": "rdma", "name": name} for name in host.wanted.get("modules", [])],
        "driver": {"version": DRIVER, "activation": _activation(host)},
        "image": {
            "reference": f"{REPOSITORY}@{DIGEST}",
            "architectures": ["amd64", "arm64"],
            "bytes_needed": 60_000_000_000,
            "inodes_needed": 200_000,
        },
    }
    if host.values["engine"]:
        expected["engine"] = {
            "container": "kimi-engine",
            "unit": "kimi-engine.service",
            "port": 8000,
            "args": host.values["engine"]["args"][1:],
        }
    return expected


def questions_of(host: Host) -> dict[str, Any]:
    """Return what the snapshot module is asked: its parameters by name."""
    expected = expected_of(host)
    return {
        "packages": [package["name"] for package in expected["packages"]],
        "files": ["/etc/nccl.conf"],
        "units": [unit["name"] for unit in expected["units"]],
        "modules": ["nvidia", "nvidia_drm", "ib_umad", "mlx5_core", "nvidia_peermem", *host.wanted.get("modules", [])],
        "ports": [8000],
        "image": expected["image"]["reference"],
        "engine_container": "kimi-engine",
        "engine_unit": "kimi-engine.service",
        "weights_path": host.values["weights"]["path"],
        "container_files": ["/etc/nccl.conf"],
    }


def _activation(host: Host) -> str:
    return str(host.wanted.get("activation", "reboot"))


def _packages(host: Host) -> tuple[str, tuple[str, ...]]:
    name, version = host.values["os"]["id"], host.values["os"]["version_id"]
    return _PACKAGES.get(f"{name} {version.partition('.')[0]}") or _PACKAGES[name]
