"""Counters: both text forms, sums over engines and endpoints, zero against absent, restarts."""

import pytest

from kimi_runbook.acceptance.geometry import UnknownGeometryError, read_geometry
from kimi_runbook.acceptance.http import BadAnswerError, BadStatusError
from kimi_runbook.acceptance.metrics import HITS, QUERIES, Reading, delta, parse, read, why_void
from tests.faults.engine.fake_engine import FakeEngine, Fault

TEXT = "text/plain; version=1.0.0; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# vLLM 0.32 on CPU, 2026-11-30, shortened
PYTHON = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79605037508e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 256.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 128.0
# TYPE vllm:prefix_cache_hits_created gauge
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7960504114126136e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0",mamba_cache_mode="none",\
num_gpu_blocks="4096",prefix_cache_retention_interval="0"} 1.0
"""
# the Rust front end's form: a labelled family has no sample before its first use
RUST = """\
# TYPE vllm:prefix_cache_hits counter
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 19
# EOF
"""


def reading(*texts: str, kind: str = TEXT) -> Reading:
    return Reading(expositions=tuple(parse(f"http://host-{n}/metrics", text, kind) for n, text in enumerate(texts)))


def test_a_counter_is_summed_over_engines_and_endpoints() -> None:
    assert reading(PYTHON).total(HITS) == 384
    assert reading(PYTHON, PYTHON).total(HITS) == 768
    assert reading(PYTHON).total(HITS, engine="1") == 128


def test_declared_without_a_sample_is_zero_and_undeclared_is_absent() -> None:
    rust = reading(RUST, kind=OPENMETRICS)
    assert rust.total(HITS) == 0
    assert rust.total("vllm:num_preemptions") is None


def test_a_family_one_endpoint_lacks_is_absent_since_the_sum_would_be_partial() -> None:
    assert reading(PYTHON, "# TYPE other gauge\nother 1\n").total(HITS) is None


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        pytest.param(PYTHON, PYTHON.replace(" 256.0", " 300.0"), "", id="counter-grew"),
        pytest.param(PYTHON, PYTHON.replace(" 256.0", " 10.0"), "fell from 256 to 10", id="counter-fell"),
        pytest.param(
            PYTHON,
            PYTHON.replace("1.79605037508e+09", "1.79605039999e+09"),
            "process_start_time_seconds",
            id="start-time-changed",
        ),
        pytest.param(
            PYTHON, PYTHON.replace("1.7960504114126136e+09", "1.7960509e+09"), "created anew", id="created-changed"
        ),
        pytest.param(
            PYTHON, PYTHON.replace('hits_total{engine="1"', 'hits_total{engine="2"'), "not after it", id="series-gone"
        ),
    ],
)
def test_restart_voids_a_window(before: str, after: str, why: str) -> None:
    told = why_void(reading(before), reading(after))
    assert why in told if why else told == ""


def test_delta_of_an_absent_counter_is_unknown_not_zero() -> None:
    assert delta(reading(PYTHON), reading(PYTHON), QUERIES) is None
    assert delta(reading(PYTHON), reading(PYTHON), HITS) == 0


def test_both_front_ends_are_read_over_http() -> None:
    for openmetrics in (False, True):
        with FakeEngine(openmetrics=openmetrics) as engine:
            seen = read([f"{engine.url}/metrics"])
        assert seen.total(HITS) == 0
        assert seen.total(QUERIES) == 0
        assert read_geometry(seen).block_size == 64


def test_metrics_that_cannot_be_read_are_an_error_and_not_zeros() -> None:
    with FakeEngine(Fault.METRICS_500) as engine, pytest.raises(BadStatusError, match="HTTP 500"):
        read([f"{engine.url}/metrics"])
    with FakeEngine(Fault.METRICS_TEXT) as engine, pytest.raises(BadAnswerError, match="not a Prometheus exposition"):
        read([f"{engine.url}/metrics"])


def test_geometry_is_read_from_the_engine() -> None:
    found = read_geometry(reading(PYTHON))
    assert (found.block_size, found.num_gpu_blocks, found.prefix_caching, found.recurrent) == (128, 4096, True, False)
    assert found.retention == "0"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(RUST.replace("# EOF\n", ""), "absent", id="rust-front-end"),
        pytest.param(PYTHON.replace('block_size="128"', 'block_size="None"'), "block_size='None'", id="no-number"),
        pytest.param(PYTHON.replace('caching="True"', 'caching="?"'), "enable_prefix_caching='[?]'", id="no-flag"),
    ],
)
def test_geometry_that_is_unknown_is_not_guessed(text: str, why: str) -> None:
    with pytest.raises(UnknownGeometryError, match=why):
        read_geometry(reading(text))


def test_engines_that_disagree_have_no_geometry() -> None:
    with pytest.raises(UnknownGeometryError, match="disagree on block_size"):
        read_geometry(reading(PYTHON, PYTHON.replace('block_size="128"', 'block_size="64"')))
