"""What the parts of step 2 share: the context, the answers so far, and when it is no use to ask further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kimi_runbook.acceptance.alive import ask_health
from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.gateway import next_step_after
from kimi_runbook.acceptance.http import (
    BadStatusError,
    ConnectionDroppedError,
    EngineError,
    NotReachableError,
    TimedOutError,
)
from kimi_runbook.acceptance.plan import Ability, Wanted
from kimi_runbook.acceptance.result import Check, State
from kimi_runbook.reading import Fields, data_file

LOG = "Read the engine's log around this request: run playbooks/diagnose.yml."


@cache
def settings() -> Fields:
    """Return what step 2 asks and allows (data/short_request.yml)."""
    return data_file("short_request.yml")


@dataclass(slots=True, kw_only=True)
class Look:
    """Step 2 while it runs.

    Attributes:
        context: The run.
        answers: Answers to the plain questions, by kind (``chat``, ``stream``, ...).
        figures: What is kept for the record.
        abilities: What was found of each ability, in a word.
        lost: Why nothing further can be asked; empty while the engine answers.
    """

    context: Context
    answers: dict[str, Answer] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    abilities: dict[str, str] = field(default_factory=dict)
    lost: str = ""

    def wants(self, ability: Ability) -> Wanted:
        """Return what the plan wants of an ability; one it does not name is probed."""
        return self.context.plan.abilities.get(ability, Wanted.PROBE)

    def ask(self, send: Callable[[], Answer]) -> Answer | EngineError:
        """Return what one request brought. An error that says the engine is gone or stuck ends the step."""
        try:
            return send()
        except EngineError as error:
            if is_lost(error):
                self.lost = f"{error}; then {ask_health(self.context.client).says}"
            return error

    def failed(self, name: str, error: EngineError, *, expected: str, evidence: str) -> Check:
        """Return the check of a request that brought no answer."""
        return Check(
            name=name,
            state=State.FAIL,
            observed=self.lost or str(error),
            expected=expected,
            evidence=evidence,
            next_step=next_step_after(error, LOG),
        )


def is_lost(error: EngineError) -> bool:
    """Return whether an error means that the engine is gone or stuck, so that further requests would only wait."""
    if isinstance(error, BadStatusError):
        return error.status >= 500 and not refused(error)
    if isinstance(error, ConnectionDroppedError):
        return not error.reused  # a kept connection may have been closed by a server that lives
    return isinstance(error, NotReachableError | TimedOutError)


def refused(error: EngineError) -> bool:
    """Return whether an error is the engine's refusal of what a request asks for: it understood it and says no.

    A limit, a missing right or a route that is not passed on says nothing about the model.
    """
    statuses = settings().fields("abilities").integers("refused_with")
    return isinstance(error, BadStatusError) and error.status in statuses


def not_offered(  # noqa: PLR0913 - the parts of one message, each named by the caller
    name: str, wanted: Wanted, *, what: str, observed: str, evidence: str, next_step: str
) -> Check:
    """Return the check of an ability that is not there: a failure where it is required, else a pass that says so.

    A model without it is not broken, and a warning that comes with every text-only model would soon be read past.
    """
    required = wanted is Wanted.REQUIRED
    return Check(
        name=name,
        state=State.FAIL if required else State.PASS,
        observed=f"not offered: {observed}",
        expected=f"{what} (required)" if required else f"{what}, where the model has it",
        evidence=evidence,
        next_step=next_step if required else "",
    )
