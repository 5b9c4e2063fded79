"""The ladder's pure parts: rungs, percentiles with losses, the knee, figures, and the checks on a rung's figures."""

from dataclasses import replace

import pytest

from kimi_runbook.acceptance.client import Answer, Lag, Load, Outcome, Usage
from kimi_runbook.acceptance.http import BadStatusError, EngineError, TimedOutError
from kimi_runbook.acceptance.ladder.drive import Driven, Sample
from kimi_runbook.acceptance.ladder.failures import losses
from kimi_runbook.acceptance.ladder.figures import figures
from kimi_runbook.acceptance.ladder.judge import ladder_checks
from kimi_runbook.acceptance.ladder.knee import find_knee
from kimi_runbook.acceptance.ladder.rungs import Rung, rungs_of
from kimi_runbook.acceptance.metrics import Reading, parse
from kimi_runbook.acceptance.percentiles import percentile, percentiles
from kimi_runbook.acceptance.result import Check, State


@pytest.mark.parametrize(
    ("nominal", "peak", "rungs"),
    [
        (1, 1, [("nominal", 1, 4)]),
        (1, 3, [("nominal", 1, 4), ("peak", 3, 6)]),
        (4, 4, [("single", 1, 4), ("c2", 2, 4), ("nominal", 4, 8)]),
        (6, 8, [("single", 1, 4), ("c2", 2, 4), ("c4", 4, 8), ("nominal", 6, 12), ("peak", 8, 16)]),
    ],
)
def test_rungs(nominal: int, peak: int, rungs: list[tuple[str, int, int]]) -> None:
    assert [(rung.label, rung.concurrency, rung.requests) for rung in rungs_of(nominal, peak)] == rungs


@pytest.mark.parametrize(
    ("values", "censored", "share", "value"),
    [
        ([3.0, 1.0, 2.0], 0, 0.5, 2.0),
        ([3.0, 1.0, 2.0], 0, 0.99, 3.0),
        ([1.0], 0, 0.5, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 0, 0.5, 2.0),
        ([1.0, 2.0, 3.0], 1, 0.5, 2.0),
        ([1.0, 2.0, 3.0], 1, 0.75, 3.0),
        ([1.0, 2.0, 3.0], 1, 0.9, None),
        ([], 3, 0.5, None),
        ([], 0, 0.5, None),
    ],
)
def test_percentile(values: list[float], censored: int, share: float, value: float | None) -> None:
    assert percentile(values, censored, share) == value


def test_a_failed_request_makes_no_tail_better() -> None:
    """Dropping the failures would show p90 = 9: they are later than all that ended."""
    whole = [float(number) for number in range(1, 11)]
    assert percentiles(whole, 0)["p90"] == 9
    assert percentiles(whole[:8], 2)["p90"] is None


@pytest.mark.parametrize(
    ("points", "knee", "says"),
    [
        pytest.param([(1, 10.0), (2, 19.0), (4, 36.0)], None, "the last rung still paid", id="still-rising"),
        pytest.param([(1, 10.0), (2, 19.0), (4, 20.0)], 2, "from 2 to 4 streams they changed by +5%", id="flat"),
        pytest.param([(8, 80.0), (16, 50.0)], 8, "-38%", id="a-cliff"),
        pytest.param([(1, 10.0), (2, 9.0), (4, 40.0)], None, "the last rung still paid", id="a-hiccup-of-a-low-rung"),
        pytest.param([(1, 10.0), (2, 20.0), (4, 20.5), (6, 21.0)], 2, "+2%", id="the-first-after-which-none-paid"),
        pytest.param([(32, 100.0), (40, 103.0)], None, "still paid", id="a-small-step-within-its-noise"),
        pytest.param([(4, 10.0)], None, "4: 10.0", id="one-rung"),
    ],
)
def test_find_knee(points: list[tuple[int, float]], knee: int | None, says: str) -> None:
    found = find_knee(points)
    assert found.concurrency == knee
    assert says in found.text


_ANSWER = Answer(
    text="xxxx",
    reasoning="",
    tool_calls=(),
    finish_reason="length",
    usage=Usage(prompt_tokens=9, completion_tokens=11, total_tokens=20, cached_tokens=0),
    first_token_s=0.2,
    total_s=1.2,
    chunks=4,
    gaps_s=(0.3, 0.3, 0.4),
)
_METRICS = """\
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} %d
"""


def outcome(*, late_s: float = 0.0, error: EngineError | None = None, answer: Answer = _ANSWER) -> Outcome:
    return Outcome(
        label="x",
        intended_s=0.0,
        sent_s=late_s,
        ended_s=late_s + 1.2,
        answer=None if error else answer,
        error=error,
    )


def reading(preemptions: int = 0) -> Reading:
    return Reading(expositions=(parse("http://x/metrics", _METRICS % preemptions, "text/plain"),))


