"""What is public although it is long and random: digests, UUIDs, ids, fingerprints, certificates, public keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from kimi_runbook.evidence.randomness import HEX
from kimi_runbook.reading import Fields, data_file

_AROUND = 600  # characters of a line before and behind a place that are searched for what makes it public
_AROUND_HEX = 100  # the same around a hexadecimal number
_NAMED = 40  # characters before a number that are searched for the word that names it


def public_spans(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return where public spans begin and end in the part of a line around a place."""
    around = _AROUND_HEX if HEX.fullmatch(text, start, end) else _AROUND
    first = max(text.rfind("\n", 0, start) + 1, start - around)
    last = min(_or(text.find("\n", end), len(text)), end + around)
    named = [span for span, is_public in _numbers(text, first, last) if is_public]
    return [*named, *(match.span() for pattern in _spans() for match in pattern.finditer(text, first, last))]


def public_blocks(text: str) -> list[tuple[int, int]]:
    """Return where public blocks of several lines begin and end, in order: certificates, public keys."""
    if "-----BEGIN" not in text:
        return []
    return [match.span() for match in _blocks().finditer(text)]


def hex_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where hexadecimal numbers stand that are as long as keys."""
    return (match.span() for match in HEX.finditer(text))


def private_hex(text: str) -> Iterator[tuple[int, int]]:
    """Yield where long hexadecimal numbers stand that nothing around them says are public."""
    return (span for span, is_public in _numbers(text, 0, len(text)) if not is_public)


def _numbers(text: str, first: int, last: int) -> Iterator[tuple[tuple[int, int], bool]]:
    for match in HEX.finditer(text, first, last):
        line = text.rfind("\n", 0, match.start()) + 1
        before = text[max(line, match.start() - _NAMED) : match.start()]
        alone = not before.strip() and _line().match(text, match.start())
        yield match.span(), bool(alone or _before().search(before))


def _or(place: int, otherwise: int) -> int:
    return otherwise if place < 0 else place


@cache
def _blocks() -> re.Pattern[str]:
    return re.compile(_data().text("blocks"))


@cache
def _spans() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in _data().texts("spans"))


@cache
def _before() -> re.Pattern[str]:
    words = "|".join(_data().texts("hex_after"))
    return re.compile(rf"(?i)(?:(?<![a-z])(?:{words})(?:\[sha1\])?[\"'\]]?[ \t]*[:=/\[(\"'` -]{{0,3}}|\+g)$")


@cache
def _line() -> re.Pattern[str]:
    return re.compile(_data().text("checksum_line").removeprefix("^"))


def _data() -> Fields:
    return data_file("secrets.yml").fields("public")
