"""Cases about GPUs, fabric, racks and all else of a host, one value away from healthy: id, change, codes, verdict."""

from __future__ import annotations

from typing import Any

from driver_cases import LATE
from whole_host import DOMAIN, TARGET, b300

UPDATES = "unattended-upgrades.service"


def xid(code: int) -> dict[str, Any]:
    text = f"NVRM: Xid (PCI:0000:1b:00): {code}, pid=4242, name=python3"
    return {"kernel_log|lines": [{"at": "2026-11-30T13:00:00Z", "kind": "xid", "text": text}]}


def recovery(change: str) -> dict[str, Any]:
    text = f"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from {change}"
    return {"kernel_log|lines": [{"at": "2026-11-30T13:00:00Z", "kind": "xid", "text": text}]}


def line(kind: str) -> dict[str, Any]:
    return {"kernel_log|lines": [{"at": "2026-11-30T13:00:00Z", "kind": kind, "text": f"a line about {kind}"}]}


def left(state: str, **more: str) -> dict[str, Any]:
    return {"transaction": {"state": state, "run": "r1", "step": "gpu_driver", **more}}


FOREIGN = [{"pid": 9, "name": "/usr/bin/jupyter", "used_mib": 4000}]

# Case: id, what is changed, the codes, and the host's verdict. Those about the driver are in driver_cases.py.
GPUS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("seven", {"gpus": b300()["gpus"][:7]}, ["gpu.count"], "stop"),
    ("seven-on-the-bus", {**LATE, "accelerators": b300()["accelerators"][:7]}, ["driver.reboot", "gpu.count"], "stop"),
    ("other-model", {"gpus|0|name": "NVIDIA GB300"}, ["gpu.model"], "stop"),
    (
        "other-architecture",
        {"os|arch": "aarch64", "image|architecture": "arm64"},
        ["gpu.arch"],
        "stop",
    ),
    ("ecc-untold-of-one", {"gpus|3|ecc": None}, ["snapshot.unknown"], "ok"),
    ("remap-untold-of-one", {"gpus|3|remap": None}, ["snapshot.unknown"], "ok"),
    ("processes-untold-of-one", {"gpus|3|processes": None}, ["snapshot.unknown"], "ok"),
    ("ecc-off", {"gpus|3|ecc|mode": "Disabled"}, ["gpu.ecc_off"], "ok"),
    ("ecc-errors", {"gpus|3|ecc|uncorrected_volatile": 2}, ["gpu.ecc_errors"], "ok"),
    ("remap-failed", {"gpus|3|remap": {"pending": False, "failed": True}}, ["gpu.remap_failed"], "stop"),
    ("remap-pending", {"gpus|3|remap": {"pending": True, "failed": False}}, ["gpu.remap_pending"], "ok"),
    ("stranger", {"gpus|0|processes": FOREIGN, "gpus|1|processes": FOREIGN}, ["gpu.foreign_process"], "stop"),
    (
        "engine-is-no-stranger",
        {"gpus|0|processes": [{"pid": 42, "name": "x"}, {"pid": 43, "name": "VLLM::Worker_TP0"}]},
        [],
        "ok",
    ),
    (
        "memory-nobody-owns",
        {"gpus|0|memory_used_mib": 90000, "engine|container": None, "network|listening": []},
        ["engine.absent", "gpu.memory_taken"],
        "reload",
    ),
    ("xid-fatal", xid(79), ["gpu.xid_fatal"], "stop"),
    ("xid-warned", xid(74), ["gpu.xid"], "ok"),
    ("xid-asks-for-a-reboot", recovery("0x0 (None) to 0x2 (Node Reboot Required)"), ["gpu.xid_fatal"], "stop"),
    ("xid-asks-for-nothing-more", recovery("0x1 (GPU Reset Required) to 0x0 (None)"), ["gpu.xid"], "ok"),
    ("xid-nobody-knows", xid(999), ["gpu.xid"], "ok"),
    ("xid-of-a-program", xid(31), ["gpu.xid_application"], "ok"),
]

