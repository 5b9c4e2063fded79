"""Whole hosts, one value away from healthy: each says exactly what is wrong with it, and weighs it rightly."""

from __future__ import annotations

from typing import Any

import pytest
from driver_cases import DRIVER, LATE, other_kernel, pinned
from host_cases import FABRIC, GPUS, HOST, RACK, xid
from whole_host import KERNEL, NEXT, OLD, TARGET, TRAY_ARGS, b300, codes, examine, gb300, platform_lock, wanted

from kimi_runbook.host_verdict import host_verdict
from kimi_runbook.judge import CHECKS

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


def test_a_peermem_of_another_ofed_is_built_again_not_loaded_again() -> None:
    text = "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client"
    changes = {
        "rdma|ofed": "OFED-internal-25.07-0.9.7",
        "kernel_log|lines": [{"at": "2026-11-30T13:00:00Z", "kind": "module", "text": text}],
    }
    findings = examine(changes, modules=[{"role": "rdma", "name": "nvidia_peermem"}]).findings
    assert codes(findings) == ["module.unloaded", "rdma.peermem_symbols"]
    assert text in findings[1].observed and f"dkms install nvidia/{TARGET}" in findings[1].next_step


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
    ("runtime|read_only", "image.present"),
    ("image|stack", "image.stack"),
    ("weights", "weights"),
    ("iommu|enabled", "network.iommu"),
    ("network|addresses", "host.address"),
    ("memlock|systemd_default", "network.memlock"),
]


@pytest.mark.parametrize(("path", "check"), UNTOLD)
def test_what_is_not_told_is_counted_and_is_never_fine(path: str, check: str) -> None:
    empty: Any = {} if path in ("fabric|services", "network|addresses") else False if "readable" in path else None
    judged = examine({path: empty})
    assert check in judged.coverage["k3-a"].unknown
    found = [finding for finding in judged.findings if finding.code == "snapshot.unknown"]
    assert len(found) == 1 and found[0].severity == "info" and codes(judged.findings)[-1] == "snapshot.unknown"


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"image|present": False, "runtime|free_bytes": None}, "image.present"),
        ({"weights|bytes": 10**12, "weights|free_bytes": None}, "weights"),
    ],
)
def test_room_that_is_needed_and_not_told_is_unknown(changes: dict[str, Any], check: str) -> None:
    assert check in examine(changes).coverage["k3-a"].unknown


def test_peermem_is_asked_for_by_name_and_needs_ofed() -> None:
    asked = {"modules": [{"role": "rdma", "name": "nvidia-peermem"}]}
    assert codes(examine({}, **asked).findings) == ["module.unloaded", "rdma.peermem"]
    assert codes(examine({"rdma|ofed": "OFED-internal-25.10"}, **asked).findings) == ["module.unloaded"]
    assert codes(examine({"modules|nvidia_peermem": {"loaded": True}}, **asked).findings) == []


NODE_LIST = "/etc/nvidia-imex/nodes_config.cfg"


def test_a_node_list_that_a_role_writes_anew_does_not_stop_it() -> None:
    """The wrong list is what provision mends; once it is written, the stop is back for a list that lacks the host."""
    wrong = {"fabric|imex_nodes": ["192.0.2.12"], f"files|{NODE_LIST}": {"sha256": "b" * 64, "mode": "0644"}}
    engine = wanted(args=TRAY_ARGS)["engine"]
    for written, code in (("a", "file.content"), ("b", "fabric.imex_self")):
        wish = {"role": "fabric_services", "path": NODE_LIST, "sha256": written * 64, "mode": "0644"}
        findings = examine(wrong, base=gb300(), lock=platform_lock("gb300"), engine=engine, files=[wish]).findings
        assert codes(findings) == [code]


def test_a_declared_unit_or_package_is_one_finding_and_not_two() -> None:
    down = {"fabric|services|nvidia-fabricmanager|active": "failed"}
    unit = {"load": "loaded", "active": "failed", "enabled": "enabled"}
    units = [{"role": "fabric_services", "name": "nvidia-fabricmanager.service", "enabled": True, "active": True}]
    found = examine({**down, "units|nvidia-fabricmanager.service": unit}, units=units).findings
    assert codes(found) == ["unit.inactive"]


