"""Step progress for people: what runs, how far it is, how long it has taken; with or without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

TERMINAL_INTERVAL_S = 0.5  # how often a line on a terminal is redrawn
LOG_INTERVAL_S = 20.0  # how often a log gets a line about a step that is still running
_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """Return a count of bytes with a decimal unit: 2100000000 is ``2.1 GB``."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {_UNITS[-1]}"


def human_seconds(seconds: float) -> str:
    """Return a duration as minutes and seconds: 72.4 is ``1:12``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One look at a running step: everything a line shows.

    Attributes:
        number: Position of the step, from 1.
        total: How many steps the run has.
        name: What the step makes.
        elapsed_s: Seconds since it began.
        done: How much is done, in ``unit``; None when the step does not count.
        of: How much there is; None when unknown.
        unit: ``B`` for bytes, else a word put behind the numbers.
        note: What it is doing right now, free text.
    """

    number: int
    total: int
    name: str
    elapsed_s: float
    done: float | None = None
    of: float | None = None
    unit: str = "B"
    note: str = ""


def amount(view: View) -> str:
    """Return how far a step is: ``42 % of 2.1 GB``, ``12 of 30 tasks``, ``1.2 GB``, or nothing."""
    if view.done is None:
        return ""
    if view.unit == "B":
        if view.of:
            return f"{100 * view.done / view.of:.0f} % of {human_bytes(view.of)}"
        return human_bytes(view.done)
    if view.of:
        return f"{view.done:.0f} of {view.of:.0f} {view.unit}"
    return f"{view.done:.0f} {view.unit}"


def running_line(view: View) -> str:
    """Return the line of a step that runs: ``[ 3/11] engine image: 42 % of 2.1 GB, 1:12``."""
    facts = [fact for fact in (amount(view), view.note, human_seconds(view.elapsed_s)) if fact]
    return f"{_head(view)}: {', '.join(facts)}"


def final_line(view: View, outcome: str) -> str:
    """Return the last line of a step: its outcome and its seconds."""
    return f"{_head(view)}: {outcome}, {view.elapsed_s:.1f} s"


def _head(view: View) -> str:
    width = len(str(view.total))
    return f"[{view.number:>{width}}/{view.total}] {view.name}"


@dataclass(slots=True)
class Step:
    """A running step, as the code that does the work sees it. Safe to use from one other thread."""

    number: int
    total: int
    name: str
    started: float
    clock: Callable[[], float]
    outcome: str = "done"
    _done: float | None = None
    _of: float | None = None
    _unit: str = "B"
    _note: str = ""

    def update(
        self, done: float | None = None, *, of: float | None = None, unit: str = "B", note: str | None = None
    ) -> None:
        """Say how far the step is (``done`` of ``of``, in ``unit``) and, in ``note``, what it is at."""
        self._done, self._of, self._unit = done, of, unit
        if note is not None:
            self._note = note

    def say(self, note: str) -> None:
        """Say what the step is at, leaving the amount as it is."""
        self._note = note

    def view(self) -> View:
        """Return what can be shown now."""
        return View(
            number=self.number,
            total=self.total,
            name=self.name,
            elapsed_s=self.clock() - self.started,
            done=self._done,
            of=self._of,
            unit=self._unit,
            note=self._note,
        )


@dataclass(slots=True)
class Progress:
    """Numbers the steps of a run and prints their lines.

    A terminal shows one line per step that is redrawn; anything else gets a line when a step begins, one every 20
    seconds and one at the end.
    """

    total: int
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    _number: int = 0
    _width: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Show a step while the block runs; its last line says ``step.outcome``, or that it failed."""
        self._number += 1
        step = Step(self._number, self.total, name, self.clock(), self.clock)
        stop = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(step, stop), daemon=True)
        ticker.start()
        outcome = "failed"
        try:
            yield step
            outcome = step.outcome
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            stop.set()
            ticker.join()
            self._print(final_line(step.view(), outcome), last=True)

    def line(self, text: str) -> None:
        """Print a line of its own while a step is shown."""
        self._print(text, last=True)

    def _tick(self, step: Step, stop: threading.Event) -> None:
        terminal = self.stream.isatty()
        if stop.wait(TERMINAL_INTERVAL_S):  # a step that is over at once needs no more than its last line
            return
        self._print(running_line(step.view()), last=False)
        while not stop.wait(TERMINAL_INTERVAL_S if terminal else LOG_INTERVAL_S):
            self._print(running_line(step.view()), last=False)

    def _print(self, text: str, *, last: bool) -> None:
        with self._lock:
            if not self.stream.isatty():
                self.stream.write(text + "\n")
            else:
                padding = " " * max(0, self._width - len(text))
                self.stream.write(f"\r{text}{padding}" + ("\n" if last else ""))
                self._width = 0 if last else len(text)
            self.stream.flush()
