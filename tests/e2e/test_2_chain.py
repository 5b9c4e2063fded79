"""From bare to accepted, and again with nothing to do."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from labkit import AS_INVENTORIED, HOSTS, Shell, newest_record, play

pytestmark = pytest.mark.lab


def figures(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The figures of one step, which has to be in the record."""
    return dict(next(step for step in record["steps"] if step["name"] == name)["figures"])


def test_site_takes_bare_hosts_to_accept(tmp_path: Path, shell: Shell) -> None:
    outcome = play("site.yml", tmp_path, **AS_INVENTORIED)
    assert outcome.rc == 0, outcome.messages
    assert outcome.seen >= HOSTS
    # k3-b came to the lock, with a reboot, while k3-a failed in the file before.
    assert "reboot | Boot" in outcome.changed["k3-a"]
    assert "reboot | Boot" not in outcome.changed["k3-b"]
    for host in HOSTS:
        assert "580.178.04" in shell(host, "cat /proc/driver/nvidia/version")
    record = newest_record(tmp_path)
    assert record["verdict"]["name"] == "accept"
    assert record["simulated"] == ["GPUs"]
    assert {step["state"] for step in record["steps"]} <= {"PASS", "WARN"}
    assert record["observation"] == "complete"
    loss = figures(record, "multi-node")["peer_loss"]
    assert (loss["killed_host"], loss["named_host"]) == ("k3-b", "k3-b")
    assert "gloo" in loss["cause"]
    assert loss["noticed_s"] < 60
    assert loss["restored_s"] > 0
    assert figures(record, "short request")["abilities"]["tools"] == "valid"
    for name in ("report.html", "report.md", "junit.xml", "metrics.prom", "plan.json", "findings.json"):
        assert list((tmp_path / "runs").glob(f"*/{name}")), name


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    outcome = play("site.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert outcome.changed == {}
    assert outcome.seen >= HOSTS
    assert newest_record(tmp_path)["verdict"]["name"] == "accept"


def test_an_observation_completes_the_record_of_the_run(tmp_path: Path) -> None:
    assert play("playbooks/accept.yml", tmp_path).rc == 0
    accepted = newest_record(tmp_path)
    assert accepted["observation"] == "pending"
    outcome = play("playbooks/observe.yml", tmp_path, acceptance_observe_s=30)
    assert outcome.rc == 0, outcome.messages
    completed = json.loads((tmp_path / "runs" / accepted["run_id"] / "record.json").read_text(encoding="utf-8"))
    assert completed["observation"] == "complete"
    assert completed["verdict"]["name"] == "accept"
    assert [step["step"] for step in completed["steps"]] == [0, 1, 2, 3, 4, 5, 6]
    again = play("playbooks/observe.yml", tmp_path, acceptance_observe_s=30)
    assert "no accepted run waits for its observation" in again.messages


def test_rank_1_runs_on_the_second_host_from_the_locked_digest(shell: Shell, lock_text: str) -> None:
    container = json.loads(shell("k3-b", "docker container inspect kimi-engine"))[0]
    image = json.loads(shell("k3-b", f"docker image inspect {container['Image']}"))[0]
    digest = re.search(r"digest: (sha256:[0-9a-f]{64})", lock_text)
    assert digest is not None
    assert any(reference.endswith(digest[1]) for reference in image["RepoDigests"])
    assert "VLLM_HOST_IP=172.31.240.12" in container["Config"]["Env"]
    arguments = container["Args"]
    assert arguments[arguments.index("--node-rank") + 1] == "1"
    assert "--headless" in arguments


def test_bytes_move_between_the_hosts_during_a_request(shell: Shell) -> None:
    def received() -> int:
        return int(shell("k3-b", "cat /sys/class/net/eth0/statistics/rx_bytes"))

    body = json.dumps({"model": "moonshotai/Kimi-K3", "prompt": "move " * 100, "max_tokens": 16})
    request = urllib.request.Request(
        "http://172.31.240.11:8000/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    before = received()
    idle = received() - before
    before = received()
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0
    assert received() - before > 100_000 + 10 * idle


def test_another_block_size_changes_the_expected_hits_and_still_agrees(tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert play("playbooks/accept.yml", first).rc == 0
    try:
        outcome = play("site.yml", second, engine_block_size=64)
    finally:
        assert play("playbooks/serve.yml", tmp_path).rc == 0  # back to the inventory's block size
    assert outcome.rc == 0, outcome.messages
    shared = [figures(newest_record(path), "shared prefix") for path in (first, second)]
    expected = [one["expected_hit_tokens"] for one in shared]
    assert [one["hit_tokens"] for one in shared] == expected
    assert expected[0] != expected[1]
