"""Steps' figures read back: what is missing, null or of another form is None and never 0."""

from typing import Any

import pytest

from kimi_runbook.acceptance.result import StepResult
from kimi_runbook.figures import Figures, MemorySample, integer, number, quantiles
from tests.unit import records


def of(step: int, **figures: Any) -> Figures:
    return Figures.of([StepResult.of(step, "x", [], figures)])


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0, 0),
        (1.5, 1.5),
        (None, None),
        ("1", None),
        (True, None),
        (float("nan"), None),
        (float("inf"), None),
        ([], None),
    ],
)
def test_a_number_is_one_or_none(value: object, read: float | None) -> None:
    assert number(value) == read


@pytest.mark.parametrize(("value", "read"), [(4, 4), (4.0, 4), (4.5, None), (None, None), (False, None)])
def test_a_whole_number_is_one_or_none(value: object, read: int | None) -> None:
    assert integer(value) == read


def test_quantiles_that_are_null_are_left_out() -> None:
    """Step 4 writes null where a quantile falls on a request that failed."""
    assert quantiles({"p50": 0.2, "p90": None, "p99": "late", "p42": 1}) == {"p50": 0.2}
    assert quantiles(None) == {}


@pytest.mark.parametrize("ladder", [None, 7, "text", [], {}, [3], [{"requests": 4}], [{"concurrency": None}]])
def test_a_ladder_of_another_form_has_no_rungs(ladder: object) -> None:
    assert of(4, ladder=ladder).ladder() == ()


def test_rungs_rise_and_keep_zero_apart_from_absent() -> None:
    rungs = of(4, ladder=[{"concurrency": 8, "failed": 0}, {"concurrency": 2, "preemptions": 1.0}]).ladder()
    assert [(rung.concurrency, rung.failed, rung.preemptions) for rung in rungs] == [(2, None, 1.0), (8, 0, None)]


def test_requests_of_an_earlier_version_are_read_too() -> None:
    (request,) = of(3, requests=[{"label": "second", "hit_tokens": 256, "counted_hit_tokens": 0}]).prefix_requests()
    assert (request.expected_hit_tokens, request.counted_hit_tokens, request.cached_tokens) == (256, 0, None)


def test_memory_is_read_from_every_step_that_samples_it() -> None:
    found = Figures.of(records.accepted().steps).memory()
    assert {(sample.step, sample.moment) for sample in found} == {
        (1, ""),
        *((step, moment) for step in (3, 4) for moment in ("before", "after")),
    }
    odd = of(3, memory={"before": {"k3-a": {"gpu_used_mib": [1, None, "x"], "engine_rss_bytes": None}, "k3-b": 4}})
    sample = MemorySample(step=3, moment="before", host="k3-a", gpu_used_mib=(1,), engine_rss_bytes=None)
    assert odd.memory() == (sample,)


def test_looked_for_and_not_found_is_not_absent() -> None:
    figures = of(4, knee=None)
    assert (figures.has(4, "knee"), figures.has(4, "peak"), figures.has(5, "knee")) == (True, False, False)
    assert figures.integer(4, "knee") is None


def test_samples_are_in_time_order() -> None:
    samples = of(6, samples=[{"at_s": 20}, {"at_s": 10, "errors": 0}, {"kv_usage": 0.1}]).samples()
    assert [(sample.at_s, sample.errors) for sample in samples] == [(10, 0), (20, None)]
