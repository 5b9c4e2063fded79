"""A plan that was shown and approved, held against the one that is about to be applied."""

from __future__ import annotations

from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.plan import Plan, diff
from kimi_runbook.reading import Fields, parse_json, read_text


def load_approved(path: Path) -> Plan:
    """Read an approved plan; RunbookError when it is not one."""
    data = parse_json(read_text(path), str(path))
    return Plan.from_json(Fields(data, str(path), "Name a run's plan.json.").mapping(), str(path))


def refuse_other(approved: Plan, plan: Plan, source: str) -> None:
    """Raise RunbookError with the lines that differ, unless both plans do the same."""
    lines = diff(approved, plan)
    if lines:
        raise RunbookError(
            where=source,
            observed="the plan of this run differs from the approved one:\n" + "\n".join(lines) + "\n",
            expected="the same plan (- only in the approved one, + only in this one)",
            next_step="Nothing was changed. Read the new plan.json, and approve it or put the hosts back.",
        )
