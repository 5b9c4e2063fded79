"""Which strings look random: scored pair by pair in bits, since names are made of words and keys are not. Pure.

The figures and where they were counted stand in data/secrets.yml, ``randomness``.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from kimi_runbook.reading import data_file

CANDIDATE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-./+~]{14,1000}[A-Za-z0-9_\-+/~]={0,2}")
"""What is worth scoring: long enough, of the characters that keys and names are made of; taken in pieces of 1000."""

HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-f]{32,}|[0-9A-F]{32,})(?![0-9A-Za-z])")
"""Hexadecimal numbers as long as a key; whether one is public only its place tells."""

_PART = re.compile(r"[A-Za-z0-9]+")
_MANGLED = re.compile(
    r"_Z(?:T[VTISC])?(?P<nested>N?)[KVRO]{0,2}(?:(?P<standard>S[tabsiod])|(?P<length>\d{1,2}))(?P<rest>\w*)"
)
_UUID = re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![0-9A-Za-z])")
_CHUNK = re.compile(r"[A-Za-z0-9_\-+]{16,}")
_JOINTS = "_-+/=~"
_ENDS = "_-+=~"
_WORDY = 3.0  # bits; "abc" has about that
_WORD = 20.0
_MIX = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).|[a-z][A-Z]|[A-Za-z]{16}")
_LETTER_A = ord("a")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    pairs: dict[str, float]
    changes: dict[str, float]
    words: frozenset[str]
    joint: float
    threshold: float
    slope: float
    shortest: int


@cache
def _table() -> _Table:
    data = data_file("secrets.yml").fields("randomness")
    rows = data.texts("letter_pairs")
    letters = [chr(_LETTER_A + number) for number in range(26)]
    changes = data.fields("changes")
    return _Table(
        pairs={a + b: int(rows[i][k]) - 6.0 for i, a in enumerate(letters) for k, b in enumerate(letters)},
        changes={name: changes.number(name) for name in changes.names()},
        words=frozenset(word for line in data.texts("words") for word in line.split()),
        joint=data.number("joint"),
        threshold=data.number("threshold"),
        slope=data.number("slope"),
        shortest=data.integer("shortest"),
    )


def looks_random(text: str) -> bool:
    """Return whether a string as a whole, or a part of it, looks random."""
    return any(True for _ in random_spans(text))


def random_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where random-looking strings begin and end, in order."""
    for match in CANDIDATE.finditer(text):
        for start, end in _spans(match.group()):
            yield match.start() + start, match.start() + end


def decoded(text: str) -> str | None:
    """Return the text a base64 string stands for, or None when it is not base64 of printable text."""
    body = text.rstrip("=")
    if len(body) < 8 or len(body) % 4 == 1:
        return None
    try:
        plain = base64.b64decode(body.replace("-", "+").replace("_", "/") + "=" * (-len(body) % 4), validate=True)
        found = plain.decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return found if all(letter.isprintable() or letter in "\r\n\t" for letter in found) else None


@lru_cache(maxsize=65536)
def _spans(candidate: str) -> tuple[tuple[int, int], ...]:
    """Return the parts of one candidate whose score is at or below the threshold, widened to whole words."""
    table = _table()
    if not _MIX.search(candidate):
        return ()
    symbols = [match.span() for match in _MANGLED.finditer(candidate) if _is_mangled(match)]
    # ids, and numbers that only their place can tell from keys: public.py
    symbols += [match.span() for pattern in (_UUID, HEX) for match in pattern.finditer(candidate)]
    parts = [
        (match.start(), match.end(), _WORD if _within(match.start(), symbols) else _score(match.group()))
        for match in _PART.finditer(candidate)
    ]
    found: list[tuple[int, int]] = []
    for lowest in _lowest(parts, table):
        first, last = _widened(candidate, parts, lowest)
        start, end = parts[first][0], parts[last][1]
        if sum(part[1] - part[0] for part in parts[first : last + 1]) >= table.shortest:
            while start > 0 and candidate[start - 1] in _ENDS:
                start -= 1
            while end < len(candidate) and candidate[end] in _ENDS:
                end += 1
            found.append((start, end))
    mixed = (match.span() for match in _CHUNK.finditer(candidate) if _is_mixed(match.group()))
    return tuple(sorted({*found, *(span for span in mixed if not _within(span[0], symbols + found))}))


