"""Steps' figures, read back as values. A figure that is missing, null or of another form is None, never 0.

Figures are written by the steps and kept as plain JSON in a record, so what reads them has to live with a step that was
not run and with a record of another version. Keys and units are those of data/record.schema.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_runbook.acceptance.result import StepResult

QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99"}
"""Names of quantiles in figures, and the quantile they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """One request of step 3: what the cache owed it and what the witnesses say it got, in tokens; times in seconds."""

    label: str
    family: str
    sighting: int | None
    prompt_tokens: int | None
    expected_hit_tokens: int | None
    counted_hit_tokens: int | None
    counted_query_tokens: int | None
    cached_tokens: int | None
    first_token_s: float | None
    total_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rung of step 4's ladder: so many requests in flight at once. Times in seconds, KV usage as a share of 1."""

    concurrency: int
    requests: int | None
    complete: int | None
    failed: int | None
    wall_s: float | None
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    itl_s: Mapping[str, float]
    e2e_s: Mapping[str, float]
    output_tokens_per_s: float | None
    kv_usage_peak: float | None
    running_peak: float | None
    waiting_peak: float | None
    preemptions: float | None
    client_lag_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of step 6. ``at_s`` counts from its start; hits, queries and errors are totals since then."""

    at_s: float
    kv_usage: float | None
    running: float | None
    waiting: float | None
    ttft_s: float | None
    hit_tokens: float | None
    query_tokens: float | None
    errors: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """A node's memory at one moment of the chain: MiB used per GPU, resident bytes of the engine's process."""

    step: int
    moment: str
    host: str
    gpu_used_mib: tuple[int, ...]
    engine_rss_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Time to the first token without and with hits, in seconds; the ratio is warm over cold, with its interval.

    ``coverage`` is the share of such intervals that hold the true ratio, 0 to 1.
    """

    cold_median_s: float | None = None
    warm_median_s: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    coverage: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run's steps.

    Attributes:
        steps: Results by step number; a step that was not planned is not there.
    """

    steps: Mapping[int, StepResult] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[StepResult]) -> Figures:
        """Return the figures of these steps."""
        return cls({step.step: step for step in steps})

    def raw(self, step: int, key: str) -> Any:
        """Return a figure as it is, or None."""
        return self.steps[step].figures.get(key) if step in self.steps else None

    def has(self, step: int, key: str) -> bool:
        """Return whether the step wrote the figure, a null included: "looked for and not found" differs from absent."""
        return step in self.steps and key in self.steps[step].figures

    def number(self, step: int, key: str) -> float | None:
        """Return a finite number, or None."""
        return number(self.raw(step, key))

    def integer(self, step: int, key: str) -> int | None:
        """Return a whole number, or None."""
        return integer(self.raw(step, key))

    def rows(self, step: int, key: str) -> tuple[Mapping[str, Any], ...]:
        """Return a figure that is a list of mappings; anything else in it is left out."""
        value = self.raw(step, key)
        found = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
        return tuple(row for row in found if isinstance(row, Mapping))

    def mapping(self, step: int, key: str) -> Mapping[str, Any]:
        """Return a figure that is a mapping; empty when it is none."""
        value = self.raw(step, key)
        return value if isinstance(value, Mapping) else {}

    def prefix_requests(self) -> tuple[PrefixRequest, ...]:
        """Return step 3's requests in the order they were sent."""
        return tuple(
            PrefixRequest(
                label=str(row.get("label", "?")),
                family=str(row.get("family") or ""),
                sighting=integer(row.get("sighting")),
                prompt_tokens=integer(row.get("prompt_tokens")),
                expected_hit_tokens=integer(
                    row.get("expected_hit_tokens", row.get("hit_tokens"))
                ),  # hit_tokens: schema 1
                counted_hit_tokens=integer(row.get("counted_hit_tokens")),
                counted_query_tokens=integer(row.get("counted_query_tokens")),
                cached_tokens=integer(row.get("cached_tokens")),
                first_token_s=number(row.get("first_token_s")),
                total_s=number(row.get("total_s")),
            )
            for row in self.rows(3, "requests")
        )

    def first_token(self) -> FirstToken:
        """Return step 3's comparison of first-token times."""
        value = self.mapping(3, "first_token_ratio")
        return FirstToken(**{name: number(value.get(name)) for name in FirstToken.__dataclass_fields__})

    def ladder(self) -> tuple[Rung, ...]:
        """Return step 4's rungs by rising concurrency; a row without a concurrency is left out."""
        rungs = [
            _rung(concurrency, row)
            for row in self.rows(4, "ladder")
            if (concurrency := integer(row.get("concurrency"))) is not None
        ]
        return tuple(sorted(rungs, key=lambda rung: rung.concurrency))

    def samples(self) -> tuple[Sample, ...]:
        """Return step 6's samples in time order."""
        names = [name for name in Sample.__dataclass_fields__ if name != "at_s"]
        found = [
            Sample(at_s=at_s, **{name: number(row.get(name)) for name in names})
            for row in self.rows(6, "samples")
            if (at_s := number(row.get("at_s"))) is not None
        ]
        return tuple(sorted(found, key=lambda sample: sample.at_s))

    def memory(self) -> tuple[MemorySample, ...]:
        """Return every memory sample of the run: step 1 once, steps 3, 4 and 6 before and after."""
        found: list[MemorySample] = []
        for step in (1, 3, 4, 6):
            value = self.mapping(step, "memory")
            moments = {"": value} if step == 1 else {str(moment): hosts for moment, hosts in value.items()}
            for moment, hosts in moments.items():
                for host, sample in hosts.items() if isinstance(hosts, Mapping) else ():
                    if isinstance(sample, Mapping):
                        found.append(_memory(step, moment, str(host), sample))
        return tuple(found)


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else; true is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def integer(value: object) -> int | None:
    """Return a whole number, 4.0 included, or None for anything else."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def quantiles(value: object) -> dict[str, float]:
    """Return the quantiles of a figure such as ``ttft_s`` by name, those that are numbers."""
    table = value if isinstance(value, Mapping) else {}
    return {name: found for name in QUANTILES if (found := number(table.get(name))) is not None}


def _rung(concurrency: int, row: Mapping[str, Any]) -> Rung:
    return Rung(
        concurrency=concurrency,
        requests=integer(row.get("requests")),
        complete=integer(row.get("complete")),
        failed=integer(row.get("failed")),
        wall_s=number(row.get("wall_s")),
        ttft_s=quantiles(row.get("ttft_s")),
        tpot_s=quantiles(row.get("tpot_s")),
        itl_s=quantiles(row.get("itl_s")),
        e2e_s=quantiles(row.get("e2e_s")),
        output_tokens_per_s=number(row.get("output_tokens_per_s")),
        kv_usage_peak=number(row.get("kv_usage_peak")),
        running_peak=number(row.get("running_peak")),
        waiting_peak=number(row.get("waiting_peak")),
        preemptions=number(row.get("preemptions")),
        client_lag_p99_s=number(row.get("client_lag_p99_s")),
    )


def _memory(step: int, moment: str, host: str, sample: Mapping[str, Any]) -> MemorySample:
    used = sample.get("gpu_used_mib")
    per_gpu = [integer(value) for value in used] if isinstance(used, Sequence) and not isinstance(used, str) else []
    return MemorySample(
        step=step,
        moment=moment,
        host=host,
        gpu_used_mib=tuple(value for value in per_gpu if value is not None),
        engine_rss_bytes=integer(sample.get("engine_rss_bytes")),
    )
