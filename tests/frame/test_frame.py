"""The frame of a provision run: batches, order, failures, leases, approval, window, rollback; what a repeat costs."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.frame.site import NEW, OLD, PLAYED, Site

PAIR: dict[str, dict[str, Any]] = {"a": {"engine_nodes": ["a", "b"]}, "b": {"engine_nodes": ["a", "b"]}, "c": {}}
FEW = ["node_drain", "gpu_driver", "rdma", "interconnect"]


def site_of(folder: Path, hosts: dict[str, dict[str, Any]] = PAIR, **site: Any) -> Site:
    """Return a site where only a few roles are played and wanted, for speed."""
    made = Site(folder, hosts, host_transaction_roles=FEW, **site)
    for host in hosts:
        for role in set(PLAYED) - set(FEW):
            made.put(host, role, NEW)
    return made


def roles(journal: list[str]) -> list[str]:
    return [line.partition(" ")[0] for line in journal]


def test_every_role_in_order_and_nothing_on_a_repeat(tmp_path: Path) -> None:
    """The hosts of one batch differ in what they need, and the first needs the later steps only."""
    site = Site(tmp_path, PAIR)
    for role in ("gpu_driver", "container_runtime", "rdma"):
        site.put("a", role, NEW)
    first = site.provision()
    assert first.code == 0, first.output
    assert site.outcome()["batches"] == [["a", "b"], ["c"]]
    assert site.ends() == dict.fromkeys("abc", "done")
    in_order = [entry for role in PLAYED for entry in (role, f"{role}-handler")]
    assert roles(site.journal("b")) == ["drain", *in_order, "restore"]
    assert roles(site.journal("a")) == ["drain", *in_order[6:], "restore"]
    assert all(site.versions(host) == {NEW} for host in PAIR)
    state = site.state("b")
    assert state and (state["state"], state["lease"]) == ("done", None)
    assert set(state["durations"]) == {"drain", *PLAYED, "audit", "restore"}

    before = {host: site.journal(host) for host in PAIR}
    again = site.provision()
    assert again.code == 0, again.output
    assert {host: site.journal(host) for host in PAIR} == before
    assert not re.search(r"changed=[1-9]", again.output)
    cost = re.search(r"cost: (\d+) tasks, run (\d+) times", again.output)
    assert cost
    played = [name for name in site.tasks() if name.partition(" ")[0] not in ("host_snapshot",)]
    before_it = re.search(r"cost: (.*)", first.output)
    print(f"\nthe change cost {before_it and before_it[1]}")
    print(f"a repeat on {len(PAIR)} hosts costs {cost[1]} tasks, run {cost[2]} times:", *site.tasks(), sep="\n  ")
    assert played == []


def test_a_gentle_change_does_not_drain(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}})
    for role in ("gpu_driver", "rdma"):
        site.put("a", role, NEW)
    done = site.provision()
    assert done.code == 0, done.output
    assert roles(site.journal("a")) == ["interconnect", "interconnect-handler"]


def test_a_failed_host_stays_drained_its_batch_ends_and_the_roll_stops(tmp_path: Path) -> None:
    site = site_of(tmp_path)
    stopped = site.provision(frame_fail={"a": "rdma"})
    assert stopped.code != 0
    assert site.ends() == {"a": "failed", "b": "done", "c": "not_begun"}
    assert "drained at step rdma: failed" in stopped.output
    assert "rdma cannot: the test says so" in site.outcome()["hosts"]["a"]["reason"]
    assert site.drained("a") and not site.drained("b")
    state = site.state("a")
    assert state and (state["state"], state["step"], state["lease"]) == ("failed", "rdma", None)
    assert "rdma cannot" in state["reason"]
    assert site.journal("c") == []

    resumed = site.provision()
    assert resumed.code == 0, resumed.output
    assert not site.drained("a")
    assert site.ends() == {"a": "done", "c": "done"}
    # What had been done was not done again; the host was drained once more, since a disruptive step was due.
    assert roles(site.journal("a")) == [
        *("drain", "gpu_driver", "gpu_driver-handler"),
        *("drain", "rdma", "rdma-handler", "interconnect", "interconnect-handler", "restore"),
    ]


def test_a_host_lost_in_the_middle_stops_the_roll(tmp_path: Path) -> None:
    site = site_of(tmp_path)
    stopped = site.provision(frame_lose={"a": "rdma"})
    assert stopped.code != 0
    assert site.ends() == {"a": "unreachable", "b": "done", "c": "not_begun"}
    assert "batch 2 (c): a of an earlier batch did not end well" in stopped.output
    assert site.journal("c") == []
    assert f"-e take_over={site.last_run()}" in stopped.output
    resumed = site.provision(take_over=site.last_run())
    assert resumed.code == 0, resumed.output
    assert site.ends() == {"a": "done", "c": "done"}


def test_two_runs_refuse_each_other_and_one_takes_over(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}, "b": {}})
    killed = site.provision(kill_after=30)
    assert killed.code == -9
    run = site.last_run()
    held = site.state("a")
    assert held and held["lease"]["run"] == run
    refused = site.provision()
    assert refused.code != 0
    for part in (f"for run {run}", "expires in", "at step", f"-e take_over={run}"):
        assert part in refused.output
    assert site.state("a") == held, "nothing was changed"
    resumed = site.provision(take_over=run)
    assert resumed.code == 0, resumed.output
    assert not site.drained("a")


def test_an_expired_lease_is_taken_and_named(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}}, host_transaction_lease_s=1)
    assert site.provision(kill_after=30).code == -9
    run = site.last_run()
    resumed = site.provision()
    assert resumed.code == 0, resumed.output
    assert re.search(rf"a: leased by .* for run {run}, renewed .* ago, expired .* ago, at step", resumed.output)


def test_an_approved_plan_and_another(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}})
    checked = site.provision("--check", "--diff")
    assert checked.code == 0, checked.output
    assert site.versions("a") == {OLD, NEW} and site.state("a") is None
    assert f"+{NEW}" in checked.output, "the difference is shown"
    approved = tmp_path / "runs" / site.last_run() / "plan.json"
    site.put("a", "rdma", NEW)
    refused = site.provision(approved_plan=str(approved))
    assert refused.code != 0
    assert "- a: configure rdma: " in refused.output
    assert site.state("a") is None
    site.put("a", "rdma", OLD)
    granted = site.provision(approved_plan=str(approved))
    assert granted.code == 0, granted.output


def test_a_batch_that_does_not_fit_the_window_is_not_begun(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}, "b": {}})
    closed = site.provision(window_start=(datetime.now().astimezone() + timedelta(hours=1)).isoformat())
    assert closed.code != 0
    assert "this batch was not begun" in closed.output
    assert site.state("a") is None
    # What both hosts took before: a is quick, b is known to take ten minutes.
    history = {"drain": [1], "gpu_driver": [1], "rdma": [1], "interconnect": [1], "audit": [1], "restore": [1]}
    for host, driver_s in (("a", 1), ("b", 600)):
        taken = history | {"gpu_driver": [driver_s]}
        done = {"schema_version": 1, "state": "done", "run": "r0", "owner": "o", "lock_digest": "", "plan_digest": ""}
        done |= {"step": "commit", "begun": [], "interrupted": [], "playing": False, "began": {}, "step_began": {}}
        done |= {"reason": "", "lease": None, "durations": taken, "history": []}
        (site.home(host) / "state/transaction.json").write_text(json.dumps(done), encoding="utf-8")
    short = site.provision(window_end=(datetime.now().astimezone() + timedelta(minutes=9)).isoformat())
    assert short.code != 0
    assert site.ends() == {"a": "done", "b": "not_begun"}
    assert re.search(
        r"batch 2 \(b\): .* left until window_end .*expected 10 min \(slowest b; all measured\)", short.output
    )
    assert site.journal("b") == []


def test_capacity_is_asked_of_the_inventory(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}, "b": {}})
    refused = site.provision(provision_min_up=1)
    assert refused.code != 0
    assert "provision_min_up: 0 of 2 replicas serve" in refused.output
    assert site.state("a") is None


def test_a_canary_whose_audit_fails_goes_back_to_the_previous_lock(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}, "b": {}})
    for host in site.hosts:  # only a few roles are wanted, so that all files can go back
        for role in PLAYED:
            site.put(host, role, OLD)
    stopped = site.provision(
        provision_rollback="canary", frame_break=f"rdma {NEW}", host_transaction_roles=["node_drain", *PLAYED]
    )
    assert stopped.code != 0
    assert site.ends() == {"a": "rolled_back", "b": "not_begun"}, stopped.output[-3000:]
    assert site.versions("a") == {OLD}
    assert not site.drained("a")
    state = site.state("a")
    assert state and [row["end"] for row in state["history"]] == ["failed", "rolled_back"]
    assert "rolled back to the previous lock" in stopped.output
    assert "/etc/frame/rdma" in site.outcome()["hosts"]["a"]["reason"], "why it was rolled back"
    assert site.journal("b") == []


def test_without_the_wish_a_failed_canary_stays_as_it_is(tmp_path: Path) -> None:
    site = site_of(tmp_path, {"a": {}})
    stopped = site.provision(frame_break=f"rdma {NEW}")
    assert stopped.code != 0
    assert site.ends() == {"a": "failed"}
    assert site.drained("a")
    assert "/etc/frame/rdma" in site.outcome()["hosts"]["a"]["reason"]
