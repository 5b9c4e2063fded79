"""Several hosts at once: what is alike is fine, each difference is told once, with the hosts it is between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from judging import spoil
from whole_host import DOMAIN, OLD, b300, codes, gb300, platform_lock, wanted

from kimi_runbook.findings import FLEET, Finding
from kimi_runbook.judge import examine_fleet
from kimi_runbook.lock import Lock
from kimi_runbook.snapshot import Snapshot

Json = dict[str, Any]
ADDRESSES = {"k3-a": "192.0.2.11", "k3-b": "192.0.2.12"}
ARGS = ["/models/k3", "--tensor-parallel-size", "16", "--nnodes", "2", "--master-addr", "192.0.2.11"]


def judge(
    changes: Json, *, base: Callable[[], Json] = b300, lock: Lock | None = None, args: list[str] = ARGS
) -> tuple[Finding, ...]:
    """Judge two nodes of one engine, the second one changed; return the findings about the fleet."""
    snapshots, asked = {}, {}
    for name, address in ADDRESSES.items():
        data = base() | {"hostname": name}
        data["network"]["addresses"] = {"eth0": [address]}
        data["engine"]["container"]["args"] = ["serve", *args]
        if name == "k3-b":
            for path, value in changes.items():
                spoil(data, path, value)
        snapshots[name], asked[name] = Snapshot.from_json(data), wanted(name, address=address, args=args)
    found = examine_fleet(snapshots, asked, lock or platform_lock()).findings
    return tuple(finding for finding in found if finding.host == FLEET)


def gpus(**changes: Any) -> list[Json]:
    return [gpu | changes for gpu in b300()["gpus"]]


# Case: id, what is changed on the second host, the codes, and what the last of them says.
CASES: list[tuple[str, Json, list[str], str]] = [
    ("alike", {}, [], ""),
    ("driver", {"driver|loaded": OLD}, ["fleet.drivers"], "k3-a: 580.178.04; k3-b: 570.133.20"),
    ("kernel", {"os|kernel": "6.8.0-90-generic"}, ["fleet.kernels"], "k3-b: 6.8.0-90-generic"),
    (
        "model",
        {"gpus": gpus(name="NVIDIA H200")},
        ["fleet.gpu_models", "fleet.replica_gpus"],
        "k3-b: 8 x NVIDIA H200",
    ),
    ("fewer", {"gpus": gpus()[:7]}, ["fleet.replica_gpus", "fleet.gpus_short"], "15 GPUs on k3-a, k3-b"),
    (
        "settings",
        {"engine|container|env|NCCL_IB_HCA": "=mlx5_0:1"},
        ["fleet.replica_settings"],
        "k3-b: NCCL_IB_HCA==mlx5_0:1",
    ),
    ("mtu", {"network|mtu|eth0": 1500}, ["fleet.mtu"], "k3-a: 9000; k3-b: 1500"),
    ("weights", {"weights|revision": "def"}, ["fleet.weights"], "k3-a: abc; k3-b: def"),
    ("weights-with-checksums-on-one", {"weights|checksums": {"a.safetensors": "1" * 64}}, [], ""),
    ("what-one-does-not-tell", {"weights|revision": None, "network|mtu": {}, "driver|loaded": None}, [], ""),
    ("small-memory", {"gpus": gpus(memory_total_mib=1000)}, [], ""),
]


@pytest.mark.parametrize(("changes", "wanted_codes", "says"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_two_nodes_of_one_engine(changes: Json, wanted_codes: list[str], says: str) -> None:
    findings = judge(changes)
    assert codes(findings) == wanted_codes
    assert not findings or says in findings[-1].observed
    assert all(finding.next_step and finding.source and finding.action is None for finding in findings)


def test_an_improvised_image_on_several_hosts_is_told_once() -> None:
    spoiled = b300()
    spoiled["image"]["stack"]["torch_cuda"] = "12.8"
    (finding,) = judge({}, base=lambda: {**spoiled, "network": {}, "engine": b300()["engine"]})
    assert finding.code == "fleet.images" and "k3-a, k3-b" in finding.observed


RACK: list[tuple[str, Json, list[str]]] = [
    ("one-domain", {}, []),
    ("two-cliques", {"fabric|gpus|0|clique_id": "8"}, ["fleet.domain_split"]),
    ("apart", {"fabric|imex_domain|nodes|1|apart": ["192.0.2.11 DISCONNECTED"]}, ["fleet.imex_apart"]),
    (
        "not-yet-started",
        {
            "fabric|imex_domain|nodes|1|apart": ["192.0.2.11 DISCONNECTED"],
            "fabric|services|nvidia-imex|active": "inactive",
        },
        [],
    ),
    ("two-lists", {"fabric|imex_nodes": ["192.0.2.12", "192.0.2.11"]}, ["fleet.imex_nodes"]),
]


@pytest.mark.parametrize(("changes", "wanted_codes"), [pytest.param(*case[1:], id=case[0]) for case in RACK])
def test_two_trays_of_one_engine(changes: Json, wanted_codes: list[str]) -> None:
    args = [argument if argument != "16" else "8" for argument in ARGS]
    findings = judge(changes, base=gb300, lock=platform_lock("gb300"), args=args)
    assert [code for code in codes(findings) if code != "fleet.memory_short"] == wanted_codes
    assert DOMAIN in gb300()["fabric"]["gpus"][0]["cluster_uuid"]


# Memory of one GPU as nvidia-smi reports it, in MiB. B300: lab/standin/host.py; the others: the node's figure of
# data/hardware.yml spread over its GPUs, and 189471 MiB for GB200, the largest that was seen.
@pytest.mark.parametrize(
    ("platform", "nodes", "memory_mib", "share", "fits"),
    [
        ("b300", 1, 275040, None, True),
        ("b200", 1, 183359, None, False),
        ("b200", 2, 183359, None, True),
        ("h200", 1, 143771, None, False),
        ("h200", 2, 143771, None, True),
        ("gb200", 2, 189471, None, False),
        ("gb200", 3, 189471, None, True),
        ("gb300", 2, 275040, None, True),
        ("gb300", 2, 275040, "0.60", False),
    ],
)
def test_the_memory_the_weights_need(platform: str, nodes: int, memory_mib: int, share: str | None, fits: bool) -> None:
    lock, rack = platform_lock(platform), platform.startswith("gb")
    args = ["/models/k3", "--nnodes", str(nodes), "--master-addr=192.0.2.11"]
    args += ["--gpu-memory-utilization", share] if share else []
    snapshots, asked = {}, {}
    for number in range(nodes):
        data = (gb300() if rack else b300()) | {"hostname": f"n{number}"}
        data["gpus"] = [gpu | {"memory_total_mib": memory_mib} for gpu in data["gpus"]]
        snapshots[f"n{number}"], asked[f"n{number}"] = Snapshot.from_json(data), wanted(f"n{number}", args=args)
    found = [finding for finding in examine_fleet(snapshots, asked, lock).findings if finding.host == FLEET]
    assert codes(tuple(found)) == ([] if fits else ["fleet.memory_short"])
    assert fits or (found[0].severity == "stop" and "1.561 TB" in found[0].expected)


def test_a_model_of_unknown_size_is_not_taken_to_fit() -> None:
    lock = platform_lock(model={"name": "somebody/else", "revision": "abc"})
    assert codes(judge({}, lock=lock)) == ["fleet.memory_unknown"]


def test_part_of_a_replica_is_not_judged_for_room() -> None:
    data = b300()
    data["engine"]["container"]["args"] = ["serve", *ARGS]
    found = examine_fleet({"k3-a": Snapshot.from_json(data)}, {"k3-a": wanted(args=ARGS)}, platform_lock()).findings
    assert codes(found) == []


def test_two_engines_are_two_replicas() -> None:
    snapshots, asked = {}, {}
    for name, head in (("k3-a", "192.0.2.11"), ("k3-b", "192.0.2.12")):
        data = b300() | {"hostname": name}
        data["network"]["mtu"] = {"eth0": 9000 if name == "k3-a" else 1500}
        data["network"]["addresses"] = {"eth0": [head]}
        args = ["/models/k3", "--master-addr", head]
        data["engine"]["container"]["args"] = ["serve", *args]
        snapshots[name], asked[name] = Snapshot.from_json(data), wanted(name, address=head, args=args)
    assert codes(examine_fleet(snapshots, asked, platform_lock()).findings) == []
