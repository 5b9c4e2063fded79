"""Small pieces of inline SVG: a canvas, marks that differ in shape as well as in colour, axes. Pure.

Colours are classes, so that a page's light and dark palettes apply. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from kimi_runbook.report.text import clean

WIDTH = 460
"""Width of every plot in its own units: narrow enough to be read on a phone without scrolling."""

Scale = Callable[[float], float]
"""From a value to a coordinate."""


@dataclass(slots=True)
class Canvas:
    """One picture with a title and a description for those who do not see it.

    Attributes:
        id: Id of the picture in its page; title and description get ids from it.
        height: Height in the picture's units.
        title: What it shows.
        description: What is to be seen in it, in a sentence or two.
    """

    id: str
    height: float
    title: str
    description: str
    _parts: list[Markup] = field(default_factory=list)

    def add(self, template: str, **values: object) -> None:
        """Add an element; values are escaped, numbers rounded to a tenth."""
        shown = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in values.items()}
        self._parts.append(Markup(template).format(**shown))  # noqa: S704 - format escapes what it fills in

    def text(self, x: float, y: float, text: str, *, kind: str = "tick", anchor: str = "start") -> None:
        """Add a text; ``kind`` is a class, ``anchor`` start, middle or end."""
        self.add(
            '<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>',
            kind=kind,
            x=x,
            y=y,
            anchor=anchor,
            text=clean(text),
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Add a straight line of a class."""
        self.add(
            '<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>', kind=kind, x1=x1, y1=y1, x2=x2, y2=y2
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Add a rectangle of a class."""
        self.add(
            '<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}"/>', kind=kind, x=x, y=y, w=width, h=height
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Add a line through points; fewer than two draw nothing."""
        if len(points) > 1:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self.add('<polyline class="{kind}" points="{points}"/>', kind=kind, points=joined)

    def mark(self, x: float, y: float, shape: str, kind: str, size: float = 3.5) -> None:
        """Add a mark: ``circle``, ``square``, ``triangle`` or ``diamond``."""
        if shape == "circle":
            self.add('<circle class="{kind}" cx="{x}" cy="{y}" r="{r}"/>', kind=kind, x=x, y=y, r=size)
            return
        corners = {
            "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
            "triangle": ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
            "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
        }[shape]
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
        self.add('<polygon class="{kind}" points="{points}"/>', kind=kind, points=points)

    def markup(self) -> Markup:
        """Return the picture."""
        head = Markup(
            '<svg id="{id}" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{id}-title" '
            'aria-describedby="{id}-desc" focusable="false">'
            '<title id="{id}-title">{title}</title><desc id="{id}-desc">{desc}</desc>'
        ).format(
            id=self.id, width=WIDTH, height=round(self.height), title=clean(self.title), desc=clean(self.description)
        )
        return head + Markup("").join(self._parts) + Markup("</svg>")


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Return the scale that maps low..high to start..end; a range of no width maps to its start."""
    span = high - low
    return lambda value: start + (end - start) * ((value - low) / span if span else 0.0)


def ticks(high: float, count: int = 4) -> list[float]:
    """Return round values from 0 up to one that is at least ``high``: about ``count`` steps of 1, 2 or 5 times 10^n."""
    if high <= 0 or not math.isfinite(high):
        return [0.0, 1.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [n * step for n in range(math.ceil(high / step - 1e-9) + 1)]


def short(value: float) -> str:
    """Return a tick's label: thousands with a k, no trailing zeros."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"