def _is_mixed(chunk: str) -> bool:
    """Return whether small letters, capitals and digits are mixed as in a key, even where ``-`` and ``_`` divide it.

    Random letters and digits change at 45 of 100 places (capital before small letter not counted), names at 5 to 20.
    """
    bare = "".join(letter for letter in chunk if letter.isalnum())
    kinds = "".join(_kind(letter) for letter in bare)
    if len(kinds) < _table().shortest or min(kinds.count("l"), kinds.count("u")) < 3 or "d" not in kinds:
        return False
    if not any(len(part) > 3 and _score(part) < 0 for part in _PART.findall(chunk)):
        return False  # DeepSeek-V4-Flash-0731
    changes = sum(a != b and a + b != "ul" for a, b in pairwise(kinds))
    return changes >= (len(kinds) - 1) / 3 or (changes >= (len(kinds) - 1) / 4 and _bits(bare) <= _table().threshold)


def _widened(candidate: str, parts: list[tuple[int, int, float]], lowest: tuple[int, int]) -> tuple[int, int]:
    """Return the range with the neighbours that are no words: keys hold ``-``, ``_``, ``+`` and ``/`` themselves."""

    def belongs(number: int, joint: str) -> bool:
        return joint in _JOINTS and parts[number][2] < (0.0 if joint == "/" else _WORDY)

    first, last = lowest
    while first > 0 and belongs(first - 1, candidate[parts[first][0] - 1]):
        first -= 1
    while last + 1 < len(parts) and belongs(last + 1, candidate[parts[last][1]]):
        last += 1
    return first, last


def _lowest(parts: list[tuple[int, int, float]], table: _Table) -> list[tuple[int, int]]:
    """Return ranges of neighbouring parts with the lowest sums, each low enough to be random."""
    found, waiting = [], [(0, len(parts))]
    while waiting:
        begin, end = waiting.pop()
        if begin == end:
            continue
        lowest, first, last = _lowest_of(parts, begin, end, table.joint)
        letters = sum(part[1] - part[0] for part in parts[first : last + 1])
        if lowest <= table.threshold + table.slope * max(letters - table.shortest, 0):
            found.append((first, last))
            waiting += [(begin, first), (last + 1, end)]
    return sorted(found)


def _lowest_of(parts: list[tuple[int, int, float]], begin: int, end: int, joint: float) -> tuple[float, int, int]:
    """Return the lowest sum of neighbouring parts with its range (Kadane's method); ``begin`` is before ``end``."""
    best = (parts[begin][2], begin, begin)
    running, first = parts[begin][2], begin
    for number in range(begin + 1, end):
        bits = parts[number][2]
        if running + joint < 0:
            running += joint + bits
        else:
            running, first = bits, number
        best = min(best, (running, first, number), key=lambda one: one[0])
    return best


def _score(part: str) -> float:
    """Return a part's score in bits; below zero is rather random, above rather a word."""
    lower = part.lower()
    known = lower in _table().words or lower.rstrip("0123456789") in _table().words
    return _WORDY if known else _bits(part)


def _bits(part: str) -> float:
    table = _table()
    total = 0.0
    for a, b in pairwise(part):
        change = _kind(a) + _kind(b)
        total += table.changes.get(change, 0.0)
        if "d" not in change:
            total += table.pairs[(a + b).lower()]
    return total


def _kind(letter: str) -> str:
    return "d" if letter.isdigit() else ("u" if letter.isupper() else "l")


def _within(place: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


def _is_mangled(match: re.Match[str]) -> bool:
    """Return whether this is a C++ symbol of the Itanium ABI: a standard name, or a length and a name that long."""
    if match["standard"]:
        return True
    length = int(match["length"])
    name = match["rest"][:length]
    wordy = bool(match["nested"]) or sum(_bits(part) for part in _PART.findall(name)) >= 0
    return len(name) == length > 2 and name[0].isalpha() and wordy
