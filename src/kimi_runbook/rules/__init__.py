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
    """One host to be judged: what is, what is asked of it, and the lock.

    Attributes:
        skipped: Sections of the snapshot that were left out when it was read: what they hold here says nothing.
    """

    snapshot: Snapshot
    expected: Expected
    lock: Lock
    skipped: frozenset[str] = frozenset()

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

    def told(self, section: str) -> bool:
        """Whether a section of the snapshot was asked, answered and read, so that an empty one means: nothing there."""
        return section not in self.skipped and not self.failed(section)

    def failed(self, *probes: str) -> str:
        """Return what the first of these probes failed with, in words; empty when none of them did."""
        found = (error for error in self.snapshot.errors if error.probe.partition(" ")[0] in probes)
        return next((f"{error.probe}: {error.message or 'no answer'}" for error in found), "")

    def unanswered(self, question: str, failure: str) -> Finding:
        """Build the finding for a question that decides about a change and got no answer."""
        return self.finding(
            "snapshot.unanswered", observed=failure, expected=f"an answer: {question}", subject=question
        )

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
