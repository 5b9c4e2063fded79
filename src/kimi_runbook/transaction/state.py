"""What stands on a host of an earlier or a present run, as the snapshot carries it, and what follows from it.

The states of one host, kept in its state file by the module host_transaction:

    none ──begin──► open ──step──► open ──commit──► done
                     ▲ │
              begin  │ └──fail──► failed
                     └──────────────┘

``open`` without a live lease is what a killed run leaves; ``failed`` is what a run leaves that could still say so.
Both are unfinished: the host may be drained, and the next run takes it up again at the step it stands at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_runbook.errors import RunbookError
from kimi_runbook.host_facts import LeaseFacts, TransactionFacts

UNFINISHED = ("open", "failed", "unreadable")


def is_unfinished(facts: TransactionFacts | None) -> bool:
    """Whether a run began something here that no run has ended well."""
    return facts is not None and facts.state in UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A host whose lease belongs to another run."""

    host: str
    step: str
    lease: LeaseFacts

    @property
    def expired(self) -> bool:
        """Whether nobody has renewed it in time: its run is taken for dead."""
        return self.lease.expires_in_s <= 0


def foreign(standing: Mapping[str, TransactionFacts | None], run_id: str, take_over: str = "") -> tuple[Standing, ...]:
    """Return the hosts whose lease belongs to a run that is neither this one nor the one it takes over."""
    return tuple(
        Standing(host=host, step=facts.step or "begin", lease=facts.lease)
        for host, facts in standing.items()
        if facts is not None and facts.lease is not None and facts.lease.run not in (run_id, take_over)
    )


def describe(one: Standing) -> str:
    """Return a lease in words: owner, run, age, expiry and the step it stands at."""
    lease = one.lease
    end = f"expired {span(-lease.expires_in_s)} ago" if one.expired else f"expires in {span(lease.expires_in_s)}"
    return (
        f"{one.host}: leased by {lease.owner} for run {lease.run}, "
        f"renewed {span(lease.age_s)} ago, {end}, at step {one.step}"
    )


def refuse_foreign(held: tuple[Standing, ...]) -> None:
    """Raise RunbookError where a lease is still alive; expired ones are for the caller to name and take."""
    alive = [one for one in held if not one.expired]
    if alive:
        runs = sorted({one.lease.run for one in alive})
        raise RunbookError(
            where="lease",
            observed="; ".join(map(describe, alive)),
            expected="hosts that no other run works on",
            next_step=(
                f"Wait for that run to end. If it is dead, add -e take_over={runs[0]}; nothing was changed by this run."
            ),
        )


def span(seconds: float) -> str:
    """Return a time span a person reads at a glance: ``40 s``, ``12 min``, ``3 h 5 min``."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
