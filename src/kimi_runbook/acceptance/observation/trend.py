"""Whether a series of samples rises or falls beyond its noise. Pure.

The slope is Theil and Sen's: the median over all pairs of samples, which a few outliers do not move. Whether it is a
trend at all is Kendall's test: how many pairs are in order, against what a steady series would show, ties included;
the interval of the slope follows from the same count (Sen 1968). Samples are taken as independent of each other, which
a service's are not quite: so a proven trend counts only from a size on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

_INTERVAL = NormalDist().inv_cdf(0.975)  # 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A series' trend.

    Attributes:
        slope_per_s: Change per second.
        low_per_s, high_per_s: 95 % interval of the slope: a change outside it would have been seen.
        p_value: Probability that a steady series looks like this or more so.
        samples: Points it rests on.
        span_s: Seconds from the first to the last.
        level: Median of the values.
    """

    slope_per_s: float
    low_per_s: float
    high_per_s: float
    p_value: float
    samples: int
    span_s: float
    level: float

    @property
    def change(self) -> float:
        """Change over the whole span, in the series' own unit."""
        return self.slope_per_s * self.span_s

    def to_json(self) -> dict[str, Any]:
        """Return the trend as JSON-ready values."""
        return {
            "slope_per_s": _short(self.slope_per_s),
            "low_per_s": _short(self.low_per_s),
            "high_per_s": _short(self.high_per_s),
            "p_value": _short(self.p_value),
            "samples": self.samples,
            "span_s": round(self.span_s, 3),
            "level": _short(self.level),
            "change": _short(self.change),
        }


def trend(points: Sequence[tuple[float, float]], *, most_points: int = 400) -> Trend | None:
    """Return the trend of (second, value) points in time order, or None for fewer than three of them.

    Args:
        points: The series; no two points at one time.
        most_points: Longer series are thinned to medians of neighbours first.
    """
    series = thinned(points, most_points)
    if len(series) < 3:
        return None
    slopes = sorted(
        (later - earlier) / (later_s - earlier_s)
        for position, (earlier_s, earlier) in enumerate(series)
        for later_s, later in series[position + 1 :]
    )
    in_order = sum((slope > 0) - (slope < 0) for slope in slopes)
    spread = math.sqrt(_variance([value for _, value in series]))
    low, high = _interval(slopes, spread)
    return Trend(
        slope_per_s=median(slopes),
        low_per_s=low,
        high_per_s=high,
        p_value=_p_value(in_order, spread),
        samples=len(series),
        span_s=series[-1][0] - series[0][0],
        level=median(value for _, value in series),
    )


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most so many points, each the medians of equally many neighbours."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(median(at_s for at_s, _ in group), median(value for _, value in group)) for group in groups]


def _variance(values: Sequence[float]) -> float:
    """Variance of Kendall's count for a steady series with these ties."""
    n = len(values)
    ties = [values.count(value) for value in set(values)]
    return (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18


def _p_value(in_order: int, spread: float) -> float:
    """Two-sided, by the normal approximation with its correction for whole numbers."""
    if spread == 0 or in_order == 0:
        return 1.0
    deviation = (abs(in_order) - 1) / spread
    return 2 * (1 - NormalDist().cdf(deviation))


def _interval(slopes: Sequence[float], spread: float) -> tuple[float, float]:
    half = _INTERVAL * spread
    first = max(0, math.floor((len(slopes) - half) / 2))
    last = min(len(slopes) - 1, math.ceil((len(slopes) + half) / 2))
    return slopes[first], slopes[last]


def _short(value: float) -> float:
    """Round to six significant digits."""
    return float(f"{value:.6g}")
