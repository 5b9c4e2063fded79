"""Whole hosts, one value away from healthy: each says exactly what is wrong with it, and weighs it rightly."""

from __future__ import annotations

from typing import Any

import pytest
from driver_cases import DRIVER, LATE, other_kernel
from whole_host import KERNEL, NEXT, OLD, TARGET, TRAY_ARGS, b300, codes, examine, gb300, platform_lock, wanted

from kimi_runbook.host_verdict import host_verdict
from kimi_runbook.judge import CHECKS

UPDATES = "unattended-upgrades.service"


def xid(code: int) -> dict[str, Any]:
    text = f"NVRM: Xid (PCI:0000:1b:00): {code}, pid=4242, name=python3"
    return {"kernel_log|lines": [{"at": "2026-11-30T13:00:00Z", "kind": "xid", "text": text}]}


def line(kind: str) -> dict[str, Any]:
    return {"kernel_log|lines": [{"at": "2026-11-30T13:00:00Z", "kind": kind, "text": f"a line about {kind}"}]}


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

RACK: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("healthy", {}, [], "ok"),
    ("no-clique", {"fabric|gpus|0|clique_id": "0"}, ["fabric.no_domain"], "stop"),
    (
        "no-cluster",
        {"fabric|gpus|0|cluster_uuid": "00000000-0000-0000-0000-000000000000"},
        ["fabric.no_domain"],
        "stop",
    ),
    ("no-channel", {"fabric|imex_channels": []}, ["fabric.imex_channel"], "stop"),
    ("not-in-the-list", {"fabric|imex_nodes": ["192.0.2.12"]}, ["fabric.imex_self"], "stop"),
    ("imex-stopped", {"fabric|services|nvidia-imex|active": "inactive"}, ["fabric.service"], "reload"),
    (
        "channels-come-with-the-driver",
        {**LATE, "fabric|imex_channels": [], "fabric|gpus": None},
        ["driver.reboot"],
        "reboot",
    ),
]

HOST: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("aer", line("pcie-aer"), ["kernel.log"], "ok"),
    ("oom", line("oom"), ["kernel.log_processes"], "ok"),
    ("clock", {"clock": {"synchronized": False, "source": None}}, ["clock.unsynchronized"], "ok"),
    ("updater", {"updaters": [{"name": UPDATES, "active": True, "enabled": True}]}, ["updates.automatic"], "ok"),
    ("updater-off", {"updaters": [{"name": UPDATES, "active": False, "enabled": False}]}, [], "ok"),
    ("updater-unknown", {"updaters": [{"name": "autopatch.timer", "enabled": True}]}, ["updates.automatic"], "ok"),
    ("port-down", {"rdma_devices|1|state": "DOWN"}, ["rdma.port_down"], "ok"),
    ("port-slow", {"rdma_devices|1|rate": "200 Gb/sec (4X HDR)"}, ["network.link_slow"], "ok"),
    ("memlock", {"memlock|docker_unit": "8388608"}, ["rdma.memlock"], "ok"),
    ("iommu", {"iommu|passthrough": False}, ["rdma.iommu"], "ok"),
    ("acs", {"iommu|acs": True}, ["rdma.acs"], "ok"),
    (
        "dmabuf-off-without-peermem",
        {"engine|container|env|NCCL_DMABUF_ENABLE": "0"},
        ["interconnect.contradiction"],
        "stop",
    ),
    ("fixed-gid", {"engine|container|env|NCCL_IB_GID_INDEX": "3"}, ["interconnect.caution"], "ok"),
    ("old-toolkit-package", {"runtime|toolkit|libnvidia-container1": "1.19.0-1"}, ["runtime.toolkit_mixed"], "ok"),
    ("docker-and-toolkit", {"runtime|docker_version": "29.1.0"}, ["runtime.known_pair"], "ok"),
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

CASES = [*DRIVER, *GPUS, *FABRIC, *HOST]


@pytest.mark.parametrize(
    ("changes", "wanted_codes", "verdict"), [pytest.param(*case[1:], id=case[0]) for case in CASES]
)
def test_an_hgx_host(changes: dict[str, Any], wanted_codes: list[str], verdict: str) -> None:
    findings = examine(changes).findings
    assert codes(findings) == wanted_codes, [finding.observed for finding in findings]
    assert host_verdict(findings).name == verdict


@pytest.mark.parametrize(("changes", "wanted_codes", "verdict"), [pytest.param(*case[1:], id=case[0]) for case in RACK])
def test_a_tray_of_a_rack(changes: dict[str, Any], wanted_codes: list[str], verdict: str) -> None:
    engine = wanted(args=TRAY_ARGS)["engine"]
    findings = examine(changes, base=gb300(), lock=platform_lock("gb300"), engine=engine).findings
    assert codes(findings) == wanted_codes, [finding.observed for finding in findings]
    assert host_verdict(findings).name == verdict


