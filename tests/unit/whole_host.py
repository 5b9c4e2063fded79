"""Whole hosts in plain values: an HGX B300 node and a GB300 tray about which every question has its answer."""

from __future__ import annotations

import copy
from typing import Any

from judging import IMAGE, expected_data, lock_data, snapshot_data, spoil

from kimi_runbook.findings import Finding
from kimi_runbook.judge import Judgement, examine_fleet
from kimi_runbook.lock import Lock, parse_lock
from kimi_runbook.snapshot import Snapshot

TARGET = "580.178.04"
OLD = "570.133.20"
KERNEL = "6.8.0-60-generic"
NEXT = "6.8.0-90-generic"
TRAY_ARGS = ["/models/k3", "--tensor-parallel-size", "8", "--nnodes", "2", "--master-addr", "192.0.2.11"]
DOMAIN = "0b8a4d2e-0000-4c1f-9d3a-5f2d1c7e9a10"


def platform_lock(platform: str = "b300", **changes: Any) -> Lock:
    """Return a lock for real hardware; ``changes`` replace whole keys of it."""
    data = lock_data() | {"platform": platform} | changes
    data["toolkit"]["packages"] = [
        *("nvidia-container-toolkit", "nvidia-container-toolkit-base"),
        *("libnvidia-container-tools", "libnvidia-container1"),
    ]
    if platform in ("gb200", "gb300"):
        data["image"]["manifests"] = {"arm64": "sha256:" + "b" * 64}
    return parse_lock(data, "lock.yml")


def _service(package: str, version: str = f"{TARGET}-1") -> dict[str, Any]:
    return {
        "package": package,
        "version": version,
        "active": "active",
        "started_at": "2026-11-30T12:00:00Z",
        "replaced": False,
    }


