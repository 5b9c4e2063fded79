"""How far a run of the chain is: the value steps tell, who listens to it, and what is left by the pace so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BEGINS = "begins"
"""What a step's first event says; its last one says the state the step ended in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One event of a run.

    Attributes:
        step: The step's number.
        name: Its short name.
        what: What is being done, in a few words; ``BEGINS`` at the start, the step's state at its end.
        done: Requests (step 6: seconds) done so far, of what is being done.
        total: How many there will be; 0 when that is not known.
    """

    step: int
    name: str
    what: str
    done: int
    total: int


Listener = Callable[[Progress], None]
"""Is told every event, in the thread of the step that tells it; must be quick and must not raise."""


def silent(progress: Progress) -> None:
    """Listen to nothing."""


def begins(step: int, name: str) -> Progress:
    """Return the event of a step's start."""
    return Progress(step=step, name=name, what=BEGINS, done=0, total=0)


def ended(step: int, name: str, state: str) -> Progress:
    """Return the event of a step's end, in a state."""
    return Progress(step=step, name=name, what=state, done=1, total=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that a step sends, and how many of them run at once."""

    requests: int
    at_once: int = 1


class Pace:
    """What is left of a run, by what its requests took so far.

    What runs at once takes one turn together. A step's own pace counts for the rest of that step, the pace of the whole
    run for the steps to come. It is a guess: a turn of one step is not one of another.
    """

    def __init__(self, planned: Mapping[int, Sequence[Batch]], *, observe_s: int = 0) -> None:
        """Begin with about what each planned step sends, in order, and the seconds step 6 takes, 0 without it."""
        self._planned = {step: batches for step, batches in planned.items() if step != 6}
        self._observe_s = observe_s
        self._taken: dict[int, float] = {}
        self._done: dict[int, int] = {}
        self._step = -1
        self._began_s = 0.0
        self._part = (0, 0)
        self._before_part = 0

    def begin(self, step: int, at_s: float) -> None:
        """Take the start of a step."""
        self._step, self._began_s, self._part, self._before_part = step, at_s, (0, 0), 0
        self._done[step] = 0

    def note(self, done: int, total: int) -> None:
        """Take how many requests of how many are done; a total that changes, or a count that falls, is a new part."""
        if total != self._part[1] or done < self._part[0]:
            self._before_part = self._done[self._step]
        self._part = (done, total)
        self._done[self._step] = self._before_part + done

    def end(self, at_s: float) -> None:
        """Take the end of the running step: all it planned counts as done."""
        self._taken[self._step] = at_s - self._began_s
        self._done[self._step] = sum(batch.requests for batch in self._planned.get(self._step, ()))
        self._step = -1

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds left; None while nothing says how long a request takes."""
        in_step_s = now_s - self._began_s if self._step >= 0 else 0.0
        left_s = float(self._observe_s)
        if self._step == 6:
            return max(0.0, left_s - in_step_s)
        if 6 in self._taken:
            left_s = 0.0
        done = sum(self._turns(step) for step in self._done)
        spent_s = sum(taken for step, taken in self._taken.items() if step != 6) + in_step_s
        for step, planned in self._planned.items():
            if step in self._taken:
                continue
            here = self._turns(step)
            missing = sum(batch.requests / batch.at_once for batch in planned) - here
            if missing and not done:
                return None
            left_s += missing * (in_step_s / here if here and step == self._step else spent_s / max(1, done))
        return left_s

    def _turns(self, step: int) -> float:
        """Return how many turns a step's finished requests took; further ones than it planned take none."""
        left, turns = self._done.get(step, 0), 0.0
        for batch in self._planned.get(step, ()):
            turns += min(left, batch.requests) / batch.at_once
            left = max(0, left - batch.requests)
        return turns
