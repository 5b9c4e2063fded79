"""What an engine's log says about its start: phases with times, fatal lines, world size and backend. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from kimi_runbook.reading import Fields, data_file

_DOCKER_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) ")
# `(<process> pid=N) LEVEL MM-DD HH:MM:SS [file.py:line] message`; there is no year, and none is needed for differences
_VLLM_STAMP = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) \[")
_WORLD = re.compile(r"\bworld_size=(\d+) rank=(\d+)\b.*\bdistributed_init_method=(\S+) backend=(\S+)")
_LEAP_YEAR = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a start and the text that marks it."""

    name: str
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """A line an accepted engine must not have printed: all of the parts, in one line."""

    kind: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FatalLine:
    """One fatal line as found."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One worker's rendezvous line: world size, rank, address, backend."""

    world_size: int
    rank: int
    address: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """What a node's log says.

    Attributes:
        phases: Phase name to its first moment; None where the line carries no time.
        fatal: Fatal lines in order, each once.
        ranks: Rendezvous lines in order.
        nccl: NCCL version the engine named, or None.
        ready: Whether a ready line was seen; only the head prints one.
        transport: NCCL's lines about the way it took, each once; empty where NCCL_DEBUG is off, the normal case.
    """

    phases: dict[str, datetime | None]
    fatal: tuple[FatalLine, ...]
    ranks: tuple[Rank, ...]
    nccl: str | None
    ready: bool
    transport: tuple[str, ...] = ()


@cache
def phases() -> tuple[Phase, ...]:
    """Return the phases in the order a healthy start prints them (data/engine_log.yml)."""
    return tuple(Phase(name=item.text("name"), marks=item.texts("marks")) for item in _data().each("phases"))


@cache
def fatals() -> tuple[Fatal, ...]:
    """Return the fatal patterns (data/engine_log.yml)."""
    return tuple(Fatal(kind=item.text("kind"), parts=item.texts("parts")) for item in _data().each("fatal"))


@cache
def transport_lines() -> tuple[tuple[str, ...], ...]:
    """Return what proves or refutes a transport, the parts of one line each (data/interconnect_proof.yml)."""
    kinds = data_file("interconnect_proof.yml").each("kinds")
    return tuple(parts for kind in kinds for key in ("proof", "refutation") if (parts := kind.texts(key)))


def patterns() -> tuple[str, ...]:
    """Return every text a log is searched for: what a remote filter has to let through."""
    found = [mark for phase in phases() for mark in phase.marks]
    found += [max(fatal.parts, key=len) for fatal in fatals()]
    found += [max(parts, key=len) for parts in transport_lines()]
    return tuple(dict.fromkeys(found))


def read_log(lines: Iterable[str]) -> EngineLog:
    """Return what the lines say; lines may be a whole log or only those that hold one of ``patterns``."""
    seen: dict[str, datetime | None] = {}
    fatal: list[FatalLine] = []
    ranks: list[Rank] = []
    nccl: str | None = None
    transport: list[str] = []
    for raw in lines:
        line = raw.rstrip("\r\n")
        for phase in phases():
            if phase.name not in seen and any(mark in line for mark in phase.marks):
                seen[phase.name] = _moment(line)
        fatal += [
            FatalLine(kind=one.kind, text=line.strip()[:300])
            for one in fatals()
            if all(part in line for part in one.parts)
        ][:1]
        if match := _WORLD.search(line):
            world_size, rank, address, backend = match.groups()
            ranks.append(Rank(world_size=int(world_size), rank=int(rank), address=address, backend=backend))
        if any(all(part in line for part in parts) for parts in transport_lines()):
            transport.append(line.strip()[:300])
        if nccl is None and "vLLM is using nccl==" in line:
            nccl = line.split("vLLM is using nccl==", 1)[1].split()[0]
    return EngineLog(
        phases=seen,
        fatal=tuple(dict.fromkeys(fatal)),
        ranks=tuple(ranks),
        nccl=nccl,
        ready="ready" in seen,
        transport=tuple(dict.fromkeys(transport)),
    )


def seconds_into(log: EngineLog, started: datetime | None) -> dict[str, float]:
    """Return each phase's first moment in seconds after a start, or after the first phase with a time.

    Args:
        log: The log.
        started: When the container started; used only where the lines carry whole dates (a container log with
            timestamps), since vLLM's own stamps have no year and no time zone.
    """
    moments = {name: moment for name, moment in log.phases.items() if moment is not None}
    if not moments:
        return {}
    whole = all(moment.year != _LEAP_YEAR for moment in moments.values())
    zero = started if started is not None and whole else min(moments.values())
    return {name: round((moment - zero).total_seconds(), 3) for name, moment in moments.items()}


def parse_stamp(text: str) -> datetime | None:
    """Return the moment in an RFC 3339 stamp (nanoseconds cut to microseconds), or None when it is none."""
    try:
        return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        return None


def _moment(line: str) -> datetime | None:
    if match := _DOCKER_STAMP.match(line):
        return parse_stamp(match.group(1))
    if match := _VLLM_STAMP.search(line):
        return datetime.strptime(f"{_LEAP_YEAR}-{match.group(1)}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return None


def _data() -> Fields:
    return data_file("engine_log.yml")
