"""Step 6: the service is watched for a while under a light load of its own; what drifts beyond noise is told.

One short request every few seconds and one reading of the counters after each. A restart voids every figure over the
whole time, and fails the step: that a service stays up is what an observation is to show.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.geometry import ContradictedGeometryError, UnknownGeometryError
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.observation.judge import LOG, drift_of, memory_checks, watch_checks
from kimi_runbook.acceptance.observation.nodes import node_checks, node_states
from kimi_runbook.acceptance.observation.watch import Watch, every_s, probe_for, settings, watch
from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.acceptance.shared_prefix.engine_side import find_geometry

STEP = 6
NAME = "observation"


def requests_of(plan: AcceptancePlan) -> int:
    """Return how many requests the observation sends."""
    return int(plan.observe_s / every_s(plan.observe_s)) + 1


def run(context: Context) -> StepResult:
    """Return what happened and what drifted while the service was watched.

    Raises:
        StepInterruptedError: On the operator's interrupt, with what was seen until then.
    """
    try:
        seen = _prepared(context)
    except EngineError as error:
        failed = Check(
            name="engine-answers", state=State.FAIL, observed=str(error), expected="an answer", next_step=LOG
        )
        return StepResult.of(STEP, NAME, [failed], {"observe_s": context.plan.observe_s, "samples": []})
    memory_before, nodes_before = context.memory(), node_states(context)
    try:
        watch(context, seen)
    except KeyboardInterrupt as interrupt:
        raise StepInterruptedError(_result(context, seen, [_interrupted(seen)], {})) from interrupt
    after = context.memory()
    checks = [*node_checks(nodes_before, node_states(context)), *memory_checks(memory_before, after)]
    return _result(context, seen, checks, {"memory": {"before": memory_before, "after": after}})


def _prepared(context: Context) -> Watch:
    """Return a watch that can begin: engine version, geometry and the request to repeat are known."""
    plan = context.plan
    context.note("engine_version", context.client.version())
    if context.geometry is None:
        # Step 3 judges a geometry that is not known, the watch judges metrics that are down: here no hits are due then.
        with suppress(UnknownGeometryError, ContradictedGeometryError, EngineError):
            context.geometry = find_geometry(context, context.read_metrics())
    longest = next((card.max_model_len for card in context.client.models() if card.name == plan.model), None)
    seen = Watch(probe=probe_for(context, longest=longest), every_s=every_s(plan.observe_s))
    context.requests.append(
        {
            "step": STEP,
            "every_s": seen.every_s,
            "prompt_blocks": settings().fields("watch").number("prompt_blocks") if seen.probe.blocks else 0,
            "max_tokens": plan.max_tokens,
        }
    )
    return seen


def _result(context: Context, seen: Watch, more: list[Check], figures: dict[str, Any]) -> StepResult:
    return StepResult.of(
        STEP,
        NAME,
        [*watch_checks(seen, context.plan.observe_s), *more],
        {
            "observe_s": context.plan.observe_s,
            "every_s": seen.every_s,
            "samples": [sample.to_json() for sample in seen.samples],
            "drift": {} if seen.void else drift_of(seen),
            "counters": {} if seen.void else seen.counters(),
            **figures,
        },
    )


def _interrupted(seen: Watch) -> Check:
    return Check(
        name="step-completed",
        state=State.INCONCLUSIVE,
        observed=f"interrupted from the keyboard after {len(seen.samples)} samples",
        expected="the step to reach its end",
        next_step="Run playbooks/observe.yml again.",
    )
