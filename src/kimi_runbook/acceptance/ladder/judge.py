"""The checks of step 4 on rungs that ran to their end: one rung by itself, then the ladder as a whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_runbook.acceptance.ladder.drive import Driven
from kimi_runbook.acceptance.ladder.failures import COMPLETE, LOG, STREAMED
from kimi_runbook.acceptance.ladder.figures import peak, tokens_per_s
from kimi_runbook.acceptance.ladder.knee import Knee, find_knee
from kimi_runbook.acceptance.ladder.rungs import NOMINAL, PEAK, settings
from kimi_runbook.acceptance.metrics import FINISHED, KV_USAGE, PREEMPTIONS, RUNNING, WAITING, Reading, delta, why_void
from kimi_runbook.acceptance.result import Check, State, unknown, verify

_ABSENT = "Compare what each metrics URL shows with vLLM's own page: a router or an older version leaves families out."
_MORE = "Give the cache more memory, or lower --max-num-seqs."


def rung_checks(driven: Driven) -> list[Check]:
    """Return the checks of one rung all of whose requests completed."""
    label, streams = driven.rung.label, driven.rung.concurrency
    checks = [
        complete_check(driven),
        verify(
            f"{label}.in-flight",
            driven.load.most_in_flight == streams,
            observed=f"{driven.load.most_in_flight} requests were in flight at once",
            expected=str(streams),
            evidence="the client's own count",
            next_step="The client did not send at once, so the engine was not asked: repeat on a less busy machine.",
            otherwise=State.INCONCLUSIVE,
        ),
    ]
    if driven.after is None:
        failed = Check(name="metrics", state=State.FAIL, observed=driven.unread, expected="metrics", next_step=LOG)
        return [*checks, failed]
    void = why_void(driven.before, driven.after)
    if void:
        return [*checks, unknown(f"{label}.window", void, expected="no restart while the rung ran", next_step=LOG)]
    failed_there = failed_requests(driven.before, driven.after)
    return [
        *checks,
        verify(
            f"{label}.no-failed-requests",
            failed_there == 0,
            observed="the counter is absent" if failed_there is None else f"{failed_there:g} ended in error or abort",
            expected="0",
            evidence=FINISHED,
            next_step=_ABSENT if failed_there is None else LOG,
            otherwise=State.INCONCLUSIVE if failed_there is None else State.FAIL,
        ),
    ]


def complete_check(driven: Driven) -> Check:
    """Return the check of a rung all of whose requests completed; one that lost some has those of failures.py."""
    asked = len(driven.load.outcomes)
    return verify(
        f"{driven.rung.label}.streams-complete",
        True,
        observed=f"{asked} of {asked} complete at {driven.rung.concurrency} at once",
        expected=COMPLETE,
        evidence=STREAMED,
    )


def ladder_checks(rungs: Sequence[Driven], nominal: int) -> list[Check]:
    """Return what the complete rungs show together: preemption, headroom, queue, the client's own lag, the knee."""
    if not rungs:
        return []
    up_to_nominal = [driven for driven in rungs if driven.rung.label != PEAK]
    at_peak = [driven for driven in rungs if driven.rung.label == PEAK]
    return [
        *(_preemption("no-preemption", up_to_nominal) if up_to_nominal else []),
        *(_preemption("peak.no-preemption", at_peak) if at_peak else []),
        *_headroom("kv-headroom", up_to_nominal),
        *_headroom("peak.kv-headroom", at_peak),
        *(_queue(driven) for driven in rungs if driven.rung.label == NOMINAL and driven.samples),
        *_knee(rungs, nominal),
        _alone(rungs),
        _sampled(rungs),
        _client_lag(rungs),
    ]


def failed_requests(before: Reading, after: Reading) -> float | None:
    """Return the requests the engine ended in error or abort, by its own count; None where it does not say."""
    moved = [delta(before, after, FINISHED, finished_reason=reason) for reason in ("error", "abort")]
    return None if None in moved else sum(value for value in moved if value is not None)


def knee_of(rungs: Sequence[Driven]) -> Knee:
    """Return the knee the complete rungs show."""
    return find_knee([(driven.rung.concurrency, tokens_per_s(driven)) for driven in rungs])


def _client_lag(rungs: Sequence[Driven]) -> Check:
    """Latencies are the engine's only as far as the client read in time; says which rungs are the client's."""
    rule = settings().fields("client_lag")
    warn_s, limit_s = rule.number("warn_s"), rule.number("limit_s")
    worst = max(rungs, key=lambda driven: driven.load.lag.p99_s)
    late = [driven.rung.label for driven in rungs if driven.load.lag.p99_s > warn_s]
    lag = worst.load.lag
    marked = f"; latencies of {', '.join(late)} are limited by the client" if late else ""
    return verify(
        "client-lag",
        not late,
        observed=f"p99 {lag.p99_s * 1000:.2f} ms at {worst.rung.concurrency} streams ({lag.source} stamps){marked}",
        expected=f"p99 within {warn_s * 1000:g} ms; above {limit_s * 1000:g} ms nothing can be said",
        evidence="the moment a read returned less the moment its bytes had arrived",
        next_step="Run the chain from a machine with idle cores.",
        otherwise=State.INCONCLUSIVE if lag.p99_s > limit_s else State.WARN,
    )


