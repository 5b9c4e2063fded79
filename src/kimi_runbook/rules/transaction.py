"""The rule about what an earlier run left of its change."""

from __future__ import annotations

from kimi_runbook.rules import Case, Check, Outcome
from kimi_runbook.transaction.state import is_unfinished


def _unfinished(case: Case) -> Outcome:
    facts = case.snapshot.transaction
    if facts is None or not is_unfinished(facts):
        return
    # Without ages: two looks at the same state make the same plan.
    told = {"open": "was in", "failed": "failed in"}
    observed = f"run {facts.run} {told[facts.state]} step {facts.step}" if facts.state in told else "an unreadable file"
    if facts.reason:
        observed += f" ({facts.reason.strip().splitlines()[0][:160]})"
    yield case.finding("transaction.unfinished", observed=observed, expected="no change half made")


CHECKS = (Check("transaction.state", _unfinished),)
