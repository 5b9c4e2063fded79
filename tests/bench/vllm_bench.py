"""The same load from `vllm bench serve`, on the same CPU against the same server, run in turn with this client."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.null_server import Phasing
from lab.model import write_model

Measure = Callable[[Phasing, argparse.Namespace], dict[str, Any]]
Server = Callable[[Phasing, int], AbstractContextManager[tuple[str, dict[str, Any]]]]


def compare(options: argparse.Namespace, measure: Measure, null_server: Server) -> None:
    """Run both in turn and print the ratio of the medians.

    What a token costs vLLM's client is the CPU time of its process from the first request that the server read to its
    end: imports and making prompts are left out. Ours is main + post, with making the requests.
    """
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        for _ in range(options.pairs):
            figures = measure(Phasing.ARRIVAL, options)
            ours.append(figures)
            theirs.append(_vllm(options, null_server, Path(folder)))
    cost = [f["cpu_s_per_1000_tokens_main"] + f["cpu_s_per_1000_tokens_post"] for f in ours]
    rows = [
        ("CPU per 1000 tokens, s", cost, [one["per_1000_s"] for one in theirs]),
        (
            "CPU per 1000 tokens, all-in, s",
            [f["cpu_s_per_1000_tokens_all"] for f in ours],
            [t["all_s"] for t in theirs],
        ),
        ("TTFT told for 20 ms, p50, ms", [f["ttft_ms"]["p50"] for f in ours], [t["ttft_p50"] for t in theirs]),
        ("TTFT told for 20 ms, p99, ms", [f["ttft_ms"]["p99"] for f in ours], [t["ttft_p99"] for t in theirs]),
        ("peak memory, MiB", [f["peak_mib"] for f in ours], [t["peak_mib"] for t in theirs]),
    ]
    print(f"against vllm bench serve, tokens spread, medians of {options.pairs} pairs run in turn")
    for name, mine, other in rows:
        first, second = statistics.median(mine), statistics.median(other)
        print(f"  {name:36} {first:10.4f}  vllm {second:10.4f}  ratio {first / second:.3f}")


def _vllm(options: argparse.Namespace, null_server: Server, folder: Path) -> dict[str, float]:
    """Return the figures of one `vllm bench serve`."""
    client_cpu, server_cpu = options.cpus
    with null_server(Phasing.ARRIVAL, server_cpu) as (url, served):
        command = [
            *("taskset", "--cpu-list", str(client_cpu)),
            *(options.vllm, "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
            *("--base-url", url, "--model", "null", "--tokenizer", str(folder / "model"), "--disable-tqdm"),
            *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(options.tokens)),
            *("--num-prompts", str(options.requests), "--max-concurrency", str(options.streams)),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
        ]
        with (
            (folder / "output").open("w+") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env=_env()) as client,
        ):
            samples = list(_cpu_samples(client))
    if client.returncode:
        said = (folder / "output").read_text(encoding="utf-8")[-2000:]
        raise SystemExit(f"{' '.join(command)}: exit {client.returncode}\n{said}")
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    before_s = max(cpu_s for at_s, cpu_s, _ in samples if at_s <= served["first_request_s"])
    _, all_s, peak_mib = samples[-1]
    tokens = options.requests * options.tokens
    return {
        "per_1000_s": 1000 * (all_s - before_s) / tokens,
        "all_s": 1000 * all_s / tokens,
        "ttft_p50": told["median_ttft_ms"],
        "ttft_p99": told["p99_ttft_ms"],
        "peak_mib": peak_mib,
    }


def _cpu_samples(process: subprocess.Popen[bytes]) -> Iterator[tuple[float, float, float]]:
    """Yield (monotonic seconds, CPU seconds, peak memory in MiB) of a process, every 20 ms until it has ended."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    while process.poll() is None:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except OSError:  # it has just ended
            return
        peak_kib = re.search(r"VmHWM:\s+(\d+)", status)  # a process that has ended and is not reaped has none
        if peak_kib:
            yield time.monotonic(), (int(stat[11]) + int(stat[12])) * tick_s, int(peak_kib[1]) / 1024
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)


def _env() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
