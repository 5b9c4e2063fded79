"""The metric families of data/metrics.yml: names by version, front ends, and when their absence is normal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kimi_runbook.acceptance.version import Release, parse_version
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyName:
    """One name of a family and the versions that write it, both ends included; an empty end is open."""

    name: str
    since: str
    until: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        names: The name used here first, then older ones.
        steps: Steps of the chain that rest on it.
        front_ends: Who publishes it: ``python``, ``rust``.
        absent_when: Why a healthy engine may lack it; empty when it may not.
    """

    names: tuple[FamilyName, ...]
    steps: tuple[int, ...]
    front_ends: tuple[str, ...]
    absent_when: str

    @property
    def name(self) -> str:
        """The name the chain uses, whatever the engine calls it."""
        return self.names[0].name


@cache
def families() -> tuple[Family, ...]:
    """Return every family of data/metrics.yml."""
    return tuple(
        Family(
            names=tuple(_name(name) for name in item.each("names")),
            steps=item.integers("steps"),
            front_ends=item.texts("front_ends"),
            absent_when=item.optional_text("absent_when") or "",
        )
        for item in _data().each("families")
    )


@cache
def older_names() -> dict[str, str]:
    """Return older name to the name used here."""
    return {older.name: family.name for family in families() for older in family.names[1:]}


@cache
def oldest_read() -> Release:
    """Return the oldest version whose sources data/metrics.yml was read from."""
    text = _data().fields("read").text("oldest")
    version = parse_version(text)
    if version is None:
        raise RunbookError(
            where="data/metrics.yml: read", observed=text, expected="a version", next_step="Correct that field."
        )
    return version


def _name(item: Fields) -> FamilyName:
    return FamilyName(
        name=item.text("name"),
        since=item.optional_text("since") or "",
        until=item.optional_text("until") or "",
    )


def _data() -> Fields:
    return data_file("metrics.yml")
