"""One rung in figures: latencies over all requests, throughput, peaks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kimi_runbook.acceptance.client import Answer, Load, Outcome
from kimi_runbook.acceptance.ladder.drive import Driven
from kimi_runbook.acceptance.ladder.rungs import settings
from kimi_runbook.acceptance.metrics import PREEMPTIONS, delta
from kimi_runbook.acceptance.percentiles import percentile, percentiles

# `error`, `abort` and `repetition` also exist in vLLM and end no answer
_FINISHED = ("stop", "length")


def is_complete(outcome: Outcome) -> bool:
    """Return whether a request brought a whole answer: ended as promised, and charged for."""
    answer = outcome.answer
    return answer is not None and answer.usage is not None and answer.finish_reason in _FINISHED


def complete_answers(load: Load) -> list[Answer]:
    """Return the whole answers of a load."""
    return [outcome.answer for outcome in load.outcomes if outcome.answer is not None and is_complete(outcome)]


def tokens_per_s(driven: Driven) -> float:
    """Return the output tokens of whole answers per second of the rung, as the engine counted them."""
    tokens = sum(answer.usage.completion_tokens for answer in complete_answers(driven.load) if answer.usage)
    return tokens / driven.load.wall_s if driven.load.wall_s > 0 else 0.0


def is_client_limited(driven: Driven) -> bool:
    """Return whether the client read too late for the rung's latencies to be the engine's alone."""
    return driven.load.lag.p99_s > settings().fields("client_lag").number("warn_s")


def figures(driven: Driven) -> dict[str, Any]:
    """Return a rung's figures for the record.

    Latencies count from the moment a request was due, so that a client that sends late shows. TPOT is per request,
    ``(total - first token) / (tokens - 1)`` with the tokens of ``usage``: a chunk is no token, with drafts or
    ``--stream-interval`` it is several. ITL is over the gaps between chunks of all answers. A request that never came
    so far is kept as later than all others (``percentiles``): a percentile that falls on one of those is null.
    """
    outcomes = driven.load.outcomes
    whole = [outcome for outcome in outcomes if is_complete(outcome)]
    lost = len(outcomes) - len(whole)
    answers = complete_answers(driven.load)
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    first = [seconds for outcome in outcomes if (seconds := _first_token_s(outcome)) is not None]
    before, after = driven.before, driven.after
    return {
        "label": driven.rung.label,
        "concurrency": driven.rung.concurrency,
        "requests": len(outcomes),
        "complete": len(whole),
        "failed": lost,
        "wall_s": round(driven.load.wall_s, 3),
        "ttft_s": percentiles(first, len(outcomes) - len(first)),
        "tpot_s": percentiles(list(_per_token(answers)), lost),
        "itl_s": percentiles(gaps, 0, (50, 99)),
        "e2e_s": percentiles([outcome.ended_s - outcome.intended_s for outcome in whole], lost),
        "output_tokens_per_s": round(tokens_per_s(driven), 2),
        "kv_usage_peak": peak(sample.kv_usage for sample in driven.samples),
        "running_peak": peak(sample.running for sample in driven.samples),
        "waiting_peak": peak(sample.waiting for sample in driven.samples),
        "preemptions": None if after is None else delta(before, after, PREEMPTIONS),
        "client_lag_p99_s": round(driven.load.lag.p99_s, 6),
        "client_lag_source": driven.load.lag.source,
        "client_limited": is_client_limited(driven),
        "send_lag_p99_s": percentile([outcome.sent_s - outcome.intended_s for outcome in outcomes], 0, 0.99),
        "metrics_samples": len(driven.samples),
        "metrics_samples_failed": driven.failed_samples,
    }


def peak(values: Iterable[float | None]) -> float | None:
    """Return the highest value; None when none was seen."""
    return max((value for value in values if value is not None), default=None)


def _first_token_s(outcome: Outcome) -> float | None:
    """A stream that broke off after its first token had one."""
    came = outcome.answer or (outcome.error.partial if outcome.error else None)
    if came is None or came.first_token_s is None:
        return None
    return outcome.sent_s - outcome.intended_s + came.first_token_s


def _per_token(answers: Iterable[Answer]) -> Iterable[float]:
    for answer in answers:
        tokens = answer.usage.completion_tokens if answer.usage else 0
        if answer.first_token_s is not None and tokens > 1:
            yield (answer.total_s - answer.first_token_s) / (tokens - 1)
