"""What an engine's log says of its cache, for engines whose metrics do not say it (vLLM's Rust front end). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from kimi_runbook.reading import data_file


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One kind of line: the value it holds, a text to filter by, and where in the line the value stands."""

    value: str
    mark: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryLog:
    """What a log says.

    Attributes:
        values: By name (data/engine_log.yml, ``geometry``), the last line's value; empty where the line says None.
    """

    values: Mapping[str, str]

    def number(self, name: str) -> int | None:
        """Return a whole number, or None when the log does not hold it."""
        text = self.values.get(name, "").replace(",", "")
        return int(text) if text.isdecimal() else None

    def argument(self, name: str) -> str | None:
        """Return an argument the engine was given, as Python writes it; None when it was not given or is not logged."""
        match = re.search(rf"'{re.escape(name)}': ('[^']*'|\{{[^}}]*\}}|[^,}}]+)", self.values.get("arguments", ""))
        return match.group(1).strip("'") if match else None

    @property
    def has_arguments(self) -> bool:
        """Whether the line with the arguments is there, so that one it lacks was left at its default."""
        return "arguments" in self.values

    @property
    def whole_start(self) -> bool:
        """Whether the start is logged up to the cache, so that a line that is absent was not printed."""
        return "kv_tokens" in self.values


@cache
def log_lines() -> tuple[LogLine, ...]:
    """Return the kinds of lines looked for (data/engine_log.yml)."""
    return tuple(
        LogLine(value=item.text("value"), mark=item.text("mark"), pattern=re.compile(item.text("pattern")))
        for item in data_file("engine_log.yml").each("geometry")
    )


def marks() -> tuple[str, ...]:
    """Return the texts a log has to be filtered by."""
    return tuple(dict.fromkeys(line.mark for line in log_lines()))


def read_geometry_log(lines: Iterable[str]) -> GeometryLog:
    """Return what the lines say of the cache; lines may be a whole log or only those that hold one of ``marks``."""
    values: dict[str, str] = {}
    for text in lines:
        for kind in log_lines():
            if kind.mark in text and (match := kind.pattern.search(text)):
                values[kind.value] = match.group("value") or ""
    return GeometryLog(values=values)
