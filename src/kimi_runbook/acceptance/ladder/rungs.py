"""Which rungs the ladder has: one stream, then twice as many each time, up to the nominal load, then the peak. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kimi_runbook.reading import Fields, data_file

NOMINAL, PEAK = "nominal", "peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rung: nothing but the concurrency differs from the one before.

    Attributes:
        label: ``single``, ``c2``, ``c4``, ..., ``nominal``, ``peak``, or ``warm-up`` and ``after``: the first part of
            its checks' names.
        concurrency: Streams at once.
        requests: Requests in all, at least one per stream.
    """

    label: str
    concurrency: int
    requests: int


WARM_UP = Rung(label="warm-up", concurrency=1, requests=1)
"""Sent before the ladder and left out of its figures: a shape's first request may pay for a compilation."""

AFTER = Rung(label="after", concurrency=1, requests=1)
"""Sent after the ladder and left out of its figures: whether the engine is still there after its peak."""


@cache
def settings() -> Fields:
    """Return how the ladder is climbed and judged (data/concurrency.yml)."""
    return data_file("concurrency.yml")


def rungs_of(nominal: int, peak: int) -> tuple[Rung, ...]:
    """Return the rungs up to a nominal and a peak concurrency, both at least 1 and the peak not below the nominal."""
    below = []
    concurrency = 1
    while concurrency < nominal:
        below.append(("single" if concurrency == 1 else f"c{concurrency}", concurrency))
        concurrency *= 2
    above = [(PEAK, peak)] if peak > nominal else []
    return tuple(_rung(label, streams) for label, streams in (*below, (NOMINAL, nominal), *above))


def _rung(label: str, concurrency: int) -> Rung:
    rules = settings().fields("ladder")
    requests = max(rules.integer("least_requests"), rules.integer("rounds") * concurrency)
    return Rung(label=label, concurrency=concurrency, requests=requests)
