"""When at least one request was in flight, whichever thread sent it."""

from __future__ import annotations

import threading
import time

_NS = 1_000_000_000


class Flight:
    """The union of the intervals in which requests were in flight. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._since_ns = 0
        self._past: list[tuple[int, int]] = []

    def begin(self, at_ns: int) -> None:
        """Say that a request goes out, at a moment of the monotonic clock."""
        with self._lock:
            if not self._now:
                self._since_ns = at_ns
            self._now += 1

    def end(self, at_ns: int) -> None:
        """Say that a request has ended."""
        with self._lock:
            self._now -= 1
            if not self._now:
                self._past.append((self._since_ns, at_ns))

    def seconds(self, since_s: float, until_s: float) -> float:
        """Return the seconds between two moments of ``time.monotonic()`` in which a request was in flight."""
        with self._lock:
            intervals = [*self._past, *([(self._since_ns, time.monotonic_ns())] if self._now else [])]
        return sum(max(0.0, min(until_s, end / _NS) - max(since_s, begin / _NS)) for begin, end in intervals)
