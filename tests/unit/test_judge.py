"""One thing spoiled per case: the judge says exactly that, and says nothing about a healthy host."""

from __future__ import annotations

from typing import Any

import pytest
from judging import IMAGE, a_lock, expected_data, lock_data, snapshot_data, spoil

from kimi_runbook.errors import RunbookError
from kimi_runbook.findings import Finding
from kimi_runbook.judge import judge_fleet, judge_host
from kimi_runbook.lock import parse_lock
from kimi_runbook.snapshot import Snapshot

OLD = "570.133.20"
OTHER_IMAGE = IMAGE.replace("a" * 64, "c" * 64)
NGINX = {"address": "127.0.0.1", "port": 8000, "pid": 7, "process": "nginx"}

# Case: id, what is spoiled in the snapshot, and the (code, action, role) expected.
CASES: list[tuple[str, dict[str, Any], list[tuple[str, str | None, str]]]] = [
    ("healthy", {}, []),
    ("os", {"os|id": "gentoo"}, [("os.unsupported", None, "host_snapshot")]),
    ("release", {"os|version_id": "11"}, [("os.unsupported", None, "host_snapshot")]),
    ("address", {"network|addresses": {"eth0": ["192.0.2.12"]}}, [("network.address_missing", None, "engine")]),
    (
        "probe",
        {"errors": [{"probe": "nvidia-smi", "message": "late"}]},
        [("snapshot.probe_failed", None, "host_snapshot")],
    ),
    ("standin", {"driver|standin": True}, [("host.simulated", None, "host_snapshot")]),
    ("port", {"network|listening": [NGINX]}, [("port.taken", None, "engine")]),
    (
        "port-and-no-engine",
        {"network|listening|0|pid": None, "engine|container": None},
        [("port.taken", None, "engine"), ("engine.absent", "restart", "engine")],
    ),
    ("worker-listens", {"network|listening|0|pid": 43}, []),
    ("other-port", {"network|listening": [{**NGINX, "port": 9000}]}, []),
    ("arch", {"os|arch": "aarch64"}, [("image.arch_missing", None, "engine_image")]),
    ("image-absent", {"image": None}, [("image.absent", "pull", "engine_image")]),
    ("image-other-digest", {"image|repo_digests": [OTHER_IMAGE]}, [("image.absent", "pull", "engine_image")]),
    ("image-arch", {"image|architecture": "arm64"}, [("image.architecture", "pull", "engine_image")]),
    (
        "disk",
        {"image|present": False, "runtime|free_bytes": 1999},
        [("disk.short", None, "engine_image"), ("image.absent", "pull", "engine_image")],
    ),
    (
        "inodes",
        {"image|present": False, "runtime|free_inodes": 99},
        [("disk.short", None, "engine_image"), ("image.absent", "pull", "engine_image")],
    ),
    ("disk-full-but-image-there", {"runtime|free_bytes": 0, "runtime|free_inodes": 0}, []),
    ("inodes-not-counted", {"runtime|free_inodes": None}, []),
    (
        "driver-older",
        {"driver|on_disk": OLD, "driver|loaded": OLD, "driver|userspace": OLD},
        [("driver.install", "install", "gpu_driver"), ("driver.reboot", "reboot", "gpu_driver")],
    ),
    ("driver-not-loaded", {"driver|loaded": OLD, "driver|smi_rc": 18}, [("driver.reboot", "reboot", "gpu_driver")]),
    (
        "driver-not-built",
        {"driver|on_disk": None, "driver|loaded": OLD},
        [("driver.repair", "repair", "gpu_driver"), ("driver.reboot", "reboot", "gpu_driver")],
    ),
    ("driver-proprietary", {"driver|flavour": "proprietary"}, [("driver.install", "install", "gpu_driver")]),
    ("smi-fails", {"driver|smi_rc": 15}, [("driver.smi_failed", None, "gpu_driver")]),
    ("smi-mismatch", {"driver|smi_rc": 18}, [("driver.repair", "repair", "gpu_driver")]),
    (
        "secure-boot",
        {"driver|on_disk": OLD, "driver|secure_boot": True},
        [("driver.secure_boot", None, "gpu_driver"), ("driver.install", "install", "gpu_driver")],
    ),
    ("secure-boot-and-nothing-to-do", {"driver|secure_boot": True}, []),
    (
        "headers",
        {"driver|on_disk": OLD, "driver|headers_present": False},
        [("driver.headers_missing", None, "gpu_driver"), ("driver.install", "install", "gpu_driver")],
    ),
    (
        "runfile",
        {"driver|on_disk": OLD, "driver|runfile": True},
        [("driver.runfile", None, "gpu_driver"), ("driver.install", "install", "gpu_driver")],
    ),
    (
        "stranger-on-gpu",
        {"driver|on_disk": OLD, "driver|holders": [{"pid": 9, "name": "jupyter"}]},
        [("driver.foreign_holder", None, "gpu_driver"), ("driver.install", "install", "gpu_driver")],
    ),
    (
        "known-on-gpu",
        {"driver|on_disk": OLD, "driver|holders": [{"pid": 9, "name": "nvidia-persiste"}, {"pid": 42, "name": "x"}]},
        [("driver.install", "install", "gpu_driver")],
    ),
    ("package-missing", {"packages|docker.io": None}, [("package.missing", "install", "container_runtime")]),
    (
        "package-version",
        {"packages|nvidia-kernel-open-dkms|version": "580.167.08-1"},
        [("package.version", "install", "gpu_driver")],
    ),
    (
        "package-unheld",
        {"packages|nvidia-kernel-open-dkms|held": False},
        [("package.unheld", "configure", "gpu_driver")],
    ),
    ("package-held-by-choice", {"packages|docker.io|held": True}, []),
    (
        "package-not-asked",
        {"packages": {"docker.io": {"version": "1"}}},
        [("snapshot.incomplete", None, "host_snapshot")],
    ),
    ("file-missing", {"files|/etc/nccl.conf": None}, [("file.missing", "configure", "interconnect")]),
    ("file-content", {"files|/etc/nccl.conf|sha256": "2" * 64}, [("file.content", "configure", "interconnect")]),
    ("file-mode", {"files|/etc/nccl.conf|mode": "0600"}, [("file.mode", "configure", "interconnect")]),
    (
        "unit-missing",
        {"units|docker.service": {"load": "not-found", "active": "inactive", "enabled": ""}},
        [("unit.missing", "configure", "container_runtime")],
    ),
    (
        "unit-disabled",
        {"units|docker.service|enabled": "disabled"},
        [("unit.enablement", "configure", "container_runtime")],
    ),
    (
        "unit-until-reboot",
        {"units|docker.service|enabled": "enabled-runtime"},
        [("unit.enablement", "configure", "container_runtime")],
    ),
    ("unit-failed", {"units|docker.service|active": "failed"}, [("unit.inactive", "restart", "container_runtime")]),
    ("module", {"modules|mlx5_core|loaded": False}, [("module.unloaded", "configure", "rdma")]),
    (
        "daemon-key",
        {"runtime|daemon": {"log-driver": "journald"}},
        [("daemon.setting", "configure", "container_runtime")],
    ),
    ("daemon-absent", {"runtime|daemon": None}, [("daemon.setting", "configure", "container_runtime")]),
    (
        "daemon-malformed",
        {"runtime|daemon": None, "runtime|daemon_error": "line 3"},
        [("daemon.unreadable", None, "container_runtime")],
    ),
    (
        "engine-stopped",
        {"engine|container|pid": None, "network|listening": []},
        [("engine.absent", "restart", "engine")],
    ),
    (
        "engine-image",
        {"engine|container|image_reference": OTHER_IMAGE, "engine|container|image_repo_digests": [OTHER_IMAGE]},
        [("engine.image", "restart", "engine")],
    ),
    ("engine-args", {"engine|container|args": ["serve", "/models/k3"]}, [("engine.args", "restart", "engine")]),
    ("engine-env", {"engine|container|env": {}}, [("engine.env", "restart", "engine")]),
    ("engine-file", {"engine|container|files": {"/etc/nccl.conf": None}}, [("engine.files", "restart", "engine")]),
    ("engine-restarts", {"engine|container|restart_count": 2}, [("engine.restarted", None, "engine")]),
    (
        "debug",
        {"engine|container|env": {"VLLM_HOST_IP": "192.0.2.11", "NCCL_DEBUG": "INFO"}},
        [("interconnect.debug_leftover", None, "interconnect")],
    ),
]