def _sampled(rungs: Sequence[Driven]) -> Check:
    """A peak is one only if a sample fell while streams ran."""
    blind = [d.rung.label for d in rungs if not peak(sample.running for sample in d.samples)]
    counts = ", ".join(f"{driven.rung.label} {len(driven.samples)}" for driven in rungs)
    return verify(
        "sampled-under-load",
        not blind,
        observed=f"no running request was seen in any sample of {', '.join(blind)}" if blind else f"samples: {counts}",
        expected="a sample while streams ran in every rung, or its peaks are unknown",
        evidence=f"{RUNNING}, every {settings().fields('ladder').number('sample_every_s')} s",
        next_step="Raise max_tokens (model_limits), so that the streams last longer.",
        otherwise=State.WARN,
    )


def _preemption(name: str, rungs: Sequence[Driven]) -> list[Check]:
    moved = [(d.rung.concurrency, delta(d.before, d.after, PREEMPTIONS)) for d in rungs if d.after is not None]
    absent = any(count is None for _, count in moved)
    first = next(((streams, count) for streams, count in moved if count), None)
    total = sum(count or 0 for _, count in moved)
    observed = f"{total:g} preemptions" + (f", the first at {first[0]} streams" if first else "")
    return [
        verify(
            name,
            not absent and total == 0,
            observed="the counter is absent" if absent else observed,
            expected="0",
            evidence=PREEMPTIONS,
            next_step=_ABSENT if absent else _MORE,
            otherwise=State.INCONCLUSIVE if absent else State.WARN,
        )
    ]


def _headroom(name: str, rungs: Sequence[Driven]) -> list[Check]:
    seen = [driven for driven in rungs if peak(sample.running for sample in driven.samples)]
    if not seen:
        return []
    limit = settings().number("kv_headroom")
    usage = peak(sample.kv_usage for driven in seen for sample in driven.samples)
    return [
        verify(
            name,
            usage is not None and usage < limit,
            observed="the gauge is absent" if usage is None else f"peak {usage:.1%} of the KV cache",
            expected=f"below {limit:.0%}",
            evidence=KV_USAGE,
            next_step=_ABSENT if usage is None else "More KV memory, or another replica.",
            otherwise=State.INCONCLUSIVE if usage is None else State.WARN,
        )
    ]


def _alone(rungs: Sequence[Driven]) -> Check:
    """More requests running than were sent are somebody else's, and then no figure of a rung is this load's."""
    shared = [
        f"{most:g} ran where {driven.rung.concurrency} were sent"
        for driven in rungs
        if (most := peak(sample.running for sample in driven.samples) or 0) > driven.rung.concurrency
    ]
    return verify(
        "no-other-traffic",
        not shared,
        observed="; ".join(shared) or "never more requests ran than were sent",
        expected="the service alone, or the rungs' figures are those of a shared one",
        evidence=RUNNING,
        next_step="Repeat with no other traffic: run playbooks/accept.yml.",
        otherwise=State.INCONCLUSIVE,
    )


def _queue(driven: Driven) -> Check:
    """At nominal load the engine should run what is sent; a short wait for a prefill is normal."""
    streams = driven.rung.concurrency
    queued = [s for s in driven.samples if s.waiting and s.running is not None and s.running < streams]
    share = len(queued) / len(driven.samples)
    most = peak(sample.running for sample in driven.samples) or 0
    return verify(
        "no-queue",
        share <= settings().number("queue_share"),
        observed=f"at most {most:g} of {streams} ran at once; requests waited in {share:.0%} of the samples",
        expected="the nominal load runs without a standing queue",
        evidence=f"{RUNNING}, {WAITING}",
        next_step="Raise --max-num-seqs if memory allows, or plan for fewer streams.",
        otherwise=State.WARN,
    )


def _knee(rungs: Sequence[Driven], nominal: int) -> list[Check]:
    if len(rungs) < 2:
        return []
    knee = knee_of(rungs)
    below = knee.concurrency is not None and knee.concurrency < nominal
    return [
        verify(
            "knee",
            not below,
            observed=(f"knee at {knee.concurrency} streams; " if knee.concurrency is not None else "") + knee.text,
            expected=f"no knee below the nominal {nominal} streams (rule in data/concurrency.yml)",
            evidence="completion_tokens of usage over each rung's wall time",
            next_step="More streams add queueing, hardly any tokens: another replica, or fewer streams.",
            otherwise=State.WARN,
        )
    ]