def test_nvlsm_without_a_unit_is_the_fabric_manager_s_business() -> None:
    seen = {"fabric|services|nvlsm|active": "inactive"}
    assert codes(examine(seen).findings) == ["fabric.service"]
    none = {"load": "not-found", "active": "inactive", "enabled": "not-found"}
    assert codes(examine({**seen, "units|nvlsm.service": none}).findings) == []


@pytest.mark.parametrize(
    ("wanted", "seen", "found"),
    [
        ("OFED-internal-25.10-1", "OFED-internal-25.10-1", []),
        ("OFED-internal-25.10-1", "OFED-internal-24.10-1", ["rdma.ofed"]),
        ("OFED-internal-25.10-1", None, ["rdma.ofed"]),
        ("inbox", None, []),
        ("inbox", "OFED-internal-25.10-1", ["rdma.ofed"]),
        ("", "OFED-internal-25.10-1", []),
    ],
)
def test_the_ofed_is_asserted(wanted: str, seen: str | None, found: list[str]) -> None:
    assert codes(examine({"rdma|ofed": seen}, ofed=wanted).findings) == found


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("passed", "interconnect.dmabuf"),
        ("untested", "interconnect.dmabuf"),
        ("not_met", "interconnect.dmabuf_blocked"),
        ("failed", "interconnect.dmabuf_blocked"),
    ],
)
def test_the_rung_of_the_dma_buf_ladder_is_told(state: str, code: str) -> None:
    (finding,) = examine({}, dmabuf={"rung": "software", "state": state, "reason": "a kernel"}).findings
    assert (finding.code, finding.observed) == (code, f"rung software {state}: a kernel")


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


def test_the_pin_of_the_driver_before_goes_with_its_package() -> None:
    own = pinned("version 570.*")
    own["pins"][0]["path"] = "/etc/apt/preferences.d/nvidia-driver-pinning-570"
    asked = wanted()["packages"]
    asked.append({"role": "gpu_driver", "name": "nvidia-driver-pinning-580", "version": None, "held": False})
    late = {**LATE, **own, "packages|nvidia-driver-pinning-580": {"version": "1"}}
    assert codes(examine(late, packages=asked).findings) == ["driver.reboot"]
    late["driver|loaded"], late["driver|smi_rc"] = TARGET, 0
    (finding,) = examine(late, packages=asked).findings
    assert finding.observed == (
        "/etc/apt/preferences.d/nvidia-driver-pinning-570: nvidia-* libnvidia-* version 570.* at priority 1001"
    )
    assert finding.expected == "580.178.04, or no pin"


@pytest.mark.parametrize(
    ("name", "companions", "observed", "expected", "install"),
    [
        pytest.param(
            "nvidia-imex-570",
            {},
            "nvidia-imex-570 570.133.20-1",
            "nvidia-imex-580 580.178.04",
            "nvidia-imex-580 in place of nvidia-imex-570",
            id="branch-in-the-name",
        ),
        pytest.param(
            "nvidia-imex-570",
            {"nvidia-imex": "580.178.04-1"},
            "nvidia-imex-570 570.133.20-1",
            "nvidia-imex 580.178.04-1",
            "nvidia-imex in place of nvidia-imex-570",
            id="as-the-lock-names-it",
        ),
        pytest.param(
            "nvidia-imex",
            {"nvidia-imex": "580.178.04-1"},
            "nvidia-imex 570.133.20-1",
            "580.178.04-1",
            "nvidia-imex",
            id="one-name",
        ),
    ],
)
def test_a_companion_is_called_as_at_the_locked_driver(
    name: str, companions: dict[str, str], observed: str, expected: str, install: str
) -> None:
    lock = platform_lock(driver=platform_lock().to_json()["driver"] | {"companions": companions})  # type: ignore[operator]  # JSON
    (finding,) = examine({f"packages|{name}": {"version": f"{OLD}-1", "held": True}}, lock=lock).findings
    assert (finding.code, finding.observed, finding.expected) == ("driver.companion", observed, expected)
    assert finding.next_step.startswith(f"Install {install} at the driver's version on k3-a")


