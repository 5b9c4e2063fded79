"""Step 3's other witnesses and sources: answers, first tokens, memory, the log, names of counters, an interrupt."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance import step3_shared_prefix
from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.result import State, StepResult
from tests.faults.engine.cache_model import CacheModel
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import context
from tests.unit.prefix_runs import Engine, red, result_of

PLAN_ENGINE = {
    "container": "kimi-engine",
    "unit": "",
    "port": 8000,
    "nodes": 1,
    "engines": 1,
    "api_servers": 1,
    "parallelism": {},
}


def test_memory_and_cache_usage_are_read_before_and_after(tmp_path: Path) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        moments = iter(({"k3-a": {"engine_rss_bytes": 1}}, {"k3-a": {"engine_rss_bytes": 2}}))
        type(asked).memory, original = lambda self: next(moments), type(asked).memory  # type: ignore[method-assign]
        try:
            figures = step3_shared_prefix.run(asked).figures
        finally:
            type(asked).memory = original  # type: ignore[method-assign]
    assert figures["memory"] == {
        "before": {"k3-a": {"engine_rss_bytes": 1}},
        "after": {"k3-a": {"engine_rss_bytes": 2}},
    }
    assert figures["kv_usage"] == {"before": 0.0, "after": 0.0}


class Speaker:
    """Answers in words of the test's own; the engine behind it counts as ever."""

    def __init__(self, asked: Context, *, warm: list[str], cold: list[str]) -> None:
        self.stream_chat = asked.client.stream_chat
        self.warm, self.cold = iter(warm), iter(cold)
        self.salted: list[dict[str, Any]] = []
        self.seen: Counter[str] = Counter()

    def __call__(self, body: dict[str, Any]) -> Answer:
        if "cache_salt" in body:
            self.salted.append(body)
            answer = self.stream_chat(
                body | {"messages": [*body["messages"], {"role": "user", "content": body["cache_salt"]}]}
            )
            assert answer.usage is not None
            return replace(answer, text=next(self.cold), usage=replace(answer.usage, cached_tokens=0))
        self.seen[json.dumps(body["messages"])] += 1
        answer = self.stream_chat(body)
        again = self.seen[json.dumps(body["messages"])] > 1 and answer.usage and answer.usage.cached_tokens
        return replace(answer, text=next(self.warm)) if again else answer


@pytest.mark.parametrize(
    ("warm", "cold", "state", "says"),
    [
        pytest.param(["same", "same"], [], State.PASS, "the cold one parts from them at character 0", id="equal"),
        pytest.param(["text", "test"], ["a", "a"], State.FAIL, "it is the hit path that varies", id="corrupt"),
        pytest.param(["text", "test"], ["a", "b"], State.WARN, "this engine repeats nothing", id="noisy"),
    ],
)
def test_warm_answers_are_compared_with_each_other(
    warm: list[str], cold: list[str], state: State, says: str, tmp_path: Path
) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        speaker = Speaker(asked, warm=warm, cold=cold)
        asked.client.stream_chat = speaker  # type: ignore[method-assign, assignment] # words of the test's own
        result = step3_shared_prefix.run(asked)
    check = next(check for check in result.checks if check.name == "same-answer")
    assert check.state is state, check.sentence()
    assert says in check.observed
    assert len(speaker.salted) == len(cold)
    assert len({body["cache_salt"] for body in speaker.salted}) == len(cold)


def test_the_first_token_is_told_with_its_interval_and_contradicts_only_beyond_doubt(tmp_path: Path) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        stream_chat = asked.client.stream_chat

        def slower_warm(body: dict[str, Any]) -> Answer:
            answer = stream_chat(body)
            assert answer.usage is not None
            return replace(answer, first_token_s=0.9 if answer.usage.cached_tokens else 0.3)

        asked.client.stream_chat = slower_warm  # type: ignore[method-assign, assignment] # times of the test's own
        result = step3_shared_prefix.run(asked)
    assert (result.state, red(result).name) == (State.WARN, "first-token-ratio")
    assert result.figures["first_token_ratio"] == {
        "cold_median_s": 0.3,
        "warm_median_s": 0.9,
        "ratio": 3.0,
        "low": 3.0,
        "high": 3.0,
        "coverage": 0.66,
    }


