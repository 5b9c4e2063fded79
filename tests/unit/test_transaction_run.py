"""Windows, leases and outcomes: when a batch may begin, whose host it is, and what is said of it in the end."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from kimi_runbook.errors import RunbookError
from kimi_runbook.host_facts import LeaseFacts, TransactionFacts
from kimi_runbook.transaction.outcome import STATES, Outcome, next_step, render, unsettled_before, words
from kimi_runbook.transaction.state import describe, foreign, is_unfinished, refuse_foreign, span
from kimi_runbook.transaction.steps import NAMES
from kimi_runbook.transaction.window import Estimate, Window, estimate, parse_window, refuse_outside

CET = timezone(timedelta(hours=1), "CET")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=CET)


@pytest.mark.parametrize(
    ("start", "end", "now", "wanted"),
    [
        ("", "", "2026-11-30T12:00", (None, None)),
        ("10:00", "14:00", "2026-11-30T12:00", ("2026-11-30T10:00", "2026-11-30T14:00")),
        ("22:00", "04:00", "2026-11-30T23:00", ("2026-11-30T22:00", "2026-12-01T04:00")),
        ("22:00", "04:00", "2026-11-30T01:00", ("2026-11-29T22:00", "2026-11-30T04:00")),
        ("22:00", "04:00", "2026-11-30T12:00", ("2026-11-30T22:00", "2026-12-01T04:00")),
        ("", "4:00", "2026-11-30T01:00", (None, "2026-11-30T04:00")),
        ("2026-11-30T10:00", "", "2026-11-30T01:00", ("2026-11-30T10:00", None)),
    ],
)
def test_parse_window(start: str, end: str, now: str, wanted: tuple[str | None, str | None]) -> None:
    window = parse_window(start, end, at(now))
    assert (window.start, window.end) == tuple(text and at(text) for text in wanted)


def test_a_window_with_a_zone_keeps_it() -> None:
    window = parse_window("2026-11-30T10:00+00:00", "2026-11-30T12:00Z", at("2026-11-30T11:30"))
    assert window.start == datetime(2026, 11, 30, 10, tzinfo=UTC)
    assert window.left_s(at("2026-11-30T11:30")) == 90 * 60


@pytest.mark.parametrize(
    ("start", "end"), [("25:00", ""), ("soon", ""), ("", "1320"), ("2026-11-30T10:00", "2026-11-30T09:00")]
)
def test_parse_window_refuses(start: str, end: str) -> None:
    with pytest.raises(RunbookError, match="window_"):
        parse_window(start, end, at("2026-11-30T12:00"))


@pytest.mark.parametrize(
    ("measured", "seconds", "guessed"),
    [
        pytest.param({"a": {"drain": (10,), "rdma": (5, 7)}}, 17, (), id="here"),
        pytest.param({"b": {"drain": (10,), "rdma": (5,)}, "c": {"rdma": (9,)}}, 19, (), id="elsewhere-the-longest"),
        pytest.param({"a": {"drain": (900, 1, 2, 3, 4, 5), "rdma": (5,)}}, 10, (), id="the-last-five"),
        pytest.param({"a": {"drain": (10,)}}, 70, ("rdma",), id="a-guess"),
        pytest.param({}, 660, ("drain", "rdma"), id="all-guesses"),
    ],
)
def test_estimate(measured: dict[str, Any], seconds: int, guessed: tuple[str, ...]) -> None:
    found = estimate({"a": ("drain", "rdma")}, measured)
    assert (found.seconds, found.guessed) == (seconds, guessed)
    assert ("guessed" in str(found)) is bool(guessed)


def test_a_batch_takes_as_long_as_its_slowest_host() -> None:
    found = estimate({"a": ("rdma",), "b": ("rdma", "audit")}, {"a": {"rdma": (5,), "audit": (1,)}})
    assert (found.host, found.seconds) == ("b", 6)


def test_every_step_has_a_guess() -> None:
    for name in NAMES:
        assert estimate({"a": (name,)}, {}).seconds > 0


@pytest.mark.parametrize(
    ("now", "seconds", "message"),
    [
        ("2026-11-30T09:59", 60, "window_start"),
        ("2026-11-30T11:30", 1801, "30 min left until window_end 12:00.*30 min .slowest a.*not begun"),
        ("2026-11-30T12:01", 1, "the window is over"),
    ],
)
def test_outside_the_window(now: str, seconds: int, message: str) -> None:
    window = parse_window("10:00", "12:00", at(now))
    with pytest.raises(RunbookError, match=message):
        refuse_outside(window, at(now), Estimate(seconds=seconds, host="a"), where="batch 2 (a)")


def test_inside_the_window() -> None:
    refuse_outside(
        parse_window("10:00", "12:00", at("2026-11-30T11:30")),
        at("2026-11-30T11:30"),
        Estimate(seconds=1800, host="a"),
        where="x",
    )
    refuse_outside(Window(), at("2026-11-30T11:30"), Estimate(seconds=10**6, host="a"), where="x")


def facts(run: str = "old", expires_in_s: int = 60, state: str = "open") -> TransactionFacts:
    lease = LeaseFacts(run=run, owner="ops@desk", age_s=7200, expires_in_s=expires_in_s)
    return TransactionFacts(state=state, run=run, step="gpu_driver", lease=lease)


@pytest.mark.parametrize(
    ("run", "take_over", "wanted"),
    [("new", "", ["a"]), ("old", "", []), ("new", "old", []), ("new", "other", ["a"])],
)
def test_foreign(run: str, take_over: str, wanted: list[str]) -> None:
    standing = {"a": facts(), "b": None, "c": TransactionFacts(state="done", run="old")}
    assert [one.host for one in foreign(standing, run, take_over)] == wanted


def test_a_live_lease_is_refused_with_all_that_is_known() -> None:
    with pytest.raises(RunbookError) as told:
        refuse_foreign(foreign({"a": facts()}, "new"))
    for part in (
        "a: leased by ops@desk for run old",
        "2 h ago",
        "expires in 60 s",
        "at step gpu_driver",
        "take_over=old",
    ):
        assert part in str(told.value)


def test_an_expired_lease_is_named_and_not_refused() -> None:
    held = foreign({"a": facts(expires_in_s=-600)}, "new")
    refuse_foreign(held)
    assert "expired 10 min ago" in describe(held[0])


@pytest.mark.parametrize(("state", "wanted"), [("open", True), ("failed", True), ("unreadable", True), ("done", False)])
def test_unfinished(state: str, wanted: bool) -> None:
    assert is_unfinished(facts(state=state)) is wanted
    assert not is_unfinished(None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (7200, "2 h"), (11100, "3 h 5 min")],
)
def test_span(seconds: int, text: str) -> None:
    assert span(seconds) == text


def an_outcome(**states: str) -> Outcome:
    outcome = Outcome.of("r1", "p", "l", [["a", "b"], ["c"]])
    for host, state in states.items():
        outcome = outcome.with_host(host, state=state, step="rdma", drained=state != "done", seconds=5)
    return outcome


@pytest.mark.parametrize(
    ("states", "batch", "wanted"),
    [
        ({"a": "done", "b": "done"}, ["c"], ()),
        ({"a": "done"}, ["c"], ("b",)),
        ({"a": "unreachable", "b": "failed"}, ["c"], ("a", "b")),
        ({}, ["a", "b"], ()),
    ],
)
def test_unsettled_before(states: dict[str, str], batch: list[str], wanted: tuple[str, ...]) -> None:
    assert unsettled_before(an_outcome(**states), batch) == wanted


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ({"a": "done", "b": "done", "c": "done"}, "ansible-playbook playbooks/serve.yml"),
        ({"a": "failed", "b": "done"}, "ansible-playbook playbooks/provision.yml"),
        ({"a": "open"}, "ansible-playbook playbooks/provision.yml -e take_over=r1"),
        ({"a": "unreachable", "b": "failed"}, "ansible-playbook playbooks/provision.yml -e take_over=r1"),
        ({"a": "rolled_back", "b": "rolled_back"}, "Read why the canary failed"),
    ],
)
def test_next_step(states: dict[str, str], wanted: str) -> None:
    told = next_step(an_outcome(**states))
    assert told == wanted if wanted.startswith("ansible") else told.startswith(wanted)


def test_round_trip_and_table() -> None:
    outcome = an_outcome(a="done", b="failed").with_host("b", reason="apt: 404\nnot found")
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert render(outcome).splitlines() == [
        "HOST  BATCH  TIME      END",
        "a     1      5 s       done",
        "b     1      5 s       drained at step rdma: failed",
        "      apt: 404",
        "      not found",
        "c     2      -         not begun",
        "next: ansible-playbook playbooks/provision.yml",
    ]


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_words(state: str) -> None:
    assert words(an_outcome(a=state).hosts["a"])
