"""Plan: what would be done, per host and per batch. Built from findings, compared, then applied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kimi_runbook.errors import RunbookError
from kimi_runbook.findings import ACTIONS, Finding
from kimi_runbook.lock import Lock
from kimi_runbook.reading import Fields, digest_of
from kimi_runbook.table import render_findings_table

__all__ = ["Plan", "PlanItem", "build_plan", "diff", "make_batches", "render_findings_table"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanItem:
    """One thing to do on one host: action, the role that does it, and what differs now."""

    action: str
    role: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would change.

    Attributes:
        run_id: The run that made it.
        lock_digest: Digest of the lock it leads to.
        hosts: Every judged host, with what is to be done there; empty when nothing is.
        batches: Hosts that change together, in order; the first is the canary. Hosts on which only serve has work, or
            nobody, are in none.
    """

    run_id: str
    lock_digest: str
    hosts: Mapping[str, tuple[PlanItem, ...]]
    batches: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "lock_digest": self.lock_digest,
            "hosts": {
                host: [{"action": item.action, "role": item.role, "what": item.what} for item in items]
                for host, items in self.hosts.items()
            },
            "batches": [list(batch) for batch in self.batches],
        }

    def digest(self) -> str:
        """Return a digest of everything but the run id: two runs that would do the same have the same digest."""
        return digest_of({**self.to_json(), "run_id": None})

    @classmethod
    def from_json(cls, data: Mapping[str, object], source: str = "plan") -> Plan:
        """Read the JSON form; RunbookError when it is not a plan."""
        root = Fields(data, source, "Make the plan again with playbooks/audit.yml.")
        root.require_schema(SCHEMA_VERSION)
        hosts = root.fields("hosts")
        batches = Fields({str(n): batch for n, batch in enumerate(root.optional_sequence("batches") or ())}, source)
        return cls(
            run_id=root.text("run_id"),
            lock_digest=root.text("lock_digest"),
            hosts={
                host: tuple(
                    PlanItem(action=item.text("action"), role=item.text("role"), what=item.text("what"))
                    for item in hosts.each(host)
                )
                for host in hosts.names()
            },
            batches=tuple(batches.texts(key) for key in batches.names()),
        )


def build_plan(run_id: str, findings: Iterable[Finding], lock: Lock, batches: Sequence[Sequence[str]]) -> Plan:
    """Build the plan that would make the change findings go away.

    Raises:
        RunbookError: a host is in two batches, or a finding is about a host that is in none.
    """
    hosts: dict[str, list[PlanItem]] = {}
    for host in (host for batch in batches for host in batch):
        if host in hosts:
            raise _misplaced(host, "in more than one batch")
        hosts[host] = []
    for finding in findings:
        if finding.action is None:
            continue
        if finding.host not in hosts:
            raise _misplaced(finding.host, "in no batch")
        what = f"{finding.title}: {finding.observed}; expected {finding.expected}"
        item = PlanItem(action=finding.action, role=finding.role, what=what)
        if item not in hosts[finding.host]:
            hosts[finding.host].append(item)
    return Plan(
        run_id=run_id,
        lock_digest=lock.digest(),
        hosts={
            host: tuple(sorted(items, key=lambda item: ACTIONS.index(item.action))) for host, items in hosts.items()
        },
        batches=tuple(tuple(batch) for batch in batches),
    )


def make_batches(hosts: Sequence[str], sizes: Sequence[int | str]) -> tuple[tuple[str, ...], ...]:
    """Cut hosts into batches.

    Args:
        hosts: Inventory names, in order.
        sizes: Size per batch, a number or a share of all hosts such as ``"25%"`` (rounded down, at least one);
            the last one repeats. ``[1, "25%"]`` is a canary, then quarters.

    Raises:
        RunbookError: no size, or one that is no positive number or share.
    """
    counts = [_count(size, len(hosts)) for size in sizes]
    if not counts:
        raise _bad_size("none")
    batches: list[tuple[str, ...]] = []
    start = 0
    while start < len(hosts):
        count = counts[min(len(batches), len(counts) - 1)]
        batches.append(tuple(hosts[start : start + count]))
        start += count
    return tuple(batches)


def diff(before: Plan, after: Plan) -> tuple[str, ...]:
    """Return what differs between two plans, one line each, ``-`` only before and ``+`` only after.

    The run id is left out: equal plans of two runs give nothing.
    """
    lines: list[str] = []
    if before.lock_digest != after.lock_digest:
        lines += [f"- lock {before.lock_digest}", f"+ lock {after.lock_digest}"]
    for host in sorted(set(before.hosts) | set(after.hosts)):
        old, new = before.hosts.get(host, ()), after.hosts.get(host, ())
        lines += [f"- {host}: {item.action} {item.role}: {item.what}" for item in old if item not in new]
        lines += [f"+ {host}: {item.action} {item.role}: {item.what}" for item in new if item not in old]
    if before.batches != after.batches:
        lines += [f"- batches {_batches(before)}", f"+ batches {_batches(after)}"]
    return tuple(lines)


def _batches(plan: Plan) -> str:
    return " | ".join(", ".join(batch) for batch in plan.batches)


def _count(size: int | str, total: int) -> int:
    match = re.fullmatch(r"(\d+)(%?)", str(size)) if not isinstance(size, bool) else None
    if match is None or int(match[1]) == 0 or (match[2] and int(match[1]) > 100):
        raise _bad_size(repr(size))
    return max(1, total * int(match[1]) // 100) if match[2] else int(match[1])


def _bad_size(observed: str) -> RunbookError:
    return RunbookError(
        where="batch sizes",
        observed=observed,
        expected='positive numbers or shares, e.g. [1, "25%"]',
        next_step="Correct them in the inventory.",
    )


def _misplaced(host: str, observed: str) -> RunbookError:
    return RunbookError(
        where=f"plan: {host}",
        observed=observed,
        expected="every judged host in exactly one batch",
        next_step="Build the batches from the hosts that were judged.",
    )
