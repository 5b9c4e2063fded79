"""Step 3 against an engine that is healthy or fails in one way: the check that owns the fault goes red first."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance import step3_shared_prefix
from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.result import State
from tests.faults.engine.cache_model import CacheModel, Flaw
from tests.faults.engine.fake_engine import Fault
from tests.faults.engine.site import argv, context
from tests.unit.prefix_runs import Engine, red, result_of, series

LAUNCH = {"k3-a": {"argv": argv(0), "env": {}, "image": "x"}}


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_a_healthy_engine_passes(openmetrics: bool, tmp_path: Path) -> None:
    result = result_of(tmp_path, openmetrics=openmetrics)
    assert result.state is State.PASS, result.unmet()
    assert series(result) == {
        "too-short": [0, 0],
        "zero-prefix": [0, 0],
        "short-suffix": [0, 128, 128],
        "resend": [128, 128],
        "long-suffix": [0, 128, 128],
        "changed-system": [64],
    }
    assert result.figures["hit_tokens"] == result.figures["expected_hit_tokens"] == 832
    assert result.figures["rule"] == "whole-blocks"


@pytest.mark.parametrize(
    ("cache", "hits", "plan"),
    [
        pytest.param(CacheModel(block_size=128), [0, 256, 256, 256, 256, 0, 128, 128, 128], {}, id="attention-only"),
        pytest.param(
            CacheModel(block_size=128, recurrent=True), [0, 256, 256, 256, 256, 0, 0, 128, 0], {}, id="recurrent"
        ),
        pytest.param(
            CacheModel(block_size=128, recurrent=True, match_unit=64),
            [0, 256, 256, 256, 256, 0, 0, 128, 0],
            {},
            id="recurrent-match-unit",
        ),
        pytest.param(
            CacheModel(block_size=128, recurrent=True, match_unit=64, internal_checkpoint=True),
            [0, 256, 256, 256, 256, 0, 0, 128, 0],
            {},
            id="recurrent-match-unit-and-a-kernel-that-writes-from-inside",
        ),
        pytest.param(
            CacheModel(block_size=128, recurrent=True, retention=None, batch_tokens=128),
            [0, 256, 256, 256, 256, 0, 128, 128, 128],
            {"launch": {"k3-a": {"argv": [*argv(0), "--max-num-batched-tokens", "128"], "env": {}, "image": "x"}}},
            id="recurrent-dense",
        ),
        pytest.param(
            CacheModel(block_size=64, recurrent=True, retention=128, batch_tokens=128),
            [0, 128, 128, 128, 128, 0, 128, 128, 0],
            {"launch": {"k3-a": {"argv": [*argv(0), "--max-num-batched-tokens=128"], "env": {}, "image": "x"}}},
            id="recurrent-interval",
        ),
        pytest.param(
            CacheModel(block_size=128, recurrent=True, draft_drop=True),
            [0, 256, 256, 256, 256, 0, 0, 128, 0],
            {
                "launch": {
                    "k3-a": {"argv": [*argv(0), "--speculative-config", '{"method": "mtp"}'], "env": {}, "image": "x"}
                }
            },
            id="recurrent-draft",
        ),
        pytest.param(
            CacheModel(block_size=1024, recurrent=True, match_unit=128),
            [0, 2048, 2048, 2048, 2048, 0, 0, 1024, 0],
            {},
            id="recurrent-large-block",
        ),
    ],
)
def test_a_healthy_cache_of_every_kind_is_accepted(
    cache: CacheModel, hits: list[int], plan: dict[str, Any], tmp_path: Path
) -> None:
    """Chats that part for more than a block hit at the third sighting where recurrent state is kept, not the second."""
    result = result_of(tmp_path, cache=cache, plan=plan)
    # a ratio of a few milliseconds is what else this machine does
    assert {check.name for check in result.unmet()} <= {"first-token-ratio"}, result.unmet()
    assert result.state in (State.PASS, State.WARN)
    found = series(result)
    counted = [*found["short-suffix"], *found["resend"], *found["long-suffix"], *found["changed-system"]]
    assert counted == hits
    assert set(found["zero-prefix"] + found["too-short"]) == {0}


@pytest.mark.parametrize(
    ("flaw", "recurrent", "check", "says"),
    [
        (
            Flaw.NEVER_HITS,
            False,
            "short-suffix.counted-hits",
            "short-suffix.2: vllm:prefix_cache_hits moved by 0 tokens",
        ),
        (Flaw.NEVER_HITS, True, "short-suffix.counted-hits", "Nothing was found at all"),
        (Flaw.STATE_LOST, True, "short-suffix.counted-hits", "expected 128 tokens"),
        (
            Flaw.JUNCTION_LOST,
            True,
            "long-suffix.counted-hits",
            "long-suffix.3: vllm:prefix_cache_hits moved by 0 tokens",
        ),
        (Flaw.BLOCK_SHORT, False, "short-suffix.counted-hits", "moved by 64 tokens; expected 128 tokens"),
        (Flaw.BLOCK_SHORT, True, "short-suffix.counted-hits", "moved by 64 tokens; expected 128 tokens"),
        (
            Flaw.BLOCK_LONG,
            False,
            "zero-prefix.counted-hits",
            "zero-prefix.1: vllm:prefix_cache_hits moved by 64 tokens",
        ),
        (Flaw.BLOCK_LONG, True, "zero-prefix.counted-hits", "More was found than was kept"),
        (
            Flaw.ANY_PREFIX,
            False,
            "zero-prefix.counted-hits",
            "zero-prefix.2: vllm:prefix_cache_hits moved by 128 tokens",
        ),
        (Flaw.ANY_PREFIX, True, "zero-prefix.counted-hits", "suspect wrong answers"),
    ],
)
def test_an_unhealthy_cache_is_not_accepted(flaw: Flaw, recurrent: bool, check: str, says: str, tmp_path: Path) -> None:
    result = result_of(tmp_path, cache=CacheModel(block_size=64, recurrent=recurrent, flaw=flaw))
    first = red(result)
    assert (first.name, first.state) == (check, State.FAIL), result.unmet()
    assert says in first.sentence()


@pytest.mark.parametrize(
    ("fault", "check", "state", "says"),
    [
        (
            Fault.HITS_ZERO,
            "short-suffix.counted-hits",
            State.FAIL,
            "moved by 0 tokens; expected 128 tokens (shared part",
        ),
        (Fault.COUNTERS_FROZEN, "witnesses-agree", State.FAIL, "counters and cached_tokens disagree"),
        (Fault.CACHED_TOKENS_WRONG, "witnesses-agree", State.FAIL, "moved by 128 tokens, cached_tokens says 64"),
        (Fault.CACHED_TOKENS_MISSING, "cached-tokens", State.INCONCLUSIVE, "--enable-prompt-tokens-details"),
        (Fault.CACHING_OFF, "prefix-caching-on", State.FAIL, "enable_prefix_caching=False"),
        (Fault.BLOCK_TOO_LARGE, "block-fits-context", State.FAIL, "block 100000"),
        (Fault.GEOMETRY_ABSENT, "geometry", State.INCONCLUSIVE, "the block size is unknown; no engine log was given"),
        (Fault.SECOND_ENGINE, "engines-reporting", State.INCONCLUSIVE, "2 engines report"),
        (Fault.RESTART_IN_WINDOW, "window", State.INCONCLUSIVE, "process_start_time_seconds"),
        (Fault.OTHER_TRAFFIC, "window", State.INCONCLUSIVE, "this request alone"),
        (Fault.METRICS_500, "metrics", State.FAIL, "HTTP 500"),
        (Fault.METRICS_TEXT, "metrics", State.FAIL, "not a Prometheus exposition"),
        (Fault.TEMPLATE_DIFFERS, "prompt-tokens", State.INCONCLUSIVE, "/tokenize counts"),
        (Fault.STREAM_CUT, "requests", State.FAIL, "too-short.1: "),
        (Fault.NO_STREAM_USAGE, "prompt-tokens", State.INCONCLUSIVE, "usage says None"),
    ],
)
def test_a_fault_turns_its_check_red(fault: Fault, check: str, state: State, says: str, tmp_path: Path) -> None:
    """The first red check is the one that owns the fault."""
    result = result_of(tmp_path, fault)
    first = red(result)
    assert (first.name, first.state) == (check, state), result.unmet()
    assert says in first.sentence()
    assert first.next_step


def test_a_window_that_does_not_hold_ends_the_step_at_once(tmp_path: Path) -> None:
    """Nothing that is sent after a restart can be compared with what was computed before it."""
    result = result_of(tmp_path, Fault.RESTART_IN_WINDOW)
    assert len(result.figures["requests"]) <= 2
    assert not [check for check in result.checks if check.name.endswith("counted-hits")]


def test_counters_that_stand_still_are_named_at_the_first_answer(tmp_path: Path) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        frozen = asked.read_metrics()
        asked.read_metrics = lambda: frozen
        result = step3_shared_prefix.run(asked)
    assert red(result).name == "counters-move"
    assert "moved by 0" in red(result).observed
    assert len(result.figures["requests"]) == 1


def test_metrics_that_go_away_between_requests_are_told_from_answers_that_do(tmp_path: Path) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        read, reads = asked.read_metrics, Counter[str]()

        def failing() -> Any:
            reads["all"] += 1
            if reads["all"] == 4:
                engine.faults.add(Fault.METRICS_500)
            return read()

        asked.read_metrics = failing
        result = step3_shared_prefix.run(asked)
    assert red(result).name == "metrics"
    assert "zero-prefix.1: GET" in red(result).observed
    assert "HTTP 500" in red(result).observed


@pytest.mark.parametrize("block_size", [16, 64, 128, 512])
def test_the_expectation_follows_the_engines_block_size(block_size: int, tmp_path: Path) -> None:
    result = result_of(tmp_path, block_size=block_size)
    assert result.state is State.PASS, result.unmet()
    blocks = max(2, 128 // block_size)
    assert series(result)["short-suffix"] == [0, blocks * block_size, blocks * block_size]
    left_out = [family for family in ("too-short",) if family not in series(result)]
    assert bool(left_out) == (block_size == 16)
    assert bool(result.figures["left_out"]) == bool(left_out)


def test_the_expectation_is_written_before_the_first_request(tmp_path: Path) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        stream_chat, seen = asked.client.stream_chat, []

        def watched(body: dict[str, object]) -> Answer:
            seen.append(json.loads((tmp_path / "expectation.json").read_text()))
            return stream_chat(body)

        asked.client.stream_chat = watched  # type: ignore[method-assign, assignment] # watches the order
        step3_shared_prefix.run(asked)
    assert len(seen) == 13
    assert seen[0] == seen[-1]
    assert asked.expectation == seen[0]["requests"]
    assert [request["label"] for request in seen[0]["requests"]][:6] == [
        *("too-short.1", "too-short.2", "zero-prefix.1", "short-suffix.1", "short-suffix.2", "short-suffix.3"),
    ]
    assert seen[0]["geometry"]["block_size_tokens"] == 64
    assert seen[0]["geometry"]["witnesses"]["block_size"] == "vllm:cache_config_info block_size"
    assert seen[0]["rule"]["source"]


def test_lengths_come_from_the_geometry(tmp_path: Path) -> None:
    result = result_of(tmp_path, block_size=128)
    by_label = {request["label"]: request for request in result.figures["requests"]}
    assert all(request["prompt_tokens"] % 128 for request in by_label.values())
    assert by_label["too-short.2"]["prompt_tokens"] < 128
    for sighting in (2, 3):
        short, long = by_label[f"short-suffix.{sighting}"], by_label[f"long-suffix.{sighting}"]
        assert short["prompt_tokens"] - short["shared_tokens"] < 64
        assert long["prompt_tokens"] - long["shared_tokens"] > 128
    assert abs(by_label["zero-prefix.1"]["prompt_tokens"] - by_label["short-suffix.1"]["prompt_tokens"]) < 32
    changed = by_label["changed-system.1"]
    assert 128 < changed["shared_tokens"] < 256
    assert changed["prompt_tokens"] > 256


def test_a_template_that_fills_a_block_is_opened_before_it_is_counted(tmp_path: Path) -> None:
    """Whether earlier traffic left the template's blocks behind is not known, so one request makes sure of it."""
    with Engine(block_size=16) as engine:
        render = engine.render
        head = list(range(1000, 1040))
        asked = context(engine.url, tmp_path, steps=(3,))
        engine.cache.look_up([*head, 1])  # somebody else's chat
        look_up = engine.look_up
        engine.look_up = lambda tokens: look_up([*head, *tokens])  # type: ignore[method-assign] # a longer template
        stream_chat = asked.client.stream_chat

        def longer(body: dict[str, Any]) -> Answer:
            answer = stream_chat(body)
            assert answer.usage is not None
            usage = replace(answer.usage, prompt_tokens=answer.usage.prompt_tokens + len(head))
            return replace(answer, usage=usage)

        asked.client.stream_chat = longer  # type: ignore[method-assign, assignment] # the template's tokens are charged
        asked.client.tokenize = lambda _model, messages, _options: (  # type: ignore[method-assign, assignment] # same
            *head,
            *render(messages),
        )
        result = step3_shared_prefix.run(asked)
    assert result.state is State.PASS, result.unmet()
    assert series(result)["zero-prefix"] == [48, 48]  # the template and what follows it up to the salt
    assert len(result.figures["requests"]) == 11
    assert json.loads((tmp_path / "expectation.json").read_text())["opening_tokens"] > 100


def test_a_second_run_is_cold_again(tmp_path: Path) -> None:
    """The salt is new each time: the same engine accepts twice."""
    with Engine() as engine:
        for _ in range(2):
            assert step3_shared_prefix.run(context(engine.url, tmp_path, steps=(3,))).state is State.PASS


def test_missing_cached_tokens_are_a_failure_where_the_launch_asked_for_them(tmp_path: Path) -> None:
    result = result_of(tmp_path, Fault.CACHED_TOKENS_MISSING, plan={"launch": LAUNCH})
    assert (red(result).name, red(result).state) == ("cached-tokens", State.FAIL)
    assert "proxy" in red(result).next_step


def test_two_runs_ask_the_same_of_the_fingerprint(tmp_path: Path) -> None:
    """Words are drawn anew; what is compared between runs are the rules they were drawn by."""
    asked = []
    for _ in range(2):
        with Engine() as engine:
            one = context(engine.url, tmp_path, steps=(3,))
            step3_shared_prefix.run(one)
            asked.append(one.requests)
    assert asked[0] == asked[1]
