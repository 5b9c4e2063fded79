"""The chain: planned steps in order, one layer at a time, ending in a record with its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kimi_runbook.acceptance import (
    peer_loss,
    progress,
    step0_host,
    step1_start,
    step2_short_request,
    step3_shared_prefix,
    step4_concurrency,
    step5_multi_node,
    step6_observation,
)
from kimi_runbook.acceptance.completion import observation_of
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.fingerprint import fingerprint_of
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.acceptance.wording import for_an_endpoint
from kimi_runbook.campaign.fill import with_campaign
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
    step6_observation.STEP: step6_observation.run,
}

Drill = Callable[[Context], tuple[list[Check], dict[str, Any]]]


class Chain:
    """One run. A planned step whose predecessor is not PASS or WARN is NOT_RUN; one nobody asked for is NOT_RUN too."""

    def __init__(self, context: Context, steps: Mapping[int, Step] = STEPS, drill: Drill = peer_loss.drill) -> None:
        self._context = context
        self._steps = steps
        self._drill = drill
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
        with self._noted(step):
            self._context.listener(progress.begins(step, STEP_NAMES[step]))
            began_s = time.monotonic()
            result = self._steps[step](self._context)
            told = result if self._context.plan.hosts else for_an_endpoint(result)
            self._results[step] = replace(told, figures={**result.figures, **self._times(began_s)})
        self._context.listener(progress.ended(step, STEP_NAMES[step], self._results[step].state))
        return self._results[step]

    def run_drill(self) -> StepResult | None:
        """Run the peer-loss drill where the plan asks for it, after all steps; its checks become step 5's.

        Returns:
            Step 5 with the drill in it, or None when no drill was planned or a planned step does not hold.
        """
        plan = self._context.plan
        results = [self._results.get(step) for step in plan.steps]
        if not plan.peer_loss_drill or any(r is None or not r.state.lets_next_layer_run for r in results):
            return None
        step = step5_multi_node.STEP
        with self._noted(step, _interrupted_drill()):
            self._context.listener(progress.begins(step, STEP_NAMES[step]))
            checks, figures = self._drill(self._context)
            proved = self._results[step]
            merged = {**proved.figures, **figures}
            self._results[step] = StepResult.of(step, STEP_NAMES[step], [*proved.checks, *checks], merged)
        self._context.listener(progress.ended(step, STEP_NAMES[step], self._results[step].state))
        return self._results[step]

    @contextmanager
    def _noted(self, step: int, on_interrupt: Check | None = None) -> Iterator[None]:
        """Keep in the record why a step did not reach its end: a defect of the chain, or the operator's interrupt."""
        self._context.step = step
        try:
            yield
        except StepInterruptedError as interrupt:
            self._results[step] = replace(interrupt.partial, note="interrupted")
            raise
        except KeyboardInterrupt:
            found = self._results.get(step)
            checks = [*(found.checks if found else ()), on_interrupt or _interrupted()]
            result = StepResult.of(step, STEP_NAMES[step], checks, found.figures if found else {})
            self._results[step] = replace(result, note="interrupted")
            raise
        except Exception as error:
            self._results[step] = _broken(step, error)
            raise

    def _times(self, began_s: float) -> dict[str, float]:
        """Return how long a step took, and for how much of it the engine had a request to work on."""
        ended_s = time.monotonic()
        in_flight_s = self._context.client.in_flight_s(began_s, ended_s)
        return {"wall_s": round(ended_s - began_s, 3), "in_flight_s": round(in_flight_s, 3)}

    def record(self) -> Record:
        """Return what was observed so far, planned steps that were not run included, with the verdict it leads to."""
        plan = self._context.plan
        steps = tuple(
            self._results.get(step) or StepResult.not_run(step, STEP_NAMES[step], "nobody asked for it in this run")
            for step in plan.steps
        )
        record = Record(
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
            observation=observation_of(steps),
        )
        return with_verdict(with_campaign(record, plan))


def _interrupted_drill() -> Check:
    return Check(
        name="peer-loss.completed",
        state=State.INCONCLUSIVE,
        observed="interrupted in the drill, after one node's engine was killed; every rank was told to start again",
        expected="the drill to reach its end",
        next_step="See that the service is back: run playbooks/serve.yml, then playbooks/accept.yml.",
    )


def _interrupted() -> Check:
    return Check(
        name="step-completed",
        state=State.INCONCLUSIVE,
        observed="interrupted from the keyboard",
        expected="the step to reach its end",
        next_step="Run the chain again.",
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