def driven(
    *outcomes: Outcome,
    lag_s: float = 0.0001,
    label: str = "nominal",
    streams: int = 4,
    samples: tuple[Sample, ...] = (),
) -> Driven:
    lag = Lag(p50_s=0.0, p99_s=lag_s, max_s=lag_s, samples=100, source="kernel")
    return Driven(
        rung=Rung(label=label, concurrency=streams, requests=len(outcomes)),
        load=Load(outcomes=outcomes, lag=lag, most_in_flight=streams, wall_s=2.0),
        samples=samples or (Sample(at_s=0.2, kv_usage=0.1, running=float(streams), waiting=0.0),),
        failed_samples=0,
        before=reading(),
        after=reading(),
    )


def test_tokens_come_from_usage_and_not_from_chunks() -> None:
    """Four chunks of eleven tokens: 0.1 s a token, though chunks are 0.33 s apart."""
    found = figures(driven(outcome(), outcome()))
    assert found["tpot_s"]["p50"] == pytest.approx(0.1)
    assert found["output_tokens_per_s"] == 11.0
    assert found["itl_s"]["p99"] == 0.4


def test_latencies_count_from_the_moment_a_request_was_due() -> None:
    found = figures(driven(outcome(late_s=0.5)))
    assert found["ttft_s"]["p50"] == pytest.approx(0.7)
    assert found["e2e_s"]["p50"] == pytest.approx(1.7)
    assert found["send_lag_p99_s"] == 0.5


def test_failures_and_time_outs_stay_in_the_tails() -> None:
    error = TimedOutError("POST http://x", "no answer before the deadline")
    found = figures(driven(*(outcome() for _ in range(9)), outcome(error=error)))
    assert (found["complete"], found["failed"]) == (9, 1)
    assert found["ttft_s"] == {"p50": 0.2, "p90": 0.2, "p99": None}


def test_a_stream_that_broke_off_had_its_first_token() -> None:
    error = TimedOutError("POST http://x", "stalled")
    error.partial = _ANSWER
    found = figures(driven(outcome(), outcome(error=error)))
    assert (found["complete"], found["failed"]) == (1, 1)
    assert found["ttft_s"]["p99"] == 0.2
    assert found["tpot_s"]["p99"] is None


def test_losses_are_counted_by_kind() -> None:
    errors = [BadStatusError("POST http://x", 500, b"boom"), TimedOutError("POST http://x", "late")]
    load = driven(outcome(), *(outcome(error=error) for error in [*errors, errors[1]])).load
    assert losses(load).startswith("2 timed out, 1 HTTP 500; the first, 1.2 s in: POST http://x: HTTP 500: boom")


@pytest.mark.parametrize(
    ("lag_s", "state", "limited"),
    [(0.004, State.PASS, False), (0.006, State.WARN, True), (1.2, State.INCONCLUSIVE, True)],
)
def test_a_client_that_reads_late_marks_its_rungs(lag_s: float, state: State, limited: bool) -> None:
    rung = driven(outcome(), lag_s=lag_s)
    check = named(ladder_checks([driven(outcome(), label="single", streams=1), rung], 4), "client-lag")
    assert check.state is state
    assert ("latencies of nominal are limited by the client" in check.observed) is limited
    assert figures(rung)["client_limited"] is limited


def test_a_knee_below_the_nominal_load_is_a_warning() -> None:
    single, nominal = driven(outcome(), label="single", streams=1), driven(outcome())
    check = named(ladder_checks([single, nominal], 4), "knee")
    assert check.state is State.WARN
    assert "knee at 1 streams" in check.observed


def test_more_running_than_sent_is_somebody_else_s() -> None:
    crowded = driven(outcome(), samples=(Sample(at_s=0.2, kv_usage=0.1, running=7.0, waiting=0.0),))
    check = named(ladder_checks([crowded], 4), "no-other-traffic")
    assert check.state is State.INCONCLUSIVE
    assert "7 ran where 4 were sent" in check.observed


def test_peaks_nobody_sampled_are_unknown_and_not_zero() -> None:
    blind = driven(outcome(), samples=(Sample(at_s=0.2, kv_usage=0.0, running=0.0, waiting=0.0),))
    found = ladder_checks([blind], 4)
    assert named(found, "sampled-under-load").state is State.WARN
    assert "kv-headroom" not in {check.name for check in found}


def test_an_absent_counter_is_no_lack_of_memory() -> None:
    nothing = Reading(expositions=(parse("http://x/metrics", "# TYPE other gauge\nother 1\n", "text/plain"),))
    rung = replace(driven(outcome()), before=nothing, after=nothing)
    found = named(ladder_checks([rung], 4), "no-preemption")
    assert found.state is State.INCONCLUSIVE
    assert "metrics URL" in found.next_step and "memory" not in found.next_step


def test_the_peaks_checks_have_names_of_their_own() -> None:
    full = (Sample(at_s=0.2, kv_usage=0.95, running=8.0, waiting=0.0),)
    peak = driven(outcome(), label="peak", streams=8, samples=full)
    found = {check.name: check.state for check in ladder_checks([driven(outcome()), peak], 4)}
    assert found["kv-headroom"] is State.PASS
    assert found["peak.kv-headroom"] is State.WARN
    assert found["peak.no-preemption"] is State.PASS


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)
