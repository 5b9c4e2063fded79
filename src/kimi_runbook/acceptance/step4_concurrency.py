"""Step 4: a ladder over one variable, the streams at once, up to the nominal load and then its peak.

Every request of every rung has one shape and a salt of its own; one before the ladder and one after it are not timed. A
rung that loses a request ends the ladder: what is above it is named and not looked at. Failures and time-outs stay in
the latencies' tails (``percentiles``).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.ladder.drive import Driven, drive
from kimi_runbook.acceptance.ladder.failures import LOG, failure_checks
from kimi_runbook.acceptance.ladder.figures import figures, is_complete, peak
from kimi_runbook.acceptance.ladder.judge import complete_check, knee_of, ladder_checks, rung_checks
from kimi_runbook.acceptance.ladder.rungs import AFTER, WARM_UP, Rung, rungs_of, settings
from kimi_runbook.acceptance.metrics import why_void
from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.progress import Batch
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown
from kimi_runbook.errors import RunbookError

STEP = 4
NAME = "concurrency"


def batches_of(plan: AcceptancePlan) -> tuple[Batch, ...]:
    """Return what the ladder sends when it is climbed to its end."""
    rungs = (WARM_UP, *rungs_of(plan.concurrency, plan.peak_concurrency), AFTER)
    return tuple(Batch(requests=rung.requests, at_once=rung.concurrency) for rung in rungs)


def run(context: Context) -> StepResult:
    """Return whether every stream of every rung completed, and what that took.

    Raises:
        StepInterruptedError: On the operator's interrupt, with the rungs that were climbed.
    """
    climb = _Climb(context)
    try:
        climb.up()
    except KeyboardInterrupt as interrupt:
        raise StepInterruptedError(climb.result(interrupted=True)) from interrupt
    return climb.result()


class _Climb:
    """The ladder while it is climbed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rungs = rungs_of(context.plan.concurrency, context.plan.peak_concurrency)
        self._driven: list[Driven] = []
        self._complete: list[Driven] = []
        self._any_complete = False
        self._checks: list[Check] = []
        self._memory: dict[str, Any] = {"before": {}, "after": {}}
        context.requests.append(
            {
                "step": STEP,
                "streams": [rung.concurrency for rung in self._rungs],
                "requests": [rung.requests for rung in self._rungs],
                "words": settings().fields("ladder").integer("prompt_words"),
                "max_tokens": context.plan.max_tokens,
            }
        )

    def up(self) -> None:
        """Climb until a rung does not hold. The nodes' memory is asked for beside the requests that are not timed."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory") as pool:
            before = pool.submit(self._context.memory)
            held = self._holds(WARM_UP)
            self._memory["before"] = before.result()
            if held:
                held = self._climbed()
            else:
                self._checks += _not_looked_at(WARM_UP, self._rungs)
            after = pool.submit(self._context.memory)
            if held:
                self._holds(AFTER)
            self._memory["after"] = after.result()

    def _climbed(self) -> bool:
        for position, rung in enumerate(self._rungs):
            if not self._holds(rung):
                self._checks += _not_looked_at(rung, self._rungs[position + 1 :])
                return False
        return True

    def _holds(self, rung: Rung) -> bool:
        """Drive one rung and judge it; returns whether the next one may be looked at."""
        try:
            driven = drive(self._context, rung)
        except EngineError as error:
            self._checks.append(_unreadable(error))
        except RunbookError as error:
            self._checks.append(_not_sendable(rung, error))
        else:
            self._judge(driven)
        return all(check.state.lets_next_layer_run for check in self._checks)

    def _judge(self, driven: Driven) -> None:
        self._checks += self._restarted(driven)
        complete, timed = all(map(is_complete, driven.load.outcomes)), driven.rung in self._rungs
        if not complete:
            self._checks += failure_checks(self._context, driven, completed_before=self._any_complete)
        else:
            self._checks += rung_checks(driven) if timed else [complete_check(driven)]
        self._any_complete = self._any_complete or complete
        if timed:
            self._driven.append(driven)
            self._complete += [driven] if complete else []

    def _restarted(self, driven: Driven) -> list[Check]:
        """Return the check of an engine that was started again since the last window: step 3's, or the rung before."""
        last = self._context.last_reading
        self._context.last_reading = driven.after or driven.before
        void = why_void(last, driven.before) if last is not None else ""
        if not void:
            return []
        expected = "no restart since the last request before it"
        return [unknown(f"{driven.rung.label}.window", void, expected=expected, next_step=LOG)]

    def result(self, *, interrupted: bool = False) -> StepResult:
        """Return what the climb has found so far."""
        checks = [*self._checks, *ladder_checks(self._complete, self._context.plan.concurrency)]
        if interrupted:
            checks.append(_interrupted(len(self._driven), self._rungs))
        return StepResult.of(STEP, NAME, checks, self._figures())

    def _figures(self) -> dict[str, Any]:
        plan, ladder = self._context.plan, [figures(driven) for driven in self._driven]
        return {
            "ladder": ladder,
            "nominal": plan.concurrency,
            "peak": plan.peak_concurrency,
            "knee": knee_of(self._complete).concurrency if self._complete else None,
            "kv_usage_peak": peak(rung["kv_usage_peak"] for rung in ladder),
            "memory": self._memory,
        }


def _unreadable(error: EngineError) -> Check:
    return Check(
        name="metrics",
        state=State.FAIL,
        observed=str(error),
        expected="HTTP 200 and metrics on every metrics URL",
        next_step=LOG,
    )


def _not_sendable(rung: Rung, error: RunbookError) -> Check:
    """This machine cannot open so many connections, which says nothing about the engine."""
    return unknown(
        f"{rung.label}.in-flight",
        f"{error.where}: {error.observed}",
        expected=error.expected,
        next_step=error.next_step,
    )


def _not_looked_at(last: Rung, rest: Sequence[Rung]) -> list[Check]:
    return [
        Check(
            name=f"{rung.label}.streams-complete",
            state=State.NOT_RUN,
            observed=f"{rung.concurrency} at once, not looked at: {last.concurrency} at once did not hold",
            expected="every rung, as far as the ones before it hold",
            next_step="Mend the lowest rung that does not hold, then run the chain again.",
        )
        for rung in rest
    ]


def _interrupted(climbed: int, rungs: Sequence[Rung]) -> Check:
    return Check(
        name="step-completed",
        state=State.INCONCLUSIVE,
        observed=f"interrupted from the keyboard after {climbed} of {len(rungs)} rungs",
        expected="the step to reach its end",
        next_step="Run the chain again.",
    )