def b300() -> dict[str, Any]:
    """Return the snapshot of a healthy HGX B300 node: no finding at all, no question open."""
    data = snapshot_data()
    data["os"] |= {"kernel": KERNEL}
    data["driver"] |= {
        "on_disk_next": {"kernel": KERNEL, "version": TARGET},
        "initramfs": [{"kernel": KERNEL, "versions": []}],
        "license": "Dual MIT/GPL",
        "nvml": TARGET,
        "libcuda": [TARGET],
        "dkms": [{"module": "nvidia", "version": TARGET, "kernel": KERNEL, "state": "installed"}],
        "nouveau": {"loaded": False, "blacklisted": True},
        "secure_boot": False,
        "run_installer": [],
        "params": {"CreateImexChannel0": "1", "DeviceFileMode": "438", "CoherentGPUMemoryMode": '"driver"'},
        "params_wanted": {},
        "toolkit": [],
        "init_complete_s": 12.5,
    }
    data["gpus"] = [
        {
            "index": n,
            "name": "NVIDIA B300 SXM6 AC",
            "uuid": f"GPU-{n}",
            "pci": f"00000000:{0x1B + n:02X}:00.0",
            "memory_total_mib": 275040,
            "memory_used_mib": 0,
            "ecc": {"mode": "Enabled", "uncorrected_volatile": 0, "uncorrected_aggregate": 0},
            "remap": {"pending": False, "failed": False},
            "processes": [],
        }
        for n in range(8)
    ]
    data["modules"] |= {"ib_umad": {"loaded": True}, "nvidia_peermem": {"loaded": False}}
    data["rdma_devices"] = [
        {"name": f"mlx5_{n}", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
        for n in range(2)
    ]
    data["boot"]["booted_at"] = "2026-11-30T08:00:00Z"
    data["engine"]["container"]["created_at"] = "2026-11-30T12:59:58.123456789Z"
    data["network"] |= {"mtu": {"eth0": 9000}, "speed": {"eth0": 100000}}
    data["runtime"] |= {
        "docker_version": "28.4.0",
        "toolkit": dict.fromkeys(platform_lock().toolkit.packages, "1.20.0-1"),
        "default_runtime": "runc",
        "storage_driver": "overlay2",
        "cdi_enabled": True,
        "read_only": False,
        "root_read_only": False,
    }
    data["image"]["stack"] = {
        "python": [{"name": "torch", "version": "2.14.0"}, {"name": "nvidia-nccl-cu13", "version": "2.30.7"}],
        "libraries": [
            {"path": "/usr/local/cuda/lib64/libcudart.so.13", "name": "libcudart", "version": "13"},
            {"path": "/usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.54.0", "name": "libmlx5", "version": "1.25.54.0"},
        ],
        "torch": "2.14.0",
        "torch_cuda": "13.0",
        "vllm": "0.32.0",
        "nccl": "2.30.7",
    }
    data |= {
        "kernel": {"running": KERNEL, "next": KERNEL, "installed": [KERNEL], "headers": {KERNEL: True}},
        "accelerators": [{"pci": f"0000:{0x1B + n:02x}:00.0", "vendor": "0x10de"} for n in range(8)],
        "fabric": {
            "nvswitches": 0,
            "sw_mng": 2,
            "services": {
                "nvidia-fabricmanager": _service("nvidia-fabricmanager"),
                "nvlsm": _service("nvlsm", "2025.10.1-1"),
                "nvidia-imex": {"package": None, "active": "inactive"},
                "nvidia-persistenced": _service("nvidia-persistenced"),
            },
            "gpus": [{"index": n, "state": "Completed", "status": "Success"} for n in range(8)],
            "imex_channels": [],
            "imex_nodes": None,
        },
        "cdi": [{"path": "/var/run/cdi/nvidia.yaml", "versions": [TARGET], "missing": []}],
        "kernel_log": {"readable": True, "lines": []},
        "rdma": {"ofed": None, "modules": {}},
        "memlock": {"limits_conf": [], "systemd_default": "infinity"},
        "iommu": {"enabled": True, "passthrough": True, "acs": False},
        "clock": {"synchronized": True, "source": "chrony"},
        "transaction": None,
        "updaters": [{"name": "apt-daily.timer", "active": True, "enabled": True}],
        "weights": {
            "path": "/srv/models/Kimi-K3",
            "revision": "abc",
            "files": 110,
            "bytes": 1_561_500_000_000,
            "checksums": None,
            "free_bytes": 10**12,
        },
        "holds": [],
        "pins": [],
        "holders": [],
    }
    return copy.deepcopy(data)


def gb300() -> dict[str, Any]:
    """Return the snapshot of a healthy GB300 tray."""
    data = b300()
    data["os"]["arch"] = "aarch64"
    data["image"]["architecture"] = "arm64"
    data["gpus"] = [gpu | {"name": "NVIDIA GB300"} for gpu in data["gpus"][:4]]
    data["accelerators"] = data["accelerators"][:4]
    data["engine"]["container"]["args"] = ["serve", *TRAY_ARGS]
    services = data["fabric"]["services"]
    services["nvidia-imex"] = _service("nvidia-imex")
    for name in ("nvidia-fabricmanager", "nvlsm"):
        services[name] = {"package": None, "active": "inactive"}
    data["fabric"] |= {
        "nvswitches": 0,
        "sw_mng": 0,
        "gpus": [
            {"index": n, "state": "Completed", "status": "Success", "cluster_uuid": DOMAIN, "clique_id": "7"}
            for n in range(4)
        ],
        "imex_channels": ["channel0"],
        "imex_nodes": ["192.0.2.11", "192.0.2.12"],
        "imex_domain": {
            "status": "UP",
            "nodes": [
                {"host": f"192.0.2.{n}", "status": "READY", "version": "580.178.04", "apart": []} for n in (11, 12)
            ],
        },
    }
    return data


def wanted(host: str = "k3-a", *, address: str = "192.0.2.11", args: list[str] | None = None) -> dict[str, Any]:
    """Return what is asked of one of these hosts."""
    data = expected_data() | {"host": host, "address": address}
    data["image"] = {"reference": IMAGE, "architectures": ["amd64", "arm64"], "bytes_needed": 1, "inodes_needed": 1}
    if args is not None:
        data["engine"]["args"] = args
    return data


def examine(
    changes: dict[str, Any], *, base: dict[str, Any] | None = None, lock: Lock | None = None, **expected: Any
) -> Judgement:
    """Judge one host after changing values of its snapshot; see judging.spoil for the paths."""
    data = b300() if base is None else base
    for path, value in changes.items():
        spoil(data, path, value)
    asked = {"k3-a": wanted() | expected}
    return examine_fleet({"k3-a": Snapshot.from_json(data)}, asked, lock or platform_lock())


def codes(findings: tuple[Finding, ...]) -> list[str]:
    """Return the codes of findings, in order."""
    return [finding.code for finding in findings]
