"""Text of an engine, a log or an inventory, made fit to be shown. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from kimi_runbook.campaign.values import NOT_OBSERVED

# What no page may hold: controls but tab and newline, half surrogate pairs, characters XML 1.0 refuses, and marks that
# turn the direction of text round, with which a line can be made to read as another.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean(text: str) -> str:
    """Return the text with what no page may hold replaced by U+FFFD."""
    return _UNFIT.sub(_REPLACEMENT, text.replace("\r\n", "\n"))


def clipped(text: str, most: int) -> str:
    """Return the text on one line, cut at a word to at most so many characters, with an ellipsis where it was cut."""
    line = " ".join(clean(text).split())
    if len(line) <= most:
        return line
    kept = line[: most - 1]
    return f"{kept[: kept.rfind(' ')] if kept.rfind(' ') > most // 2 else kept}\N{HORIZONTAL ELLIPSIS}"


def told(value: Any) -> str:
    """Return a figure as text: ``not observed`` for None, JSON for what is nested."""
    if value is None:
        return NOT_OBSERVED
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def rounded(value: float | None, digits: int = 3) -> str:
    """Return a number with so many digits after the point, none where it is whole; a dash for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.{digits}f}"
