"""Counters: both text forms, sums over engines and endpoints, zero against absent, restarts, names by version."""

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_runbook.acceptance.capabilities import Presence, probe
from kimi_runbook.acceptance.geometry import read_geometry
from kimi_runbook.acceptance.http import BadAnswerError, BadStatusError
from kimi_runbook.acceptance.metrics import (
    CACHE_CONFIG,
    DRAFTS,
    HITS,
    KV_USAGE,
    QUERIES,
    Reading,
    delta,
    parse,
    read,
    why_void,
)
from kimi_runbook.acceptance.metrics_data import families
from kimi_runbook.acceptance.plan import Access
from kimi_runbook.acceptance.version import parse_version, within
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


def test_a_value_that_is_no_number_is_absent() -> None:
    broken = PYTHON.replace('engine="1",model_name="m"} 128.0', 'engine="1",model_name="m"} NaN')
    assert reading(broken).total(HITS) is None
    assert reading(broken).highest(HITS) is None
    assert reading(broken).total(HITS, engine="0") == 256
    assert delta(reading(PYTHON), reading(broken), HITS) is None


def test_an_engine_is_a_label_of_one_endpoint() -> None:
    one, two = PYTHON.replace('engine="1"', 'engine="0"'), PYTHON.replace('engine="0"', 'engine="2"')
    running = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0\n'
    assert reading(running).engine_count == 1
    assert reading(running, running.replace('"0"', '"1"')).engine_count == 2
    assert reading(running, running).engine_count == 2
    assert reading(one, two).engine_count == 0


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
        assert seen.expositions[0].openmetrics is openmetrics


def test_metrics_that_cannot_be_read_are_an_error_and_not_zeros() -> None:
    with FakeEngine(Fault.METRICS_500) as engine, pytest.raises(BadStatusError, match="HTTP 500"):
        read([f"{engine.url}/metrics"])
    with FakeEngine(Fault.METRICS_TEXT) as engine, pytest.raises(BadAnswerError, match="not a Prometheus exposition"):
        read([f"{engine.url}/metrics"])


@pytest.mark.parametrize("kind", [TEXT, OPENMETRICS], ids=["text", "openmetrics"])
def test_an_older_name_is_found_under_todays_whatever_the_version(kind: str) -> None:
    old = "# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.25\n" + (
        "# EOF\n" * (kind == OPENMETRICS)
    )
    seen = reading(old, kind=kind)
    assert seen.highest(KV_USAGE) == 0.25
    assert seen.expositions[0].renamed == {KV_USAGE: "vllm:gpu_cache_usage_perc"}


def test_where_both_names_are_written_todays_counts_once() -> None:
    """vLLM 0.10 wrote both (vllm-project/production-stack#617)."""
    both = PYTHON + "# TYPE vllm:gpu_prefix_cache_hits_total counter\nvllm:gpu_prefix_cache_hits_total 999\n"
    assert reading(both).total(HITS) == 384


def test_histogram_buckets_are_left_out_and_the_rest_of_a_histogram_is_kept() -> None:
    histogram = """\
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 2
vllm:e2e_request_latency_seconds_count 2
vllm:e2e_request_latency_seconds_sum 1.5
"""
    for text, kind in ((histogram, TEXT), (histogram + "# EOF\n", OPENMETRICS)):
        samples = reading(text, kind=kind).expositions[0].samples["vllm:e2e_request_latency_seconds"]
        found = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
        assert found == {"bucket": 2, "count": 2, "sum": 1.5}


def test_an_api_key_goes_with_the_request_for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_TEST_KEY", "sk-kimi")
    seen: list[str | None] = []
    with FakeEngine() as engine:
        handler = engine._server.RequestHandlerClass
        do_get = handler.do_GET

        def watched(self: object) -> None:
            seen.append(self.headers.get("Authorization"))  # type: ignore[attr-defined] # a request handler
            do_get(self)

        monkeypatch.setattr(handler, "do_GET", watched)
        read([f"{engine.url}/metrics"], access=Access(api_key_env="KIMI_TEST_KEY"))
        read([f"{engine.url}/metrics"])
    assert seen == ["Bearer sk-kimi", None]


# What vLLM 0.32 declares, by front end, as far as the chain asks.
PYTHON_FAMILIES = "".join(
    f"# TYPE {family.name}{'_total' * counter} {'counter' if counter else 'gauge'}\n"
    for family in families()
    if family.name != DRAFTS
    for counter in ["num_" not in family.name and "perc" not in family.name and "time" not in family.name]
)
RUST_FAMILIES = "".join(
    f"# TYPE {family.name} {'gauge' if 'perc' in family.name or 'num_requests' in family.name else 'counter'}\n"
    for family in families()
    if "rust" in family.front_ends and family.name != DRAFTS
)


