"""RDMA devices and their ports, the modules behind them, and which OFED they come from."""

from __future__ import annotations

import re

from ansible.module_utils.host_probe import kernel_modules, whole

MODULES = (
    "mlx5_core",
    "mlx5_ib",
    "ib_core",
    "ib_uverbs",
    "rdma_cm",
    "rdma_ucm",
    "ib_umad",
    "ib_ipoib",
    "nvidia_peermem",
    "gdrdrv",
)
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EMPTY_RUN = 8  # this many empty entries in a row end the table; the 256 of a RoCE port cost too much to read
_LINK_LOCAL = "fe80:"


def rdma_devices(probe):
    """Return one row per RDMA port: state, link layer and rate as the kernel names them, GIDs, firmware, links."""
    mtus = _active_mtus(probe) if probe.names("/sys/class/infiniband") else {}
    rows = []
    for name in probe.names("/sys/class/infiniband"):
        device = f"/sys/class/infiniband/{name}"
        for port in probe.names(f"{device}/ports"):
            if whole(port) is None:
                continue
            base = f"{device}/ports/{port}"
            rows.append(
                {
                    "name": name,
                    "port": int(port),
                    "state": (probe.text(f"{base}/state") or "").rpartition(":")[2].strip() or None,
                    "link_layer": probe.line(f"{base}/link_layer"),
                    "rate": probe.line(f"{base}/rate"),
                    "gids": _gids(probe, base),
                    "mtu": mtus.get((name, int(port))),
                    "fw": probe.line(f"{device}/fw_ver"),
                    "guid": probe.line(f"{device}/node_guid"),
                    "netdev": probe.names(f"{device}/device/net"),
                }
            )
    return rows


def _gids(probe, base):
    """Return how many GIDs of a port are set; None where it has no table."""
    names = sorted((name for name in probe.names(f"{base}/gids") if name.isdigit()), key=int)
    count = empty = 0
    for name in names:
        told = probe.line(f"{base}/gids/{name}")
        if told in (None, _EMPTY_GID) or (told.startswith(_LINK_LOCAL) and told.endswith(":0000:0000:0000:0000")):
            empty += 1
            if empty == _EMPTY_RUN:
                break
        else:
            count, empty = count + 1, 0
    return count if names else None


def _active_mtus(probe):
    """Return ``{(device, port): bytes}`` from ibv_devinfo, the only one that names a port's active MTU."""
    answer = probe.command("ibv_devinfo")
    found, device, port = {}, None, None
    for line in answer[1].splitlines() if answer else ():
        name, separator, value = (part.strip() for part in line.partition(":"))
        if separator and name == "hca_id":
            device, port = value, None
        elif separator and name == "port":
            port = whole(value)
        elif separator and name == "active_mtu" and port is not None:
            found[device, port] = whole(value.partition(" ")[0])
    return found


def rdma(probe):
    """Return the OFED installed (None where the modules are the kernel's own), RDMA modules, and peer memory."""
    answer = probe.command("ofed_info", "-s")
    told = re.search(r"\S+", answer[1]) if answer and answer[0] == 0 else None
    return {
        "ofed": told[0].rstrip(":") if told else None,
        "modules": kernel_modules(probe, MODULES),
        # Where NCCL looks for it: src/transport/net_ib/gdr.cc, v2.30.7.
        "peer_memory": any(
            probe.path(path).exists()
            for path in (
                "/sys/kernel/mm/memory_peers/nv_mem/version",
                "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
                "/sys/module/nvidia_peermem/version",
            )
        ),
    }
