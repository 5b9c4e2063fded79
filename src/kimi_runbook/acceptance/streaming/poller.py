"""Waiting: for descriptors to become ready, and for moments to come."""

from __future__ import annotations

import heapq
import select
import sys
from collections.abc import Callable
from itertools import count

POLLIN = select.POLLIN
POLLOUT = select.POLLOUT  # EPOLLIN and EPOLLOUT are the same numbers

_NEVER_NS = 2**62  # in 146 years
_LONGEST_NS = 3600 * 10**9  # epoll counts milliseconds in 32 bits


class Poller:
    """epoll, or poll where there is none. Always waits for bytes, and for room where it is asked to."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._poller = self._epoll or select.poll()
        self._per_ns = 1e-9 if self._epoll else 1e-6  # epoll wants seconds, poll milliseconds

    def add(self, fd: int, *, writing: bool) -> None:
        """Watch a descriptor."""
        self._poller.register(fd, POLLIN | POLLOUT if writing else POLLIN)

    def change(self, fd: int, *, writing: bool) -> None:
        """Watch a descriptor for something else."""
        self._poller.modify(fd, POLLIN | POLLOUT if writing else POLLIN)

    def remove(self, fd: int) -> None:
        """Watch a descriptor no more; to be called before it is closed."""
        self._poller.unregister(fd)

    def wait(self, at_most_ns: int) -> list[tuple[int, int]]:
        """Return descriptors with what they are ready for, after at most so long."""
        return self._poller.poll(max(0, min(at_most_ns, _LONGEST_NS)) * self._per_ns)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._epoll is not None:
            self._epoll.close()


class Timers:
    """What is to be done when, in nanoseconds of the monotonic clock. An action that has become moot does nothing.

    Attributes:
        next_ns: The next moment; one that never comes when nothing is to be done.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self.next_ns = _NEVER_NS

    def add(self, at_ns: int, action: Callable[[], None]) -> None:
        """Do something at a moment."""
        heapq.heappush(self._heap, (at_ns, next(self._order), action))
        self.next_ns = self._heap[0][0]

    def run(self, now_ns: int) -> None:
        """Do everything whose moment has come."""
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2]()
        self.next_ns = self._heap[0][0] if self._heap else _NEVER_NS

    def clear(self) -> None:
        """Forget everything that was to be done."""
        self._heap.clear()
        self.next_ns = _NEVER_NS
