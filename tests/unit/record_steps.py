"""Results of steps made for tests: the keys of real ones, every figure invented. For tests/unit/records.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import Check, State, StepResult, verify

ADDRESSES = {"k3-01": "192.0.2.11", "k3-02": "192.0.2.12"}
GPUS = 8
BLOCK = 768
UNIT = 128
NOMINAL = 32
KNEE = 48
PEAK = 64
DIGEST = "sha256:" + "5f" * 32
REPOSITORY = "mirror.example:5000/vllm/vllm-openai"


def host_step(hosts: Sequence[str]) -> StepResult:
    """Step 0: every node as locked."""
    checks = []
    for name in hosts:
        checks += [
            _pass(f"{name}.driver-loaded", "driver 580.178.04 is loaded", "580.178.04 (lock)"),
            _pass(f"{name}.findings", "0 findings above warn", "none"),
            _pass(f"{name}.image-digest", f"the container runs {REPOSITORY}@{DIGEST}", f"{REPOSITORY}@{DIGEST} (lock)"),
            _pass(f"{name}.arguments", "35 arguments as launched", "the launch's"),
            _pass(f"{name}.environment", "14 variables as launched", "the launch's"),
            _pass(f"{name}.own-address", f"VLLM_HOST_IP={ADDRESSES[name]}", f"{ADDRESSES[name]} (inventory)"),
            _pass(f"{name}.inside/etc/nccl.conf", "sha256 e88d33148d99 in the container", "sha256 e88d33148d99"),
        ]
    models = "; ".join(f"{name}: {GPUS} x NVIDIA B300" for name in hosts)
    checks.append(_pass("same-topology", models, "the same GPUs on every node"))
    return StepResult.of(0, STEP_NAMES[0], checks, {"hosts": len(hosts), "wall_s": 6.2, "in_flight_s": 0.0})


def start_step(hosts: Sequence[str]) -> StepResult:
    """Step 1: ready on every node, started once."""
    checks = [_pass("health", "HTTP 200", "200"), _pass("version", "0.33.0", "0.33.0 (lock)")]
    for name in hosts:
        checks += [
            _pass(f"{name}.running", "running, 0 restarts", "running, 0 restarts"),
            _pass(f"{name}.unit-restarts", "kimi-engine.service was restarted 0 times by systemd", "0"),
            _pass(f"{name}.no-fatal-line", "no fatal line", "no fatal line (data/engine_log.yml)"),
        ]
    checks.append(_pass(f"{hosts[0]}.ready-line", "ready line seen", "a ready line on the head"))
    phases = {"arguments": 7.9, "rendezvous": 31.4, "weights_begin": 48.0, "weights_end": 903.7, "kv_cache": 921.2}
    head = phases | {"graphs": 1004.8, "engine_done": 1011.3, "api": 1012.0, "ready": 1012.4}
    figures = {
        "phases_s": {name: head if n == 0 else phases for n, name in enumerate(hosts)},
        "memory": _memory(hosts, 238_100, 41.2),
        "wall_s": 3.1,
        "in_flight_s": 0.0,
    }
    return StepResult.of(1, STEP_NAMES[1], checks, figures)


def short_request_step(*, cut: bool = False) -> StepResult:
    """Step 2: the API as promised, or with its streams cut."""
    stream = verify(
        "stream-answer",
        not cut,
        observed="the stream ended after 3 chunks without [DONE]" if cut else "212 characters of content",
        expected="a stream that ends with [DONE]",
        evidence="POST /v1/chat/completions (stream)",
        next_step="Read the engine's log around this request: run playbooks/diagnose.yml.",
    )
    checks = [
        _pass("model-served", "serves moonshotai/Kimi-K3", "moonshotai/Kimi-K3"),
        _pass("chat-answer", "214 characters of content, 0 of reasoning", "an answer that is not empty"),
        _pass("chat-usage", "31 prompt + 64 completion = 95 tokens", "usage that adds up"),
        stream,
    ]
    figures: dict[str, Any] = {"chat_total_s": 0.9134, "wall_s": 4.6, "in_flight_s": 4.3}
    if not cut:
        checks += [
            _pass("tool-call", "get_weather({'city': 'Paris'}) fits its schema", "a call valid against its schema"),
            _pass("refuses-unknown-model", "HTTP 404: The model does not exist", "HTTP 404 with an OpenAI error body"),
        ]
        abilities = {"tools": "valid", "reasoning": "valid", "images": "absent"}
        figures |= {"stream_total_s": 0.9021, "stream_first_token_s": 0.1184, "abilities": abilities}
    return StepResult.of(2, STEP_NAMES[2], checks, figures)


def prefix_step(hosts: Sequence[str]) -> StepResult:
    """Step 3: counted hits equal the expectation, with controls that hit nothing."""
    rows = [
        _request("zero-prefix-1", "zero-prefix", 1, 2420, 0, 0, 0.611),
        _request("short-suffix-1", "short-suffix", 1, 2310, 0, 0, 0.602),
        _request("short-suffix-2", "short-suffix", 2, 2318, 2190, 2176, 0.187),
        _request("short-suffix-3", "short-suffix", 3, 2305, 2190, 2176, 0.181),
        _request("resend-1", "resend", 1, 2310, 2310, 2304, 0.166),
        _request("long-suffix-1", "long-suffix", 1, 3470, 0, 0, 0.853),
        _request("long-suffix-2", "long-suffix", 2, 3481, 2190, 0, 0.861),
        _request("long-suffix-3", "long-suffix", 3, 3466, 2190, 2176, 0.402),
        _request("changed-system-1", "changed-system", 1, 2312, 1811, 1792, 0.231),
        _request("too-short-1", "too-short", 1, 110, 0, 0, 0.151),
        _request("too-short-2", "too-short", 2, 110, 110, 0, 0.149),
    ]
    checks = [
        _pass("counters-present", "vllm:prefix_cache_hits and vllm:prefix_cache_queries present", "both"),
        _pass("prefix-caching-on", "enable_prefix_caching=True", "True"),
    ]
    for row in rows:
        wanted = f"{row['expected_hit_tokens']} tokens (expectation.json)"
        checks.append(_pass(f"{row['label']}.counted-hits", f"moved by {row['counted_hit_tokens']} tokens", wanted))
        checks.append(_pass(f"{row['label']}.cached-tokens", f"cached_tokens is {row['cached_tokens']}", wanted))
    hits = sum(row["expected_hit_tokens"] for row in rows)
    figures = {
        "block_size_tokens": BLOCK,
        "num_gpu_blocks": 21_504,
        "kv_cache_tokens": 5_505_024,
        "witnesses": {"block_size": "vllm:cache_config_info block_size", "match_unit": "--prefix-match-unit"},
        "match_unit_tokens": UNIT,
        "retention": "0",
        "rule": "kept-states",
        "requests": rows,
        "hit_tokens": hits,
        "expected_hit_tokens": hits,
        "first_token_ratio": {
            "cold_median_s": 0.853,
            "warm_median_s": 0.187,
            "ratio": 0.219,
            "low": 0.19,
            "high": 0.67,
        },
        "kv_usage": {"before": 0.0, "after": 0.0},
        "wall_s": 7.9,
        "in_flight_s": 7.4,
    }
    if hosts:
        figures["memory"] = {"before": _memory(hosts, 238_100, 41.2), "after": _memory(hosts, 240_318, 41.9)}
    return StepResult.of(3, STEP_NAMES[3], checks, figures)


def load_step(hosts: Sequence[str], *, full: bool = False) -> StepResult:
    """Step 4: the ladder up to the peak; ``full`` fills the cache at nominal."""
    ladder = [_rung(count, full=full) for count in (1, 2, 4, 8, 16, NOMINAL, KNEE, PEAK)]
    usage = next(rung["kv_usage_peak"] for rung in ladder if rung["concurrency"] == NOMINAL)
    most = ladder[-1]["kv_usage_peak"]
    checks = [
        *(_pass(f"{name}.streams-complete", "all complete", "all complete") for name in ("nominal", "peak")),
        _pass("no-preemption", "0 preemptions", "0"),
        _headroom("kv-headroom", usage),
        _headroom("peak.kv-headroom", most),
        _pass("knee", f"knee at {KNEE} streams", f"no knee below the nominal {NOMINAL} streams"),
    ]
    figures: dict[str, Any] = {
        "ladder": ladder,
        "nominal": NOMINAL,
        "peak": PEAK,
        "knee": KNEE,
        "kv_usage_peak": max(rung["kv_usage_peak"] for rung in ladder),
        "wall_s": 118.4,
        "in_flight_s": 109.9,
    }
    if hosts:
        figures["memory"] = {"before": _memory(hosts, 240_318, 41.9), "after": _memory(hosts, 246_902, 43.4)}
    return StepResult.of(4, STEP_NAMES[4], checks, figures)


def nodes_step(hosts: Sequence[str]) -> StepResult:
    """Step 5: one engine over the interconnect, and the drill."""
    checks = []
    for rank, name in enumerate(hosts):
        seen = f"rank {rank} running under {ADDRESSES[name]} from {DIGEST[:19]}"
        checks.append(_pass(f"{name}.rank", seen, f"{seen} (plan, lock)"))
        checks.append(_pass(f"{name}.traffic", "41873210 bytes on the ports during a request", "at least 44672 bytes"))
    checks += [
        _pass("world-size-formed", f"world size {GPUS * len(hosts)}", f"one world of {GPUS * len(hosts)}"),
        _pass("backend", "backend nccl", "nccl for rdma-ib (data/interconnect_proof.yml)"),
        _pass("peer-loss-noticed", f"{hosts[-1]} named after 11.8 s", "the killed node named within 120 s"),
    ]
    figures = {
        "backends": ["nccl"],
        "nccl": "2.28.9",
        "busy_bytes": dict.fromkeys(hosts, 41_873_210),
        "idle_bytes": dict.fromkeys(hosts, 8_310),
        "peer_loss": {
            "killed_host": hosts[-1],
            "noticed_s": 11.8,
            "named_host": hosts[-1],
            "cause": "worker process died",
            "restored_s": 1041.0,
        },
        "wall_s": 1064.7,
        "in_flight_s": 2.0,
    }
    return StepResult.of(5, STEP_NAMES[5], checks, figures)


def observation_step() -> StepResult:
    """Step 6: ten minutes without drift."""
    samples = [
        {
            "at_s": float(at),
            "kv_usage": round(0.34 + 0.06 * math.sin(at / 47) + 0.00002 * at, 4),
            "running": float(24 + round(6 * math.sin(at / 31))),
            "waiting": float(max(0, round(2 * math.sin(at / 19)))),
            "ttft_s": round(0.41 + 0.05 * math.sin(at / 23), 4),
            "hit_tokens": float(at * 2100),
            "query_tokens": float(at * 2900),
            "errors": 0.0,
        }
        for at in range(0, 601, 10)
    ]
    checks = [
        _pass("no-errors", "0 requests ended in error or abort", "0"),
        _pass("kv-drift", "0.002 % of the cache per second", "no slope that fills the cache within a day"),
    ]
    figures = {
        "observe_s": 600,
        "samples": samples,
        "drift": {"kv_usage_per_s": 0.00002, "ttft_s_per_s": 0.0},
        "counters": {"xid": 0, "retransmissions": 0},
        "wall_s": 601.2,
        "in_flight_s": 600.4,
    }
    return StepResult.of(6, STEP_NAMES[6], checks, figures)


def _headroom(name: str, usage: float) -> Check:
    return verify(
        name,
        usage < 0.9,
        observed=f"peak {usage:.1%} of the KV cache",
        expected="below 90%",
        evidence="vllm:kv_cache_usage_perc",
        next_step="More KV memory, or another replica.",
        otherwise=State.WARN,
    )


def _pass(name: str, observed: str, expected: str) -> Check:
    return verify(name, True, observed=observed, expected=expected, evidence="made for tests")


def _request(  # noqa: PLR0917 - one row of a table, read in columns
    label: str, family: str, sighting: int, prompt: int, shared: int, hits: int, first_token_s: float
) -> dict[str, Any]:
    return {
        "label": label,
        "family": family,
        "sighting": sighting,
        "prompt_tokens": prompt,
        "shared_tokens": shared,
        "expected_hit_tokens": hits,
        "counted_hit_tokens": hits,
        "counted_query_tokens": prompt,
        "cached_tokens": hits,
        "first_token_s": first_token_s,
        "total_s": round(first_token_s + 0.78, 4),
    }


def _rung(count: int, *, full: bool) -> dict[str, Any]:
    throughput = 118.0 * count / (1 + (count / 40) ** 1.6)
    ttft = 0.112 + 0.011 * count
    tpot = 0.0081 + 0.00021 * count
    usage = min(0.995, count * (0.0295 if full else 0.0146))
    return {
        "concurrency": count,
        "requests": 4 * count,
        "complete": 4 * count,
        "failed": 0,
        "wall_s": round(4 * (ttft + 64 * tpot), 3),
        "ttft_s": {"p50": round(ttft, 4), "p90": round(ttft * 1.5, 4), "p99": round(ttft * 2.1 + 0.02, 4)},
        "tpot_s": {"p50": round(tpot, 5), "p90": round(tpot * 1.2, 5), "p99": round(tpot * 1.6, 5)},
        "itl_s": {"p50": round(tpot, 5), "p99": round(tpot * 2.4, 5)},
        "e2e_s": {
            "p50": round(ttft + 64 * tpot, 3),
            "p90": round(ttft + 77 * tpot, 3),
            "p99": round(ttft + 100 * tpot, 3),
        },
        "output_tokens_per_s": round(throughput, 1),
        "kv_usage_peak": round(usage, 4),
        "running_peak": float(count),
        "waiting_peak": float(max(0, count - KNEE)),
        "preemptions": 0.0,
        "client_lag_p99_s": round(0.0006 + 0.00001 * count, 6),
    }


def _memory(hosts: Sequence[str], used_mib: int, rss_gib: float) -> dict[str, Any]:
    return {
        name: {
            "gpu_used_mib": [used_mib + 31 * n + (12 if gpu == 0 else 0) for gpu in range(GPUS)],
            "engine_rss_bytes": int(rss_gib * 1024**3),
        }
        for n, name in enumerate(hosts)
    }
