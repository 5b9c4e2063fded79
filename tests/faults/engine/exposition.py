"""The fake engine's /metrics, in vLLM's names, as Prometheus text or OpenMetrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What an engine shows besides its counters.

    Attributes:
        started: Start time, seconds of the epoch.
        running, waiting: Requests.
        kv_usage: Share of the KV cache in use, 0 to 1.
        cache_config: Labels of ``vllm:cache_config_info``; empty for none, as with the Rust front end.
        second_engine: Whether a second engine reports too.
    """

    started: float
    running: int
    waiting: int
    kv_usage: float
    cache_config: Mapping[str, str] = field(default_factory=dict)
    second_engine: bool = False


# counter of the engine -> family and further labels
_COUNTERS = {
    "queries": ("vllm:prefix_cache_queries", ""),
    "hits": ("vllm:prefix_cache_hits", ""),
    "preemptions": ("vllm:num_preemptions", ""),
    "prompt_tokens": ("vllm:prompt_tokens", ""),
    "generation_tokens": ("vllm:generation_tokens", ""),
    "length": ("vllm:request_success", ',finished_reason="length"'),
    "stop": ("vllm:request_success", ',finished_reason="stop"'),
    "abort": ("vllm:request_success", ',finished_reason="abort"'),
    "error": ("vllm:request_success", ',finished_reason="error"'),
}


_LAZY = ("hits", "length", "stop", "abort", "error")


def text(counters: Mapping[str, int], gauges: Gauges, *, model: str, openmetrics: bool) -> str:
    """Return the whole page. OpenMetrics leaves some counters out until their first use, as vLLM's Rust one does."""
    labels = f'engine="0",model_name="{model}"'
    suffix = "" if openmetrics else "_total"
    lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {gauges.started}"]
    declared: set[str] = set()
    for name, (family, more) in _COUNTERS.items():
        if family not in declared:
            lines.append(f"# TYPE {family}{suffix} counter")
            declared.add(family)
        if counters[name] or name not in _LAZY or not openmetrics:
            lines.append(f"{family}_total{{{labels}{more}}} {counters[name]}")
        if gauges.second_engine and name == "queries":
            second = labels.replace('engine="0"', 'engine="1"')
            lines.append(f"{family}_total{{{second}}} 0")
    for family, value in (
        ("vllm:num_requests_running", gauges.running),
        ("vllm:num_requests_waiting", gauges.waiting),
        ("vllm:kv_cache_usage_perc", gauges.kv_usage),
    ):
        lines += [f"# TYPE {family} gauge", f"{family}{{{labels}}} {value}"]
    if gauges.cache_config:
        told = ",".join(f'{name}="{value}"' for name, value in sorted(gauges.cache_config.items()))
        lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{engine="0",{told}}} 1.0']
    return "\n".join([*lines, *(["# EOF"] if openmetrics else [])]) + "\n"
