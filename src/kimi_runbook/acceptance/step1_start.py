"""Step 1: the engine is ready on every node, started once, and its log holds no fatal line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.engine_log import EngineLog, patterns, read_log, seconds_into
from kimi_runbook.acceptance.hosts import Container, EngineHost, HostError
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown, verify

STEP = 1
NAME = "start"

_SERVE = "Read the engine's log on that node, then run playbooks/serve.yml."


def run(context: Context) -> StepResult:
    """Return whether the engine is up, and how long each phase of its start took."""
    plan = context.plan
    checks = [_health(context)]
    if plan.lock is not None:
        checks.append(_version(context, plan.lock.image.engine.version))
    phases: dict[str, Any] = {}
    for name, host in context.hosts.items():
        try:
            container = host.container(plan.engine.container)
        except HostError as error:
            checks.append(unknown(f"{name}.running", str(error), expected="a running container", next_step=_SERVE))
            continue
        checks += _running(host, container, plan.engine.unit)
        try:
            log = node_log(context, host)
        except (HostError, OSError) as error:
            checks.append(unknown(f"{name}.log", str(error), expected="the engine's log", next_step=_SERVE))
            continue
        checks.append(_no_fatal_line(name, log))
        if host.plan.rank == 0:
            checks.append(_ready_line(name, log))
        phases[name] = seconds_into(log, container.started_at)
    return StepResult.of(STEP, NAME, checks, {"phases_s": phases, "memory": context.memory()})


def node_log(context: Context, host: EngineHost) -> EngineLog:
    """Return what a node's engine log says, from the plan's file or from the node; raises HostError or OSError."""
    file = context.plan.engine.logs.get(host.name)
    if file:
        with Path(file).open(encoding="utf-8", errors="replace") as stream:
            return read_log(stream)
    return read_log(host.log_lines(context.plan.engine.container, patterns()))


def _health(context: Context) -> Check:
    where = f"GET {context.plan.endpoint}/health"
    try:
        status = context.client.health()
    except EngineError as error:
        return Check(name="health", state=State.FAIL, observed=str(error), expected="200", next_step=_SERVE)
    return verify("health", status == 200, observed=f"HTTP {status}", expected="200", evidence=where, next_step=_SERVE)


def _version(context: Context, wanted: str) -> Check:
    expected = f"{wanted} (lock)"
    try:
        version = context.client.version()
    except EngineError as error:
        return Check(name="version", state=State.FAIL, observed=str(error), expected=expected, next_step=_SERVE)
    context.note("engine_version", version)
    return verify(
        "version",
        version == wanted,
        observed=version,
        expected=expected,
        evidence="GET /version",
        next_step="The image's tag and the engine in it differ: resolve the lock again.",
    )


def _running(host: EngineHost, container: Container, unit: str) -> list[Check]:
    """A container that a unit removes and makes anew has no restart count, so the unit's own count is asked too."""
    checks = [
        verify(
            f"{host.name}.running",
            container.running and container.restart_count == 0,
            observed=f"{'running' if container.running else 'not running'}, {container.restart_count} restarts",
            expected="running, 0 restarts",
            evidence="docker inspect",
            next_step=_SERVE,
        )
    ]
    if unit:
        name = f"{host.name}.unit-restarts"
        try:
            restarts = host.unit_restarts(unit)
        except HostError as error:
            return [*checks, unknown(name, str(error), expected="0", next_step=f"systemctl status {unit}")]
        checks.append(
            verify(
                name,
                restarts == 0,
                observed=f"{unit} was restarted {restarts} times by systemd",
                expected="0",
                evidence=f"systemctl show {unit}, NRestarts",
                next_step=f"Find the first cause: journalctl -u {unit} on {host.name}.",
            )
        )
    return checks


def _no_fatal_line(name: str, log: EngineLog) -> Check:
    first = log.fatal[0] if log.fatal else None
    return verify(
        f"{name}.no-fatal-line",
        first is None,
        observed=f"{first.kind}: {first.text}" if first else "no fatal line",
        expected="no fatal line (data/engine_log.yml)",
        evidence="engine log",
        next_step="The first fatal line of the lowest process is nearest to the cause: run playbooks/diagnose.yml.",
    )


def _ready_line(name: str, log: EngineLog) -> Check:
    last = list(log.phases)[-1] if log.phases else "none"
    return verify(
        f"{name}.ready-line",
        log.ready,
        observed="ready line seen" if log.ready else f"no ready line; the last phase seen is {last}",
        expected="a ready line on the head",
        evidence="engine log",
        next_step=_SERVE,
    )
