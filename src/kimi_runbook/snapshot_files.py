"""Snapshots from elsewhere, as far as they can be read: a part that makes no sense is left out and told about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, parse_json, read_text
from kimi_runbook.snapshot import SCHEMA_VERSION, Snapshot

# Sections the judge cannot do without: a host with one of them unread must not be changed.
_NEEDED = ("os", "packages", "files", "units", "driver", "gpus", "modules", "network", "runtime", "image", "engine")
_NOT_JSON = ("container",)  # fields of Snapshot that are no keys of its JSON form
_WHOLE = "accelerators"  # a section of the module that asks everything: beside it, none may be absent
_OPTIONAL = ("taken_at", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """A part of a snapshot that was left out.

    Attributes:
        section: Its key.
        message: What is wrong with it; empty for a key this version does not know.
        needed: Whether the judge cannot do without it.
    """

    section: str
    message: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A snapshot as far as it could be read, and what was left out of it."""

    snapshot: Snapshot
    flaws: tuple[Flaw, ...] = ()


def read_snapshot(data: Mapping[str, object], source: str = "snapshot") -> Reading:
    """Read one snapshot, leaving out sections of a wrong shape.

    Raises:
        RunbookError: it is no snapshot of this schema version, or names no host.
    """
    known = {"schema_version", "hostname", *Snapshot.__dataclass_fields__} - set(_NOT_JSON)
    others = tuple(Flaw(section=key) for key in map(str, data) if key not in known)
    if _WHOLE in data:
        others += tuple(_absent(key) for key in sorted(known - set(map(str, data)) - set(_OPTIONAL)))
    try:
        return Reading(snapshot=Snapshot.from_json(data, source), flaws=others)
    except RunbookError:
        kept = {key: data[key] for key in ("schema_version", "hostname") if key in data}
        Snapshot.from_json(kept, source)  # not even these two: no snapshot at all
    flaws: list[Flaw] = []
    for key, value in data.items():
        if key in kept:
            continue
        try:
            Snapshot.from_json({"schema_version": SCHEMA_VERSION, "hostname": data["hostname"], key: value}, source)
        except RunbookError as error:
            flaws.append(Flaw(section=str(key), message=_within(error, source), needed=key in _NEEDED))
        else:
            kept[key] = value
    return Reading(snapshot=Snapshot.from_json(kept, source), flaws=(*flaws, *others))


def _absent(section: str) -> Flaw:
    return Flaw(section=section, message=f"{section}: absent, expected an answer", needed=section in _NEEDED)


def _within(error: RunbookError, source: str) -> str:
    return f"{error.where.removeprefix(f'{source}: ')}: {error.observed}, expected {error.expected}"


def load_snapshots(path: Path) -> dict[str, Reading | str]:
    """Return host to its snapshot, or to why it cannot be read, from a file with one snapshot or a mapping of them.

    Raises:
        RunbookError: the file as a whole cannot be read, or its only snapshot is none.
    """
    source = str(path)
    data = Fields(parse_json(read_text(path), source), source)
    if "schema_version" in data.names():
        reading = read_snapshot(data.mapping(), source)
        return {reading.snapshot.hostname: reading}
    found: dict[str, Reading | str] = {}
    for host in data.names():
        try:
            found[host] = read_snapshot(data.fields(host).mapping(), f"{source}: {host}")
        except RunbookError as error:
            found[host] = str(error)
    return found