def test_a_front_end_that_publishes_no_geometry_is_read_from_its_log(tmp_path: Path) -> None:
    """vLLM's Rust front end: OpenMetrics, no cache_config_info; the log of the start says the rest."""
    log = tmp_path / "engine.log"
    log.write_text(
        "(APIServer pid=1) INFO 11-30 10:00:00 [x.py:1] non-default args: {'prefix_match_unit': 64, "
        "'enable_prefix_caching': True}\n"
        "(APIServer pid=1) INFO 11-30 10:00:00 [config.py:690] Mamba cache mode is set to 'align' for X by default\n"
        "(Worker pid=2) INFO 11-30 10:00:09 [interface.py:1] Setting attention block size to 128 tokens to ensure\n"
        "(EngineCore pid=3) INFO 11-30 10:00:10 [kv.py:1] GPU KV cache size: 524,288 tokens, Maximum concurrency\n"
    )
    plan = {"engine": {**PLAN_ENGINE, "log": {"endpoint": str(log)}}}
    cache = CacheModel(block_size=128, recurrent=True, match_unit=64)
    result = result_of(tmp_path, Fault.GEOMETRY_ABSENT, cache=cache, openmetrics=True, plan=plan)
    assert result.state is State.PASS, result.unmet()
    assert result.figures["match_unit_tokens"] == 64
    assert result.figures["kv_cache_tokens"] == 524_288
    assert result.figures["witnesses"]["block_size"] == "log: Setting attention block size to"


def test_what_the_operator_says_wrongly_is_told_beside_what_the_engine_has(tmp_path: Path) -> None:
    result = result_of(tmp_path, plan={"geometry": {"block_size": 128}})
    assert (red(result).name, red(result).state) == ("geometry", State.FAIL)
    assert (
        "block_size was given as 128, and the engine has 64 (vllm:cache_config_info block_size)" in red(result).observed
    )


def test_an_old_name_of_a_counter_is_found_and_a_new_one_that_is_missing_is_told(tmp_path: Path) -> None:
    def renamed(asked: Context, engine: FakeEngine, old: str, new: str) -> StepResult:
        text = engine.metrics
        engine.metrics = lambda: text().replace(old, new)  # type: ignore[method-assign] # another version's names
        return step3_shared_prefix.run(asked)

    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        assert renamed(asked, engine, "vllm:prefix_cache", "vllm:gpu_prefix_cache").state is State.PASS
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        first = red(renamed(asked, engine, "vllm:prefix_cache_hits", "vllm:prefix_cache_found"))
    assert (first.name, first.state) == ("counters-present", State.INCONCLUSIVE)
    assert "vllm:prefix_cache_hits is missing: vLLM 0.32.0 should write it" in first.observed


def test_few_questions_are_asked_about_lengths(tmp_path: Path) -> None:
    """Lengths are found by arithmetic: each further question is time without a request in flight."""
    with Engine(block_size=128) as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        tokenize, calls = asked.client.tokenize, Counter[str]()

        def counted(model: str, messages: Any, options: Any) -> tuple[int, ...]:
            calls["tokenize"] += 1
            return tokenize(model, messages, options)

        asked.client.tokenize = counted  # type: ignore[method-assign] # counts
        assert step3_shared_prefix.run(asked).state is State.PASS
    assert calls["tokenize"] <= 24


def test_an_interrupt_leaves_what_was_seen(tmp_path: Path) -> None:
    with Engine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        stream_chat, calls = asked.client.stream_chat, Counter[str]()

        def interrupted(body: dict[str, Any]) -> Answer:
            calls["all"] += 1
            if calls["all"] == 4:
                raise KeyboardInterrupt
            return stream_chat(body)

        asked.client.stream_chat = interrupted  # type: ignore[method-assign, assignment] # the operator's Ctrl-C
        with pytest.raises(StepInterruptedError) as raised:
            step3_shared_prefix.run(asked)
    partial = raised.value.partial
    assert (partial.state, red(partial).name) == (State.INCONCLUSIVE, "step-completed")
    assert [request["label"] for request in partial.figures["requests"]] == [
        "too-short.1",
        "too-short.2",
        "zero-prefix.1",
    ]