FABRIC: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("not-ready", {"fabric|gpus|0|state": "In Progress"}, ["fabric.state"], "stop"),
    ("no-resources", {"fabric|gpus|0|status": "Insufficient Resources"}, ["fabric.state"], "stop"),
    (
        "service-first",
        {"fabric|gpus|0|state": "In Progress", "fabric|services|nvidia-fabricmanager|active": "failed"},
        ["fabric.service", "fabric.pending"],
        "reload",
    ),
    (
        "no-nvlsm",
        {"fabric|services|nvlsm": {"package": None, "active": "inactive"}},
        ["fabric.package_missing"],
        "install",
    ),
    ("no-umad", {"modules|ib_umad": {"loaded": False}}, ["fabric.umad"], "install"),
    ("undetected", {"fabric|sw_mng": 0}, ["fabric.undetected"], "ok"),
    ("imex-list-without-a-rack", {"fabric|imex_nodes": ["192.0.2.11"]}, ["fabric.imex_unwanted"], "ok"),
]

FABRIC_ROW = {"index": 0, "state": "Completed", "status": "Success", "cluster_uuid": DOMAIN, "clique_id": "7"}
OTHER_DOMAIN = "5f3c0e9a-1b2d-4c3e-9f10-aabbccddeeff"
IMEX_LATE = ["driver.reboot", "fabric.pending"]
IMEX_PEERS = ["fabric.imex_peers"]
RACK: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("healthy", {}, [], "ok"),
    ("no-clique", {"fabric|gpus|0|clique_id": "0"}, ["fabric.no_domain"], "stop"),
    (
        "no-cluster",
        {"fabric|gpus|0|cluster_uuid": "00000000-0000-0000-0000-000000000000"},
        ["fabric.no_domain"],
        "stop",
    ),
    ("two-cliques", {"fabric|gpus|1|clique_id": "8"}, ["fabric.split"], "stop"),
    ("two-clusters", {"fabric|gpus|3|cluster_uuid": OTHER_DOMAIN}, ["fabric.split"], "stop"),
    ("fabric-of-two-gpus-alone", {"fabric|gpus": [FABRIC_ROW, FABRIC_ROW | {"index": 1}]}, ["snapshot.unknown"], "ok"),
    (
        "imex-over-another-interface",
        {
            "network|addresses|eth9": ["198.51.100.7/24"],
            "fabric|imex_nodes|0": "198.51.100.7",
            "fabric|imex_domain|nodes|0|host": "198.51.100.7",
        },
        [],
        "ok",
    ),
    ("imex-untold", {"fabric|services|nvidia-imex|active": "unknown"}, ["snapshot.unknown"], "ok"),
    ("no-channel", {"fabric|imex_channels": []}, ["fabric.imex_channel"], "stop"),
    ("not-in-the-list", {"fabric|imex_nodes": ["192.0.2.12"]}, ["fabric.imex_self"], "stop"),
    (
        "imex-stopped",
        {"fabric|services|nvidia-imex|active": "inactive", "fabric|imex_domain": None},
        ["fabric.service"],
        "reload",
    ),
    (
        "imex-waits",
        {"fabric|imex_domain|nodes|0|status": "WAITING_FOR_PEERS", "fabric|imex_domain|status": "DOWN"},
        ["fabric.imex_not_ready"],
        "stop",
    ),
    ("imex-starts-with-the-driver", {**LATE, "fabric|imex_domain|nodes|0|status": None}, IMEX_LATE, "reboot"),
    ("imex-peer-down", {"fabric|imex_domain|nodes|1|status": "UNAVAILABLE"}, ["fabric.imex_peers"], "ok"),
    ("imex-peer-apart", {"fabric|imex_domain|nodes|0|apart": ["192.0.2.12 DISCONNECTED"]}, IMEX_PEERS, "ok"),
    ("imex-versions", {"fabric|imex_domain|nodes|1|version": "570.133.20"}, ["fabric.imex_versions"], "ok"),
    ("imex-of-another-domain", {"fabric|imex_domain|nodes": []}, ["snapshot.unknown"], "ok"),
    ("imex-silent", {"fabric|imex_domain": None}, ["snapshot.unknown"], "ok"),
    (
        "channels-come-with-the-driver",
        {**LATE, "fabric|imex_channels": [], "fabric|gpus": None},
        ["driver.reboot"],
        "reboot",
    ),
]

