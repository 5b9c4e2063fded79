"""Percentiles over all requests, those without an end included. Pure.

A request that failed or timed out never had its first token, so its value is not left out but counts as later than any
that was seen: it is censored. Dropping it would make the tail better the more requests fail. Nearest rank is used, as
no value between a seen one and a censored one could be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

_PLACES = 6


def percentile(values: Iterable[float], censored: int, share: float) -> float | None:
    """Return the smallest value that at least this share of all requests does not exceed.

    Args:
        values: What was seen, in any order.
        censored: Requests that have no value and would have a later one than all that were seen.
        share: Between 0 and 1, e.g. 0.99.

    Returns:
        The value, or None where it falls on a censored request, or where there is none at all.
    """
    ordered = sorted(values)
    rank = math.ceil(share * (len(ordered) + censored))
    return round(ordered[max(rank, 1) - 1], _PLACES) if 0 < max(rank, 1) <= len(ordered) else None


def percentiles(
    values: Sequence[float], censored: int, shares: Sequence[int] = (50, 90, 99)
) -> Mapping[str, float | None]:
    """Return percentiles by name, e.g. ``{"p50": 0.21, "p90": 0.4, "p99": None}``; None as in ``percentile``."""
    return {f"p{share}": percentile(values, censored, share / 100) for share in shares}
