"""Step 6: the watch on an engine that is steady or drifts. Its statistics are tested in test_trend.py."""

from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance import step6_observation
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.observation.judge import memory_checks
from kimi_runbook.acceptance.observation.watch import every_s
from kimi_runbook.acceptance.result import Check, State, StepResult
from tests.faults.engine.cache_model import CacheModel
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import FakeHost, context, nodes


def asked(engine: FakeEngine, run_dir: Path, *hosts: FakeHost, **changes: Any) -> Context:
    """A minute of observation on a clock that is set forward: it takes a second or so."""
    engine.token_delay_s = 0.001
    steps = (0, 1, 6) if hosts else (6,)
    return context(engine.url, run_dir, *hosts, steps=steps, **{"observe_s": 60} | changes)


def result_of(run_dir: Path, *faults: Fault, **options: Any) -> StepResult:
    with FakeEngine(*faults, **options) as engine:
        return step6_observation.run(asked(engine, run_dir))


def named(result: StepResult, name: str) -> Check:
    return next(check for check in result.checks if check.name == name)


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_a_steady_service_passes(openmetrics: bool, tmp_path: Path) -> None:
    result = result_of(tmp_path, openmetrics=openmetrics)
    assert result.state is State.PASS, result.unmet()
    samples = result.figures["samples"]
    assert len(samples) == 31
    assert samples[-1]["at_s"] >= 60
    assert samples[-1]["errors"] == 0
    assert samples[-1]["query_tokens"] > samples[-1]["hit_tokens"] > samples[5]["hit_tokens"] > 0
    assert result.figures["drift"]["time_to_limit_s"] is None
    assert result.figures["drift"]["kv_usage"]["p_value"] > 0.01
    assert result.figures["counters"]["preemptions"] == 0


def test_an_engine_with_recurrent_state_is_steady_too(tmp_path: Path) -> None:
    result = result_of(tmp_path, cache=CacheModel(block_size=128, recurrent=True))
    assert result.state is State.PASS, result.unmet()
    assert result.figures["counters"]["hit_tokens"] > 0


@pytest.mark.parametrize(
    ("fault", "check", "state", "says"),
    [
        (Fault.KV_LEAKS, "kv-usage-drift", State.WARN, "the cache is full in"),
        (Fault.SLOWS_DOWN, "first-token-drift", State.WARN, "beyond noise"),
        (Fault.HITS_STOP, "hits-keep-coming", State.FAIL, "0.0% of the tokens asked for were hits in the last part"),
        (Fault.HITS_ZERO, "hits-keep-coming", State.FAIL, "0.0% before"),
        (Fault.RESTART_IN_WINDOW, "no-restart", State.FAIL, "process_start_time_seconds"),
        (Fault.METRICS_500, "metrics", State.FAIL, "HTTP 500"),
        (Fault.STREAM_CUT, "probes-answered", State.FAIL, "0 of 5 answered; the first after 0 s"),
        (Fault.PREEMPTS, "no-preemption", State.WARN, "31; expected 0"),
    ],
)
def test_a_fault_turns_its_check_red(fault: Fault, check: str, state: State, says: str, tmp_path: Path) -> None:
    result = result_of(tmp_path, fault)
    first = result.unmet()[0]
    assert (first.name, first.state) == (check, state), first.sentence()
    assert says in first.sentence()
    assert first.next_step


def test_a_leak_is_told_with_the_time_that_is_left(tmp_path: Path) -> None:
    """0.4 % of the cache per request, one every two seconds: from 12 % on, 88 % last 440 s."""
    result = result_of(tmp_path, Fault.KV_LEAKS)
    drift = result.figures["drift"]
    assert drift["kv_usage"]["slope_per_s"] == pytest.approx(0.002, rel=0.1)
    assert drift["time_to_limit_s"] == pytest.approx(440, rel=0.15)
    assert "full in 7 min" in named(result, "kv-usage-drift").observed


def test_a_restart_voids_every_figure_over_the_whole_time(tmp_path: Path) -> None:
    result = result_of(tmp_path, Fault.RESTART_IN_WINDOW)
    assert result.figures["drift"] == result.figures["counters"] == {}
    assert not [check for check in result.checks if "drift" in check.name]
    assert named(result, "observed-in-full").state is State.INCONCLUSIVE


