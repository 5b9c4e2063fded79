"""The acceptance plan: which steps to run against which engine and hosts. Read once, validated, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import Lock, parse_lock
from kimi_runbook.reading import Fields, parse_json, read_text
from kimi_runbook.snapshot import Snapshot

SCHEMA_VERSION = 1

# Steps by number; 6 (observation) is planned by `observe`, later.
STEP_NAMES = {
    0: "host",
    1: "start",
    2: "short request",
    3: "shared prefix",
    4: "concurrency",
    5: "multi-node",
    6: "observation",
}
_STEPS_OF_A_CHAIN = (0, 1, 2, 3, 4, 5)
_STEPS_NEEDING_HOSTS = (0, 1, 5)
_DEFAULT_MAX_TOKENS = 16
_NEXT_STEP = "The acceptance role writes this file: run playbooks/accept.yml again."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHost:
    """One node of the engine.

    Attributes:
        name: Inventory name.
        address: The address the engine's other nodes reach it by.
        rank: Node rank, 0 on the head.
        uri: testinfra connection, e.g. ``ssh://root@192.0.2.11:22?sudo=true``.
        options: What a testinfra connection takes that a URI cannot hold, e.g. ``ssh_extra_args``.
    """

    name: str
    address: str
    rank: int
    uri: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What runs the model, as the inventory asked for it.

    Attributes:
        container: Container name on every node.
        unit: systemd unit on every node; empty where something else starts the engine.
        port: Port of the OpenAI API on the head.
        nodes: Nodes of one engine.
        engines: Engine cores that report metrics (the data-parallel size).
        api_servers: API server processes on the head.
        parallelism: Sizes by kind: tensor, pipeline, data.
        logs: Host name to a log file on this machine; a host without one is asked for its container's log.
    """

    container: str
    unit: str
    port: int
    nodes: int
    engines: int
    api_servers: int
    parallelism: Mapping[str, int]
    logs: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of one engine core: tensor times pipeline."""
        return self.parallelism.get("tensor", 1) * self.parallelism.get("pipeline", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one node was told to start: arguments after the image's entrypoint, environment, image by digest."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    image: str


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
        concurrency: Streams at once in step 4.
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
    concurrency: int

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
        root = Fields(value, source, _NEXT_STEP)
        root.require_schema(SCHEMA_VERSION)
        plan = _read(root)
        _validate(plan, source)
        return plan


def _read(root: Fields) -> AcceptancePlan:
    limits = root.fields("model_limits")
    options = limits.optional_fields("chat_template_kwargs")
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
        hosts=tuple(sorted(map(_host, root.each("hosts")), key=lambda host: (host.rank, host.name))),
        engine=_engine(root.fields("engine")),
        launch={name: _launch(launch) for name, launch in _by_name(root, "launch")},
        expected={name: item.mapping() for name, item in _by_name(root, "expected")},
        snapshots={name: Snapshot.from_json(item.mapping(), item.where) for name, item in _by_name(root, "snapshots")},
        lock=parse_lock(root.raw("lock"), f"{root.where}: lock") if root.raw("lock") else None,
        max_tokens=limits.optional_integer("max_tokens") or _DEFAULT_MAX_TOKENS,
        chat_template_kwargs=options.mapping() if options else {},
        concurrency=root.integer("concurrency"),
    )


def _by_name(root: Fields, key: str) -> list[tuple[str, Fields]]:
    section = root.optional_fields(key)
    return [(name, section.fields(name)) for name in section.names()] if section else []


def _host(host: Fields) -> PlanHost:
    return PlanHost(
        name=host.text("name"),
        address=host.text("address"),
        rank=host.integer("rank"),
        uri=host.text("uri"),
        options=host.text_map("options"),
    )


def _engine(engine: Fields) -> EnginePlan:
    parallelism = engine.fields("parallelism")
    return EnginePlan(
        container=engine.text("container"),
        unit=engine.optional_text("unit") or "",
        port=engine.integer("port"),
        nodes=engine.integer("nodes"),
        engines=engine.integer("engines"),
        api_servers=engine.integer("api_servers"),
        parallelism={kind: parallelism.integer(kind) for kind in parallelism.names()},
        logs={name: file for name, file in engine.text_map("log").items() if file},
    )


def _launch(launch: Fields) -> Launch:
    return Launch(argv=launch.texts("argv"), env=launch.text_map("env"), image=launch.text("image"))


def _whole(root: Fields, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(f"{root.where}: {key}", f"{value!r}", "step numbers")
    return value


def _validate(plan: AcceptancePlan, source: str) -> None:
    unknown = [step for step in plan.steps if step not in _STEPS_OF_A_CHAIN]
    if unknown or not plan.steps:
        raise _bad(source, f"steps are {list(plan.steps)}", "one or more of 0 to 5")
    for url in (plan.endpoint, *plan.metrics):
        if not url.startswith(("http://", "https://")):
            raise _bad(source, f"{url!r} is no URL", "http:// or https:// in endpoint and metrics")
    if not plan.metrics:
        raise _bad(source, "metrics is empty", "at least one URL, or the counters cannot be read")
    if plan.concurrency < 1 or plan.max_tokens < 1:
        raise _bad(source, f"concurrency {plan.concurrency}, max_tokens {plan.max_tokens}", "both at least 1")
    needing = [step for step in plan.steps if step in _STEPS_NEEDING_HOSTS]
    if needing and not plan.hosts:
        raise _bad(source, f"steps {needing} are planned and hosts is empty", "the engine's nodes in hosts")
    if sorted(host.rank for host in plan.hosts) != list(range(len(plan.hosts))):
        raise _bad(source, f"ranks are {[host.rank for host in plan.hosts]}", "0, 1, 2, ... each once")
    if needing and plan.lock is None:
        raise _bad(source, f"steps {needing} are planned and lock is empty", "the lock the hosts were set up by")
    tables: dict[str, Mapping[str, object]] = {
        "launch": plan.launch,
        "expected": plan.expected,
        "snapshots": plan.snapshots,
    }
    for host in plan.hosts:
        for what, table in tables.items():
            if host.name not in table:
                raise _bad(source, f"{what} has nothing about {host.name}", f"{what} for every host")


def _bad(where: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(where=where, observed=observed, expected=expected, next_step=_NEXT_STEP)
