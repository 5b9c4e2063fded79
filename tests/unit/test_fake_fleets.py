"""Fleets of fake hosts: what the audit says of several hosts together, from their trees to the findings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.findings import FLEET, Finding
from kimi_runbook.judge import examine_fleet
from kimi_runbook.snapshot import Snapshot
from tests.hosts.build import build
from tests.hosts.described import Host, load_host, merged
from tests.hosts.snapshots import snapshot
from tests.hosts.wanted import expected_of, lock_of, questions_of

Json = dict[str, Any]
HGX, RACK = "hgx-h200-ib", "gb300-tray"
HEAD = "192.0.2.11"
TRAYS = ("192.0.2.11", "192.0.2.12", "192.0.2.13", "192.0.2.14")


def node(name: str, base: str, address: str, size: int, over: Mapping[str, Any]) -> Host:
    """Return one node of an engine over several hosts: its own name and address, the engine's sizes, what differs."""
    host = load_host(base)
    gpus = int(host.values["gpus"]["count"]) * size
    args = ["serve", "/models/kimi-k3", "--tensor-parallel-size", str(gpus)]
    args += ["--nnodes", str(size), "--master-addr", HEAD]
    own = {
        "hostname": name,
        "network": {"interfaces": {"eth0": {"address": address, "mtu": 9000, "speed": 100000}}},
        "engine": {"args": args, "env": {**host.values["engine"]["env"], "VLLM_HOST_IP": address}},
    }
    return replace(host, name=name, values=merged(merged(host.values, own), over))


def fleet(folder: Path, base: str, size: int, over: Mapping[str, Any], whole: Mapping[str, Any]) -> list[Finding]:
    """Judge so many hosts, all with ``whole`` and the last one with ``over``; return the findings about the fleet."""
    addresses = [f"192.0.2.{11 + number}" for number in range(size)]
    hosts = [
        node(f"n{number}", base, address, size, merged(whole, over) if number == size - 1 else whole)
        for number, address in enumerate(addresses)
    ]
    seen, asked = {}, {}
    for host in hosts:
        taken = json.loads(json.dumps(snapshot(build(host, folder), questions_of(host))))
        seen[host.name], asked[host.name] = Snapshot.from_json(taken), expected_of(host)
    found = examine_fleet(seen, asked, lock_of(hosts[0])).findings
    return [finding for finding in found if finding.host == FLEET]


OLD_KERNEL = "6.8.0-60-generic"
# Case: id, the kind of host, how many, what differs on the last one, what all of them have, the codes, what the first
# of them says.
Case = tuple[str, str, int, Json, Json, list[str], str]
CASES: list[Case] = [
    ("alike", HGX, 2, {}, {}, [], ""),
    ("one-rack", RACK, 4, {}, {}, [], ""),
    (
        "mixed-models",
        HGX,
        2,
        {"gpus": {"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}},
        {},
        ["fleet.gpu_models", "fleet.replica_gpus"],
        "n0: NVIDIA H200; n1: NVIDIA H100 80GB HBM3",
    ),
    (
        "mixed-drivers",
        HGX,
        3,
        {"driver": {"loaded": "570.133.20"}, "engine": None},
        {},
        ["fleet.drivers"],
        "n0, n1: 580.178.04; n2: 570.133.20",
    ),
    (
        "mixed-kernels",
        HGX,
        2,
        {"kernel": {"running": OLD_KERNEL, "installed": [OLD_KERNEL], "headers": [OLD_KERNEL], "next": OLD_KERNEL}},
        {},
        ["fleet.kernels"],
        f"n0: 6.8.0-90-generic; n1: {OLD_KERNEL}",
    ),
    (
        "two-domains",
        RACK,
        4,
        {"fabric": {"cluster_uuid": "11111111-2222-4333-8444-555555555555"}},
        {},
        ["fleet.domain_split"],
        "n0, n1, n2: 5f3c0e9a-1b2d-4c3e-9f10-aabbccddeeff/32766; n3: 11111111-2222-4333-8444-555555555555/32766",
    ),
    (
        "two-lists-of-the-domain",
        RACK,
        4,
        {"fabric": {"imex": {"nodes": list(reversed(TRAYS))}}},
        {},
        ["fleet.imex_nodes"],
        "n0, n1, n2: 192.0.2.11, 192.0.2.12, 192.0.2.13, 192.0.2.14; n3: 192.0.2.14",
    ),
    (
        "one-node-is-too-small",
        HGX,
        1,
        {},
        {},
        ["fleet.memory_short"],
        "TB on n0 (8 GPUs at 0.9",
    ),
    (
        "two-revisions",
        HGX,
        2,
        {"weights": {"revision": "0" * 40}},
        {},
        ["fleet.weights"],
        f"n0: 4f1c2d3e4f5061728394a5b6c7d8e9f001122334; n1: {'0' * 40}",
    ),
    (
        "a-node-with-other-settings",
        HGX,
        2,
        {"engine": {"env": {"NCCL_IB_TC": "106"}}},
        {},
        ["fleet.replica_settings"],
        "n0: none; n1: NCCL_IB_TC=106",
    ),
    (
        "a-node-with-another-mtu",
        HGX,
        2,
        {"network": {"interfaces": {"eth0": {"mtu": 1500}}}},
        {},
        ["fleet.mtu"],
        "n0: 9000; n1: 1500",
    ),
    (
        "a-node-short-of-a-gpu",
        HGX,
        2,
        {"gpus": {"count": 7}},
        {},
        ["fleet.replica_gpus", "fleet.gpus_short"],
        "n0: 8 x NVIDIA H200; n1: 7 x NVIDIA H200",
    ),
    (
        "one-improvised-image-on-all",
        HGX,
        2,
        {},
        {"image": {"wheels": {"nvidia-nccl-cu12": "2.27.3"}}},
        ["fleet.images"],
        "an improvised stack on n0, n1",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case[0]) for case in CASES])
def test_a_fleet(tmp_path: Path, case: Case) -> None:
    _, base, size, over, whole, codes, says = case
    found = fleet(tmp_path, base, size, over, whole)
    assert [finding.code for finding in found] == codes, [finding.observed for finding in found]
    assert not found or says in found[0].observed
    assert all(finding.expected and finding.next_step and finding.source for finding in found)
