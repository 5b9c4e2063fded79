"""Steps 2 to 4 against an engine that is healthy or fails in one way: the check that owns the fault goes red."""

import json
from pathlib import Path

import pytest

from kimi_runbook.acceptance import step2_short_request, step3_shared_prefix, step4_concurrency
from kimi_runbook.acceptance.geometry import read_geometry
from kimi_runbook.acceptance.result import Check, State, StepResult
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import argv, context

RUN = {2: step2_short_request.run, 3: step3_shared_prefix.run, 4: step4_concurrency.run}


def result_of(step: int, run_dir: Path, *faults: Fault, block_size: int = 64, **options: bool) -> StepResult:
    with FakeEngine(*faults, block_size=block_size, **options) as engine:
        return RUN[step](context(engine.url, run_dir, steps=(2, 3, 4)))


def red(result: StepResult) -> Check:
    """The first check that did not pass."""
    return result.unmet()[0]


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_a_healthy_engine_passes(step: int, openmetrics: bool, tmp_path: Path) -> None:
    result = result_of(step, tmp_path, openmetrics=openmetrics)
    assert result.state is State.PASS, result.unmet()


@pytest.mark.parametrize(
    ("step", "fault", "check", "state", "says"),
    [
        (2, Fault.EMPTY_ANSWER, "chat-answer", State.FAIL, "0 characters"),
        (2, Fault.FINISH_ERROR, "chat-finish-reason", State.FAIL, "'error'"),
        (2, Fault.USAGE_WRONG, "chat-usage", State.FAIL, "usage that adds up"),
        (2, Fault.ERROR_IN_200, "chat-answer", State.FAIL, "an error inside a 200"),
        (2, Fault.STREAM_CUT, "stream-answer", State.FAIL, "without [DONE]"),
        (2, Fault.NO_STREAM_USAGE, "stream-usage", State.FAIL, "no usage"),
        (2, Fault.BAD_REQUEST_ACCEPTED, "refuses-unknown-model", State.FAIL, "HTTP 200"),
        (2, Fault.REFUSAL_WITHOUT_BODY, "refuses-unknown-model", State.FAIL, "without an error body"),
        (3, Fault.HITS_ZERO, "second.counted-hits", State.FAIL, "moved by 0 tokens; expected 128 tokens"),
        (3, Fault.COUNTERS_FROZEN, "second.counted-hits", State.FAIL, "moved by 0 tokens; expected 128 tokens"),
        (3, Fault.CACHED_TOKENS_WRONG, "second.cached-tokens", State.FAIL, "cached_tokens is 64; expected 128 tokens"),
        (3, Fault.CACHED_TOKENS_MISSING, "second.cached-tokens", State.INCONCLUSIVE, "--enable-prompt-tokens-details"),
        (3, Fault.CACHING_OFF, "prefix-caching-on", State.FAIL, "enable_prefix_caching=False"),
        (3, Fault.BLOCK_TOO_LARGE, "block-fits-context", State.FAIL, "block 100000"),
        (3, Fault.RECURRENT, "expectation", State.INCONCLUSIVE, "mamba_cache_mode=align"),
        (3, Fault.GEOMETRY_ABSENT, "geometry", State.INCONCLUSIVE, "block size is unknown"),
        (3, Fault.SECOND_ENGINE, "engines-reporting", State.INCONCLUSIVE, "2 engines report"),
        (3, Fault.RESTART_IN_WINDOW, "control.window", State.INCONCLUSIVE, "process_start_time_seconds"),
        (3, Fault.OTHER_TRAFFIC, "control.window", State.INCONCLUSIVE, "this request alone"),
        (3, Fault.METRICS_500, "metrics", State.FAIL, "HTTP 500"),
        (3, Fault.METRICS_TEXT, "metrics", State.FAIL, "not a Prometheus exposition"),
        (3, Fault.TEMPLATE_DIFFERS, "control.prompt-tokens", State.INCONCLUSIVE, "as /tokenize counts"),
        (3, Fault.STREAM_CUT, "requests", State.FAIL, "without [DONE]"),
        (4, Fault.STREAM_CUT, "streams-complete", State.FAIL, "0 of 4 complete"),
        (4, Fault.NO_STREAM_USAGE, "streams-complete", State.FAIL, "0 of 4 complete"),
        (4, Fault.METRICS_500, "metrics", State.FAIL, "HTTP 500"),
        (4, Fault.RESTART_IN_WINDOW, "window", State.INCONCLUSIVE, "process_start_time_seconds"),
        (4, Fault.PREEMPTS, "no-preemption", State.WARN, "4 preemptions"),
        (4, Fault.CACHE_FULL, "kv-headroom", State.WARN, "97.0%"),
    ],
)
def test_a_fault_turns_its_check_red(  # noqa: PLR0917 - a table's columns
    step: int, fault: Fault, check: str, state: State, says: str, tmp_path: Path
) -> None:
    """The first red check is the one that owns the fault."""
    result = result_of(step, tmp_path, fault)
    assert result.state is not State.PASS
    first = red(result)
    assert (first.name, first.state) == (check, state)
    assert says in first.sentence()
    assert first.next_step