def test_every_family_is_there_or_absent_as_expected_on_a_healthy_engine() -> None:
    python = probe(reading(PYTHON_FAMILIES), "0.32.0")
    rust = probe(reading(RUST_FAMILIES + "# EOF\n", kind=OPENMETRICS), "0.33.0")
    absent = {one.family for one in python.families.values() if one.presence is Presence.EXPECTED}
    assert absent == {DRAFTS}
    assert {one.presence for one in python.families.values()} == {Presence.PRESENT, Presence.EXPECTED}
    absent = {one.family for one in rust.families.values() if one.presence is Presence.EXPECTED}
    assert absent == {DRAFTS, CACHE_CONFIG, "process_start_time_seconds"}
    assert rust.lacking(*rust.families) == ()


@pytest.mark.parametrize(
    ("version", "presence", "says"),
    [
        pytest.param("0.32.0", Presence.MISSING, "vLLM 0.32.0 should write it", id="known-version"),
        pytest.param("0.41.2", Presence.MISSING, "vLLM 0.41.2 should write it", id="newer-than-what-was-read"),
        pytest.param("0.12.0", Presence.UNKNOWN, "older than the versions", id="older-than-what-was-read"),
        pytest.param("0.1.dev19262+gb6bbf29dd", Presence.UNKNOWN, "calls its version", id="build-without-a-tag"),
        pytest.param("", Presence.UNKNOWN, "calls its version ''", id="nobody-asked"),
    ],
)
def test_no_data_is_never_read_as_nothing_happened(version: str, presence: Presence, says: str) -> None:
    """After an upgrade a renamed counter is absent: that is told, whatever the version."""
    renamed = PYTHON_FAMILIES.replace("prefix_cache_hits", "prefix_cache_found")
    found = probe(reading(renamed), version)
    hits = found.families[HITS]
    assert (hits.presence, found.families[QUERIES].presence) == (presence, Presence.PRESENT)
    assert says in hits.why
    assert found.lacking(HITS, QUERIES) == (hits,)


def test_a_family_one_endpoint_lacks_is_missing_there() -> None:
    lacking = PYTHON_FAMILIES.replace("# TYPE vllm:kv_cache_usage_perc gauge\n", "")
    found = probe(reading(PYTHON_FAMILIES, lacking), "0.32.0").families[KV_USAGE]
    assert found.presence is Presence.MISSING
    assert found.why.startswith("absent on http://host-1/metrics only; ")


def test_a_family_is_not_missed_in_a_version_that_did_not_write_it_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    later = replace(families()[0], names=(replace(families()[0].names[0], since="0.34"),))
    monkeypatch.setattr("kimi_runbook.acceptance.capabilities.families", lambda: (later,))
    assert probe(reading("# TYPE other gauge\n"), "0.33.0").families[QUERIES].presence is Presence.EXPECTED
    assert probe(reading("# TYPE other gauge\n"), "0.34.0").families[QUERIES].presence is Presence.MISSING


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.33.0", (0, 33, 0)),
        ("v0.32", (0, 32, 0)),
        ("0.33.1.dev5+gabc", (0, 33, 1)),
        ("0.32.0rc1", (0, 32, 0)),
        ("0.1.dev19262+gb6bbf29dd.d20260727", None),
        ("0.32.0, 0.33.0", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_a_version_is_placed_or_not(text: str, release: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == release


def test_a_range_of_versions_includes_both_ends() -> None:
    assert within((0, 32, 7), "0.30", "0.32")
    assert within((0, 30, 0), "0.30", "")
    assert not within((0, 33, 0), "0.30", "0.32")
    assert not within((0, 29, 9), "0.30", "")
    with pytest.raises(ValueError, match="'soon' is no version"):
        within((0, 29, 9), "soon", "")


def test_a_real_page_is_read_whole(project_root: Path) -> None:
    text = (project_root / "tests/data/metrics/vllm_0.32.0_cpu.txt").read_text(encoding="utf-8")
    seen = reading(text)
    found = probe(seen, "0.32.0")
    assert (seen.total(HITS), seen.total(QUERIES)) == (5632, 14_998)
    assert {one.family for one in found.families.values() if one.presence is not Presence.PRESENT} == {DRAFTS}
    geometry = read_geometry(seen, version="0.32.0")
    assert (geometry.block_size, geometry.match_unit, geometry.kv_tokens) == (128, 128, 1_048_576)
    assert (geometry.prefix_caching, geometry.recurrent, geometry.retention, geometry.draft_drop) == (
        *(True, False, "0", False),
    )
    assert why_void(seen, seen) == ""
