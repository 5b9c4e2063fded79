"""Waiting for counters: they are written after an answer is sent, so a reading right after it may be early."""

from __future__ import annotations

import time
from collections.abc import Callable

from kimi_runbook.acceptance.metrics import HITS, QUERIES, Reading, delta, why_void

_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05
_HITS_GRACE_S = 0.1


def read_until(
    read: Callable[[], Reading],
    before: Reading,
    prompt_tokens: int,
    *,
    hit_tokens: int | None = None,
    deadline_s: float = 5.0,
) -> Reading:
    """Return the first reading whose queries have grown by so many tokens since ``before``, or the last one read.

    A counter that is absent and a restart end the wait at once: no later reading would say more.

    Args:
        read: Reads every endpoint once; raises EngineError.
        before: The reading at the window's start.
        prompt_tokens: Tokens the requests in the window asked the cache for.
        hit_tokens: Tokens the answers say were found; hits get a moment longer to arrive there. Two counters of several
            API servers are not written at once.
        deadline_s: Seconds to wait at most.
    """
    started_s = time.monotonic()
    poll_s, arrived_s = _FIRST_POLL_S, None
    while True:
        reading = read()
        now_s = time.monotonic()
        queries, hits = delta(before, reading, QUERIES), delta(before, reading, HITS)
        if queries is None or why_void(before, reading) or now_s - started_s >= deadline_s:
            return reading
        if queries >= prompt_tokens:
            arrived_s = now_s if arrived_s is None else arrived_s
            late = hit_tokens is not None and hits is not None and hits < hit_tokens
            if not late or now_s - arrived_s >= _HITS_GRACE_S:
                return reading
        time.sleep(poll_s)
        poll_s = min(poll_s * 2, _LONGEST_POLL_S)
