"""Waiting for counters: they are written after an answer is sent, so a reading right after it may be early."""

from __future__ import annotations

import time
from collections.abc import Callable

from kimi_runbook.acceptance.metrics import HITS, QUERIES, Reading, delta, why_void
from kimi_runbook.reading import data_file


def read_until(
    read: Callable[[], Reading],
    before: Reading,
    prompt_tokens: int,
    *,
    hit_tokens: int | None = None,
) -> Reading:
    """Return the first reading whose queries have grown by so many tokens since ``before``, or the last one read.

    A counter that is absent and a restart end the wait at once: no later reading would say more. How long is waited at
    most is in data/metrics.yml.

    Args:
        read: Reads every endpoint once; raises EngineError.
        before: The reading at the window's start.
        prompt_tokens: Tokens the requests in the window asked the cache for.
        hit_tokens: Tokens the answers say were found; hits get a moment longer to arrive there. Two counters of several
            API servers are not written at once.
    """
    waits = data_file("metrics.yml").fields("waits")
    deadline_s, grace_s, longest_poll_s = map(waits.number, ("deadline_s", "hits_grace_s", "longest_poll_s"))
    started_s = time.monotonic()
    poll_s, arrived_s = waits.number("first_poll_s"), None
    while True:
        reading = read()
        now_s = time.monotonic()
        queries, hits = delta(before, reading, QUERIES), delta(before, reading, HITS)
        if queries is None or why_void(before, reading) or now_s - started_s >= deadline_s:
            return reading
        if queries >= prompt_tokens:
            arrived_s = now_s if arrived_s is None else arrived_s
            late = hit_tokens is not None and hits is not None and hits < hit_tokens
            if not late or now_s - arrived_s >= grace_s:
                return reading
        time.sleep(poll_s)
        poll_s = min(poll_s * 2, longest_poll_s)
