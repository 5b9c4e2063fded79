"""Sheet and checklist put into a record: once when a run ends, again when an observation completes it. Pure."""

from __future__ import annotations

from dataclasses import replace

from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.campaign.checklist import checklist_of
from kimi_runbook.campaign.sheet import campaign_of
from kimi_runbook.record import SCHEMA_VERSION, Record


def with_campaign(record: Record, plan: AcceptancePlan) -> Record:
    """Return the record with the campaign sheet and the checklist its steps lead to.

    Args:
        record: The run.
        plan: What the run was told to do; of a run completed by a later observation, the earlier run's plan.
    """
    steps, seen = record.steps, record.fingerprint
    return replace(
        record,
        campaign=campaign_of(plan, steps, seen, started=record.started, ended=record.ended),
        checklist=checklist_of(plan, steps, seen),
        schema_version=SCHEMA_VERSION,
    )