def test_hits_that_no_request_was_owed_are_red_too(tmp_path: Path) -> None:
    """The control has to show 0: an engine that counts every token as a hit is not accepted."""
    with FakeEngine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        look_up = engine.look_up

        def generous(tokens: list[int]) -> int:
            cached = look_up(tokens)
            engine.counters["hits"] += 64 - min(cached, 64)
            return max(cached, 64)

        engine.look_up = generous  # type: ignore[method-assign] # the fault is the test's own
        result = step3_shared_prefix.run(asked)
    assert red(result).name == "control.counted-hits"


@pytest.mark.parametrize("block_size", [16, 64, 128, 512])
def test_the_expectation_follows_the_engines_block_size(block_size: int, tmp_path: Path) -> None:
    result = result_of(3, tmp_path, block_size=block_size)
    assert result.state is State.PASS, result.unmet()
    assert result.figures["hit_tokens"] == result.figures["expected_hit_tokens"] == 2 * block_size


def test_the_expectation_is_written_before_the_first_request(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        stream_chat, seen = asked.client.stream_chat, []

        def watched(body: dict[str, object]) -> object:
            seen.append(json.loads((tmp_path / "expectation.json").read_text()))
            return stream_chat(body)

        asked.client.stream_chat = watched  # type: ignore[method-assign, assignment] # watches the order
        step3_shared_prefix.run(asked)
    assert len(seen) == 3
    assert [request["hit_tokens"] for request in seen[0]["requests"]] == [0, 0, 128]
    assert seen[0] == seen[-1]
    assert asked.expectation == seen[0]["requests"]


def test_lengths_come_from_the_geometry(tmp_path: Path) -> None:
    result = result_of(3, tmp_path, block_size=128)
    control, first, second = result.figures["requests"]
    assert second["shared_tokens"] > 2 * 128
    assert second["prompt_tokens"] - second["shared_tokens"] < 128
    assert all(request["prompt_tokens"] % 128 for request in (control, first, second))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_lengths_fit_whatever_is_drawn(block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small blocks one draw in ten or so is a multiple of the block; it must be drawn again."""
    with FakeEngine(block_size=block_size) as engine:
        asked = context(engine.url, tmp_path, steps=(3,))
        monkeypatch.setattr(asked.client, "tokenize", lambda _model, messages, _options: tuple(engine.render(messages)))
        geometry = read_geometry(asked.read_metrics())
        for _ in range(200):
            for prompt in step3_shared_prefix.make_prompts(asked, geometry):
                assert len(prompt.tokens) % block_size


def test_a_second_run_is_cold_again(tmp_path: Path) -> None:
    """The salt is new each time: the same engine accepts twice."""
    with FakeEngine() as engine:
        for _ in range(2):
            assert step3_shared_prefix.run(context(engine.url, tmp_path, steps=(3,))).state is State.PASS


def test_missing_cached_tokens_are_a_failure_where_the_launch_asked_for_them(tmp_path: Path) -> None:
    launch = {"k3-a": {"argv": argv(0), "env": {}, "image": "x"}}
    with FakeEngine(Fault.CACHED_TOKENS_MISSING) as engine:
        result = step3_shared_prefix.run(context(engine.url, tmp_path, steps=(3,), launch=launch))
    assert red(result).state is State.FAIL


def test_figures_of_the_streams_are_kept(tmp_path: Path) -> None:
    figures = result_of(4, tmp_path).figures
    assert (figures["concurrency"], figures["complete"], figures["completion_tokens"]) == (4, 4, 64)
    assert figures["running_peak"] >= 1
    assert figures["preemptions"] == figures["failed_requests"] == 0
