"""Which RDMA modules a host loads, in which order, and whether nvidia_peermem can exist there. Pure.

nvidia_peermem registers with ib_register_peer_memory_client, which only the modules of DOCA-OFED export; beside the
kernel's own mlx5 it cannot be loaded, and dma-buf needs none. Source: NVIDIA/cloud-native-docs gpu-operator-rdma.rst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_runbook.errors import RunbookError
from kimi_runbook.fabric import kind_of, needs, platform_fabric

Json = Mapping[str, Any]

PEERMEM = "nvidia_peermem"
PEERMEM_CHOICES = ("never", "possible", "required")

# A module after those it stands on; one that is not here keeps its place between them and nvidia_peermem.
_FIRST = ("mlx5_core", "ib_core", "mlx5_ib", "ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm")


def host_modules(modules: Sequence[str], peermem: str, snapshot: Json, lock: Json) -> list[str]:
    """Return the modules one host loads, in the order in which they are loaded.

    Args:
        modules: What the inventory asks for.
        peermem: never, possible (where it can exist: DOCA-OFED and an RDMA device) or required.
        snapshot: The host's snapshot in its JSON form.
        lock: The lock in its JSON form; NVLink 5 platforms need ib_umad.

    Raises:
        RunbookError: ``peermem`` is none of the three.
    """
    if peermem not in PEERMEM_CHOICES:
        raise RunbookError(
            where="rdma_peermem",
            observed=repr(peermem),
            expected=", ".join(PEERMEM_CHOICES),
            next_step="Correct rdma_peermem in the inventory.",
        )
    seen = snapshot["fabric"]
    kind = kind_of(platform_fabric(lock["platform"]), nvswitches=seen.get("nvswitches"), sw_mng=seen.get("sw_mng"))
    names = {name.replace("-", "_"): None for name in (*modules, *needs(kind).texts("modules"))}
    if peermem == "required" or (peermem == "possible" and peermem_possible(snapshot)):
        names[PEERMEM] = None
    ranks = {name: rank for rank, name in enumerate(_FIRST)}
    return sorted(names, key=lambda name: len(ranks) + 1 if name == PEERMEM else ranks.get(name, len(ranks)))


def peermem_possible(snapshot: Json) -> bool:
    """Whether nvidia_peermem can exist on a host: DOCA-OFED's modules, and a device to register with."""
    return bool((snapshot.get("rdma") or {}).get("ofed")) and bool(snapshot.get("rdma_devices"))


def asked_modules(modules: Sequence[str]) -> list[str]:
    """Return the modules a snapshot is asked for, whatever the host turns out to be."""
    return list(dict.fromkeys([*(name.replace("-", "_") for name in modules), "ib_umad", PEERMEM]))
