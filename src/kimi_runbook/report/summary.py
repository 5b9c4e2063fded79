"""What every form of the report says first. Pure."""

from __future__ import annotations

from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import StepResult
from kimi_runbook.campaign.values import Box, BoxState
from kimi_runbook.record import SCHEMA_VERSION, Record
from kimi_runbook.verdict import Verdict, VerdictName, judge_steps


def headline(record: Record) -> str:
    """Return the one line that says it all: verdict, advice, what was simulated, what was not looked at."""
    verdict = verdict_of(record)
    parts = [f"verdict: {verdict.name}"]
    if verdict.advice:
        parts.append(f"advice: {', '.join(verdict.advice)}")
    if record.simulated:
        parts.append(f"simulated {', '.join(record.simulated)}")
    if record.not_planned:
        parts.append(f"not planned: {', '.join(map(step_name, record.not_planned))}")
    return " · ".join(parts)


def verdict_of(record: Record) -> Verdict:
    """Return the record's verdict; one that holds none is judged by its steps."""
    return record.verdict or judge_steps(record.steps)


def what_next(record: Record) -> str:
    """Return what to do now: what the first reason asks for, where there is one, before the command to run then."""
    verdict = verdict_of(record)
    checks = {(step.step, check.name): check for step in record.steps for check in step.checks}
    reasons = () if verdict.name is VerdictName.ACCEPT else verdict.reasons
    asked = [checks[place].next_step for reason in reasons if (place := (reason.step, reason.check)) in checks]
    first = next(filter(None, asked), "")
    return f"next: {first}\nthen: {verdict.next_command}" if first else f"next: {verdict.next_command}"


def older(record: Record) -> str:
    """Return what a record of an earlier version has no place for, as a sentence; empty for one of this version."""
    if record.schema_version >= SCHEMA_VERSION:
        return ""
    return (
        f"This record is of schema version {record.schema_version}, from before the campaign sheet and the checklist "
        "(version 2): both are missing here, and so are figures newer than it. Run the acceptance again to have them."
    )


def step_name(step: int) -> str:
    """Return a step's number and name: ``3 shared prefix``."""
    return f"{step} {STEP_NAMES.get(step, '?')}"


def why_no(record: Record, step: int, what: str) -> str:
    """Return why a step has nothing to show, as a sentence."""
    result = next((result for result in record.steps if result.step == step), None)
    if result is None:
        return f"No {what}: step {step_name(step)} was not planned."
    if result.note:
        return f"No {what}: step {step_name(step)} is {result.state}: {result.note}."
    return f"No {what}: step {step_name(step)} is {result.state} and recorded none."


def unmet(step: StepResult) -> str:
    """Return what of a step did not pass, by name, or its note."""
    return "; ".join(check.name for check in step.unmet()) or step.note


def boxes(checklist: tuple[Box, ...]) -> str:
    """Return how many boxes stand how: ``4 ticked, 1 open, 5 not measured``."""
    return ", ".join(f"{sum(box.state is state for box in checklist)} {state}" for state in BoxState)
