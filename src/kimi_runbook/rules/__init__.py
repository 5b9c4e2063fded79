"""The judge's rules, one module per subject. Each takes a Case and yields findings."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_runbook.expected import Expected
from kimi_runbook.findings import Finding, make_finding
from kimi_runbook.lock import Lock
from kimi_runbook.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Case:
    """One host to be judged: what is, what is asked of it, and the lock."""

    snapshot: Snapshot
    expected: Expected
    lock: Lock

    def finding(
        self, code: str, *, observed: str, expected: str, subject: str = "", role: str | None = None
    ) -> Finding:
        """Build a finding about this host."""
        return make_finding(
            code, host=self.expected.host, observed=observed, expected=expected, subject=subject, role=role
        )

    def not_asked(self, subject: str) -> Finding:
        """Build the finding for a question the snapshot did not ask."""
        return self.finding(
            "snapshot.incomplete", observed=f"{subject}: not asked", expected="an answer", subject=subject
        )
