"""What the nodes say of an observation: the same start as before, and no fatal line that was not there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.hosts import EngineHost, HostError
from kimi_runbook.acceptance.result import Check, unknown, verify
from kimi_runbook.acceptance.step1_start import node_log

_NEXT = "Find the first cause there: run playbooks/diagnose.yml."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node at one moment.

    Attributes:
        start: What tells one start of its engine from the next, in words.
        fatal: Fatal lines of its log so far.
    """

    start: str
    fatal: frozenset[str]


def node_states(context: Context) -> dict[str, NodeState | str]:
    """Return the state of every node, or in words why it gave none."""
    found: dict[str, NodeState | str] = {}
    for name, host in context.hosts.items():
        try:
            found[name] = _state(context, host)
        except (HostError, OSError) as error:
            found[name] = str(error)
    return found


def node_checks(before: Mapping[str, NodeState | str], after: Mapping[str, NodeState | str]) -> list[Check]:
    """Return the checks of every node: a restart of a worker's engine may show in no counter of the head's."""
    checks: list[Check] = []
    for name, first in before.items():
        last = after[name]
        if isinstance(first, str) or isinstance(last, str):
            why = first if isinstance(first, str) else str(last)
            checks.append(
                unknown(f"{name}.not-restarted", why, expected="an answer, before and after", next_step=_NEXT)
            )
            continue
        new = sorted(last.fatal - first.fatal)
        checks += [
            verify(
                f"{name}.not-restarted",
                last.start == first.start,
                observed=last.start,
                expected=first.start,
                evidence="docker inspect, before and after",
                next_step=_NEXT,
            ),
            verify(
                f"{name}.no-new-fatal-line",
                not new,
                observed=f"{len(new)} new: {new[0]}" if new else "none",
                expected="none (data/engine_log.yml)",
                evidence="engine log, before and after",
                next_step=_NEXT,
            ),
        ]
    return checks


def _state(context: Context, host: EngineHost) -> NodeState:
    container = host.container(context.plan.engine.container)
    start = f"container {container.id[:12]}, started {container.started_at}, {container.restart_count} restarts"
    return NodeState(start=start, fatal=frozenset(line.text for line in node_log(context, host).fatal))
