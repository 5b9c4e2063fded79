"""From steps to a verdict, by rules that are data (data/verdict_rules.yml). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.reading import Fields, data_file

_SHORTEST_EVENT = 20  # characters: shorter words such as "not observed" are said of many things


class VerdictName(StrEnum):
    """The six answers to "can this service be accepted"."""

    ACCEPT = "accept"
    FIX_ENVIRONMENT = "fix_environment"
    TUNE = "tune"
    MIGRATE = "migrate"
    EXTEND = "extend"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 the answer is no, 3 it could not be told."""
        return {VerdictName.ACCEPT: 0, VerdictName.INCONCLUSIVE: 3}.get(self, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why: the rule, the check it rests on, what was seen, and where the evidence is."""

    rule: str
    step: int
    check: str
    text: str
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """Return the reason as JSON-ready values."""
        return {
            "rule": self.rule,
            "step": self.step,
            "check": self.check,
            "text": self.text,
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        name: Which of the six.
        why: One sentence.
        reasons: Every check that did not pass, the decisive one first; those that saw one event share a reason.
        advice: Verdict names an acceptance carries as advice, e.g. ``tune``; empty otherwise.
        next_command: What to run next.
    """

    name: VerdictName
    why: str
    reasons: tuple[Reason, ...]
    advice: tuple[str, ...]
    next_command: str

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON-ready values."""
        return {
            "name": str(self.name),
            "why": self.why,
            "reasons": [reason.to_json() for reason in self.reasons],
            "advice": list(self.advice),
            "next_command": self.next_command,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Verdict:
        """Return the verdict that ``to_json`` wrote; raises KeyError or ValueError when it did not."""
        return cls(
            name=VerdictName(value["name"]),
            why=str(value["why"]),
            reasons=tuple(Reason(**reason) for reason in value["reasons"]),
            advice=tuple(str(item) for item in value["advice"]),
            next_command=str(value["next_command"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    id: str
    verdict: VerdictName
    state: State
    steps: tuple[int, ...]
    checks: tuple[str, ...]
    why: str
    next_command: str

    def covers(self, step: int, check: Check) -> bool:
        return (
            check.state is self.state
            and step in self.steps
            and any(fnmatchcase(check.name, pattern) for pattern in self.checks)
        )


def judge_steps(steps: Sequence[StepResult]) -> Verdict:
    """Return the verdict on the planned steps: a failure decides, then anything left unknown, then acceptance."""
    data = data_file("verdict_rules.yml")
    rules = [_rule(fields) for fields in data.each("rules")]
    unmet = [(step.step, check) for step in steps for check in step.unmet()]
    matched = [(rule, step, check) for rule in rules for step, check in unmet if rule.covers(step, check)]
    decisive = next((rule for rule, _, check in matched if check.state is State.FAIL), None)
    reasons = _reasons(matched, unmet)
    if decisive is not None:
        return Verdict(
            name=decisive.verdict, why=decisive.why, reasons=reasons, advice=(), next_command=decisive.next_command
        )
    open_steps = [step for step in steps if not step.state.lets_next_layer_run]
    if open_steps or not steps:
        told = ", ".join(f"step {step.step} ({step.name}) is {step.state}" for step in open_steps)
        return Verdict(
            name=VerdictName.INCONCLUSIVE,
            why=told or "no step was planned",
            reasons=(*reasons, *(_not_run(step) for step in open_steps if step.state is State.NOT_RUN)),
            advice=(),
            next_command=data.text("inconclusive_next"),
        )
    advice = tuple(dict.fromkeys(str(rule.verdict) for rule, _, check in matched if check.state is State.WARN))
    return Verdict(
        name=VerdictName.ACCEPT,
        why="every planned step holds" + (f"; advice: {', '.join(advice)}" if advice else ""),
        reasons=reasons,
        advice=advice,
        next_command=data.text("accepted_next"),
    )


def _reasons(matched: Iterable[tuple[_Rule, int, Check]], unmet: Iterable[tuple[int, Check]]) -> tuple[Reason, ...]:
    """Every unmet check once: first by the first rule that covers it, then those no rule covers.

    Checks that saw the same event share the reason of the first one, which names them.
    """
    found: dict[tuple[int, str], tuple[str, Check]] = {}
    for rule, step, check in matched:
        found.setdefault((step, check.name), (rule.id, check))
    for step, check in unmet:
        found.setdefault((step, check.name), ("", check))
    events: list[tuple[str, int, list[Check]]] = []
    for (step, _), (rule_id, check) in found.items():
        same = next((one for _, where, one in events if where == step and _same_event(one[0], check)), None)
        if same is None:
            events.append((rule_id, step, [check]))
        else:
            same.append(check)
    return tuple(_reason(rule_id, step, checks) for rule_id, step, checks in events)


def _reason(rule: str, step: int, checks: Sequence[Check]) -> Reason:
    first, *others = checks
    also = f" (also {', '.join(check.name for check in others)})" if others else ""
    text = replace(first, name=first.name + also).sentence()
    return Reason(rule=rule, step=step, check=first.name, text=text, evidence=first.evidence)


def _same_event(one: Check, other: Check) -> bool:
    """Whether two checks of a step tell of one event: what they saw ends in the same words after a colon."""
    tails = {tail for tail in _tails(one.observed) if len(tail) >= _SHORTEST_EVENT}
    return one.state is other.state and not tails.isdisjoint(_tails(other.observed))


def _tails(observed: str) -> set[str]:
    parts = observed.split(": ")
    return {": ".join(parts[position:]) for position in range(len(parts))}


def _not_run(step: StepResult) -> Reason:
    return Reason(rule="", step=step.step, check="", text=f"step {step.step} was not run: {step.note}", evidence="")


def _rule(fields: Fields) -> _Rule:
    return _Rule(
        id=fields.text("id"),
        verdict=VerdictName(fields.text("verdict")),
        state=State(fields.text("state")),
        steps=tuple(int(str(step)) for step in fields.optional_sequence("steps") or ()),
        checks=fields.texts("checks"),
        why=fields.text("why"),
        next_command=fields.text("next"),
    )
