"""Plans: from findings, in batches, compared; and the table people read first."""

from __future__ import annotations

from typing import Any

import pytest
from judging import a_lock

from kimi_runbook.errors import RunbookError
from kimi_runbook.findings import Finding, make_finding
from kimi_runbook.plan import Plan, build_plan, diff, make_batches


def change(host: str, code: str, role: str, observed: str = "x") -> Finding:
    return make_finding(code, host=host, observed=observed, expected="y", role=role)


FINDINGS = [
    change("b", "engine.absent", "engine"),
    change("b", "driver.reboot", "gpu_driver"),
    change("b", "package.version", "gpu_driver"),
    change("c", "file.content", "interconnect"),
    make_finding("engine.restarted", host="a", observed="1", expected="0"),
]
BATCHES = (("a",), ("b", "c"))


def a_plan(findings: list[Finding] = FINDINGS, run_id: str = "r1") -> Plan:
    return build_plan(run_id, findings, a_lock(), BATCHES)


@pytest.mark.parametrize(
    ("count", "sizes", "wanted"),
    [
        (2, [1, "25%"], [1, 1]),
        (10, [1, "25%"], [1, 2, 2, 2, 2, 1]),
        (10, ["100%"], [10]),
        (5, [2], [2, 2, 1]),
        (5, ["1", 3], [1, 3, 1]),
        (3, ["1%"], [1, 1, 1]),
        (0, [1], []),
    ],
)
def test_make_batches(count: int, sizes: list[int | str], wanted: list[int]) -> None:
    hosts = [f"h{n}" for n in range(count)]
    batches = make_batches(hosts, sizes)
    assert [len(batch) for batch in batches] == wanted
    assert [host for batch in batches for host in batch] == hosts


@pytest.mark.parametrize("sizes", [[], [0], [-1], ["0%"], ["101%"], ["a few"], [1.5], [True]])
def test_make_batches_refuses(sizes: list[Any]) -> None:
    with pytest.raises(RunbookError, match="batch sizes"):
        make_batches(["a"], sizes)


def test_actions_come_in_the_order_in_which_they_are_done() -> None:
    plan = a_plan()
    assert [(item.action, item.role) for item in plan.hosts["b"]] == [
        ("install", "gpu_driver"),
        ("reboot", "gpu_driver"),
        ("restart", "engine"),
    ]
    assert plan.hosts["a"] == ()


def test_round_trip_and_digest() -> None:
    plan = a_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert a_plan(run_id="r2").digest() == plan.digest()
    assert a_plan(FINDINGS[1:]).digest() != plan.digest()


def test_diff() -> None:
    assert diff(a_plan(), a_plan(run_id="r2")) == ()
    later = build_plan(
        "r2", [*FINDINGS[1:], change("a", "image.absent", "engine_image")], a_lock(tag="v2"), (("a", "b"), ("c",))
    )
    lines = diff(a_plan(), later)
    assert [line.split(":")[0] for line in lines] == [
        "- lock sha256",
        "+ lock sha256",
        "+ a",
        "- b",
        "- batches a | b, c",
        "+ batches a, b | c",
    ]


@pytest.mark.parametrize(
    ("batches", "message"), [([["a"]], "b: in no batch"), ([["a", "b", "c"], ["a"]], "a: in more than one batch")]
)
def test_hosts_and_batches_must_fit(batches: list[list[str]], message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        build_plan("r", FINDINGS, a_lock(), batches)
