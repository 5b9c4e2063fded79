"""Which steps are due, which hosts change together, and what was approved: values in, values out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judging import a_lock

from kimi_runbook.errors import RunbookError
from kimi_runbook.findings import make_finding
from kimi_runbook.plan import Plan, build_plan
from kimi_runbook.transaction import steps
from kimi_runbook.transaction.approval import load_approved, refuse_other
from kimi_runbook.transaction.batching import batches, units

ALL = steps.ROLES
STANDS_ON_IT = ("container_runtime", "rdma", "fabric_services")


@pytest.mark.parametrize(
    ("planned", "interrupted", "begun", "wanted"),
    [
        pytest.param(["gpu_driver"], "", (), ["drain", "gpu_driver", *STANDS_ON_IT, "audit", "restore"], id="driver"),
        pytest.param(["interconnect"], "", (), ["interconnect", "audit"], id="gentle-needs-no-drain"),
        pytest.param(["engine_image", "model_weights"], "", (), ["engine_image", "model_weights", "audit"], id="fetch"),
        pytest.param(
            ["fabric_services", "rdma"], "", (), ["drain", "rdma", "fabric_services", "audit", "restore"], id="order"
        ),
        pytest.param(["engine"], "", (), ["audit"], id="left-to-serve"),
        pytest.param(
            [],
            "gpu_driver",
            ("drain", "gpu_driver"),
            ["drain", "gpu_driver", *STANDS_ON_IT, "audit", "restore"],
            id="killed-in-driver",
        ),
        pytest.param(
            [],
            "rdma drain",
            ("drain", "rdma"),
            ["drain", "rdma", "audit", "restore"],
            id="killed-twice",
        ),
        pytest.param([], "drain", ("drain",), ["drain", "audit", "restore"], id="killed-while-draining"),
        pytest.param([], "restore", ("drain", "rdma", "restore"), ["audit", "restore"], id="killed-while-restoring"),
        pytest.param([], "audit", ("interconnect", "audit"), ["audit"], id="killed-without-drain"),
        pytest.param(
            ["interconnect"],
            "interconnect",
            ("drain", "rdma", "interconnect"),
            ["interconnect", "audit", "restore"],
            id="still-drained",
        ),
    ],
)
def test_due(planned: list[str], interrupted: str, begun: tuple[str, ...], wanted: list[str]) -> None:
    assert list(steps.due(planned, ALL, interrupted.split(), begun)) == wanted


def test_due_plays_only_what_the_frame_plays() -> None:
    assert steps.due(["gpu_driver", "rdma"], ["rdma"]) == ("rdma", "audit")
    with pytest.raises(RunbookError, match="gpu_drivers"):
        steps.due([], ["gpu_drivers"])


def test_every_step_has_an_entry() -> None:
    assert list(steps.entries()) == list(steps.NAMES)
    assert steps.entries()["restore"] == {"role": "node_drain", "entry": "restore"}


HOSTS = ["a1", "a2", "b1", "b2", "c1", "c2"]
PAIRS = [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]


@pytest.mark.parametrize(
    ("hosts", "replicas", "domains", "wanted"),
    [
        pytest.param(["x", "y"], [], {}, ["x", "y"], id="alone"),
        pytest.param(HOSTS, PAIRS, {}, ["a1 a2", "b1 b2", "c1 c2"], id="replicas"),
        pytest.param(["a1", "b1", "a2"], PAIRS, {}, ["a1 a2", "b1"], id="parted-in-the-inventory"),
        pytest.param(HOSTS, PAIRS, {"a2": "r1", "b1": "r1"}, ["a1 a2 b1 b2", "c1 c2"], id="a-rack-joins-replicas"),
        pytest.param(["x", "y", "z"], [], {"x": "r1", "z": "r1", "y": ""}, ["x z", "y"], id="a-rack"),
        pytest.param(["a1"], [["a1", "a2"]], {}, ["a1"], id="the-other-node-is-right-already"),
    ],
)
def test_units(hosts: list[str], replicas: list[list[str]], domains: dict[str, str], wanted: list[str]) -> None:
    assert [" ".join(unit) for unit in units(hosts, replicas, domains)] == wanted


@pytest.mark.parametrize(
    ("sizes", "replicas", "domains", "min_up", "wanted"),
    [
        pytest.param([1, "100%"], [], {}, 0, ["a1", "a2 b1 b2 c1 c2"], id="canary-then-all"),
        pytest.param([1, "100%"], PAIRS, {}, 0, ["a1 a2", "b1 b2 c1 c2"], id="canary-is-a-replica"),
        pytest.param([1, "100%"], PAIRS, {}, 1, ["a1 a2", "b1 b2 c1 c2"], id="one-may-stay"),
        pytest.param([1, "100%"], PAIRS, {}, 2, ["a1 a2", "b1 b2", "c1 c2"], id="smaller-for-capacity"),
        pytest.param([1, "25%"], [], {}, 0, ["a1", "a2", "b1", "b2", "c1", "c2"], id="a-quarter-of-six"),
        pytest.param([1, 2], [], {"a1": "r", "c2": "r"}, 0, ["a1 c2", "a2 b1", "b2 c1"], id="rack-canary"),
    ],
)
def test_batches(
    sizes: list[Any], replicas: list[list[str]], domains: dict[str, str], min_up: int, wanted: list[str]
) -> None:
    cut = batches(HOSTS, sizes, replicas=replicas, domains=domains, serving=replicas, min_up=min_up)
    assert [" ".join(batch) for batch in cut] == wanted


def test_a_replica_that_is_down_already_costs_no_capacity() -> None:
    cut = batches(HOSTS, [3], replicas=PAIRS, domains={}, serving=[["c1", "c2"], ["b1", "b2"]], min_up=1)
    assert [" ".join(batch) for batch in cut] == ["a1 a2 b1 b2", "c1 c2"]


@pytest.mark.parametrize(
    ("domains", "serving", "min_up"),
    [
        pytest.param({}, PAIRS, 3, id="none-may-go"),
        pytest.param({}, [], 1, id="none-is-up"),
        pytest.param({"a1": "r", "b1": "r"}, PAIRS, 2, id="a-rack-takes-two"),
    ],
)
def test_capacity_is_never_taken_below(domains: dict[str, str], serving: list[list[str]], min_up: int) -> None:
    with pytest.raises(RunbookError, match=r"provision_min_up.*a1, a2.*Nothing was changed"):
        batches(HOSTS, [1], replicas=PAIRS, domains=domains, serving=serving, min_up=min_up)


@pytest.mark.parametrize("sizes", [[], [0], ["0%"], ["101%"], ["few"], [True]])
def test_batches_refuses(sizes: list[Any]) -> None:
    with pytest.raises(RunbookError, match="batch sizes"):
        batches(["a"], sizes, replicas=[], domains={})


def a_plan(observed: str, run_id: str) -> Plan:
    finding = make_finding("package.version", host="b", observed=observed, expected="2", role="gpu_driver")
    return build_plan(run_id, [finding], a_lock(), (("a", "b"),))


def test_approval(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(a_plan("1", "r1").to_json()), encoding="utf-8")
    approved = load_approved(path)
    refuse_other(approved, a_plan("1", "r2"), str(path))
    with pytest.raises(RunbookError) as told:
        refuse_other(approved, a_plan("0", "r2"), str(path))
    lines = str(told.value).splitlines()
    assert [line[:4] for line in lines if line[:2] in ("- ", "+ ")] == ["- b:", "+ b:"]
    assert "Nothing was changed" in str(told.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema_version": 1}', "{"])
def test_an_approval_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunbookError, match=str(path)):
        load_approved(path)
