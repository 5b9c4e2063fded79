"""The drill of step 5: one node's engine is killed; the loss has to be noticed, named and explained, and is repaired.

It runs last and only where the plan asks for it. Requests go on while the node is gone, so that the time to notice is
what a user would see. Whatever happens in between, every rank is stopped and started again before it returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.hosts import EngineHost, HostError
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.interrupt import uninterrupted
from kimi_runbook.acceptance.prompts import chat, new_salt, words
from kimi_runbook.acceptance.result import Check, State, unknown, verify
from kimi_runbook.reading import Fields, data_file

_PROMPT_WORDS = 20  # few, so that an answer is quick
_SERVE = "Start the replica again: run playbooks/serve.yml."
_DIAGNOSE = "Read both nodes' engine logs around this moment: run playbooks/diagnose.yml."


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """How the loss showed to a client.

    Attributes:
        after_s: Seconds from the kill to the first request that failed.
        how: What that request met.
    """

    after_s: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the surviving nodes' logs say about the loss.

    Attributes:
        cause: In words (data/peer_loss.yml).
        line: The log line it was read from.
        on: The node whose log it is.
        address: The lost peer's address as the line names it; empty where it names none.
    """

    cause: str
    line: str
    on: str
    address: str


def drill(context: Context) -> tuple[list[Check], dict[str, Any]]:
    """Kill the engine on the last rank's node, watch, and restore; returns checks and the figure ``peer_loss``."""
    victim = max(context.hosts.values(), key=lambda host: host.plan.rank)
    unit = context.plan.engine.unit
    figures: dict[str, Any] = {"killed_host": victim.name}
    checks: list[Check] = []
    try:
        since = {name: f"@{host.epoch_s():.3f}" for name, host in context.hosts.items()}
        context.tell(f"killing the engine on {victim.name}")
        victim.kill(context.plan.engine.container)
        killed_s = context.now()
        notice = _await_notice(context, killed_s)
        checks.append(_noticed(notice, victim))
        checks += _explained(context, victim, unit, since, figures)
        figures["noticed_s"] = round(notice.after_s, 2) if notice else None
    except HostError as error:
        checks.append(unknown("peer-loss.drill", str(error), expected="a drill that runs", next_step=_SERVE))
    finally:
        restored = _restore(context, unit)
    checks.append(restored[0])
    figures["restored_s"] = restored[1]
    return checks, {"peer_loss": figures}


def explain(logs: Mapping[str, Iterable[str]]) -> Explanation | None:
    """Return what the logs (node name to lines) say of a lost peer: the kind nearest to the cause, or None.

    A line that names the peer's address goes before one of a later kind that does not (data/peer_loss.yml).
    """
    kinds = data_file("peer_loss.yml").each("lines")
    found: dict[int, Explanation] = {}
    for name, lines in logs.items():
        for line in lines:
            for position, kind in enumerate(kinds):
                if position not in found and all(part in line for part in kind.texts("parts")):
                    found[position] = _explanation(kind, name, line)
    return found[min(found)] if found else None


def _explanation(kind: Fields, name: str, line: str) -> Explanation:
    pattern = kind.optional_text("address")
    match = re.search(pattern, line) if pattern else None
    address = match["address"] if match else ""
    return Explanation(cause=kind.text("cause"), line=line.strip()[:300], on=name, address=address)


def _await_notice(context: Context, killed_s: float) -> Notice | None:
    """Send short requests until one fails; None when none did within the limit."""
    data = data_file("peer_loss.yml")
    limit_s, every_s = float(data.integer("notice_within_s")), data.number("probe_every_s")
    body = context.chat_body(chat(words(new_salt(), _PROMPT_WORDS), "Still there?"), max_tokens=1)
    while (passed_s := context.now() - killed_s) < limit_s:
        context.tell(f"waiting for the loss to show, {passed_s:.0f} s")
        try:
            context.client.chat(body)
        except EngineError as error:
            return Notice(after_s=context.now() - killed_s, how=str(error))
        context.elapse(every_s)
    return None


