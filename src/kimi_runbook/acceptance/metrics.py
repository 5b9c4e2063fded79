"""The engine's counters: read from every endpoint, summed over engines, with zero and absent kept apart.

A family that is declared (``# TYPE``) and has no sample is 0; one that is not declared is absent (None). vLLM's Rust
front end declares labelled families before their first sample, the Python one writes all series at 0 from the start.
A family an older vLLM calls by another name is found under today's (data/metrics.yml); what an absence means for the
version at hand is in capabilities.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kimi_runbook.acceptance.http import BadAnswerError, BadStatusError, fetch, longest_s
from kimi_runbook.acceptance.metrics_data import older_names
from kimi_runbook.acceptance.plan import Access

HITS = "vllm:prefix_cache_hits"
QUERIES = "vllm:prefix_cache_queries"
KV_USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions"
FINISHED = "vllm:request_success"
CACHE_CONFIG = "vllm:cache_config_info"
DRAFTS = "vllm:spec_decode_num_drafts"
_START = "process_start_time_seconds"

_DIRECT = Access()

_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One series' value, its labels sorted."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    """What one endpoint said at one moment.

    Attributes:
        url: The endpoint.
        types: Declared families and their types; a counter's name has no ``_total``.
        samples: By family name. Counters hold their totals, other families their plain samples.
        created: ``_created`` stamps by series, where the endpoint writes them.
        openmetrics: Whether it was written as OpenMetrics.
        renamed: Families found under an older name, by the name they have here.
    """

    url: str
    types: Mapping[str, str]
    samples: Mapping[str, tuple[Sample, ...]]
    created: Mapping[_Key, float]
    openmetrics: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Every endpoint of an engine, read one after the other."""

    expositions: tuple[Exposition, ...]

    def total(self, family: str, **labels: str) -> float | None:
        """Return the family's sum over all engines and endpoints, or None when an endpoint does not declare it.

        One endpoint without the family makes the sum a partial picture that looks healthy, so it counts as absent, and
        so does a value that is no number (NaN).
        """
        if not all(family in exposition.types for exposition in self.expositions):
            return None
        wanted = set(labels.items())
        return _number(
            sum(
                sample.value
                for exposition in self.expositions
                for sample in exposition.samples.get(family, ())
                if wanted <= set(sample.labels)
            )
        )

    def highest(self, family: str) -> float | None:
        """Return the family's highest sample over all engines (0 when declared without one), or None when absent."""
        if not all(family in exposition.types for exposition in self.expositions):
            return None
        values = [sample.value for exposition in self.expositions for sample in exposition.samples.get(family, ())]
        return None if None in map(_number, values) else max(values, default=0.0)

    def label_sets(self, family: str) -> list[dict[str, str]]:
        """Return the labels of each of the family's samples; empty when there are none."""
        return [dict(s.labels) for exposition in self.expositions for s in exposition.samples.get(family, ())]

    def engines(self, family: str = QUERIES) -> frozenset[tuple[str, str]]:
        """Return (endpoint, engine label) of every engine that reports the family."""
        return frozenset(
            (exposition.url, dict(sample.labels).get("engine", ""))
            for exposition in self.expositions
            for sample in exposition.samples.get(family, ())
        )

    @property
    def engine_count(self) -> int:
        """How many engines report: engine labels by endpoint.

        The API servers of one deployment number their engines through, so one label on two endpoints is two replicas,
        each with a cache of its own, or one page read twice; neither is one engine.
        """
        return len(frozenset().union(*(self.engines(family) for family in (QUERIES, RUNNING, KV_USAGE))))


