"""The acceptance plan: which steps to run against which engine and hosts. Read once, validated, never changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.plan_parts import (
    NEXT_STEP,
    Ability,
    Access,
    EnginePlan,
    GeometryOptions,
    Launch,
    PlanHost,
    Wanted,
    bad_plan,
    default,
    read_abilities,
    read_access,
    read_engine,
    read_geometry_options,
    read_host,
    read_launch,
)
from kimi_runbook.lock import Lock, parse_lock
from kimi_runbook.reading import Fields, parse_json, read_text
from kimi_runbook.snapshot import Snapshot

__all__ = [
    "SCHEMA_VERSION",
    "STEP_NAMES",
    "Ability",
    "AcceptancePlan",
    "Access",
    "EnginePlan",
    "GeometryOptions",
    "Launch",
    "PlanHost",
    "Wanted",
]

SCHEMA_VERSION = 1

STEP_NAMES = {
    0: "host",
    1: "start",
    2: "short request",
    3: "shared prefix",
    4: "concurrency",
    5: "multi-node",
    6: "observation",
}
_STEPS_NEEDING_HOSTS = (0, 1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePlan:
    """One run of the chain.

    Attributes:
        run_id: UTC stamp and four hex digits.
        run_dir: Where the run's files go.
        endpoint: Base URL of the OpenAI API.
        metrics: Every URL whose counters belong to this engine; all are read and summed.
        model: Served model name.
        steps: Planned step numbers, ascending.
        site: Inventory name.
        simulated: What is a stand-in on this site, e.g. ``GPUs``; printed in every report.
        interconnect: Kind, e.g. ``ethernet``.
        interface: Network interface the nodes talk over; empty when there is none to read.
        hosts: Nodes, by rank; empty for a bare endpoint.
        launch: What each node was told to start, by host name.
        expected: What the inventory and the lock ask of each host, by host name.
        snapshots: What was true on each host before the chain, by host name.
        lock: The lock; None for a bare endpoint.
        max_tokens: Tokens to generate per request.
        chat_template_kwargs: What the model's chat template is told, e.g. ``{"thinking": false}``.
        abilities: What is wanted of each ability in step 2.
        concurrency: Streams at once at the nominal load of step 4.
        peak_concurrency: Streams at once at its peak; never below ``concurrency``.
        observe_s: Seconds step 6 watches the service, when it is planned.
        peer_loss_drill: Whether a node's engine is killed at the end, to see it noticed, and the service restored.
        continues: Directory of the earlier run this is the observation of; None for a run of its own.
        access: How the endpoint is reached.
        geometry: What the operator told of the cache.
    """

    run_id: str
    run_dir: Path
    endpoint: str
    metrics: tuple[str, ...]
    model: str
    steps: tuple[int, ...]
    site: str
    simulated: tuple[str, ...]
    interconnect: str
    interface: str
    hosts: tuple[PlanHost, ...]
    engine: EnginePlan
    launch: Mapping[str, Launch]
    expected: Mapping[str, Mapping[str, Any]]
    snapshots: Mapping[str, Snapshot]
    lock: Lock | None
    max_tokens: int
    chat_template_kwargs: Mapping[str, Any]
    abilities: Mapping[Ability, Wanted]
    concurrency: int
    peak_concurrency: int
    observe_s: int
    peer_loss_drill: bool
    continues: Path | None
    access: Access
    geometry: GeometryOptions

    @property
    def not_planned(self) -> tuple[int, ...]:
        """Steps of the chain this run leaves out."""
        return tuple(step for step in STEP_NAMES if step not in self.steps)

    @property
    def head(self) -> PlanHost | None:
        """The node that serves the API, or None for a bare endpoint."""
        return next((host for host in self.hosts if host.rank == 0), None)

    @classmethod
    def load(cls, path: Path) -> AcceptancePlan:
        """Read a plan from a JSON file; raises RunbookError when it cannot be read or does not hold together."""
        return cls.from_json(parse_json(read_text(path), str(path)), source=str(path))

    @classmethod
    def from_json(cls, value: object, source: str = "acceptance.json") -> AcceptancePlan:
        """Return the plan in a JSON value; raises RunbookError naming the first thing that is wrong."""
        root = Fields(value, source, NEXT_STEP)
        root.require_schema(SCHEMA_VERSION)
        plan = _read(root)
        _validate(plan, source)
        return plan


def _read(root: Fields) -> AcceptancePlan:
    limits = root.fields("model_limits")
    options = limits.optional_fields("chat_template_kwargs")
    continues = root.optional_text("continues")
    return AcceptancePlan(
        run_id=root.text("run_id"),
        run_dir=Path(root.text("run_dir")),
        endpoint=root.text("endpoint").rstrip("/"),
        metrics=root.texts("metrics"),
        model=root.text("model"),
        steps=tuple(sorted({_whole(root, "steps", step) for step in root.optional_sequence("steps") or ()})),
        site=root.text("site"),
        simulated=root.texts("simulated"),
        interconnect=root.text("interconnect"),
        interface=root.optional_text("interface") or "",
        hosts=tuple(sorted(map(read_host, root.each("hosts")), key=lambda host: (host.rank, host.name))),
        engine=read_engine(root.fields("engine")),
        launch={name: read_launch(launch) for name, launch in _by_name(root, "launch")},
        expected={name: item.mapping() for name, item in _by_name(root, "expected")},
        snapshots={name: Snapshot.from_json(item.mapping(), item.where) for name, item in _by_name(root, "snapshots")},
        lock=parse_lock(root.raw("lock"), f"{root.where}: lock") if root.raw("lock") else None,
        max_tokens=limits.optional_integer("max_tokens") or default("max_tokens"),
        chat_template_kwargs=options.mapping() if options else {},
        abilities=read_abilities(limits),
        concurrency=root.integer("concurrency"),
        peak_concurrency=root.optional_integer("peak_concurrency") or root.integer("concurrency"),
        observe_s=root.optional_integer("observe_s") or 0,
        peer_loss_drill=root.optional_flag("peer_loss_drill") or False,
        continues=Path(continues) if continues else None,
        access=read_access(root.optional_fields("access")),
        geometry=read_geometry_options(root.optional_fields("geometry")),
    )


def _by_name(root: Fields, key: str) -> list[tuple[str, Fields]]:
    section = root.optional_fields(key)
    return [(name, section.fields(name)) for name in section.names()] if section else []


def _whole(root: Fields, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_plan(f"{root.where}: {key}", f"{value!r}", "step numbers")
    return value


def _validate(plan: AcceptancePlan, source: str) -> None:
    for observed, expected in _faults(plan):
        raise bad_plan(source, observed, expected)


def _faults(plan: AcceptancePlan) -> Iterator[tuple[str, str]]:
    """Yield what does not hold together, as (observed, expected)."""
    if not plan.steps or any(step not in STEP_NAMES for step in plan.steps):
        yield f"steps are {list(plan.steps)}", f"one or more of 0 to {max(STEP_NAMES)}"
    for url in (plan.endpoint, *plan.metrics):
        if not url.startswith(("http://", "https://")):
            yield f"{url!r} is no URL", "http:// or https:// in endpoint and metrics"
    if not plan.metrics:
        yield "metrics is empty", "at least one URL, or the counters cannot be read"
    yield from _faults_of_load(plan)
    yield from _faults_of_hosts(plan)


def _faults_of_load(plan: AcceptancePlan) -> Iterator[tuple[str, str]]:
    if plan.concurrency < 1 or plan.max_tokens < 1:
        yield f"concurrency {plan.concurrency}, max_tokens {plan.max_tokens}", "both at least 1"
    if plan.peak_concurrency < plan.concurrency:
        yield f"peak_concurrency {plan.peak_concurrency}", f"at least concurrency {plan.concurrency}"
    if 6 in plan.steps and plan.observe_s < 1:
        yield f"step 6 is planned and observe_s is {plan.observe_s}", "seconds to observe, at least 1"
    if plan.continues and plan.steps != (6,):
        yield f"an earlier run is continued by steps {list(plan.steps)}", "step 6 alone"
    if plan.peer_loss_drill and 5 not in plan.steps:
        yield "peer_loss_drill is on and step 5 is not planned", "step 5 in steps, or no drill"
    if plan.peer_loss_drill and not plan.engine.unit:
        yield "peer_loss_drill is on and the engine has no unit", "a unit to start the engine again by, or no drill"


def _faults_of_hosts(plan: AcceptancePlan) -> Iterator[tuple[str, str]]:
    needing = [step for step in plan.steps if step in _STEPS_NEEDING_HOSTS]
    if needing and not plan.hosts:
        yield f"steps {needing} are planned and hosts is empty", "the engine's nodes in hosts"
    if sorted(host.rank for host in plan.hosts) != list(range(len(plan.hosts))):
        yield f"ranks are {[host.rank for host in plan.hosts]}", "0, 1, 2, ... each once"
    if needing and plan.lock is None:
        yield f"steps {needing} are planned and lock is empty", "the lock the hosts were set up by"
    tables: dict[str, Mapping[str, object]] = {
        "launch": plan.launch,
        "expected": plan.expected,
        "snapshots": plan.snapshots,
    }
    for host in plan.hosts:
        for what, table in tables.items():
            if host.name not in table:
                yield f"{what} has nothing about {host.name}", f"{what} for every host"
