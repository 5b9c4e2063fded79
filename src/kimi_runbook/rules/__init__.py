"""The judge's rules, one module per subject. Each module lists its checks; a check takes a Case and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kimi_runbook.expected import Expected
from kimi_runbook.findings import Finding, make_finding
from kimi_runbook.lock import Lock
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Unknown:
    """What a check needed and the snapshot does not tell; ``what`` in words, e.g. ``kernel: headers``."""

    what: str


@dataclass(frozen=True, slots=True)
class Case:
    """One host to be judged: what is, what is asked of it, and the lock."""

    snapshot: Snapshot
    expected: Expected
    lock: Lock

    @property
    def hardware(self) -> Fields:
        """What is known of the locked platform."""
        return data_file("hardware.yml").fields(self.lock.platform)

    @property
    def simulated(self) -> bool:
        """Whether the locked platform has no real GPUs, so that capacity and fabric say nothing."""
        return self.hardware.text("generation") == "simulated"

    @property
    def complete(self) -> bool:
        """Whether the snapshot comes from a module that asks everything; one before it is judged by what it has."""
        seen = self.snapshot
        return seen.kernel.running is not None or seen.accelerators is not None or seen.kernel_log is not None

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


Outcome = Iterator[Finding | Unknown]
"""What a check yields: findings, and what it could not tell."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question the judge asks of a host."""

    name: str
    judge: Callable[[Case], Outcome]
