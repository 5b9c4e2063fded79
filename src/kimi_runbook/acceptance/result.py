"""What a step of the chain reports: states, checks and figures. Values only; nothing here looks at a host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a check or a step ended. Only PASS and WARN let the next layer be looked at."""

    PASS = "PASS"  # noqa: S105 - a state, no password
    WARN = "WARN"
    FAIL = "FAIL"
    NOT_RUN = "NOT_RUN"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def lets_next_layer_run(self) -> bool:
        """Whether a step in this state is ground firm enough to stand the next one on."""
        return self in (State.PASS, State.WARN)


# The worst first: a step is as good as the worst of its checks.
_WORST_FIRST = (State.FAIL, State.INCONCLUSIVE, State.NOT_RUN, State.WARN, State.PASS)


def worst(states: Iterable[State]) -> State:
    """Return the worst of the states; NOT_RUN when there are none, since nothing looked at proves nothing."""
    seen = set(states)
    return next((state for state in _WORST_FIRST if state in seen), State.NOT_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question with its answer.

    Attributes:
        name: Stable name, e.g. ``k3-a.image-digest``; verdict rules match on it.
        state: How it ended.
        observed: What was seen, in words with units.
        expected: What would have been right, with its source where it is not obvious.
        evidence: Where the observation comes from: a command, a file, a request.
        next_step: What to do about a check that did not pass; empty otherwise.
    """

    name: str
    state: State
    observed: str
    expected: str
    evidence: str = ""
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON-ready values."""
        return {
            "name": self.name,
            "state": str(self.state),
            "observed": self.observed,
            "expected": self.expected,
            "evidence": self.evidence,
            "next_step": self.next_step,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Check:
        """Return the check that ``to_json`` wrote; raises KeyError or ValueError when it did not."""
        return cls(
            name=str(value["name"]),
            state=State(value["state"]),
            observed=str(value["observed"]),
            expected=str(value["expected"]),
            evidence=str(value.get("evidence", "")),
            next_step=str(value.get("next_step", "")),
        )

    def sentence(self) -> str:
        """Return the check as one line: where, observed, expected, next step."""
        text = f"{self.name}: {self.observed}; expected {self.expected}"
        return f"{text}. {self.next_step}" if self.next_step else text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step of the chain found.

    Attributes:
        step: Number, 0 to 6 (docs/architecture.md).
        name: Short name, e.g. ``shared prefix``.
        state: The worst of the checks, or NOT_RUN.
        checks: In the order they were made.
        figures: Measured values; each key carries its unit (``_s``, ``_tokens``, ``_bytes``).
        note: Why a step was not run, or what voided it; empty otherwise.
    """

    step: int
    name: str
    state: State
    checks: tuple[Check, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, step: int, name: str, checks: Sequence[Check], figures: Mapping[str, Any]) -> StepResult:
        """Return the result whose state is the worst of its checks."""
        return cls(
            step=step,
            name=name,
            state=worst(check.state for check in checks),
            checks=tuple(checks),
            figures=dict(figures),
        )

    @classmethod
    def not_run(cls, step: int, name: str, why: str) -> StepResult:
        """Return the result of a planned step that was never looked at."""
        return cls(step=step, name=name, state=State.NOT_RUN, note=why)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready values."""
        return {
            "step": self.step,
            "name": self.name,
            "state": str(self.state),
            "checks": [check.to_json() for check in self.checks],
            "figures": dict(self.figures),
            "note": self.note,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepResult:
        """Return the result that ``to_json`` wrote; raises KeyError or ValueError when it did not."""
        return cls(
            step=int(value["step"]),
            name=str(value["name"]),
            state=State(value["state"]),
            checks=tuple(Check.from_json(check) for check in value["checks"]),
            figures=dict(value["figures"]),
            note=str(value.get("note", "")),
        )

    def unmet(self) -> tuple[Check, ...]:
        """Return the checks that did not pass."""
        return tuple(check for check in self.checks if check.state is not State.PASS)


def verify(  # noqa: PLR0913 - the parts of one message, each named by the caller
    name: str,
    holds: bool,
    *,
    observed: str,
    expected: str,
    evidence: str = "",
    next_step: str = "",
    otherwise: State = State.FAIL,
) -> Check:
    """Return a check that passes when something holds, and ends in ``otherwise`` with its next step when not."""
    return Check(
        name=name,
        state=State.PASS if holds else otherwise,
        observed=observed,
        expected=expected,
        evidence=evidence,
        next_step="" if holds else next_step,
    )


def unknown(name: str, why: str, *, expected: str, next_step: str, evidence: str = "") -> Check:
    """Return a check that could not be answered."""
    return Check(
        name=name,
        state=State.INCONCLUSIVE,
        observed=why,
        expected=expected,
        evidence=evidence,
        next_step=next_step,
    )
