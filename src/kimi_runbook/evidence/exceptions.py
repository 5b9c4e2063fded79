"""The first exception of a log: where it begins and what it is called. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from kimi_runbook.acceptance.engine_log import fatals
from kimi_runbook.reading import Fields, data_file

_LONGEST = 300  # characters of a line that are quoted
_REACH = 200  # lines below the head of a traceback that are searched for the exception's name


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstException:
    """The first line of a log that tells of a failure.

    Attributes:
        line: Its number, from 1.
        text: The line, its first 300 characters.
        named: The line that names the exception, where the first is the head of a traceback.
        last_start: Line of the engine's last start, None where the log holds none.
        since_start: Line of the first failure after the last start, None where there is none.
    """

    line: int
    text: str
    named: str | None
    last_start: int | None
    since_start: int | None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "line": self.line,
            "text": self.text,
            "named": self.named,
            "last_start": self.last_start,
            "since_start": self.since_start,
        }


def first_exception(text: str) -> FirstException | None:
    """Return the first failure a log tells of, or None when it tells of none."""
    mark = re.compile(pattern())
    lines = text.splitlines()
    failed = [number for number, line in enumerate(lines) if mark.search(line)]
    if not failed:
        return None
    starts = [number for number, line in enumerate(lines) if any(one in line for one in _data().texts("starts"))]
    since = next((number for number in failed if starts and number > starts[-1]), None)
    first = failed[0]
    return FirstException(
        line=first + 1,
        text=lines[first].strip()[:_LONGEST],
        named=_named(lines[first : first + _REACH]),
        last_start=starts[-1] + 1 if starts else None,
        since_start=None if since is None else since + 1,
    )


@cache
def pattern() -> str:
    """Return the one regular expression that finds a line that tells of a failure."""
    known = [".*".join(re.escape(part) for part in fatal.parts) for fatal in fatals()]
    return "|".join([*_data().texts("first_exception"), *known])


def _named(lines: list[str]) -> str | None:
    if "Traceback" not in lines[0]:
        return None
    name = re.compile(_data().text("exception"))
    found = (match for line in lines[1:] if (match := name.search(line.rstrip())))
    first = next(found, None)
    return first.group(1)[:_LONGEST] if first else None


def _data() -> Fields:
    return data_file("evidence.yml")