CREATED = "engine|container|created_at"
DOWN = {f"rdma_devices|{n}|state": "DOWN" for n in (0, 1)}
UNTOLD_STATE = {f"rdma_devices|{n}|state": None for n in (0, 1)}
NAMED_DOWN = ["rdma.all_down", "rdma.port_down", "interconnect.contradiction"]
MUTE = {"runtime|docker_version": None, "image|present": False, "engine|container": None, "network|listening": []}
HANGS = {**MUTE, "errors": [{"probe": "docker", "message": "no answer within 10 s"}]}


def asks(**settings: str) -> dict[str, Any]:
    return {"engine|container|env": {"VLLM_HOST_IP": "192.0.2.11", **settings}}


def failed(probe: str) -> dict[str, Any]:
    return {"errors": [{"probe": probe, "message": "no answer within 10 s"}]}


UNKNOWN_UNIT = {"load": "unknown", "active": "unknown", "enabled": "unknown"}
UNANSWERED = ["snapshot.probe_failed", "snapshot.unanswered"]
HOST: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("aer", line("pcie-aer"), ["kernel.log"], "ok"),
    ("oom", line("oom"), ["kernel.log_processes"], "ok"),
    ("clock", {"clock": {"synchronized": False, "source": None}}, ["clock.unsynchronized"], "ok"),
    ("updater", {"updaters": [{"name": UPDATES, "active": True, "enabled": True}]}, ["updates.automatic"], "ok"),
    ("killed-run", left("open"), ["transaction.unfinished"], "install"),
    ("failed-run", left("failed", reason="apt: no"), ["transaction.unfinished"], "install"),
    ("unreadable-state-file", left("unreadable"), ["transaction.unfinished"], "install"),
    ("finished-run", left("done"), [], "ok"),
    ("updater-off", {"updaters": [{"name": UPDATES, "active": False, "enabled": False}]}, [], "ok"),
    ("updater-unknown", {"updaters": [{"name": "autopatch.timer", "enabled": True}]}, ["updates.automatic"], "ok"),
    ("port-down", {"rdma_devices|1|state": "DOWN"}, ["rdma.port_down"], "ok"),
    ("all-ports-down", {**DOWN, **asks(NCCL_NET="IB")}, ["rdma.all_down"], "stop"),
    ("named-ports-down", {"rdma_devices|1|state": "DOWN", **asks(NCCL_IB_HCA="=mlx5_1:1")}, NAMED_DOWN, "stop"),
    ("named-port-not-there", asks(NCCL_IB_HCA="=mlx5_7:1"), ["rdma.all_down", "interconnect.contradiction"], "stop"),
    ("no-rdma-at-all", {"rdma_devices": [], **asks(UCX_TLS="rc,cuda_copy")}, ["rdma.all_down"], "stop"),
    ("all-ports-down-over-ethernet", {**DOWN, **asks(NCCL_NET="Socket", UCX_TLS="tcp,cuda_copy,sm")}, [], "ok"),
    ("port-state-unknown", {**UNTOLD_STATE, **asks(NCCL_NET="IB")}, ["snapshot.unknown"], "ok"),
    ("docker-hangs", HANGS, ["snapshot.probe_failed", "runtime.silent", "snapshot.unknown"], "stop"),
    ("docker-says-nothing", MUTE, ["runtime.silent", "snapshot.unknown"], "stop"),
    ("no-cdi-file", {"cdi": [], "runtime|daemon|features": {"cdi": True}}, ["cdi.missing"], "install"),
    ("no-cdi-wanted", {"cdi": []}, [], "ok"),
    (
        "no-toolkit-to-write-cdi",
        {"cdi": [], "runtime|daemon|features": {"cdi": True}, "runtime|toolkit": {}},
        [],
        "ok",
    ),
    ("container-of-before-the-boot", {CREATED: "2026-11-30T07:00:00Z"}, ["engine.older_than_driver"], "reload"),
    (
        "container-of-before-the-driver",
        {CREATED: "2026-11-30T08:00:05Z"},
        ["engine.older_than_driver"],
        "reload",
    ),
    (
        "container-and-no-word-of-the-load",
        {"driver|init_complete_s": None},
        ["snapshot.unknown"],
        "ok",
    ),
    (
        "container-of-before-the-boot-and-no-word-of-the-load",
        {CREATED: "2026-11-30T07:00:00Z", "driver|init_complete_s": None},
        ["engine.older_than_driver"],
        "reload",
    ),
    ("container-of-an-unknown-age", {CREATED: "gestern"}, ["snapshot.unknown"], "ok"),
    ("unit-of-its-own-mind", {"engine|unit_env": {"NCCL_DEBUG": "INFO"}}, ["engine.unit_env"], "ok"),
    ("unit-against-the-inventory", {"engine|unit_env": {"VLLM_HOST_IP": "192.0.2.99"}}, ["engine.unit_env"], "ok"),
    ("unit-as-the-inventory", {"engine|unit_env": {"VLLM_HOST_IP": "192.0.2.11", "LANG": "fr"}}, [], "ok"),
    ("port-slow", {"rdma_devices|1|rate": "200 Gb/sec (4X HDR)"}, ["network.link_slow"], "ok"),
    ("memlock", {"memlock|docker_unit": "8388608"}, ["rdma.memlock"], "ok"),
    ("C46-memlock-in-the-container", {"memlock|container": "8388608"}, ["rdma.memlock"], "ok"),
    ("no-memlock-in-the-container", {"memlock|container": "unlimited"}, [], "ok"),
    ("iommu", {"iommu|passthrough": False}, ["rdma.iommu"], "ok"),
    ("acs", {"iommu|acs": True}, ["rdma.acs"], "ok"),
    (
        "dmabuf-off-without-peermem",
        {"engine|container|env|NCCL_DMABUF_ENABLE": "0"},
        ["interconnect.contradiction"],
        "stop",
    ),
    (
        "dmabuf-off-with-peermem",
        {
            "modules": {"mlx5_core": {"loaded": True}, "ib_umad": {"loaded": True}},
            "rdma|modules": {"nvidia_peermem": {"loaded": True}},
            "engine|container|env|NCCL_DMABUF_ENABLE": "0",
        },
        [],
        "ok",
    ),
    ("hca-without-a-port", asks(NCCL_NET="IB", NCCL_IB_HCA="=mlx5_0,mlx5_1"), [], "ok"),
    ("hca-with-rail-and-plane", asks(NCCL_NET="IB", NCCL_IB_HCA="=mlx5_0:1:0:0,mlx5_1::1"), [], "ok"),
    ("hca-of-another-port", asks(NCCL_IB_HCA="=mlx5_0:2"), ["rdma.all_down", "interconnect.contradiction"], "stop"),
    (
        "cdi-with-libraries-of-their-own-numbers",
        {"cdi|0|versions": ["1.1.2", TARGET], "cdi|0|missing": []},
        [],
        "ok",
    ),
    ("cdi-of-another-driver", {"cdi|0|versions": ["1.1.2", "570.133.20"]}, ["cdi.stale"], "install"),
    (
        "docker-and-a-toolkit-without-a-version",
        {"runtime|docker_version": "29.1.0", "runtime|toolkit|nvidia-container-toolkit": "!! none"},
        ["runtime.toolkit_mixed"],
        "ok",
    ),
    ("loaded-at-the-end-of-time", {"driver|init_complete_s": 1e300}, ["snapshot.unknown"], "ok"),
    ("booted-at-the-end-of-time", {"boot|booted_at": "9999-12-31T23:59:59Z"}, ["snapshot.unknown"], "ok"),
    (
        "modinfo-hangs",
        {**failed("modinfo"), "driver|on_disk": None, "driver|license": None},
        UNANSWERED,
        "stop",
    ),
    (
        "package-manager-silent",
        {**failed("packages"), "packages": {"nvidia-kernel-open-dkms": None, "docker.io": None}},
        [*UNANSWERED, "snapshot.unknown"],
        "stop",
    ),
    ("systemctl-hangs", {**failed("systemctl"), "units|docker.service": UNKNOWN_UNIT}, UNANSWERED, "stop"),
    (
        "rdma-devices-untold",
        {**failed("rdma_devices"), "rdma_devices": [], **asks(NCCL_NET="IB")},
        ["snapshot.probe_failed", "snapshot.unknown"],
        "ok",
    ),
    ("fixed-gid", {"engine|container|env|NCCL_IB_GID_INDEX": "3"}, ["interconnect.caution"], "ok"),
    ("old-toolkit-package", {"runtime|toolkit|libnvidia-container1": "1.19.0-1"}, ["runtime.toolkit_mixed"], "ok"),
    ("docker-and-toolkit", {"runtime|docker_version": "29.1.0"}, ["runtime.known_pair"], "ok"),
    ("store-read-only", {"runtime|read_only": True}, ["disk.read_only"], "stop"),
    ("root-read-only", {"runtime|root_read_only": True}, ["disk.read_only"], "stop"),
    ("cdi-off", {"runtime|cdi_enabled": False}, ["runtime.cdi_off"], "ok"),
    (
        "wheel-of-another-cuda",
        {"image|stack|python": [{"name": "nvidia-nccl-cu12", "version": "2.27.3"}]},
        ["image.stack_mixed"],
        "stop",
    ),
    ("torch-of-another-cuda", {"image|stack|torch_cuda": "12.9"}, ["image.stack_mixed"], "stop"),
    (
        "library-of-another-cuda",
        {"image|stack|libraries": [{"path": "/opt/lib/libcudart.so.12.4.127", "name": "libcudart", "version": "12.4"}]},
        ["image.stack_mixed"],
        "stop",
    ),
    (
        "copied-library",
        {
            "image|stack|libraries": [
                {"path": "/usr/lib/libnccl.so.2.30.7", "name": "libnccl", "version": "2.30.7"},
                {"path": "/opt/libnccl.so.2.28.3", "name": "libnccl", "version": "2.28.3"},
            ]
        },
        ["image.stack_copied"],
        "ok",
    ),
    ("nightly", {"image|stack|torch": "2.15.0.dev20261101+cu130"}, ["image.stack_nightly"], "ok"),
    ("another-vllm", {"image|stack|vllm": "0.31.0"}, ["image.stack_engine"], "ok"),
    ("local-build-of-the-same-vllm", {"image|stack|vllm": "0.32.0+cu130"}, [], "ok"),
    (
        "old-libmlx5",
        {
            "image|stack|libraries": [
                {"path": "/usr/lib/libmlx5.so.1.24.44.0", "name": "libmlx5", "version": "1.24.44.0"}
            ]
        },
        ["image.libmlx5"],
        "ok",
    ),
    (
        "compat-libcuda",
        {
            "image|stack|libraries": [
                {"path": "/usr/local/cuda/compat/libcuda.so.1", "name": "libcuda.so", "version": "580.95.05"}
            ]
        },
        ["image.compat_libcuda"],
        "ok",
    ),
    (
        "no-weights",
        {"weights|files": 0, "weights|bytes": 0, "weights|free_bytes": 2 * 10**12},
        ["weights.missing"],
        "ok",
    ),
    ("half-the-weights", {"weights|bytes": 10**12}, ["weights.incomplete"], "ok"),
    (
        "no-room-for-the-rest",
        {"weights|bytes": 10**12, "weights|free_bytes": 10**11},
        ["weights.incomplete", "weights.room"],
        "ok",
    ),
    ("other-revision", {"weights|revision": "def"}, ["weights.revision"], "ok"),
]
