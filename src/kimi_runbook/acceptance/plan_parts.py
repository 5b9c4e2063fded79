"""The parts of an acceptance plan: nodes, engine, launch, access, what is wanted; each with its reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file

NEXT_STEP = "The acceptance role writes this file: run playbooks/accept.yml again."
"""What to do about a plan that does not hold together."""


class Ability(StrEnum):
    """Something a model may be able to do beyond text in, text out."""

    TOOLS = "tools"
    REASONING = "reasoning"
    IMAGES = "images"


class Wanted(StrEnum):
    """What the inventory says of an ability: its absence fails the chain, is told and no fault, or is not looked at."""

    REQUIRED = "required"
    PROBE = "probe"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the endpoint is reached. No secret is kept here: a key is named by its environment variable.

    Attributes:
        api_key_env: Environment variable that holds the API key; empty for none.
        ca_file: Certificates to trust in place of the system's; empty for the system's.
        proxy: ``http://host:port`` to go through; empty for a direct connection, whatever the environment says.
    """

    api_key_env: str = ""
    ca_file: str = ""
    proxy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryOptions:
    """Cache geometry as the operator tells it, used only where the engine does not tell it itself.

    Attributes:
        block_size: Tokens per block, or None.
        match_unit: Tokens a hit may land on, or None.
        retention: ``0``, a number of tokens, or ``dense``; empty when not told.
        cache_mode: ``none`` where layers are all attention, ``align`` where recurrent state is kept; empty: not told.
    """

    block_size: int | None = None
    match_unit: int | None = None
    retention: str = ""
    cache_mode: str = ""


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
        ready_timeout_s: Seconds a start may take until the engine serves.
    """

    container: str
    unit: str
    port: int
    nodes: int
    engines: int
    api_servers: int
    parallelism: Mapping[str, int]
    logs: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: int = field(default_factory=lambda: default("ready_timeout_s"))

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


def read_abilities(limits: Fields) -> dict[Ability, Wanted]:
    """Return what is wanted of each ability; one that is not named is probed."""
    section = limits.optional_fields("abilities")
    told = {name: section.text(name) for name in section.names()} if section else {}
    try:
        asked = {Ability(name): Wanted(wanted) for name, wanted in told.items()}
    except ValueError as error:
        expected = f"{', '.join(Ability)} with one of {', '.join(Wanted)}"
        raise bad_plan(f"{limits.where}: abilities", str(error), expected) from error
    return {ability: asked.get(ability, Wanted.PROBE) for ability in Ability}


def read_access(access: Fields | None) -> Access:
    """Return how the endpoint is reached; a direct connection without a key where nothing is told."""
    if access is None:
        return Access()
    told = {name: access.optional_text(name) or "" for name in ("api_key_env", "ca_file", "proxy")}
    return Access(**told)


def read_geometry_options(told: Fields | None) -> GeometryOptions:
    """Return what was told of the cache, nothing where nothing is told."""
    if told is None:
        return GeometryOptions()
    return GeometryOptions(
        block_size=told.optional_integer("block_size"),
        match_unit=told.optional_integer("match_unit"),
        retention=told.optional_text("retention") or "",
        cache_mode=told.optional_text("cache_mode") or "",
    )


def read_host(host: Fields) -> PlanHost:
    """Return one node."""
    return PlanHost(
        name=host.text("name"),
        address=host.text("address"),
        rank=host.integer("rank"),
        uri=host.text("uri"),
        options=host.text_map("options"),
    )


def default(name: str) -> int:
    """Return what a plan that does not say it means (data/plan.yml)."""
    return data_file("plan.yml").fields("defaults").integer(name)


def read_engine(engine: Fields) -> EnginePlan:
    """Return what runs the model."""
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
        ready_timeout_s=engine.optional_integer("ready_timeout_s") or default("ready_timeout_s"),
    )


def read_launch(launch: Fields) -> Launch:
    """Return what one node was told to start."""
    return Launch(argv=launch.texts("argv"), env=launch.text_map("env"), image=launch.text("image"))


def bad_plan(where: str, observed: str, expected: str) -> RunbookError:
    """Return the error that a plan does not hold together."""
    return RunbookError(where=where, observed=observed, expected=expected, next_step=NEXT_STEP)
