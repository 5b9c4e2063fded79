"""The knee: from which concurrency on more streams bring hardly more tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_runbook.acceptance.ladder.rungs import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """What the ladder shows of it.

    Attributes:
        concurrency: The first rung after which none paid any more; None when the last one still did.
        text: The throughputs it was read from, in words.
    """

    concurrency: int | None
    text: str


def find_knee(points: Sequence[tuple[int, float]]) -> Knee:
    """Return the knee by the rule of data/concurrency.yml.

    A rung that brings little is no knee while a later one pays: low rungs are short, and one hiccup spoils them.

    Args:
        points: (concurrency, output tokens per second) of each complete rung, the concurrency rising.
    """
    told = ", ".join(f"{streams}: {rate:.1f}" for streams, rate in points)
    for position, (streams, rate) in enumerate(points[:-1]):
        later = points[position + 1 :]
        if not any(_pays(streams, rate, more, higher) for more, higher in later):
            more, higher = later[0]
            change = f"from {streams} to {more} streams they changed by {higher / rate - 1:+.0%}"
            return Knee(concurrency=streams, text=f"tokens/s by streams: {told}; {change}")
    return Knee(concurrency=None, text=f"tokens/s by streams: {told}; the last rung still paid")


def _pays(streams: int, rate: float, more: int, higher: float) -> bool:
    rule = settings().fields("knee")
    growth: float = (more / streams) ** rule.number("least_gain")
    return higher >= rate * growth * (1 - rule.number("noise"))