def judged(changes: dict[str, Any], expected: dict[str, Any] | None = None) -> tuple[Finding, ...]:
    data = snapshot_data()
    for path, value in changes.items():
        spoil(data, path, value)
    return judge_host(Snapshot.from_json(data), expected or expected_data(), a_lock())


@pytest.mark.parametrize(("changes", "wanted"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_one_spoiled_thing_gives_its_finding(
    changes: dict[str, Any], wanted: list[tuple[str, str | None, str]]
) -> None:
    assert [(finding.code, finding.action, finding.role) for finding in judged(changes)] == wanted


def test_every_finding_is_complete() -> None:
    for _, changes, _ in CASES:
        for finding in judged(changes):
            assert finding.observed and finding.expected and finding.source and finding.next_step
            assert "{" not in finding.next_step
            assert (finding.severity == "change") == (finding.action is not None)
            assert Finding.from_json(finding.to_json()) == finding


def test_unreachable_host() -> None:
    (finding,) = judge_host(None, expected_data(), a_lock())
    assert (finding.code, finding.severity, finding.host) == ("host.unreachable", "stop", "k3-a")


def test_fleet_takes_a_missing_snapshot_for_an_unreachable_host() -> None:
    healthy = Snapshot.from_json(snapshot_data())
    expected = {"k3-a": expected_data(), "k3-b": {**expected_data(), "host": "k3-b"}}
    assert [(f.host, f.code) for f in judge_fleet({"k3-a": healthy}, expected, a_lock())] == [
        ("k3-b", "host.unreachable")
    ]
    findings = judge_fleet({"k3-a": healthy, "k3-c": None}, {"k3-a": expected_data()}, a_lock())
    assert [(f.host, f.code) for f in findings] == [("k3-c", "host.unreachable")]


def test_a_host_whose_snapshot_failed_is_told_from_one_that_does_not_answer() -> None:
    expected = {name: {**expected_data(), "host": name} for name in ("k3-a", "k3-b", "k3-c", "k3-d")}
    snapshots = {"k3-a": Snapshot.from_json(snapshot_data())}
    missing = {"k3-a": "ignored", "k3-b": "unreachable", "k3-c": "MODULE FAILURE:\n  no module named x", "k3-d": ""}
    findings = judge_fleet(snapshots, expected, a_lock(), missing=missing)
    assert [(f.host, f.code, f.severity, f.observed) for f in findings] == [
        ("k3-b", "host.unreachable", "stop", "no answer"),
        ("k3-c", "snapshot.failed", "stop", "MODULE FAILURE: no module named x"),
        ("k3-d", "snapshot.failed", "stop", "failed without a message"),
    ]
    assert "ssh" not in findings[1].next_step


def test_fleet_refuses_a_snapshot_nothing_is_expected_of() -> None:
    with pytest.raises(RunbookError, match="nothing is expected of"):
        judge_fleet({"stranger": Snapshot.from_json(snapshot_data())}, {}, a_lock())


def test_locked_kernel_and_distribution() -> None:
    lock = parse_lock({**lock_data(), "kernel": "6.1.0-30", "os": "debian 13"}, "lock.yml")
    findings = judge_host(Snapshot.from_json(snapshot_data()), expected_data(), lock)
    assert [(f.code, f.expected) for f in findings] == [("os.unsupported", "debian 13"), ("host.kernel", "6.1.0-30")]


@pytest.mark.parametrize(
    ("locked", "os_id", "version", "expected"),
    [
        pytest.param("debian 12", "debian", "12", None, id="both-agree"),
        pytest.param("debian", "debian", "13", None, id="no-version-locked"),
        pytest.param("debian 12.5", "debian", "12.5", None, id="narrower-lock"),
        pytest.param("debian 12.5", "debian", "12", "debian 12.5", id="narrower-lock-missed"),
        pytest.param("debian 13", "ubuntu", "24.04", "debian 13", id="supported-and-not-locked"),
        pytest.param(
            "rocky 9",
            "rocky",
            "9.4",
            "debian 12 or debian 13, which the roles know; the lock names rocky 9",
            id="locked-and-not-supported",
        ),
    ],
)
def test_a_lock_narrows_the_distributions_and_adds_none(
    locked: str, os_id: str, version: str, expected: str | None
) -> None:
    data = snapshot_data()
    data["os"] |= {"id": os_id, "version_id": version}
    lock = parse_lock({**lock_data(), "os": locked}, "lock.yml")
    findings = judge_host(Snapshot.from_json(data), expected_data(), lock)
    assert [f.expected for f in findings if f.code == "os.unsupported"] == ([expected] if expected else [])


def test_precompiled_modules_need_neither_headers_nor_a_key() -> None:
    expected = expected_data()
    expected["packages"][0]["name"] = "linux-modules-nvidia-580-open-6.8.0-60-generic"
    spoiled = {
        "packages": {"linux-modules-nvidia-580-open-6.8.0-60-generic": None, "docker.io": {"version": "1"}},
        "driver|on_disk": OLD,
        "driver|secure_boot": True,
        "driver|headers_present": False,
    }
    assert [f.code for f in judged(spoiled, expected)] == ["driver.install", "package.missing"]


def test_an_enrolled_key_and_unknown_headers_stop_nothing() -> None:
    spoiled = {"driver|on_disk": OLD, "driver|secure_boot": True, "driver|key_enrolled": True}
    assert [f.code for f in judged({**spoiled, "driver|headers_present": None})] == ["driver.install"]


def test_only_what_a_snapshot_reports_is_compared() -> None:
    expected = expected_data()
    expected["engine"]["env"] |= {"HF_TOKEN": "s3cret", "VLLM_API_KEY": "s3cret", "http_proxy": "http://u:p@proxy"}
    assert judged({}, expected) == ()
    (finding,) = judged({"engine|container|env": {"VLLM_HOST_IP": "192.0.2.9"}}, expected)
    assert (finding.observed, finding.expected) == ("VLLM_HOST_IP=192.0.2.9", "192.0.2.11")


OTHER = {"/etc/nccl.conf": {"sha256": "2" * 64, "mode": "0644", "settings": {"NCCL_NET": "Socket", "NCCL_A": "1"}}}


@pytest.mark.parametrize(
    ("settings", "observed", "expected"),
    [
        pytest.param(
            {"NCCL_NET": "IB", "NCCL_A": "1"}, "/etc/nccl.conf NCCL_NET=Socket", "NCCL_NET=IB", id="another-value"
        ),
        pytest.param(
            {"NCCL_NET": "Socket", "NCCL_B": "2"},
            "/etc/nccl.conf NCCL_A=1, NCCL_B not set",
            "NCCL_A not set, NCCL_B=2",
            id="one-too-many-and-one-missing",
        ),
        pytest.param(
            {f"NCCL_{n}": "x" for n in "CDEF"} | {"NCCL_NET": "Socket", "NCCL_A": "1"},
            "/etc/nccl.conf NCCL_C not set, NCCL_D not set, NCCL_E not set and 1 more",
            "NCCL_C=x, NCCL_D=x, NCCL_E=x",
            id="many",
        ),
        pytest.param(
            {"NCCL_NET": "Socket", "NCCL_A": "1"}, f"/etc/nccl.conf sha256 {'2' * 12}", f"sha256 {'1' * 12}", id="none"
        ),
        pytest.param(None, f"/etc/nccl.conf sha256 {'2' * 12}", f"sha256 {'1' * 12}", id="not-known"),
    ],
)
def test_the_setting_that_differs_is_named(settings: dict[str, str] | None, observed: str, expected: str) -> None:
    wanted = expected_data()
    wanted["files"][0]["settings"] = settings
    (finding,) = judged({"files": OTHER}, wanted)
    assert (finding.code, finding.observed, finding.expected) == ("file.content", observed, expected)


def test_the_setting_that_differs_inside_the_container_is_named() -> None:
    wanted = expected_data()
    wanted["files"][0]["settings"] = {"NCCL_NET": "IB"}
    inside = {
        "engine|container|files": {"/etc/nccl.conf": "3" * 64},
        "engine|container|settings": {"/etc/nccl.conf": {"NCCL_NET": "Socket"}},
    }
    (finding,) = judged(inside, wanted)
    assert (finding.code, finding.observed, finding.expected) == (
        "engine.files",
        "/etc/nccl.conf in the container: NCCL_NET=Socket",
        "NCCL_NET=IB",
    )


@pytest.mark.parametrize(
    ("role", "playbook"), [("engine", "playbooks/serve.yml"), ("interconnect", "playbooks/provision.yml")]
)
def test_the_next_step_names_the_playbook_of_the_role(role: str, playbook: str) -> None:
    expected = expected_data()
    expected["files"][0]["role"] = expected["units"][0]["role"] = role
    findings = judged({"files|/etc/nccl.conf": None, "units|docker.service|active": "failed"}, expected)
    assert [f.next_step for f in findings] == [f"Run {playbook}."] * 2


def test_the_head_needs_its_rendezvous_port_too() -> None:
    expected = expected_data()
    expected["engine"]["ports"] = [8000, 29501]
    taken = {"network|listening": [NGINX, {**NGINX, "port": 29501, "process": "sshd", "pid": 8}]}
    findings = judged(taken, expected)
    assert [(f.code, f.observed.partition(" (")[0]) for f in findings] == [
        ("port.taken", "port 8000: nginx"),
        ("port.taken", "port 29501: sshd"),
    ]
    assert "port 29501 of k3-a" in findings[1].next_step
    expected["engine"]["serves_http"] = False
    assert judged(taken, expected) == ()


def test_ports_are_numbers() -> None:
    expected = expected_data()
    expected["engine"]["ports"] = ["8000"]
    with pytest.raises(RunbookError, match="ports: a list; expected a list of integers"):
        judged({}, expected)


def test_reload_where_the_site_allows_it() -> None:
    expected = expected_data()
    expected["driver"]["activation"] = "reload"
    assert [f.code for f in judged({"driver|loaded": OLD}, expected)] == ["driver.reload"]
    busy = {"driver|loaded": OLD, "modules|nvidia_drm": {"loaded": True, "refcnt": 1}}
    assert [f.code for f in judged(busy, expected)] == ["driver.reboot"]


def test_unit_that_must_not_run() -> None:
    expected = expected_data()
    expected["units"][0] |= {"active": False, "enabled": None}
    assert [f.code for f in judged({}, expected)] == ["unit.active"]


def test_headless_node_leaves_the_port_alone() -> None:
    expected = expected_data()
    expected["engine"]["serves_http"] = False
    assert judged({"network|listening": [NGINX]}, expected) == ()


@pytest.mark.parametrize(
    ("part", "key", "value"), [("driver", "version", "580.167.08"), ("image", "reference", OTHER_IMAGE)]
)
def test_expected_of_another_lock_is_refused(part: str, key: str, value: str) -> None:
    expected = expected_data()
    expected[part][key] = value
    with pytest.raises(RunbookError, match="as the lock has it"):
        judge_host(None, expected, a_lock())


def test_misspelt_expectation_is_refused() -> None:
    with pytest.raises(RunbookError, match="unknown key pakages"):
        judge_host(None, {"host": "k3-a", "pakages": []}, a_lock())


def test_supported_distributions_come_from_the_data_where_the_inventory_has_none() -> None:
    expected = {**expected_data(), "supported_os": []}
    assert judged({"os|version_id": "13"}, expected) == ()
    (one,) = judged({"os|id": "arch"}, expected)
    assert one.expected.startswith("debian 12 or debian 13 or ubuntu 22.04")
    assert one.expected.endswith("almalinux 10")
