"""Waiting for counters: they are written after an answer is sent, so a reading right after it may be early."""

from __future__ import annotations

import time
from collections.abc import Callable

from kimi_runbook.acceptance.metrics import QUERIES, Reading, delta, why_void

_POLL_S = 0.1


def read_until(read: Callable[[], Reading], before: Reading, prompt_tokens: int, *, deadline_s: float = 5.0) -> Reading:
    """Return the first reading whose queries have grown by so many tokens since ``before``, or the last one read.

    A counter that is absent and a restart end the wait at once: no later reading would say more.

    Args:
        read: Reads every endpoint once; raises EngineError.
        before: The reading at the window's start.
        prompt_tokens: Tokens the requests in the window asked the cache for.
        deadline_s: Seconds to wait at most.
    """
    give_up_s = time.monotonic() + deadline_s
    while True:
        reading = read()
        moved = delta(before, reading, QUERIES)
        arrived = moved is None or moved >= prompt_tokens
        if arrived or why_void(before, reading) or time.monotonic() >= give_up_s:
            return reading
        time.sleep(_POLL_S)
