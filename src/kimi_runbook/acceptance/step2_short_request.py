"""Step 2: the engine answers as the OpenAI API promises.

A connection used twice and the plain answers first, whole and streamed; then what the model may be able to do beyond
them (reasoning channel, tool calls, image input), as far as the plan wants it looked at; then what must be refused. An
engine that is gone or stuck ends the step: what comes after it is named and not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kimi_runbook.acceptance.alive import ask_health
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.result import Check, State, StepResult, verify
from kimi_runbook.acceptance.short_request.answers import KINDS, ask_kind, messages
from kimi_runbook.acceptance.short_request.images import check_images
from kimi_runbook.acceptance.short_request.keep_alive import check_keep_alive
from kimi_runbook.acceptance.short_request.look import LOG, Look
from kimi_runbook.acceptance.short_request.reasoning import check_content, check_reasoning
from kimi_runbook.acceptance.short_request.refusals import check_refusals
from kimi_runbook.acceptance.short_request.tools import check_tools

STEP = 2
NAME = "short request"

Stage = Callable[[Look], list[Check]]


def requests_of(_: AcceptancePlan) -> int:
    """Return about how many requests the step sends; repeated tool calls come on top."""
    return _REQUESTS


def run(context: Context) -> StepResult:
    """Return whether the endpoint keeps the API's promises."""
    look = Look(context=context)
    context.requests.append({"step": STEP, "messages": messages(), "max_tokens": context.plan.max_tokens})
    checks: list[Check] = []
    for position, (what, stage) in enumerate(_STAGES):
        context.tell(what, position, len(_STAGES))
        checks += stage(look)
        if look.lost:
            checks += _not_looked_at([name for name, _ in _STAGES[position + 1 :]])
            break
    figures = {**look.figures, "abilities": {str(ability): found for ability, found in look.abilities.items()}}
    return StepResult.of(STEP, NAME, checks, figures)


def _served(look: Look) -> list[Check]:
    context, wanted = look.context, look.context.plan.model
    told = ask_health(context.client)
    health = verify(
        "engine-healthy",
        told.well,
        observed=told.says,
        expected="HTTP 200",
        evidence="GET /health",
        next_step=LOG,
    )
    try:
        served = [card.name for card in context.client.models()]
        context.note("engine_version", context.client.version())
    except EngineError as error:
        look.lost = str(error)
        return [health, look.failed("model-served", error, expected=wanted, evidence="GET /v1/models, GET /version")]
    named = verify(
        "model-served",
        wanted in served,
        observed=f"serves {', '.join(served) or 'nothing'}",
        expected=wanted,
        evidence="GET /v1/models",
        next_step="Compare --served-model-name with the inventory's model name.",
    )
    return [health, named]


def _not_looked_at(names: Sequence[str]) -> list[Check]:
    if not names:
        return []
    return [
        Check(
            name="rest-of-step",
            state=State.NOT_RUN,
            observed=f"not asked: {', '.join(names)}",
            expected="an engine that answers",
            next_step="Find out first why it does not; then run the chain again.",
        )
    ]


_STAGES: tuple[tuple[str, Stage], ...] = (
    ("models and version", _served),
    ("kept connection", check_keep_alive),
    *((kind.name, lambda look, kind=kind: ask_kind(look, kind)) for kind in KINDS),
    ("content", lambda look: [check_content(look)]),
    ("reasoning channel", check_reasoning),
    ("tool call", check_tools),
    ("image input", check_images),
    ("refusals", check_refusals),
)
# plain answers, reasoning twice, tool call twice, image with and without, refusals
_REQUESTS = len(KINDS) + 2 + 2 + 2 + 4
