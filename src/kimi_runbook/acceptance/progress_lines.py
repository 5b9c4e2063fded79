"""A run's progress for people: one live line on a terminal, a few plain lines where the output goes elsewhere."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from kimi_runbook.acceptance.progress import BEGINS, Pace, Progress
from kimi_runbook.acceptance.result import State

# What a person can follow: a line drawn over itself, its clock, and lines that stay.
_REDRAW_S, _TICK_S, _PLAIN_EVERY_S = 0.2, 1.0, 10.0
_ERASE = "\r\x1b[2K"
_STATES = frozenset(State)


def clock(seconds: float) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def wants_live(out: TextIO, err: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether a line that is drawn over itself can be read: both streams on a terminal that knows how."""
    plain = environment.get("NO_COLOR") or environment.get("TERM", "dumb") == "dumb"
    return not plain and out.isatty() and err.isatty()


class Lines:
    """The words: what happened as lines that stay, what is under way as one line."""

    def __init__(self, steps: Sequence[int], pace: Pace) -> None:
        self._steps = tuple(steps)
        self._pace = pace
        self._started_s: float | None = None
        self._step_s = 0.0
        self._now: Progress | None = None

    def take(self, at_s: float, event: Progress) -> str | None:
        """Take one event, at a moment in seconds of one clock; return a line that stays, where one is due."""
        self._started_s = at_s if self._started_s is None else self._started_s
        if event.what == BEGINS:
            self._pace.begin(event.step, at_s)
            self._step_s, self._now = at_s, event
            return None
        if self._now is None or event.step != self._now.step:  # ended without a beginning: it was not run
            return f"{self._place(event)}: {event.what}"
        if event.what in _STATES:
            self._pace.end(at_s)
            self._now = None
            return f"{self._place(event)}: {event.what}, {at_s - self._step_s:.1f} s"
        self._pace.note(event.done, event.total)
        self._now = event
        return None

    def under_way(self, now_s: float) -> str:
        """Return the line about what is under way; empty between steps."""
        event = self._now
        if event is None or self._started_s is None:
            return ""
        what = "" if event.what == BEGINS else f": {event.what}"
        count = f" {event.done}/{event.total}" if event.total else ""
        left_s = self._pace.left_s(now_s)
        left = "" if left_s is None else f", about {clock(left_s)} left"
        return f"{self._place(event)}{what}{count} ({clock(now_s - self._started_s)} so far{left})"

    def _place(self, event: Progress) -> str:
        position = self._steps.index(event.step) + 1 if event.step in self._steps else 0
        return f"[{position}/{len(self._steps)}] step {event.step} {event.name}"


class Teller:
    """A listener that writes; use it as a context manager.

    Events are only put into a queue by the step that tells them. A thread of its own writes, so that a terminal that
    stops taking text holds up nothing that is being measured; a stream that went away is written to no more.
    """

    def __init__(
        self,
        stream: TextIO,
        lines: Lines,
        *,
        live: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with where to write, and whether a line may be drawn over itself there."""
        self._stream = stream
        self._lines = lines
        self._live = live
        self._now = now
        self._events: queue.SimpleQueue[tuple[float, Progress] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="progress", daemon=True)
        self._gone = False
        self._drawn_s = 0.0

    def __call__(self, event: Progress) -> None:
        """Take one event."""
        self._events.put((self._now(), event))

    def __enter__(self) -> Teller:
        """Begin to write."""
        self._drawn_s = self._now()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Write what is left, but wait for no terminal that stands still."""
        self._events.put(None)
        self._thread.join(timeout=2)

    def _write_all(self) -> None:
        while True:
            try:
                item = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                self._draw()
                continue
            if item is None:
                self._write(_ERASE if self._live else "")
                return
            line = self._lines.take(*item)
            if line is not None:
                self._write(f"{_ERASE}{line}\n" if self._live else f"{line}\n")
            self._draw(at_once=line is not None and self._live)

    def _draw(self, *, at_once: bool = False) -> None:
        """Write the line about what is under way, unless the last one is younger than anybody reads."""
        now_s = self._now()
        if not at_once and now_s - self._drawn_s < (_REDRAW_S if self._live else _PLAIN_EVERY_S):
            return
        self._drawn_s = now_s
        line = self._lines.under_way(now_s)
        if line:
            self._write(f"{_ERASE}{line[: self._width() - 1]}" if self._live else f"{line}\n")

    def _width(self) -> int:
        """Return the terminal's columns now; it may have been resized."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return shutil.get_terminal_size().columns

    def _write(self, text: str) -> None:
        if self._gone or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._gone = True