def _noticed(notice: Notice | None, victim: EngineHost) -> Check:
    data = data_file("peer_loss.yml")
    limit_s, warn_s = data.integer("notice_within_s"), data.integer("notice_warn_s")
    if notice is None:
        observed = f"requests went on for {limit_s} s with {victim.name} gone"
    else:
        observed = f"a request failed {notice.after_s:.1f} s after {victim.name} was lost: {notice.how}"
    late = notice is not None and notice.after_s > warn_s
    return verify(
        "peer-loss.noticed",
        notice is not None and not late,
        observed=observed,
        expected=f"a failing request within {warn_s} s, {limit_s} s at the latest (data/peer_loss.yml)",
        evidence="short requests from the controller while the node was gone",
        next_step="Watch /health and the units from outside: users would notice first." if late else _DIAGNOSE,
        otherwise=State.WARN if late else State.FAIL,
    )


def _explained(
    context: Context, victim: EngineHost, unit: str, since: Mapping[str, str], figures: dict[str, Any]
) -> list[Check]:
    """Two witnesses name the node: what systemd says of every unit, and the address in a survivor's log."""
    states = {name: host.unit_state(unit) for name, host in context.hosts.items()}
    logs = {n: h.unit_log_since(unit, since[n]) for n, h in context.hosts.items() if h is not victim}
    told = explain(logs)
    by_address = {host.plan.address: name for name, host in context.hosts.items()}
    named = by_address.get(told.address) if told else None
    figures |= {"named_host": named, "cause": told.cause if told else None, "unit_states": states}
    return [
        verify(
            "peer-loss.named",
            named == victim.name,
            observed=f"the survivors' logs name {named or 'no node'}"
            + (f" ({told.address})" if told and told.address else "")
            + f"; units: {', '.join(f'{name} {state}' for name, state in states.items())}",
            expected=f"{victim.name} by its address {victim.plan.address}",
            evidence=f"journal of {unit} on {', '.join(logs)}",
            next_step=f"Only the unit's state tells which node is gone: systemctl status {unit} on every node.",
            otherwise=State.WARN if states.get(victim.name) != "active" and named is None else State.FAIL,
        ),
        verify(
            "peer-loss.cause",
            told is not None,
            observed=f"{told.on}: {told.cause}: {told.line}" if told else "no known line about a lost peer",
            expected="a line that explains the failure (data/peer_loss.yml)",
            evidence=f"journal of {unit}",
            next_step=_DIAGNOSE,
            otherwise=State.WARN,
        ),
    ]


def _restart(context: Context, unit: str) -> None:
    """Stop every rank, then start every rank; each is asked again where a connection was cut, as by the same Ctrl-C."""
    ranks = sorted(context.hosts.values(), key=lambda host: host.plan.rank)
    for ask in (EngineHost.stop_unit, EngineHost.start_unit):
        for host in ranks:
            for left in reversed(range(data_file("peer_loss.yml").integer("restart_tries"))):
                try:
                    ask(host, unit)
                    break
                except HostError:
                    if not left:
                        raise


def _restore(context: Context, unit: str) -> tuple[Check, float | None]:
    """Stop and start every rank, and wait until the engine answers a request again."""
    name, expected = "peer-loss.restored", "every rank started again and a request answered"
    began_s = context.now()
    limit_s = context.plan.engine.ready_timeout_s
    body = context.chat_body(chat(words(new_salt(), _PROMPT_WORDS), "Back again?"), max_tokens=1)
    try:
        with uninterrupted():
            _restart(context, unit)
    except HostError as error:
        failed = Check(name=name, state=State.FAIL, observed=str(error), expected=expected, next_step=_SERVE)
        return failed, None
    last = "nothing was asked"
    while (passed_s := context.now() - began_s) < limit_s:
        context.tell(f"waiting for the engine to serve again, {passed_s:.0f} s")
        try:
            if context.client.health() == 200:
                context.client.chat(body)
                restored_s = round(context.now() - began_s, 1)
                observed = f"a request was answered {restored_s} s after the restart began"
                return verify(
                    name, True, observed=observed, expected=expected, evidence=f"systemctl, {unit}"
                ), restored_s
        except EngineError as error:
            last = str(error)
        context.elapse(data_file("peer_loss.yml").number("healthy_every_s"))
    observed = f"no answer within {limit_s} s; last: {last}"
    return Check(name=name, state=State.FAIL, observed=observed, expected=expected, next_step=_SERVE), None
