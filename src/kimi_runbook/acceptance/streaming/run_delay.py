"""How long this thread was ready to run while another one had its CPU: time in which it reads and knows nothing."""

from __future__ import annotations

import os


class RunDelay:
    """The scheduler's account of the thread that makes this (Linux, ``/proc/<pid>/task/<tid>/schedstat``, field 2).

    A kernel without the account gives 0. It knows nothing of a hypervisor that takes the CPU away.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._fd = -1
        self._last_ns = self._total_ns()

    def since_last_ns(self) -> int:
        """Return the nanoseconds since the last call, or since this was made."""
        last_ns, self._last_ns = self._last_ns, self._total_ns()
        return self._last_ns - last_ns

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _total_ns(self) -> int:
        return int(os.pread(self._fd, 64, 0).split()[1]) if self._fd >= 0 else 0