def test_a_healthy_host_leaves_no_question_open() -> None:
    judged = examine({})
    assert judged.coverage["k3-a"].unknown == ()
    assert judged.coverage["k3-a"].run == len(CHECKS) == len({check.name for check in CHECKS})


# Each part that may be missing, and the check that then counts as unknown.
UNTOLD = [
    ("driver|initramfs", "driver.initramfs"),
    ("driver|nouveau", "driver.nouveau"),
    ("driver|dkms", "driver.dkms"),
    ("driver|libcuda", "driver.libraries"),
    ("driver|run_installer", "driver.run_installer"),
    ("driver|toolkit", "driver.toolkit"),
    ("kernel|next", "driver.next_kernel"),
    ("cdi", "driver.cdi"),
    ("fabric|services", "fabric.services"),
    ("fabric|gpus", "fabric.state"),
    ("kernel_log|readable", "gpus.xid"),
    ("clock|synchronized", "system.clock"),
    ("updaters", "system.updaters"),
    ("runtime|toolkit", "runtime.toolkit"),
    ("image|stack", "image.stack"),
    ("weights", "weights"),
    ("iommu|enabled", "network.iommu"),
    ("network|addresses", "host.address"),
]


@pytest.mark.parametrize(("path", "check"), UNTOLD)
def test_what_is_not_told_is_counted_and_is_never_fine(path: str, check: str) -> None:
    empty: Any = {} if path in ("fabric|services", "network|addresses") else False if "readable" in path else None
    judged = examine({path: empty})
    assert check in judged.coverage["k3-a"].unknown
    found = [finding for finding in judged.findings if finding.code == "snapshot.unknown"]
    assert len(found) == 1 and found[0].severity == "info" and codes(judged.findings)[-1] == "snapshot.unknown"


def test_peermem_is_asked_for_by_name_and_needs_ofed() -> None:
    asked = {"modules": [{"role": "rdma", "name": "nvidia-peermem"}]}
    assert codes(examine({}, **asked).findings) == ["module.unloaded", "rdma.peermem"]
    assert codes(examine({"rdma|ofed": "OFED-internal-25.10"}, **asked).findings) == ["module.unloaded"]
    assert codes(examine({"modules|nvidia_peermem": {"loaded": True}}, **asked).findings) == []


def test_a_reload_is_a_reboot_where_something_is_read_at_boot_only() -> None:
    driver = {"driver": {"version": TARGET, "activation": "reload"}}
    assert codes(examine(LATE, **driver).findings) == ["driver.reload"]
    for changes in (
        {"driver|initramfs": [{"kernel": KERNEL, "versions": [OLD]}]},
        {"driver|params_wanted": {"CoherentGPUMemoryMode": "numa"}},
        {"driver|nouveau": {"loaded": True, "blacklisted": True}},
    ):
        assert "driver.reboot" in codes(examine({**LATE, **changes}, **driver).findings)
    pending = {"driver|params_wanted": {"CreateImexChannel0": "0"}}
    assert codes(examine(pending, **driver).findings) == ["driver.reload"]


def test_a_locked_kernel_that_boots_next_is_no_surprise() -> None:
    lock = platform_lock(kernel=KERNEL)
    assert codes(examine(other_kernel(module=TARGET), lock=lock).findings) == ["kernel.next_later"]
    findings = examine(other_kernel(module=TARGET), lock=platform_lock(kernel=NEXT)).findings
    assert codes(findings) == ["host.kernel"]


def test_a_lock_for_another_platform_stops_and_says_so() -> None:
    findings = examine({}, lock=platform_lock("h200")).findings
    assert codes(findings) == ["gpu.model"] and "H200" in findings[0].expected
    tray = examine({}, base=gb300(), lock=platform_lock("b300")).findings
    assert {"gpu.arch", "gpu.count", "gpu.model", "image.arch_missing"} & set(codes(tray)) >= {"gpu.arch", "gpu.count"}


def test_simulated_gpus_are_of_no_platform_and_hold_no_model() -> None:
    data = b300()
    data["gpus"] = [{"index": n, "name": "NVIDIA B300 (simulated)", "memory_total_mib": 275040} for n in range(4)]
    data["driver"]["standin"] = True
    data["fabric"] |= {"sw_mng": 0, "gpus": None}
    data["image"]["stack"]["torch_cuda"] = None
    findings = examine({}, base=data, lock=platform_lock("lab")).findings
    assert codes(findings) == ["host.simulated", "snapshot.unknown"]


def test_dummy_weights_are_not_missed() -> None:
    args = ["/models/k3", "--load-format=dummy"]
    found = examine({"weights": None, "engine|container|args": ["serve", *args]}, engine=wanted(args=args)["engine"])
    assert codes(found.findings) == []