def parse(url: str, text: str, content_type: str) -> Exposition:
    """Return the exposition in a scrape's text; raises ValueError when it is neither Prometheus text nor OpenMetrics.

    Args:
        url: Where the text came from.
        text: The body.
        content_type: The answer's content type, which says which of the two formats it is.
    """
    openmetrics = "application/openmetrics-text" in content_type
    reader = parse_openmetrics if openmetrics else parse_text
    types: dict[str, str] = {}
    samples: dict[str, tuple[Sample, ...]] = {}
    created: dict[_Key, float] = {}
    for family in reader(_without_buckets(text)):
        if family.name.endswith("_created") and family.type == "gauge":
            base = family.name.removesuffix("_created")
            created |= {(base, _labels(item.labels)): item.value for item in family.samples}
            continue
        # OpenMetrics drops the suffix of an info family's name, the text format keeps it: one name for both.
        name = f"{family.name}_info" if family.type == "info" else family.name
        types[name] = family.type
        samples[name] = tuple(_values(family))
        created |= {
            (family.name, _labels(item.labels)): item.value
            for item in family.samples
            if item.name == f"{family.name}_created"
        }
    older = {name: now for name, now in older_names().items() if name in types and now not in types}
    return Exposition(
        url=url,
        types={older.get(name, name): kind for name, kind in types.items()},
        samples={older.get(name, name): found for name, found in samples.items()},
        created={(older.get(name, name), labels): stamp for (name, labels), stamp in created.items()},
        openmetrics=openmetrics,
        renamed={now: name for name, now in older.items()},
    )


def read(urls: Sequence[str], *, timeout_s: float | None = None, access: Access = _DIRECT) -> Reading:
    """Read every endpoint.

    Args:
        urls: The metrics of every API server of one engine.
        timeout_s: Seconds for each of them; None: as in data/client.yml.
        access: How they are reached: API key, certificates, proxy.

    Raises:
        EngineError: When an endpoint does not answer, answers outside 2xx, or writes something else than metrics.
    """
    expositions, timeout_s = [], timeout_s or longest_s("metrics_s")
    for url in urls:
        response = fetch("GET", url, timeout_s=timeout_s, access=access)
        if not 200 <= response.status < 300:
            raise BadStatusError(f"GET {url}", response.status, response.body)
        try:
            text = response.body.decode("utf-8")
            expositions.append(parse(url, text, response.headers.get("content-type", "")))
        except ValueError as error:
            raise BadAnswerError(f"GET {url}", f"is not a Prometheus exposition ({error})") from error
    return Reading(expositions=tuple(expositions))


def delta(before: Reading, after: Reading, family: str, **labels: str) -> float | None:
    """Return how far a counter moved between two readings, or None when it is absent in either."""
    first, last = before.total(family, **labels), after.total(family, **labels)
    return None if first is None or last is None else last - first


def why_void(before: Reading, after: Reading) -> str:
    """Return why nothing can be concluded from the window between two readings; empty when it holds.

    A restart shows as a counter that went down, a series that vanished, or a changed start time. The first two always
    work; the start times (``process_start_time_seconds``, ``_created``) are missing with several API servers.
    """
    for first, last in zip(before.expositions, after.expositions, strict=True):
        started = [_single(exposition, _START) for exposition in (first, last)]
        if None not in started and started[0] != started[1]:
            return f"{first.url}: process_start_time_seconds went from {started[0]:.2f} to {started[1]:.2f}"
        for family, kind in first.types.items():
            if kind != "counter":
                continue
            now = {sample.labels: sample.value for sample in last.samples.get(family, ())}
            for sample in first.samples.get(family, ()):
                if sample.labels not in now:
                    return f"{first.url}: {family}{dict(sample.labels)} was there before the window and not after it"
                if now[sample.labels] < sample.value:
                    return f"{first.url}: {family} fell from {sample.value:g} to {now[sample.labels]:g}"
        for key, stamp in first.created.items():
            if key in last.created and last.created[key] != stamp:
                return f"{first.url}: {key[0]} was created anew inside the window"
    return ""


def _without_buckets(text: str) -> str:
    """Return the text without histogram buckets: nine lines of ten in vLLM's page, and no step asks for one.

    The last bucket of each stays, since OpenMetrics does not hold together without it.
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "_bucket{" not in line or 'le="+Inf"' in line or line.startswith("#"))


def _values(family: Metric) -> list[Sample]:
    wanted = f"{family.name}_total" if family.type == "counter" else None
    return [
        Sample(name=item.name, labels=_labels(item.labels), value=item.value)
        for item in family.samples
        if wanted is None or item.name == wanted
    ]


def _number(value: float) -> float | None:
    """Return the value, or None for one nothing can be computed with."""
    return value if math.isfinite(value) else None


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _single(exposition: Exposition, family: str) -> float | None:
    samples = exposition.samples.get(family, ())
    return samples[0].value if len(samples) == 1 else None
