"""The roles' variables as Ansible templates them, for fake hosts of every kind of fabric, in one play."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.build import build
from tests.hosts.described import load_host
from tests.hosts.snapshots import snapshot
from tests.hosts.wanted import lock_data, questions_of

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HOSTS = ("hgx-h200-ib", "hgx-b200-roce", "gb300-tray", "pcie-ethernet")
RAILS = {"interconnect_hcas": ["mlx5_0:1"], "interconnect_profile": "rdma-ib"}
SPLIT = [
    {"rung": rung, "passed": False, "observed": "errno 524", "source": "nccl.log"}
    for rung in ("software", "topology_override", "no_data_direct")
]
VARIABLES: Mapping[str, dict[str, Any]] = {
    "hgx-h200-ib": {**RAILS, "rdma_peermem": "possible", "interconnect_dmabuf_tests": SPLIT},
    "hgx-b200-roce": {**RAILS, "rdma_modules": ["mlx5_ib", "mlx5_core"]},
    "gb300-tray": {"nvlink_domain": "rack1", "container_runtime_cdi": "required"},
    "pcie-ethernet": {"container_runtime_cdi": "off"},
}
PLANS = {
    "hgx-h200-ib": [{"role": "gpu_driver", "action": "install", "what": "x"}],
    "hgx-b200-roce": [{"role": "fabric_services", "action": "install", "what": "x"}],
}
PARTS = ("fabric_services", "rdma", "container_runtime", "interconnect")
PLAY = [
    {
        "hosts": "gpu_nodes",
        "connection": "local",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.import_role": {"name": "host_snapshot", "tasks_from": "expect"}},
            {
                "ansible.builtin.set_fact": {
                    "kimi_lock": "{{ lookup('file', folder ~ '/' ~ inventory_hostname ~ '.lock.json') | from_json }}",
                    "__host_snapshot_taken": {
                        "snapshot": "{{ lookup('file', folder ~ '/' ~ inventory_hostname ~ '.json') | from_json }}"
                    },
                    "kimi_plan": {"hosts": PLANS},
                }
            },
            {
                "ansible.builtin.copy": {
                    "content": "{{ answer | to_json }}",
                    "dest": "{{ folder }}/{{ inventory_hostname }}.answer.json",
                    "mode": "0644",
                },
                "vars": {
                    "answer": {
                        **{part: f"{{{{ __{part}_expected }}}}" for part in PARTS},
                        "wish": "{{ __fabric_services_wish }}",
                        "last_rung": "{{ __interconnect_last_rung }}",
                        "due": {part: f"{{{{ __{part}_due }}}}" for part in PARTS[:3]},
                        "asked": "{{ __rdma_asked_paths + __fabric_services_all_files + __interconnect_paths"
                        " + __container_runtime_files | map(attribute='path') | list"
                        " + __container_runtime_unit_files | map(attribute='path') | list }}",
                        "packages": "{{ __fabric_services_all_packages }}",
                        "modules": "{{ __rdma_asked_modules }}",
                        "units": "{{ __fabric_services_all_units }}",
                    }
                },
            },
        ],
    }
]

pytestmark = pytest.mark.skipif(not (BIN / "ansible-playbook").exists(), reason="ansible-core is not installed here")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """What the roles want of each host."""
    folder = tmp_path_factory.mktemp("wishes")
    (folder / "key.asc").write_text("key\n", encoding="utf-8")
    hosts = {}
    for number, name in enumerate(HOSTS):
        host = load_host(name)
        taken = snapshot(build(host, tmp_path_factory.mktemp(name)), questions_of(host))
        if name == "hgx-h200-ib":
            taken["rdma"]["ofed"] = "OFED-internal-25.10-1"
        (folder / f"{name}.json").write_text(json.dumps(taken), encoding="utf-8")
        lock = lock_data(host)
        (folder / f"{name}.lock.json").write_text(json.dumps(lock), encoding="utf-8")
        hosts[name] = {"engine_address": f"192.0.2.{11 + number}", **VARIABLES[name]}
    hosts["gb300-other-tray"] = {"engine_address": "192.0.2.31", "nvlink_domain": "rack1"}
    source = {"name": "x", "uris": ["http://mirror.example"], "suites": ["/"], "components": []}
    site = {
        "gpu_nodes": {
            "hosts": hosts,
            "vars": {
                "folder": str(folder),
                "gpu_driver_repository": {**source, "key_file": str(folder / "key.asc")},
                "container_runtime_repository": {**source, "key_file": str(folder / "key.asc")},
            },
        },
        "engine": {"hosts": dict.fromkeys(hosts)},
    }
    for name, value in (("inventory.yml", site), ("play.yml", PLAY)):
        (folder / name).write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    command = [
        "ansible-playbook",
        "-i",
        str(folder / "inventory.yml"),
        "--limit",
        ",".join(HOSTS),
        str(folder / "play.yml"),
    ]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / f"{name}.answer.json").read_text(encoding="utf-8")) for name in HOSTS}


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


@pytest.mark.parametrize(
    ("host", "kind", "packages", "units"),
    [
        ("hgx-h200-ib", "nvswitch", ["nvidia-fabricmanager"], ["nvidia-fabricmanager.service"]),
        (
            "hgx-b200-roce",
            "nvlink5",
            ["nvidia-fabricmanager", "nvlsm", "infiniband-diags"],
            ["nvidia-fabricmanager.service"],
        ),
        ("gb300-tray", "rack", ["nvidia-imex"], ["nvidia-imex.service"]),
        ("pcie-ethernet", "none", [], []),
    ],
)
def test_fabric_services(
    answers: Mapping[str, dict[str, Any]], host: str, kind: str, packages: list[str], units: list[str]
) -> None:
    answer = answers[host]
    wanted = answer["fabric_services"]
    assert (answer["wish"]["kind"], names(wanted["packages"]), names(wanted["units"])) == (kind, packages, units)


def test_the_node_list_is_of_the_domain_in_the_inventory_s_order(answers: Mapping[str, dict[str, Any]]) -> None:
    (listed, config) = answers["gb300-tray"]["fabric_services"]["files"]
    assert listed["content"] == "192.0.2.13\n192.0.2.31\n"
    assert "IMEX_NODE_CONFIG_FILE=/etc/nvidia-imex/nodes_config.cfg\n" in config["content"]


def test_modules(answers: Mapping[str, dict[str, Any]]) -> None:
    assert answers["hgx-h200-ib"]["rdma"]["modules"][-1] == "nvidia_peermem"
    assert answers["hgx-b200-roce"]["rdma"]["modules"] == ["mlx5_core", "mlx5_ib", "ib_umad"], "C28"
    assert "nvidia_peermem" not in answers["pcie-ethernet"]["rdma"]["modules"]


def test_the_last_rung_comes_with_evidence_and_peer_memory(answers: Mapping[str, dict[str, Any]]) -> None:
    host = answers["hgx-h200-ib"]
    assert host["last_rung"] is True and host["interconnect"]["dmabuf"]["rung"] == "peermem"
    assert "NCCL_DMABUF_ENABLE=0\n" in host["interconnect"]["files"][0]["content"]
    assert answers["hgx-b200-roce"]["interconnect"]["dmabuf"]["rung"] == "software"
    assert answers["pcie-ethernet"]["interconnect"]["dmabuf"] == {}


def test_cdi(answers: Mapping[str, dict[str, Any]]) -> None:
    assert answers["gb300-tray"]["container_runtime"]["daemon"] == {"features": {"cdi": True}}
    assert answers["hgx-h200-ib"]["container_runtime"]["daemon"] == {}
    paths = {host: [file["path"] for file in answers[host]["container_runtime"]["files"]] for host in HOSTS}
    dropin = "/etc/systemd/system/nvidia-cdi-refresh.service.d/10-kimi.conf"
    assert dropin in paths["hgx-h200-ib"] and dropin not in paths["pcie-ethernet"]


def test_c41_the_toolkit_is_one_version_and_held_with_docker(answers: Mapping[str, dict[str, Any]]) -> None:
    rows = {row["name"]: row for row in answers["hgx-h200-ib"]["container_runtime"]["packages"]}
    toolkit = [row["version"] for name, row in rows.items() if "container" in name]
    assert toolkit == ["1.20.0-1"] * 4
    assert all(row["held"] for row in rows.values()) and "docker-ce" in rows


def test_a_role_is_due_by_its_own_actions_and_by_a_new_driver(answers: Mapping[str, dict[str, Any]]) -> None:
    assert answers["hgx-h200-ib"]["due"] == dict.fromkeys(PARTS[:3], True)
    assert answers["hgx-b200-roce"]["due"] == {"fabric_services": True, "rdma": False, "container_runtime": False}
    assert answers["pcie-ethernet"]["due"] == dict.fromkeys(PARTS[:3], False)


def test_a_snapshot_is_asked_for_all_that_is_wanted(answers: Mapping[str, dict[str, Any]]) -> None:
    """What is wanted and was not asked for stops the run (snapshot.incomplete)."""
    for host in HOSTS:
        answer = answers[host]
        wanted = [file["path"] for part in PARTS for file in answer[part].get("files", [])]
        assert set(wanted) <= set(answer["asked"])
        assert set(names(answer["fabric_services"]["packages"])) <= set(answer["packages"])
        assert set(names(answer["fabric_services"]["units"])) <= set(answer["units"])
        assert set(answer["rdma"]["modules"]) <= set(answer["modules"])
