"""Snapshots are read with their types, or refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from judging import snapshot_data, spoil

from kimi_runbook.errors import RunbookError
from kimi_runbook.snapshot import Snapshot


def test_round_trip() -> None:
    snapshot = Snapshot.from_json(snapshot_data())
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert snapshot.driver.on_disk == "580.178.04"
    assert snapshot.container is not None and snapshot.container.running
    assert snapshot.network.listening[0].process == "vllm"


def test_optional_keys_may_be_missing() -> None:
    snapshot = Snapshot.from_json({"schema_version": 1, "hostname": "bare"})
    assert snapshot.container is None and snapshot.image is None
    assert snapshot.driver.loaded is None and snapshot.packages == {}


def test_absent_and_not_asked_stay_different() -> None:
    snapshot = Snapshot.from_json({"schema_version": 1, "hostname": "h", "packages": {"docker.io": None}})
    assert snapshot.packages == {"docker.io": None}


def test_what_a_newer_module_reports_is_ignored() -> None:
    data = snapshot_data() | {"quantum": {"entangled": True}}
    data["driver"] |= {"aura": "green"}
    data["gpus"][0] |= {"mood": [1]}
    assert Snapshot.from_json(data) == Snapshot.from_json(snapshot_data())


def test_unknown_none_and_not_asked_stay_different() -> None:
    data = snapshot_data()
    data["driver"] |= {"dkms": None, "libcuda": [], "on_disk_next": {"kernel": "6.8.0-101-generic", "version": None}}
    data |= {"cdi": [], "kernel_log": {"readable": False, "lines": []}, "weights": {"path": "/m", "files": 0}}
    seen = Snapshot.from_json(data)
    assert seen.driver.dkms is None and seen.driver.libcuda == ()
    assert seen.driver.on_disk_next is not None and seen.driver.on_disk_next.version is None
    assert seen.cdi == () and seen.updaters is None
    assert seen.kernel_log is not None and not seen.kernel_log.readable
    assert seen.weights is not None and (seen.weights.files, seen.weights.bytes) == (0, None)
    assert Snapshot.from_json(seen.to_json()) == seen


def test_absent_units_and_modules_are_spelled_out() -> None:
    seen = Snapshot.from_json({"schema_version": 1, "hostname": "h", "units": {"a": None}, "modules": {"b": None}})
    assert seen.units["a"].load == "not-found"
    assert not seen.modules["b"].loaded


def test_every_part_of_a_full_snapshot_is_read() -> None:
    data = snapshot_data()
    data["kernel"] = {"running": "6.8", "next": "6.9", "installed": ["6.8", "6.9"], "headers": {"6.8": True}}
    data["fabric"] = {
        "nvswitches": 4,
        "services": {"nvlsm": {"package": "nvlsm", "active": "active", "started_at": "2026-11-30T14:00:00Z"}},
        "gpus": [{"index": 0, "state": "Completed", "status": "Success", "clique_id": "0"}],
    }
    data["image"]["stack"] = {
        "python": [{"name": "torch", "version": "2.13.0+cu130"}],
        "libraries": [{"path": "/usr/lib/libmlx5.so.1", "name": "libmlx5.so.1", "version": None}],
        "torch_cuda": "13.0",
    }
    data["engine"] |= {"unit_env": {"NCCL_NET": "IB"}, "process": {"argv": ["vllm"], "started_at": None}}
    data["gpus"][0] |= {"ecc": {"mode": "Enabled", "uncorrected_volatile": 0}, "processes": [{"pid": 1}]}
    data["holders"] = [{"pid": 1, "name": "x", "device": "/dev/nvidia0"}]
    seen = Snapshot.from_json(data)
    assert seen.kernel.headers == {"6.8": True}
    assert seen.fabric.services["nvlsm"].active == "active"
    assert seen.fabric.gpus is not None and seen.fabric.gpus[0].clique_id == "0"
    assert seen.image is not None and seen.image.stack is not None and seen.image.stack.torch_cuda == "13.0"
    assert seen.engine.process is not None and seen.engine.process.argv == ("vllm",)
    assert seen.gpus[0].ecc is not None and seen.gpus[0].ecc.uncorrected_aggregate is None
    assert seen.holders is not None and seen.holders[0].device == "/dev/nvidia0"
    assert Snapshot.from_json(seen.to_json()) == seen


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version: 2; expected 1"),
        ("hostname", None, "hostname: nothing; expected a string"),
        ("driver|on_disk", 580.17, r"driver: on_disk: 580.17; expected a string \(quote it\)"),
        ("packages|docker.io", "20.10", "packages: docker.io: '20.10'; expected a mapping"),
        ("runtime|free_bytes", "many", "free_bytes: 'many'; expected an integer"),
        ("runtime|free_inodes", True, "free_inodes: True; expected an integer"),
        ("gpus", {}, "gpus: a mapping; expected a list"),
        ("modules|mlx5_core|loaded", 1, "loaded: 1; expected true or false"),
        ("kernel", [], "kernel: a list; expected a mapping"),
        ("driver|params", {"a": 1}, r"driver: params: a: 1; expected a string \(quote it\)"),
        ("driver|dkms", [{"version": "1"}], r"driver: dkms\[0\]: module: absent; expected a string that is not empty"),
        ("driver|init_complete_s", "soon", "init_complete_s: 'soon'; expected a number"),
        ("fabric", {"services": {"nvlsm": "active"}}, "fabric: services: nvlsm: 'active'; expected a mapping"),
        ("weights", {"path": "/m", "files": "many"}, "weights: files: 'many'; expected an integer"),
        ("network|mtu", {"eth0": "9000"}, "network: mtu: eth0: '9000'; expected an integer"),
        ("holds", "linux", "holds: 'linux'; expected a list"),
        ("cdi", [{}], r"cdi\[0\]: path: absent"),
    ],
)
def test_wrong_shapes_are_refused(path: str, value: Any, message: str) -> None:
    data = snapshot_data()
    spoil(data, path, value)
    with pytest.raises(RunbookError, match=message):
        Snapshot.from_json(data, "k3-a.json")
