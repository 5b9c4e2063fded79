"""A healthy host in plain values, for tests that spoil one thing at a time."""

from __future__ import annotations

import copy
from typing import Any

from kimi_runbook.lock import Lock, parse_lock

DIGEST = "sha256:" + "a" * 64
MANIFEST = "sha256:" + "b" * 64
IMAGE = f"registry.example:5000/vllm/vllm-openai@{DIGEST}"
NCCL_SHA = "1" * 64


def lock_data() -> dict[str, Any]:
    """Return a valid lock."""
    return {
        "schema_version": 1,
        "platform": "lab",
        "os": None,
        "kernel": None,
        "driver": {
            "branch": "580",
            "version": "580.178.04",
            "package_version": "580.178.04-1",
            "flavour": "open",
            "activation": "reboot",
            "allow_feature_branch": False,
            "companions": {"nvidia-fabricmanager": "580.178.04-1"},
        },
        "toolkit": {"version": "1.20.0-1", "packages": ["nvidia-container-toolkit", "libnvidia-container1"]},
        "container_runtime": {"package": "docker.io", "version": None},
        "image": {
            "repository": "registry.example:5000/vllm/vllm-openai",
            "tag": "v0.32.0",
            "digest": DIGEST,
            "manifests": {"amd64": MANIFEST},
            "engine": {"name": "vllm", "version": "0.32.0"},
            "size_bytes": 1000,
            "cuda": "13.0",
            "insecure": False,
        },
        "model": {"name": "moonshotai/Kimi-K3", "revision": "abc"},
        "recipe_facts_version": "2026-08-15",
    }


def a_lock(**image: Any) -> Lock:
    """Return a valid lock, with changes to its image."""
    data = lock_data()
    data["image"] |= image
    return parse_lock(data, "lock.yml")


def expected_data() -> dict[str, Any]:
    """Return what is asked of the healthy host."""
    return {
        "host": "k3-a",
        "address": "192.0.2.11",
        "supported_os": [{"id": "debian", "versions": ["12", "13"]}],
        "packages": [
            {"role": "gpu_driver", "name": "nvidia-kernel-open-dkms", "version": "580.178.04-1", "held": True},
            {"role": "container_runtime", "name": "docker.io", "version": None, "held": False},
        ],
        "files": [{"role": "interconnect", "path": "/etc/nccl.conf", "sha256": NCCL_SHA, "mode": "0644"}],
        "units": [{"role": "container_runtime", "name": "docker.service", "enabled": True, "active": True}],
        "modules": [{"role": "rdma", "name": "mlx5_core"}],
        "daemon": {"role": "container_runtime", "settings": {"insecure-registries": ["registry.example:5000"]}},
        "driver": {"version": "580.178.04", "activation": "reboot"},
        "image": {"reference": IMAGE, "architectures": ["amd64"], "bytes_needed": 2000, "inodes_needed": 100},
        "engine": {
            "container": "kimi-engine",
            "unit": "kimi-engine.service",
            "port": 8000,
            "serves_http": True,
            "args": ["/models/k3", "--port", "8000"],
            "env": {"VLLM_HOST_IP": "192.0.2.11"},
        },
    }


def snapshot_data() -> dict[str, Any]:
    """Return a snapshot of the healthy host: nothing to do."""
    return copy.deepcopy(
        {
            "schema_version": 1,
            "taken_at": "2026-11-30T14:00:00Z",
            "hostname": "k3-a",
            "os": {"id": "debian", "version_id": "12", "arch": "x86_64", "kernel": "6.18", "pretty": "Debian"},
            "boot": {"boot_id": "b", "pid1_started_ticks": 123},
            "packages": {
                "nvidia-kernel-open-dkms": {"version": "580.178.04-1", "held": True},
                "docker.io": {"version": "20.10.24", "held": False},
            },
            "files": {"/etc/nccl.conf": {"sha256": NCCL_SHA, "mode": "0644"}},
            "units": {"docker.service": {"load": "loaded", "active": "active", "enabled": "enabled"}},
            "driver": {
                "on_disk": "580.178.04",
                "loaded": "580.178.04",
                "flavour": "open",
                "userspace": "580.178.04",
                "smi_rc": 0,
                "smi_message": "",
                "standin": False,
                "holders": [],
            },
            "gpus": [{"index": 0, "name": "B300", "uuid": "GPU-0", "memory_total_mib": 270000, "memory_used_mib": 0}],
            "modules": {"mlx5_core": {"loaded": True, "version": None, "refcnt": 0}},
            "rdma_devices": [{"name": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand"}],
            "network": {
                "addresses": {"eth0": ["192.0.2.11"]},
                "listening": [{"address": "192.0.2.11", "port": 8000, "pid": 42, "process": "vllm"}],
            },
            "runtime": {
                "docker_version": "20.10.24",
                "root_dir": "/var/lib/docker",
                "store_path": "/var/lib/docker",
                "free_bytes": 10**6,
                "free_inodes": 10**6,
                "daemon": {"insecure-registries": ["registry.example:5000", "other:5000"], "log-driver": "json-file"},
                "daemon_error": None,
            },
            "image": {
                "reference": IMAGE,
                "present": True,
                "repo_digests": [IMAGE],
                "architecture": "amd64",
                "size_bytes": 1,
            },
            "engine": {
                "container": {
                    "name": "kimi-engine",
                    "id": "c0ffee",
                    "image_reference": IMAGE,
                    "image_repo_digests": [IMAGE],
                    "started_at": "2026-11-30T13:00:00Z",
                    "pid": 42,
                    "args": ["serve", "/models/k3", "--port", "8000"],
                    "env": {"VLLM_HOST_IP": "192.0.2.11"},
                    "restart_count": 0,
                    "files": {"/etc/nccl.conf": NCCL_SHA},
                }
            },
            "errors": [],
        }
    )


def spoil(data: dict[str, Any], path: str, value: Any) -> None:
    """Set one value; the path's parts are separated by ``|`` because names hold dots and slashes."""
    *parents, last = path.split("|")
    for part in parents:
        data = data[int(part)] if isinstance(data, list) else data[part]
    if isinstance(data, list):
        data[int(last)] = value
    else:
        data[last] = value
