"""Rounds of the loop: wait until sockets are ready, and know since when they may have been."""

from __future__ import annotations

import time

from kimi_runbook.acceptance.streaming.poller import Poller
from kimi_runbook.acceptance.streaming.run_delay import RunDelay
from kimi_runbook.reading import data_file

_NS = 1_000_000_000


class Rounds:
    """Waits on a poller, one round after the other.

    Attributes:
        now_ns: When this round's wait returned, on the monotonic clock.
        since_ns: Since when this thread could have known of what is ready now, had it been neither busy nor waiting for
            its CPU.
    """

    def __init__(self, poller: Poller) -> None:
        """Begin in the calling thread, which has to be the one that waits."""
        facts = data_file("client.yml").fields("loop")
        self._rest_ns = int(facts.number("rest_s") * _NS)
        self._slept_ns = int(facts.number("slept_s") * _NS)
        self._burst_share = facts.number("burst_share")
        self._many = facts.integer("many_streams")
        self._poller = poller
        self._run_delay = RunDelay()
        self._rest_next = False
        self.now_ns = self.since_ns = time.monotonic_ns()

    def wait(self, until_ns: int, streams: int) -> list[tuple[int, int]]:
        """Return what is ready, at the latest at a moment.

        Args:
            until_ns: When to return with nothing, on the monotonic clock.
            streams: Streams whose bytes carry the kernel's stamp, so that they may be read a little later.
        """
        rested = self._rest_next and streams >= self._many
        if rested:
            time.sleep(self._rest_ns / _NS)
        called_ns = time.monotonic_ns()
        ready = self._poller.wait(until_ns - called_ns)
        before_ns, self.now_ns = self.now_ns, time.monotonic_ns()
        waited_ns = self.now_ns - called_ns
        kept_off_ns = min(self._run_delay.since_last_ns(), waited_ns)
        slept = waited_ns - kept_off_ns > self._slept_ns
        self.since_ns = self.now_ns - kept_off_ns if slept else before_ns
        # A short sleep: tokens come one by one. A burst, as an engine's step brings it, is read without resting.
        burst = len(ready) > self._burst_share * streams
        self._rest_next = waited_ns < self._rest_ns if slept else rested and not burst
        return ready

    def close(self) -> None:
        """Give the descriptor back."""
        self._run_delay.close()
