"""How late the client reads what had arrived, and what a token costs it: 128 streams of 50 tokens/s from a null server.

    python -m tests.bench.client_lag [--vllm /path/to/vllm --pairs 3]

The client is kept on one CPU and the server on another one. Both phasings are measured: tokens spread over time, and
all in one burst every 20 ms, as the steps of an engine bring them. Exits 0 when the client holds its bar, 1 when it
read too late in either phasing, 3 when the server was late or others had the client's CPU, so that the run says
nothing. docs/performance.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.null_server import Phasing
from tests.bench.vllm_bench import compare

SERVER_LATE_MS = {Phasing.ARRIVAL: 1.0, Phasing.STEP: 2.0}
"""Own lateness (p99) of the server above which a run is void: in bursts it is the time to write 128 events."""

KEPT_OFF_PERCENT = 2.0
"""Share of the time in which other processes had the client's CPU, above which a late run is void: kept off for 2 % of
the time, a client cannot read 99 % of the tokens in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure with what is asked of it: the bar has to be held, the aim is what has been shown to be possible."""

    name: str
    value: float
    unit: str
    bar: float
    aim: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        """Whether the bar is held."""
        return self.value >= self.bar if self.at_least else self.value < self.bar

    def line(self) -> str:
        """Return the measure as a line of the table."""
        sign = ">=" if self.at_least else "<"
        mark = "" if self.held else "  over the bar" if not self.at_least else "  below the bar"
        return f"  {self.name:44} {self.value:>9.3f} {self.unit:6} {sign:>2} {self.bar:g} (aim {self.aim:g}){mark}"


def measures(figures: Mapping[str, Any]) -> list[Measure]:
    """Return what is asked of a run, the deciding one first."""
    lag, off = figures["lag_by_server_ms"], figures["ttft_off_ms"]
    return [
        Measure(name="lag p99, by the server's stamps", value=lag["p99"], unit="ms", bar=5, aim=2),
        Measure(name="lag p99.9", value=lag["p99.9"], unit="ms", bar=10, aim=3),
        Measure(name="TTFT told minus true, p50", value=off["p50"], unit="ms", bar=2, aim=1),
        Measure(name="TTFT told minus true, p99", value=off["p99"], unit="ms", bar=10, aim=2),
        Measure(name="load held", value=figures["held_percent"], unit="%", bar=99.5, aim=99.9, at_least=True),
        Measure(
            name="process start to first request", value=figures["start_to_first_request_s"], unit="s", bar=1, aim=0.3
        ),
        Measure(name="memory (PSS)", value=figures["pss_mib"], unit="MiB", bar=120, aim=60),
    ]


@contextmanager
def null_server(phasing: Phasing, cpu: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a null server; gives its URL, and a dict that holds its report afterwards."""
    command = [sys.executable, "-m", "kimi_runbook.acceptance.null_server", "--phasing", phasing, "--cpu", str(cpu)]
    report: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None:
                raise RuntimeError("the server has no output")
            yield json.loads(server.stdout.readline())["url"], report
            server.terminate()
            report.update(json.loads(server.stdout.readline()))
        finally:
            server.terminate()


def measure(phasing: Phasing, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run of the client, with the server's own report."""
    client_cpu, server_cpu = options.cpus
    with null_server(phasing, server_cpu) as (url, report):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.bench.measured_client", url, "--cpu", str(client_cpu)),
                *("--streams", str(options.streams), "--requests", str(options.requests)),
                *("--tokens", str(options.tokens)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return {**json.loads(done.stdout), "server": report}


def why_void(phasing: Phasing, figures: Mapping[str, Any]) -> str:
    """Return why a run says nothing of the client; empty when it does."""
    late_ms = figures["server"]["late_ms"]["p99"]
    if late_ms > SERVER_LATE_MS[phasing]:
        return f"the server was late itself: p99 {late_ms:.2f} ms, at most {SERVER_LATE_MS[phasing]:g} ms allowed"
    if figures["failed"]:
        return f"{figures['failed']} requests failed: {figures['first_error']}"
    kept_off = figures["waited_for_cpu_percent"]
    if kept_off > KEPT_OFF_PERCENT and not measures(figures)[0].held:
        return f"other processes had the client's CPU for {kept_off:.1f} % of the time"
    return ""


def tell(phasing: Phasing, figures: Mapping[str, Any], streams: int) -> int:
    """Print a run; returns its exit code."""
    void, asked, late = why_void(phasing, figures), measures(figures), figures["server"]["late_ms"]
    own, lag = figures["lag_by_client_ms"], figures["lag_by_server_ms"]
    main, post = (figures[f"cpu_s_per_1000_tokens_{phase}"] for phase in ("main", "post"))
    print(f"{phasing}: {streams} streams, {figures['tokens']} tokens in {figures['wall_s']:.1f} s")
    for one in asked:
        print(one.line())
    print(f"  lag p50 / p99 / p99.9 / max, by the server         {_row(lag, 'p50', 'p99', 'p99.9', 'p100')} ms")
    print(f"  lag p50 / p99 / max, as the client tells ({figures['lag_source']})  {_row(own, 'p50', 'p99', 'p100')} ms")
    print(f"  CPU per 1000 tokens, main + post (all-in)          {main:.4f} + {post:.4f} s", end="")
    print(f" ({figures['cpu_s_per_1000_tokens_all']:.4f} s)")
    print(f"  place free to request sent, p50 / p99              {_row(figures['dispatch_ms'], 'p50', 'p99')} ms")
    print(f"  server's own lateness p50 / p99 / p99.9            {_row(late, 'p50', 'p99', 'p99.9')} ms")
    print(f"  other processes had the client's CPU for           {figures['waited_for_cpu_percent']:.1f} % of the time")
    if void:
        print(f"  void: {void}; repeat on a quiet machine")
        return 3
    return 0 if asked[0].held else 1


def _row(values: Mapping[str, float], *names: str) -> str:
    return " / ".join(f"{values[name]:.2f}" for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both phasings, then compare if asked to; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.client_lag", description=__doc__)
    parser.add_argument("--streams", type=int, default=128, help="requests in flight (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="requests in all (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per request (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    parser.add_argument("--vllm", metavar="EXECUTABLE", help="compare with this vllm's `bench serve`")
    parser.add_argument(
        "--pairs", type=int, default=3, help="alternating runs of the comparison (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    cpus = sorted(os.sched_getaffinity(0))
    options.cpus = (cpus[0], cpus[-1])
    if len(cpus) == 1:
        print("One CPU only: client and server share it, and the lag is that of both.", file=sys.stderr)
    results = {phasing: measure(phasing, options) for phasing in Phasing}
    if options.json:
        print(json.dumps(results))
        codes = [3 if why_void(p, r) else int(not measures(r)[0].held) for p, r in results.items()]
    else:
        codes = [tell(phasing, figures, options.streams) for phasing, figures in results.items()]
    if options.vllm:
        compare(options, measure, null_server)
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
