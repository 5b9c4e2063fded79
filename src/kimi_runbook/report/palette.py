"""The report's colours, light and dark, with what has to be readable on what. Pure.

Contrast is WCAG 2.2's: at least 4.5 for text (1.4.3), at least 3 for what a picture or a control is told by (1.4.11).
"""

from __future__ import annotations

from collections.abc import Mapping

TEXT_CONTRAST = 4.5
GRAPHIC_CONTRAST = 3.0

LIGHT: Mapping[str, str] = {
    "page": "#ffffff",
    "panel": "#f4f6f8",
    "ink": "#16191d",
    "muted": "#515a66",
    "line": "#d3d9e0",
    "edge": "#7d8794",
    "focus": "#0b57d0",
    "link": "#0b4fb3",
    "pass": "#14632a",
    "warn": "#7a4b00",
    "fail": "#a1121f",
    "unknown": "#4b4f9c",
    "pass-panel": "#e3f4e6",
    "warn-panel": "#fdf1d8",
    "fail-panel": "#fde7e7",
    "unknown-panel": "#ececfb",
    "one": "#0b57d0",
    "two": "#b1400c",
    "three": "#14632a",
}

DARK: Mapping[str, str] = {
    "page": "#0e1116",
    "panel": "#181d24",
    "ink": "#e8ecf1",
    "muted": "#a5afbb",
    "line": "#343c47",
    "edge": "#717d8b",
    "focus": "#8ab8ff",
    "link": "#8ab8ff",
    "pass": "#6ad389",
    "warn": "#eebb55",
    "fail": "#ff9089",
    "unknown": "#b3b6ff",
    "pass-panel": "#12291a",
    "warn-panel": "#2e2411",
    "fail-panel": "#331517",
    "unknown-panel": "#20213a",
    "one": "#7fb2ff",
    "two": "#ffa06b",
    "three": "#6ad389",
}

TEXT_ON: tuple[tuple[str, str], ...] = (
    *((text, ground) for text in ("ink", "muted", "link") for ground in ("page", "panel")),
    *(
        (state, ground)
        for state in ("pass", "warn", "fail", "unknown")
        for ground in ("page", "panel", f"{state}-panel")
    ),
    *(("ink", f"{state}-panel") for state in ("pass", "warn", "fail", "unknown")),
    *((series, "page") for series in ("one", "two", "three")),
)
"""(text, ground) pairs that occur."""

GRAPHIC_ON: tuple[tuple[str, str], ...] = (
    *((name, "page") for name in ("edge", "focus", "one", "two", "three")),
    *((name, "panel") for name in ("edge", "focus")),
    *((state, f"{state}-panel") for state in ("pass", "warn", "fail", "unknown")),
)
"""(mark, ground) pairs that occur, for borders, axes, lines and marks that carry a meaning."""


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two ``#rrggbb`` colours, 1 to 21."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2, definition)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