def test_an_engine_that_goes_away_ends_the_watch(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        run = asked(engine, tmp_path)
        elapse, passed = run.elapse, []

        def later(seconds: float) -> None:
            passed.append(seconds)
            if len(passed) == 10:
                engine.die()
            elapse(seconds)

        run.elapse = later
        result = step6_observation.run(run)
    assert result.state is State.FAIL
    assert "10 of 15 answered; the first after 20 s" in named(result, "probes-answered").observed
    assert "5 probes in a row failed" in named(result, "observed-in-full").observed
    assert named(result, "metrics").state is State.FAIL


def test_an_interrupt_keeps_the_samples(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        run = asked(engine, tmp_path)
        elapse, passed = run.elapse, []

        def interrupted(seconds: float) -> None:
            passed.append(seconds)
            if len(passed) == 12:
                raise KeyboardInterrupt
            elapse(seconds)

        run.elapse = interrupted
        with pytest.raises(StepInterruptedError) as caught:
            step6_observation.run(run)
    partial = caught.value.partial
    assert partial.state is State.INCONCLUSIVE
    assert len(partial.figures["samples"]) == 12
    assert partial.figures["drift"]["kv_usage"]["samples"] == 12


def test_a_watch_by_itself_knows_the_engine_it_watched(tmp_path: Path) -> None:
    """A later run completes an earlier record by it, so version and geometry must be its own."""
    with FakeEngine() as engine:
        run = asked(engine, tmp_path)
        step6_observation.run(run)
        assert run.observed("engine_version") == engine.version
        assert run.geometry is not None
        assert run.geometry.block_size == 64
        prompts = {str(body["messages"]) for body in engine.requests}
        assert len(prompts) == 1  # the same one again and again
        assert len(engine.render(engine.requests[0]["messages"])) >= 2 * 64


def test_no_hits_are_due_where_the_block_size_is_not_known(tmp_path: Path) -> None:
    result = result_of(tmp_path, Fault.GEOMETRY_ABSENT)
    assert result.state is State.PASS, result.unmet()
    assert "hits-keep-coming" not in {check.name for check in result.checks}


def test_a_prompt_that_would_not_fit_is_a_short_one(tmp_path: Path) -> None:
    with FakeEngine(block_size=2048) as engine:
        step6_observation.run(asked(engine, tmp_path))
        assert len(engine.render(engine.requests[0]["messages"])) < 1000


def test_nodes_are_asked_before_and_after(tmp_path: Path) -> None:
    head, worker = nodes()
    with FakeEngine() as engine:
        run = asked(engine, tmp_path, head, worker)
        elapse = run.elapse

        def restarted(seconds: float) -> None:
            worker.restarts = 1
            head.log += "2026-11-30T14:59:59Z ERROR EngineCore encountered a fatal error.\n"
            elapse(seconds)

        run.elapse = restarted
        result = step6_observation.run(run)
    assert named(result, "k3-a.not-restarted").state is State.PASS
    assert named(result, "k3-b.not-restarted").state is State.FAIL
    assert "1 restarts" in named(result, "k3-b.not-restarted").observed
    assert "fatal error" in named(result, "k3-a.no-new-fatal-line").observed
    assert set(result.figures["memory"]["before"]) == {"k3-a", "k3-b"}


def test_too_short_an_observation_proves_nothing(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        result = step6_observation.run(asked(engine, tmp_path, observe_s=3))
    assert result.state is State.INCONCLUSIVE
    assert "at least 8 samples" in named(result, "kv-usage-drift").expected


@pytest.mark.parametrize(("observe_s", "every"), [(3, 1.0), (60, 2.0), (300, 10.0), (5400, 15.0)])
def test_samples_are_spread_over_the_observation(observe_s: int, every: float) -> None:
    assert every_s(observe_s) == every


def test_memory_that_grows_is_a_warning() -> None:
    before = {"k3-a": {"gpu_used_mib": [100, 100], "engine_rss_bytes": None}}
    grown = {"k3-a": {"gpu_used_mib": [100, 120], "engine_rss_bytes": 5}}
    (check,) = memory_checks(before, grown)
    assert check.state is State.WARN
    assert "GPU memory, MiB went from 200 to 220" in check.observed
    assert memory_checks(before, before)[0].state is State.PASS
    assert not memory_checks({"k3-a": {"gpu_used_mib": None, "engine_rss_bytes": None}}, grown)
