"""The client under measurement, in a process of its own: one load against a null server, figures as one JSON line.

Run by client_lag.py. Here so that start-up, CPU seconds and memory are the client's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.client import EngineClient, Load, PlannedRequest
from kimi_runbook.acceptance.load import percentile
from kimi_runbook.acceptance.streaming.driver import Run

_NS = 1_000_000_000
_STAMPS = b'"system_fingerprint":"'
_STAMPS_SIZE = 41  # two numbers of 20 digits and a hyphen


def main() -> int:
    """Send the load, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--cpu", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.cpu})
    message = {"role": "user", "content": "Name three things that are checked before a service goes live. " * 4}
    body = {"model": "null", "messages": [message], "max_tokens": options.tokens, "temperature": 0}
    planned = [
        PlannedRequest(label=str(number), path="/v1/chat/completions", body=body) for number in range(options.requests)
    ]
    client = EngineClient(options.url, timeout_s=120)
    waited_s, cpu_s = _waited_for_cpu_s(), time.process_time()
    run = client.send(planned, concurrency=options.streams)
    main_cpu_s, waited_s = time.process_time() - cpu_s, _waited_for_cpu_s() - waited_s
    load = client.read(planned, run)
    post_cpu_s = time.process_time() - cpu_s - main_cpu_s
    pss_mib, all_cpu_s = _pss_mib(), time.process_time()
    figures = {
        "start_to_first_request_s": round(_age_s() - (time.monotonic_ns() - run.started_ns) / _NS, 3),
        "pss_mib": round(pss_mib, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "waited_for_cpu_percent": round(100 * waited_s / load.wall_s, 2),
        **_figures(run, load, options.streams),
    }
    tokens = figures["tokens"]
    for name, seconds in (("main", main_cpu_s), ("post", post_cpu_s), ("all", all_cpu_s)):
        figures[f"cpu_s_per_1000_tokens_{name}"] = round(1000 * seconds / tokens, 5) if tokens else None
    print(json.dumps(figures))
    return 0


def _figures(run: Run, load: Load, streams: int) -> dict[str, Any]:
    """Return what the server's stamps say of the client's, and the client of itself."""
    lag_ns: list[int] = []
    ttft_off_s: list[float] = []
    first_token_s: list[float] = []
    served_ns = 0
    for exchange, outcome in zip(run.exchanges, load.outcomes, strict=True):
        if outcome.answer is None or outcome.answer.first_token_s is None:
            continue
        stamps = [
            (event.read[0], *map(int, event.data[at : at + _STAMPS_SIZE].split(b"-")))
            for event in exchange.events()
            if (at := event.data.find(_STAMPS) + len(_STAMPS)) >= len(_STAMPS)
        ]
        lag_ns += [read_ns - sent_ns for read_ns, _, sent_ns in stamps]
        _, received_ns, first_sent_ns = stamps[0]
        first_token_s.append(outcome.answer.first_token_s)
        ttft_off_s.append(outcome.answer.first_token_s - (first_sent_ns - received_ns) / _NS)
        served_ns += stamps[-1][2] - received_ns
    usages = [outcome.answer.usage for outcome in load.outcomes if outcome.answer]
    dispatch_s = [outcome.sent_s - outcome.intended_s for outcome in load.outcomes]
    return {
        "tokens": sum(usage.completion_tokens for usage in usages if usage),
        "failed": sum(outcome.error is not None for outcome in load.outcomes),
        "first_error": next((str(outcome.error) for outcome in load.outcomes if outcome.error), ""),
        "wall_s": round(load.wall_s, 3),
        "most_in_flight": load.most_in_flight,
        "held_percent": round(100 * served_ns / _NS / (streams * load.wall_s), 2),
        "lag_by_server_ms": _percentiles_ms((value / _NS for value in lag_ns), 50, 99, 99.9, 100),
        "lag_by_client_ms": {
            "p50": round(load.lag.p50_s * 1000, 3),
            "p99": round(load.lag.p99_s * 1000, 3),
            "p100": round(load.lag.max_s * 1000, 3),
        },
        "lag_source": load.lag.source,
        "ttft_off_ms": _percentiles_ms(ttft_off_s, 50, 99),
        "ttft_ms": _percentiles_ms(first_token_s, 50, 99),
        "dispatch_ms": _percentiles_ms(dispatch_s, 50, 99),
    }


def _percentiles_ms(seconds: Iterable[float], *percents: float) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{percent:g}": round(percentile(ordered, percent) * 1000, 3) for percent in percents}


def _age_s() -> float:
    """Return the seconds since this process was started (proc_pid_stat(5), field 22), in steps of 10 ms."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _waited_for_cpu_s() -> float:
    """Return the seconds this thread was ready to run and another one had the CPU (schedstat, second number)."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / _NS


def _pss_mib() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
