"""The chain: planned steps in order, one layer at a time, ending in a record with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from kimi_runbook.acceptance import (
    step0_host,
    step1_start,
    step2_short_request,
    step3_shared_prefix,
    step4_concurrency,
    step5_multi_node,
)
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.fingerprint import fingerprint_of
from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.environment import reportable
from kimi_runbook.record import Record, with_verdict

Step = Callable[[Context], StepResult]

STEPS: Mapping[int, Step] = {
    step0_host.STEP: step0_host.run,
    step1_start.STEP: step1_start.run,
    step2_short_request.STEP: step2_short_request.run,
    step3_shared_prefix.STEP: step3_shared_prefix.run,
    step4_concurrency.STEP: step4_concurrency.run,
    step5_multi_node.STEP: step5_multi_node.run,
}


class Chain:
    """One run. A planned step whose predecessor is not PASS or WARN is NOT_RUN; one nobody asked for is NOT_RUN too."""

    def __init__(self, context: Context, steps: Mapping[int, Step] = STEPS) -> None:
        self._context = context
        self._steps = steps
        self._started = datetime.now(UTC)
        self._results: dict[int, StepResult] = {}

    @property
    def started_any(self) -> bool:
        """Whether a step was asked for at all."""
        return bool(self._results)

    def run(self, step: int) -> StepResult:
        """Run one planned step, once; raises whatever the step did not expect, after noting it in the record."""
        if step in self._results:
            return self._results[step]
        before = [other for other in self._context.plan.steps if other < step]
        previous = self._results.get(before[-1]) if before else None
        if before and (previous is None or not previous.state.lets_next_layer_run):
            state = previous.state if previous else State.NOT_RUN
            why = f"step {before[-1]} ({STEP_NAMES[before[-1]]}) is {state}: one layer at a time"
            self._results[step] = StepResult.not_run(step, STEP_NAMES[step], why)
            return self._results[step]
        try:
            self._results[step] = self._steps[step](self._context)
        except Exception as error:
            self._results[step] = _broken(step, error)
            raise
        return self._results[step]

    def record(self) -> Record:
        """Return what was observed so far, planned steps that were not run included, with the verdict it leads to."""
        plan = self._context.plan
        steps = tuple(
            self._results.get(step) or StepResult.not_run(step, STEP_NAMES[step], "nobody asked for it in this run")
            for step in plan.steps
        )
        return with_verdict(
            Record(
                run_id=plan.run_id,
                site=plan.site,
                started=self._started,
                ended=datetime.now(UTC),
                planned=plan.steps,
                not_planned=plan.not_planned,
                simulated=plan.simulated,
                model=plan.model,
                endpoint=plan.endpoint,
                fingerprint=fingerprint_of(self._context),
                expectation=tuple(self._context.expectation),
                environment={name: reportable(launch.env) for name, launch in sorted(plan.launch.items())},
                steps=steps,
            )
        )


def _broken(step: int, error: Exception) -> StepResult:
    check = Check(
        name="step-completed",
        state=State.INCONCLUSIVE,
        observed=f"{type(error).__name__}: {error}",
        expected="the step to reach its end",
        next_step="This is a defect of the chain, not of the engine: report it with the traceback.",
    )
    return StepResult.of(step, STEP_NAMES[step], [check], {})
