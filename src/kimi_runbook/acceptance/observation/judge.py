"""The checks of step 6: what must not happen at all, then what must not drift. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kimi_runbook.acceptance.metrics import FINISHED, HITS, KV_USAGE, PREEMPTIONS
from kimi_runbook.acceptance.observation.trend import Trend, trend
from kimi_runbook.acceptance.observation.watch import Sample, Watch, settings
from kimi_runbook.acceptance.result import Check, State, unknown, verify

LOG = "Read the engine's log around that moment: run playbooks/diagnose.yml."
_EVIDENCE = "one short request and one reading every"
_HOUR_S = 3600


def watch_checks(seen: Watch, observe_s: int) -> list[Check]:
    """Return the checks of a watch that was to last so many seconds."""
    checks = [_answered(seen), _restart(seen), *_read(seen), _in_full(seen, observe_s)]
    if seen.void:
        return checks
    return [*checks, *_counted(seen), *_drifts(seen), *_hits(seen)]


def drift_of(seen: Watch) -> dict[str, Any]:
    """Return the trends as figures, and the seconds until the KV cache is full, None where it does not fill."""
    found = {name: one for name, one in trends(seen).items() if one is not None}
    limit_s = time_to_limit_s(seen)
    return {name: one.to_json() for name, one in found.items()} | {"time_to_limit_s": limit_s}


def trends(seen: Watch) -> dict[str, Trend | None]:
    """Return the trend of KV usage and of the time to the first token; the first probe is cold and left out."""
    most = settings().fields("trend").integer("most_points")
    return {
        "kv_usage": trend(_series(seen, lambda sample: sample.kv_usage), most_points=most),
        "first_token_s": trend(_series(seen, lambda sample: sample.ttft_s)[1:], most_points=most),
    }


def time_to_limit_s(seen: Watch) -> float | None:
    """Return the seconds until the KV cache would be full at the proven pace, or None when it does not fill."""
    found = trends(seen)["kv_usage"]
    last = next((s.kv_usage for s in reversed(seen.samples) if s.kv_usage is not None), None)
    if found is None or last is None or not is_proven(found) or found.slope_per_s <= 0:
        return None
    return round(max(0.0, 1 - last) / found.slope_per_s, 1)


def is_proven(found: Trend) -> bool:
    """Return whether a trend is more than noise, by the rules of data/observation.yml."""
    rules = settings().fields("trend")
    return found.samples >= rules.integer("least_samples") and found.p_value <= rules.number("p_value")


def memory_checks(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Return whether each node's engine holds about what it held before; two readings, so no trend is claimed."""
    share = settings().fields("drift").number("memory")
    return [
        verify(
            f"{host}.memory-steady",
            all(now <= then * (1 + share) for _, then, now in grown),
            observed=", ".join(f"{what} went from {then:,} to {now:,}" for what, then, now in grown),
            expected=f"growth below {share:.0%}",
            evidence="nvidia-smi, docker top, before and after",
            next_step="Watch for longer: playbooks/observe.yml with more acceptance_observe_s.",
            otherwise=State.WARN,
        )
        for host in before
        if (grown := _pairs(before[host], after.get(host, {})))
    ]


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    pairs = [("GPU memory, MiB", before.get("gpu_used_mib"), after.get("gpu_used_mib"))]
    found = [(what, sum(then), sum(now)) for what, then, now in pairs if then is not None and now is not None]
    then, now = before.get("engine_rss_bytes"), after.get("engine_rss_bytes")
    return [*found, *([("resident bytes", then, now)] if then is not None and now is not None else [])]


def _answered(seen: Watch) -> Check:
    asked, lost = len(seen.samples), len(seen.failures)
    first = f"; the first after {seen.failures[0][0]:.0f} s: {seen.failures[0][1]}" if lost else ""
    return verify(
        "probes-answered",
        lost == 0 and asked > 0,
        observed=f"{asked - lost} of {asked} answered{first}",
        expected="every one",
        evidence=f"{_EVIDENCE} {seen.every_s:g} s",
        next_step=LOG,
    )


def _restart(seen: Watch) -> Check:
    """A restart voids the figures, and is itself what an observation looks for."""
    at_s = seen.samples[-1].at_s if seen.samples else 0.0
    return verify(
        "no-restart",
        not seen.void,
        observed=f"after {at_s:.0f} s: {seen.void}" if seen.void else "no sign of one",
        expected="no restart",
        evidence="counters, process_start_time_seconds",
        next_step="Find the first cause in the engine's log and the unit's journal: run playbooks/diagnose.yml.",
    )


def _read(seen: Watch) -> list[Check]:
    """A reading that fails once is told; metrics that fail at the end, or half of the time, are down."""
    lost, asked = len(seen.unread), len(seen.samples) + 1
    down = seen.last is None or lost * 2 >= asked or bool(seen.samples and seen.samples[-1].kv_usage is None)
    first = f"; the first after {seen.unread[0][0]:.0f} s: {seen.unread[0][1]}" if lost else ""
    return [
        verify(
            "metrics",
            lost == 0,
            observed=f"{asked - lost} of {asked} readings{first}",
            expected="every one",
            evidence="every metrics URL of the plan",
            next_step="Open the metrics URLs of acceptance.json: every engine has to answer there.",
            otherwise=State.FAIL if lost and down else State.WARN,
        )
    ]


