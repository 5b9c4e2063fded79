"""Step 4: the ladder, what a rung that does not hold is called, and the figures and rules it is judged by."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance import step4_concurrency
from kimi_runbook.acceptance.client import EngineClient, Load
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.verdict import judge_steps
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import FakeHost, context, nodes


def asked(engine: FakeEngine, run_dir: Path, *hosts: FakeHost, timeout_s: float = 5.0, **changes: Any) -> Context:
    run = context(engine.url, run_dir, *hosts, **{"steps": (2, 3, 4)} | changes)
    run.client = EngineClient(engine.url, timeout_s=timeout_s)
    return run


def result_of(run_dir: Path, *faults: Fault, openmetrics: bool = False, **changes: Any) -> StepResult:
    with FakeEngine(*faults, openmetrics=openmetrics) as engine:
        return step4_concurrency.run(asked(engine, run_dir, **changes))


# Warnings that depend on times, so on what else this machine does.
OF_A_BUSY_MACHINE = {"client-lag", "sampled-under-load", "knee"}


def unmet(result: StepResult) -> list[Check]:
    return [check for check in result.unmet() if check.name not in OF_A_BUSY_MACHINE]


def states(result: StepResult) -> dict[str, State]:
    return {check.name: check.state for check in result.checks}


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_a_healthy_engine_carries_the_whole_ladder(openmetrics: bool, tmp_path: Path) -> None:
    result = result_of(tmp_path, openmetrics=openmetrics, peak_concurrency=6)
    assert result.state.lets_next_layer_run
    assert not unmet(result)
    ladder = result.figures["ladder"]
    assert [rung["concurrency"] for rung in ladder] == [1, 2, 4, 6]
    assert [rung["requests"] for rung in ladder] == [4, 4, 8, 12]
    assert all(rung["complete"] == rung["requests"] for rung in ladder)
    assert all(1 <= rung["running_peak"] <= rung["concurrency"] for rung in ladder)
    nominal = ladder[2]
    assert 0.01 <= nominal["ttft_s"]["p50"] < 0.1
    assert 0.01 <= nominal["tpot_s"]["p50"] < 0.03
    assert 0.008 <= nominal["itl_s"]["p50"] < 0.03
    assert nominal["e2e_s"]["p99"] >= nominal["e2e_s"]["p50"] > 0.1
    assert nominal["output_tokens_per_s"] > 1.5 * ladder[0]["output_tokens_per_s"]
    assert (result.figures["nominal"], result.figures["peak"]) == (4, 6)
    assert 0.01 <= result.figures["kv_usage_peak"] <= 0.06


@pytest.mark.parametrize(
    ("fault", "check", "state", "says"),
    [
        (Fault.STREAM_CUT, "warm-up.streams-complete", State.FAIL, "0 of 1 complete at 1 at once: 1 cut off"),
        (Fault.NO_STREAM_USAGE, "warm-up.streams-complete", State.FAIL, "1 without usage"),
        (Fault.STALL, "warm-up.streams-complete", State.FAIL, "1 timed out"),
        (Fault.FINISH_ERROR, "warm-up.streams-complete", State.FAIL, "0 of 1 complete"),
        (Fault.METRICS_500, "metrics", State.FAIL, "HTTP 500"),
        (Fault.RESTART_IN_WINDOW, "single.window", State.INCONCLUSIVE, "process_start_time_seconds"),
        (Fault.OOM_UNDER_LOAD, "nominal.out-of-memory", State.FAIL, "out of memory under load, at 4 streams: POST"),
        (Fault.DIES_UNDER_LOAD, "nominal.engine-alive", State.FAIL, "The engine went down under load"),
        (Fault.PREEMPTS, "no-preemption", State.WARN, "16 preemptions, the first at 1 streams"),
        (Fault.CACHE_FULL, "kv-headroom", State.WARN, "97.0%"),
        (Fault.FEW_SLOTS, "no-queue", State.WARN, "at most 1 of 4 ran at once"),
    ],
)
def test_a_fault_turns_its_check_red(fault: Fault, check: str, state: State, says: str, tmp_path: Path) -> None:
    with FakeEngine(fault) as engine:
        result = step4_concurrency.run(asked(engine, tmp_path, timeout_s=0.5 if fault is Fault.STALL else 5))
    first = unmet(result)[0]
    assert (first.name, first.state) == (check, state), first.sentence()
    assert says in first.sentence()
    assert first.next_step


def test_a_rung_that_loses_a_request_ends_the_ladder(tmp_path: Path) -> None:
    with FakeEngine(Fault.OOM_UNDER_LOAD) as engine:
        result = step4_concurrency.run(asked(engine, tmp_path, peak_concurrency=8))
    found = states(result)
    assert found["single.streams-complete"] is found["c2.streams-complete"] is State.PASS
    assert found["nominal.streams-complete"] is State.FAIL
    assert found["nominal.engine-alive"] is State.PASS  # it answered 500 and lives on
    assert found["peak.streams-complete"] is State.NOT_RUN
    assert "after.streams-complete" not in found
    assert [rung["label"] for rung in result.figures["ladder"]] == ["single", "c2", "nominal"]
    assert result.figures["ladder"][-1]["failed"] > 0


def test_out_of_memory_on_the_first_request_is_no_load_problem(tmp_path: Path) -> None:
    with FakeEngine(Fault.OOM_UNDER_LOAD) as engine:
        engine.load_limit = 0
        result = step4_concurrency.run(asked(engine, tmp_path))
    first = result.unmet()[0]
    assert first.name == "warm-up.out-of-memory"
    assert "at the first prefill" in first.observed
    assert "--max-num-batched-tokens" in first.next_step


def test_an_engine_that_dies_of_memory_says_so_in_its_log_only(tmp_path: Path) -> None:
    """The answers are cut connections; the last words are on the node."""
    head, worker = nodes()
    worker.log += "2026-11-30T14:59:59Z ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    with FakeEngine(Fault.DIES_UNDER_LOAD) as engine:
        result = step4_concurrency.run(asked(engine, tmp_path, head, worker, steps=(0, 1, 2, 3, 4, 5)))
    first, second = result.unmet()[:2]
    assert first.name == "nominal.out-of-memory"
    assert "k3-b: " in first.observed
    assert second.name == "nominal.engine-alive"


def test_memory_of_the_nodes_is_kept_before_and_after(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        result = step4_concurrency.run(asked(engine, tmp_path, *nodes(), steps=(0, 1, 2, 3, 4, 5)))
    assert set(result.figures["memory"]) == {"before", "after"}
    assert set(result.figures["memory"]["after"]) == {"k3-a", "k3-b"}


def test_no_prompt_of_the_ladder_is_sent_twice(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        step4_concurrency.run(asked(engine, tmp_path))
        prompts = [body["messages"][0]["content"] for body in engine.requests]
        assert len(set(prompts)) == len(prompts) == 18
        assert {len(body["messages"]) for body in engine.requests} == {2}
        assert all(body["ignore_eos"] for body in engine.requests)


def test_an_interrupt_keeps_the_rungs_that_were_climbed(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        run = asked(engine, tmp_path)
        drive = run.client.run

        def interrupted(requests: Sequence[Any], *, concurrency: int, **options: Any) -> Load:
            if concurrency == 4:
                raise KeyboardInterrupt
            return drive(requests, concurrency=concurrency, **options)

        run.client.run = interrupted  # type: ignore[method-assign] # the operator's Ctrl-C
        with pytest.raises(StepInterruptedError) as caught:
            step4_concurrency.run(run)
    partial = caught.value.partial
    assert partial.state is State.INCONCLUSIVE
    assert [rung["concurrency"] for rung in partial.figures["ladder"]] == [1, 2]
    assert isinstance(caught.value, KeyboardInterrupt)


def test_progress_is_told_by_rung(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with FakeEngine() as engine:
        run = asked(engine, tmp_path)
        run.listener = lambda event: told.append((event.what, event.done, event.total))
        run.step = 4
        step4_concurrency.run(run)
    assert ("4 at once", 8, 8) in told
    assert sum(total for _, done, total in told if done == total) == sum(
        batch.requests for batch in step4_concurrency.batches_of(run.plan)
    )


def test_rungs_that_were_not_looked_at_are_one_reason(tmp_path: Path) -> None:
    """One rung that does not hold is one event, however many lie above it."""
    with FakeEngine(Fault.DIES_UNDER_LOAD) as engine:
        engine.load_limit = 0
        result = step4_concurrency.run(context(engine.url, tmp_path, steps=(4,), concurrency=8))
    untouched = [check for check in result.checks if check.state is State.NOT_RUN]
    assert len(untouched) == 4
    reasons = [reason for reason in judge_steps([result]).reasons if "not looked at" in reason.text]
    assert len(reasons) == 1
    assert "(also c2.streams-complete, c4.streams-complete, nominal.streams-complete)" in reasons[0].text


def test_a_restart_between_two_steps_is_seen(tmp_path: Path) -> None:
    """It falls into no request's and no rung's window, and the engine is well again when the ladder begins."""
    with FakeEngine() as engine:
        run = asked(engine, tmp_path, concurrency=1)
        run.client.chat(run.chat_body([{"role": "user", "content": "hi"}]))
        run.last_reading = run.read_metrics()
        engine.start_engine()
        engine.started += 5
        result = step4_concurrency.run(run)
    first = result.unmet()[0]
    assert (first.name, first.state) == ("warm-up.window", State.INCONCLUSIVE)
    assert "process_start_time_seconds" in first.observed