def test_a_fabric_package_that_is_missing_is_named_as_the_lock_has_it() -> None:
    gone = {"fabric|services|nvidia-fabricmanager": {"package": None, "active": "inactive"}}
    (finding,) = examine(gone).findings
    assert (finding.observed, finding.expected) == (
        "nvidia-fabricmanager not installed",
        "nvidia-fabricmanager 580.178.04-1, as the lock has it",
    )
    assert "Install nvidia-fabricmanager=580.178.04-1 on k3-a" in finding.next_step
    (finding,) = examine({"fabric|services|nvlsm": {"package": None, "active": "inactive"}}).findings
    assert finding.expected == "nvlsm, as nvlink5 hosts need it; the lock names none"
    asked = [*wanted()["packages"], {"role": "gpu_driver", "name": "nvidia-fabricmanager", "version": None}]
    found = examine({**gone, "packages|nvidia-fabricmanager": None}, packages=asked).findings
    assert codes(found) == ["package.missing"]


def test_gpus_of_another_maker_are_another_platform_s() -> None:
    amd = [{"pci": f"0000:{n:02x}:00.0", "vendor": "0x1002"} for n in range(8)]
    late = {**LATE, "gpus": [], "accelerators": [*amd, {"pci": "0000:99:00.0", "vendor": "0x1a03"}]}
    assert examine(late).findings[-1].observed == "8 GPUs of AMD on the PCI bus"
    few = examine({**LATE, "gpus": [], "accelerators": amd[:5]}, lock=platform_lock("mi355x")).findings
    (count,) = [finding for finding in few if finding.code == "gpu.count"]
    assert "lspci -d 1002:" in count.next_step and "nvidia-smi" not in count.next_step


@pytest.mark.parametrize(("times", "says"), [(1, "once, at 2026-"), (3, "3 times, last at 2026-")])
def test_how_often_an_xid_was_seen_is_said_in_words(times: int, says: str) -> None:
    (finding,) = examine({"kernel_log|lines": xid(79)["kernel_log|lines"] * times}).findings
    assert says in finding.observed


def test_simulated_gpus_are_of_no_platform_and_hold_no_model() -> None:
    data = b300()
    data["gpus"] = [{"index": n, "name": "NVIDIA B300 (simulated)", "memory_total_mib": 275040} for n in range(4)]
    data["driver"]["standin"] = True
    data["fabric"] |= {"sw_mng": 0, "gpus": None}
    data["image"]["stack"]["torch_cuda"] = None
    findings = examine({}, base=data, lock=platform_lock("lab")).findings
    assert codes(findings) == ["host.simulated", "snapshot.unknown"]


@pytest.mark.parametrize(
    ("proved", "found"),
    [
        pytest.param("1" * 64, [], id="all"),
        pytest.param("2" * 64, ["weights.unproved"], id="some-or-others"),
        pytest.param(None, ["weights.unproved"], id="none"),
    ],
)
def test_weights_of_a_list_have_to_be_proved_on_the_host(proved: str | None, found: list[str]) -> None:
    listed = {"role": "model_weights", "proved": "1" * 64, "files": 110}
    judged = examine({"weights|proved": proved}, weights=listed)
    assert codes(judged.findings) == found
    assert [(row.action, row.role) for row in judged.findings] == [("pull", "model_weights")] * len(found)
    assert codes(examine({"weights|proved": proved}).findings) == []


def test_dummy_weights_are_not_missed() -> None:
    args = ["/models/k3", "--load-format=dummy"]
    found = examine({"weights": None, "engine|container|args": ["serve", *args]}, engine=wanted(args=args)["engine"])
    assert codes(found.findings) == []