def _in_full(seen: Watch, observe_s: int) -> Check:
    watched_s = seen.samples[-1].at_s if seen.samples else 0.0
    why = f", since {seen.gave_up}" if seen.gave_up else ""
    return verify(
        "observed-in-full",
        watched_s >= observe_s,
        observed=f"watched for {watched_s:.0f} s{why}",
        expected=f"{observe_s} s",
        evidence=f"{len(seen.samples)} samples",
        next_step="Run playbooks/observe.yml again.",
        otherwise=State.INCONCLUSIVE,
    )


def _counted(seen: Watch) -> list[Check]:
    return [
        _zero("no-failed-requests", seen.moved(FINISHED, finished_reason="error"), FINISHED, State.FAIL, LOG),
        _zero(
            "no-preemption",
            seen.moved(PREEMPTIONS),
            PREEMPTIONS,
            State.WARN,
            "Give the cache more memory, or lower --max-num-seqs.",
        ),
    ]


def _zero(name: str, moved: float | None, family: str, otherwise: State, next_step: str) -> Check:
    return verify(
        name,
        moved == 0,
        observed="the counter is absent" if moved is None else f"{moved:g}",
        expected="0",
        evidence=family,
        next_step=next_step,
        otherwise=State.INCONCLUSIVE if moved is None else otherwise,
    )


def _drifts(seen: Watch) -> list[Check]:
    rules = settings().fields("drift")
    found = trends(seen)
    limit_s = time_to_limit_s(seen)
    full = "" if limit_s is None else f"; the cache is full in {_duration(limit_s)} at this pace"
    usage, first = found["kv_usage"], found["first_token_s"]
    return [
        _drift(
            "kv-usage-drift",
            usage,
            rules.number("kv_usage"),
            unit="of the KV cache",
            evidence=KV_USAGE,
            more=full,
            next_step="Something keeps blocks: look for requests that were cancelled, compare the engine's version.",
        ),
        _drift(
            "first-token-drift",
            first,
            max(rules.number("first_token_least_s"), rules.number("first_token") * (first.level if first else 0.0)),
            unit="s to the first token",
            evidence="the probe's stream",
            next_step="Compare running and waiting requests at that time: other load, or an engine that slows down.",
        ),
    ]


def _drift(  # noqa: PLR0913 - the parts of one message, each named by the caller
    name: str, found: Trend | None, allowed: float, *, unit: str, evidence: str, next_step: str, more: str = ""
) -> Check:
    least = settings().fields("trend").integer("least_samples")
    if found is None or found.samples < least:
        why = f"{found.samples if found else 'too few'} samples"
        longer = "Observe for longer: acceptance_observe_s."
        return unknown(name, why, expected=f"at least {least} samples", next_step=longer, evidence=evidence)
    proven = is_proven(found)
    noise = "beyond noise" if proven else "within noise"
    span = f"[{found.low_per_s * found.span_s:+.3g}, {found.high_per_s * found.span_s:+.3g}]"
    return verify(
        name,
        not (proven and found.change > allowed),
        observed=f"{found.change:+.3g} {unit} in {found.span_s:.0f} s, {span} with 95 %, {noise} "
        f"(Kendall p = {found.p_value:.2g}, {found.samples} samples){more}",
        expected=f"no proven growth beyond {allowed:.3g} (data/observation.yml)",
        evidence=evidence,
        next_step=next_step,
        otherwise=State.WARN,
    )


def _hits(seen: Watch) -> list[Check]:
    """The same prompt again and again has to hit, once it is warm, up to the end."""
    if not seen.probe.blocks:
        return []
    rules = settings()
    counted = [s for s in seen.samples if s.hit_tokens is not None and s.query_tokens is not None]
    warm = counted[rules.fields("watch").integer("warm_up") - 1 :]
    if len(warm) < 2:
        too_few = f"{len(counted)} samples with counters"
        return [unknown("hits-keep-coming", too_few, expected="more than the warm-up", next_step="Observe for longer.")]
    tail = warm[-max(2, round(len(warm) * rules.number("hits_gone_share"))) :]
    before, after = _share(warm[0], tail[0]), _share(tail[0], warm[-1])
    return [
        verify(
            "hits-keep-coming",
            after is not None and after > 0 and after >= (before or 0.0) * (1 - rules.number("hits_fell_share")),
            observed=f"{_percent(after)} of the tokens asked for were hits in the last part, {_percent(before)} before",
            expected=f"hits up to the end: the probe's prompt fills {seen.probe.blocks} blocks and is always the same",
            evidence=HITS,
            next_step="Look for other load that drives prefixes out; compare retention and the engine's version.",
            otherwise=State.WARN if after else State.FAIL,
        )
    ]


def _share(first: Sample, last: Sample) -> float | None:
    asked = (last.query_tokens or 0) - (first.query_tokens or 0)
    return ((last.hit_tokens or 0) - (first.hit_tokens or 0)) / asked if asked > 0 else None


def _percent(share: float | None) -> str:
    return "none asked, so none" if share is None else f"{share:.1%}"


def _series(seen: Watch, value: Callable[[Sample], float | None]) -> list[tuple[float, float]]:
    return [(sample.at_s, found) for sample in seen.samples if (found := value(sample)) is not None]


def _duration(seconds: float) -> str:
    return f"{seconds / _HOUR_S:.1f} h" if seconds >= _HOUR_S else f"{seconds / 60:.0f} min"
