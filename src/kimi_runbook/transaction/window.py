"""The maintenance window, and whether a batch can finish in what is left of it by what such steps have taken before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import data_file
from kimi_runbook.transaction.state import span

_RECENT = 5  # durations of a step that count: the longest of them, since a window is not planned by averages
Durations = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When changes may be made; None is an open side. Both carry a time zone."""

    start: datetime | None = None
    end: datetime | None = None

    def left_s(self, now: datetime) -> float | None:
        """Return the seconds until the end, negative after it; None without an end."""
        return None if self.end is None else (self.end - now).total_seconds()


def parse_window(start: str, end: str, now: datetime) -> Window:
    """Read both ends: ISO 8601, or ``HH:MM`` of the day in the zone of ``now``; an empty one is open.

    A window given by times of the day that ends before it starts runs over midnight: at 01:00 the window 22:00 to
    04:00 is the one that began yesterday.

    Raises:
        RunbookError: Neither form, or an end that is not after the start.
    """
    first, last = _moment("window_start", start, now), _moment("window_end", end, now)
    daily = [bool(_CLOCK.fullmatch(text.strip())) for text in (start, end)]
    if first and last and all(daily) and last <= first:
        if now < last:
            first -= timedelta(days=1)
        else:
            last += timedelta(days=1)
    if first and last and last <= first:
        raise RunbookError(
            where="window_end",
            observed=f"{last.isoformat()}, not after window_start {first.isoformat()}",
            expected="an end after the start",
            next_step="Correct both in the inventory.",
        )
    return Window(start=first, end=last)


_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


def _moment(name: str, text: str, now: datetime) -> datetime | None:
    text = text.strip()
    if not text:
        return None
    clock = _CLOCK.fullmatch(text)
    if clock:
        return datetime.combine(now.date(), time(int(clock[1]), int(clock[2])), tzinfo=now.tzinfo)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RunbookError(
            where=name,
            observed=repr(text),
            expected='"HH:MM", or ISO 8601 such as 2026-11-30T22:00+01:00',
            next_step="Correct it in the inventory, in quotes: YAML reads a bare 22:00 as a number.",
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How long a batch takes: its slowest host's steps, and which of them rest on a guess and not on a measurement."""

    seconds: int
    host: str
    guessed: tuple[str, ...] = ()

    def __str__(self) -> str:
        basis = f"guessed: {', '.join(self.guessed)}" if self.guessed else "all measured"
        return f"{span(self.seconds)} (slowest {self.host}; {basis})"


def estimate(steps: Mapping[str, Iterable[str]], measured: Mapping[str, Durations]) -> Estimate:
    """Return how long a batch will take; its hosts change side by side.

    A step takes what it took longest of its last five times on this host, or else on any host of the fleet, or else
    what data/transaction.yml guesses.

    Args:
        steps: Host to the steps due there, at least one host.
        measured: Host to the seconds each step has taken there, the newest last; hosts outside the batch included.
    """
    guesses = data_file("transaction.yml").fields("guessed_s")
    fleet: dict[str, list[int]] = {}
    for durations in measured.values():
        for name, taken in durations.items():
            fleet.setdefault(name, []).extend(taken[-_RECENT:])
    found: list[Estimate] = []
    for host, names in steps.items():
        total, guessed = 0, []
        for name in names:
            taken = list(measured.get(host, {}).get(name, ()))[-_RECENT:] or fleet.get(name, [])
            if taken:
                total += max(taken)
            else:
                total += guesses.optional_integer(name) or guesses.integer("other")
                guessed.append(name)
        found.append(Estimate(seconds=total, host=host, guessed=tuple(guessed)))
    return max(found, key=lambda one: one.seconds)


def refuse_outside(window: Window, now: datetime, batch: Estimate, *, where: str) -> None:
    """Raise RunbookError where a batch may not begin: before the window, or too late to finish within it."""
    if window.start and now < window.start:
        raise RunbookError(
            where=where,
            observed=f"it is {now:%Y-%m-%d %H:%M %Z}",
            expected=f"window_start {window.start:%Y-%m-%d %H:%M %Z} or later",
            next_step="Run again in the window; this batch was not begun.",
        )
    left = window.left_s(now)
    if window.end is not None and left is not None and batch.seconds > left:
        observed = f"{span(left)} left until window_end {window.end:%H:%M %Z}" if left > 0 else "the window is over"
        raise RunbookError(
            where=where,
            observed=observed,
            expected=f"{batch}",
            next_step="This batch was not begun. Run again in the next window, or extend window_end.",
        )
