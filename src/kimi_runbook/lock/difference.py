"""What changed between two locks, which way, and what it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from kimi_runbook.lock.model import Lock
from kimi_runbook.reading import data_file
from kimi_runbook.versions import compare_upstream

Direction = Literal["newer", "older", "changed", "added", "removed"]

_VERSIONS = ("version", "branch", "package_version", "kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field that differs: dotted path, value before and after (None: absent or null), and which way it went."""

    field: str
    before: object
    after: object
    direction: Direction

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.before)} -> {shown(self.after)} ({self.direction})"


def leaves(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every field of a lock's JSON form with its dotted path; lists stay whole."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from leaves(item, f"{prefix}{key}.")
        elif not isinstance(item, Mapping):
            yield f"{prefix}{key}", item


def shown(value: object) -> str:
    """Return a field's value as one line: ``-`` for null, lists joined."""
    if value is None:
        return "-"
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def changes(before: Lock, after: Lock) -> tuple[Change, ...]:
    """Return the fields that differ, in the lock's order; empty when the locks say the same."""
    old, new = dict(leaves(before.to_json())), dict(leaves(after.to_json()))
    parts = list(after.to_json())
    names = sorted(dict.fromkeys([*old, *new]), key=lambda name: parts.index(name.partition(".")[0]))
    return tuple(
        Change(field=name, before=old.get(name), after=new.get(name), direction=_direction(name, old, new))
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    )


def consequences(found: tuple[Change, ...]) -> tuple[str, ...]:
    """Return what the changes lead to on the hosts, one sentence per part of the lock that changed."""
    means = data_file("lock_rules.yml").text_map("means")
    parts = dict.fromkeys(change.field.partition(".")[0] for change in found)
    return tuple(f"{part}: {means[part]}" for part in parts if part in means)


def _direction(name: str, old: Mapping[str, object], new: Mapping[str, object]) -> Direction:
    before, after = old.get(name), new.get(name)
    if before is None:
        return "added"
    if after is None:
        return "removed"
    if name.rpartition(".")[2] in _VERSIONS or name.startswith("driver.companions."):
        try:
            order = compare_upstream(str(before), str(after))
        except ValueError:
            return "changed"
        return "newer" if order < 0 else "older" if order > 0 else "changed"
    return "changed"
