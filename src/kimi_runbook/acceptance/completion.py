"""A record that waits for its observation, completed by a later run of step 6."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kimi_runbook.acceptance.result import StepResult
from kimi_runbook.errors import RunbookError
from kimi_runbook.record import FILE_NAME, Record, load_record, with_verdict
from kimi_runbook.verdict import VerdictName

STEP = 6
PENDING, COMPLETE = "pending", "complete"


def observation_of(steps: tuple[StepResult, ...]) -> str:
    """Return what a record says of its observation: complete once step 6 was run, pending until then."""
    return COMPLETE if any(step.step == STEP and step.state.lets_next_layer_run for step in steps) else PENDING


def completed(earlier: Record, observed: Record) -> Record:
    """Return the earlier record with the observation a later run made of the same service, and a verdict on all of it.

    Raises:
        RunbookError: The later run watched another service, or the earlier one was observed to its end already.
    """
    if earlier.observation == COMPLETE:
        raise _refused(earlier, f"run {earlier.run_id} was observed already", "a run whose observation is pending")
    for what, before, now in (
        ("model", earlier.model, observed.model),
        ("endpoint", earlier.endpoint, observed.endpoint),
        ("engine version", earlier.fingerprint.engine_version, observed.fingerprint.engine_version),
    ):
        if before != now:
            raise _refused(earlier, f"{what} is {now}", f"{before}, as run {earlier.run_id} accepted it")
    steps = (*(step for step in earlier.steps if step.step != STEP), *observed.steps)
    planned = tuple(dict.fromkeys((*earlier.planned, STEP)))
    return with_verdict(
        replace(
            earlier,
            ended=observed.ended,
            planned=planned,
            not_planned=tuple(step for step in earlier.not_planned if step != STEP),
            steps=steps,
            observation=observation_of(steps),
        )
    )


def pending_run(runs_dir: Path, run_id: str = "") -> Path:
    """Return the directory of a run that waits for its observation.

    Args:
        runs_dir: Where runs are kept, one directory each.
        run_id: Which one; empty for the newest that was accepted.

    Raises:
        RunbookError: There is no such run, its record cannot be read, or nothing waits.
    """
    if run_id:
        load_record(runs_dir / run_id)
        return runs_dir / run_id
    for folder in sorted((file.parent for file in runs_dir.glob(f"*/{FILE_NAME}")), reverse=True):
        record = load_record(folder)
        accepted = record.verdict is not None and record.verdict.name is VerdictName.ACCEPT
        if accepted and record.observation == PENDING:
            return folder
    raise RunbookError(
        where=str(runs_dir),
        observed="no accepted run waits for its observation",
        expected="a run whose record says observation: pending",
        next_step="Accept the service first: playbooks/accept.yml; or name a run: -e observe_run=RUN_ID.",
    )


def _refused(earlier: Record, observed: str, expected: str) -> RunbookError:
    return RunbookError(
        where=f"{FILE_NAME} of run {earlier.run_id}",
        observed=observed,
        expected=expected,
        next_step="Accept the service as it is now: playbooks/accept.yml, then observe that run.",
    )
