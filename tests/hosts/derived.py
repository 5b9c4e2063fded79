"""What follows from a host's values: its GPUs, RDMA devices, processes and units one by one, and where things lie."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any

REPOSITORY = "registry.example:5000/vllm/vllm-openai"

# Units that are asked about on every host; systemctl answers not-found for those a host does not have.
_UNITS = (
    *("nvidia-persistenced.service", "nvidia-fabricmanager.service", "nvlsm.service", "nvidia-imex.service"),
    *("docker.service", "containerd.service", "kimi-engine.service", "chrony.service", "chronyd.service"),
    *("systemd-timesyncd.service", "ntpsec.service", "ntp.service", "ntpd.service"),
    *("unattended-upgrades.service", "apt-daily.timer", "apt-daily-upgrade.timer"),
    *("dnf-automatic.timer", "dnf-automatic-install.timer", "dnf5-automatic.timer", "packagekit.service"),
)
_BARE = {  # PCI vendor of a GPU to its device, class and the kernel's own driver; ids of the PCI ID repository [I]
    "0x1002": {"device": "0x75a3", "class": "0x120000", "driver": "amdgpu"},  # Instinct MI355X
    "0x10de": {"device": "0x2335", "class": "0x030200", "driver": None},  # H200
}
_GPU_UNITS = ("nvidia-persistenced.service",)  # units whose process holds a GPU


def context(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names a template may use: the values, and what follows from them."""
    image = values["image"]
    return {
        **values,
        "repository": REPOSITORY,
        "lib": f"/usr/lib/{values['arch']}-linux-gnu" if values["os"]["packages"] == "deb" else "/usr/lib64",
        "module": f"lib/modules/{values['kernel']['running']}",
        "layer": f"{values['docker']['root']}/overlay2/layer{1 if image else 0}/diff",
        "gpu_rows": list(_gpus(values)),
        "bare_rows": list(_bare_gpus(values)),
        "rdma_rows": list(_rdma(values)),
        "processes": list(_processes(values)),
        "units": list(_units(values)),
        "journal": list(_journal(values)),
    }


def _gpus(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    gpus, engine, driver = values["gpus"], values["engine"], values["driver"]
    for index in range(gpus["count"] if gpus else 0):
        used = gpus["used_mib"] if engine else 0
        yield {
            "index": index,
            "bus": f"{0x1B + 0x10 * index:02x}",
            "uuid": f"GPU-0a1b2c3d-0000-4000-8000-0000000000{index:02x}",
            "driver": "nvidia" if driver["loaded"] else ("nouveau" if driver["nouveau"]["loaded"] else None),
            "used_mib": used,
            "processes": [{"pid": _worker(engine, index), "name": f"VLLM::Worker_TP{index}", "used_mib": used}]
            if engine
            else [],
        }


def _bare_gpus(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    bare = values["bare_gpus"]
    for index in range(bare["count"] if bare else 0):
        yield {"bus": f"{0x05 + 0x10 * index:02x}", "vendor": bare["vendor"], **_BARE[bare["vendor"]]}


def _worker(engine: Mapping[str, Any], index: int) -> int:
    return int(engine["pid"]) + 10 + index


def _rdma(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rails, then the functions that manage NVLink switches."""
    rdma, managing = values["rdma"], values["fabric"]["sw_mng"]
    for index in range(rdma["count"] + managing):
        own = index < rdma["count"]
        roce = own and rdma["link_layer"] == "Ethernet"
        yield {
            "name": f"mlx5_{index}",
            "index": index,
            "sw_mng": not own,
            "state": rdma["state"] if own else "4: ACTIVE",
            "link_layer": rdma["link_layer"] if own else "InfiniBand",
            "rate": rdma["rate"],
            "net": f"eth{index + 1}" if roce else f"ib{index}" if own else None,
            "gids": {
                0: f"fe80:0000:0000:0000:a088:c2ff:feaa:{index:04x}",
                **({1: f"0000:0000:0000:0000:0000:ffff:c000:{0x0100 + index:04x}"} if roce else {}),
            },
        }


def _processes(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what runs: services, the engine and its workers, and whoever else holds a GPU."""
    for unit, state in values["services"].items():
        if state.get("pid"):
            program = f"/usr/bin/{state['process']}" + (" (deleted)" if state.get("replaced") else "")
            yield {
                "pid": state["pid"],
                "name": state["process"],
                "after_s": state["after_s"],
                "gpu": unit in _GPU_UNITS,
                "program": program,
            }
    engine = values["engine"]
    if engine:
        yield {"pid": engine["pid"], "name": "vllm", "after_s": 601, "gpu": False, "program": None}
        for index in range(engine["workers"]):
            name = f"VLLM::Worker_TP{index}"[:15]
            yield {"pid": _worker(engine, index), "name": name, "after_s": 640, "gpu": True, "program": None}
    for pid, name in values["strangers"].items():
        yield {"pid": int(pid), "name": name[:15], "after_s": 7000, "gpu": True, "program": None}


def _units(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    services, engine = values["services"], values["engine"]
    for name in dict.fromkeys([*_UNITS, *services]):
        state = services.get(name)
        there = state is not None
        steering = name == "kimi-engine.service" and engine
        yield {
            "name": name,
            "load": "loaded" if there else "not-found",
            "active": state["active"] if there else "inactive",
            "enabled": state["enabled"] if there else "",
            "pid": state.get("pid", 0) if there else 0,
            "after_s": state.get("after_s", 0) if there else 0,
            "environment": " ".join(f"{key}={value}" for key, value in engine["env"].items()) if steering else "",
        }


def _journal(values: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the lines of the kernel log that matter: the driver's load, and what the host has of its own."""
    booted, driver = values["booted_at"], values["driver"]
    if driver["loaded"]:
        at = booted + datetime.timedelta(seconds=20)
        text = f"NVRM: loading NVIDIA UNIX Open Kernel Module for {values['arch']}  {driver['loaded']}  Release Build"
        yield {"at": f"{at:%Y-%m-%dT%H:%M:%S}+0000", "text": text}
    for at, text in values["kernel_log"].items():
        yield {"at": at, "text": text}
