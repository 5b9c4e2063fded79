"""A rung that lost requests: what kind of loss it was, whether the engine still lives, and its last words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from kimi_runbook.acceptance.alive import ask_health
from kimi_runbook.acceptance.client import Load
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.gateway import next_step_after
from kimi_runbook.acceptance.hosts import HostError
from kimi_runbook.acceptance.http import (
    BadStatusError,
    ConnectionDroppedError,
    EngineError,
    NotReachableError,
    TimedOutError,
    TruncatedError,
)
from kimi_runbook.acceptance.ladder.drive import Driven
from kimi_runbook.acceptance.ladder.figures import is_complete
from kimi_runbook.acceptance.ladder.rungs import settings
from kimi_runbook.acceptance.result import Check, State, verify

LOG = "Read the engine's log around this moment: run playbooks/diagnose.yml."
COMPLETE = "every request ends with [DONE], usage and a finish_reason of stop or length"
STREAMED = "POST /v1/chat/completions, streamed"
_AT_PREFILL = "Lower --gpu-memory-utilization or --max-num-batched-tokens: the pool leaves too little beside it."
_UNDER_LOAD = "Lower --max-num-seqs or --gpu-memory-utilization, or plan for fewer streams."
_KINDS: tuple[tuple[type[EngineError], str], ...] = (
    (TimedOutError, "timed out"),
    (ConnectionDroppedError, "dropped on a kept connection"),
    (NotReachableError, "not reachable"),
    (TruncatedError, "cut off"),
)


def kind_of(error: EngineError | None) -> str:
    """Return the kind of a loss in a few words; an answer that came and is not whole has no error."""
    if error is None:
        return "without usage or a proper finish_reason"
    if isinstance(error, BadStatusError):
        return f"HTTP {error.status}"
    return next((name for known, name in _KINDS if isinstance(error, known)), "not as the API promises")


def losses(load: Load) -> str:
    """Return a load's losses counted by kind, and the first error in its own words; empty when there were none."""
    lost = [outcome for outcome in load.outcomes if not is_complete(outcome)]
    if not lost:
        return ""
    counted = Counter(kind_of(outcome.error) for outcome in lost)
    first = min(lost, key=lambda outcome: outcome.ended_s)
    words = f"; the first, {first.ended_s:.1f} s in: {first.error}" if first.error else ""
    return ", ".join(f"{count} {kind}" for kind, count in counted.most_common()) + words


def failure_checks(context: Context, driven: Driven, completed_before: bool) -> list[Check]:
    """Return the checks of a rung that lost requests, the nearest to a cause first.

    Args:
        context: The run.
        driven: The rung.
        completed_before: Whether an earlier rung completed: what fails now is then the load, not the request.
    """
    label, streams = driven.rung.label, driven.rung.concurrency
    told = losses(driven.load)
    checks = []
    memory = out_of_memory(context, driven.load)
    if memory:
        nothing_ended = not any(is_complete(outcome) for outcome in driven.load.outcomes)
        when = "at the first prefill" if nothing_ended and not completed_before else f"under load, at {streams} streams"
        checks.append(
            Check(
                name=f"{label}.out-of-memory",
                state=State.FAIL,
                observed=f"out of memory {when}: {memory}",
                expected="memory for every stream of this rung",
                evidence="the answers' errors, the engine's log",
                next_step=_AT_PREFILL if "prefill" in when else _UNDER_LOAD,
            )
        )
    health = ask_health(context.client)
    checks.append(
        verify(
            f"{label}.engine-alive",
            health.well,
            observed=health.says if health.well else f"{health.says}, after {streams} streams at once: {told}",
            expected="HTTP 200",
            evidence="GET /health after the rung",
            next_step=f"The engine went down under load. {LOG}",
        )
    )
    whole = sum(map(is_complete, driven.load.outcomes))
    checks.append(
        Check(
            name=f"{label}.streams-complete",
            state=State.FAIL,
            observed=f"{whole} of {len(driven.load.outcomes)} complete at {streams} at once: {told}",
            expected=COMPLETE,
            evidence=STREAMED,
            next_step=next_step_after(_first_error(driven.load), LOG),
        )
    )
    return checks


def _first_error(load: Load) -> EngineError | None:
    """Return the error of the loss that came first, or None when it had none."""
    lost = [outcome for outcome in load.outcomes if not is_complete(outcome)]
    return min(lost, key=lambda outcome: outcome.ended_s).error if lost else None


def out_of_memory(context: Context, load: Load) -> str:
    """Return the words of an engine that ran out of memory, from the answers or a log; empty when none says so."""
    patterns = settings().texts("out_of_memory")
    for outcome in load.outcomes:
        if outcome.error is not None and _holding([str(outcome.error)], patterns):
            return str(outcome.error)
    plan = context.plan
    for name, file in plan.engine.logs.items():
        try:
            with Path(file).open(encoding="utf-8", errors="replace") as stream:
                found = _holding(stream, patterns)
        except OSError:
            continue  # a log that cannot be read has no words; the checks above stand without it
        if found:
            return f"{name}: {found}"
    for name, host in context.hosts.items():
        try:
            found = _holding(host.log_lines(plan.engine.container, patterns), patterns)
        except HostError:
            continue  # a node may be gone with its engine
        if found:
            return f"{name}: {found}"
    return ""


def _holding(lines: Iterable[str], patterns: Sequence[str]) -> str:
    """Return the last line that holds one of the patterns, shortened; empty when none does."""
    found = ""
    for line in lines:
        if any(pattern in line for pattern in patterns):
            found = line.strip()[:300]
    return found
