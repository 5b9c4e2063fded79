"""The secret scan: what a file to be written must not hold. Names file, line and rule, never the secret. Pure core.

Independent of the redaction it comes after: its own patterns (data/secret_scan.yml) and its own measure of randomness.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file

_CANDIDATE = re.compile(r"[A-Za-z0-9_+/-]{20,}={0,2}")
_IDS = re.compile(
    r"sha(?:256|384|512)-[A-Za-z0-9+/]{43,86}={0,2}|[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}|(?<![A-Za-z0-9])[0-9a-f]{12,}(?![A-Za-z0-9])"
)
_PUBLIC_LEAD = re.compile(r"(?:AAAA[A-Z0-9][A-Za-z0-9]|_Z)")
_PUBLIC_BEFORE = re.compile(r"(?i)(?:sha\d+[:-]|(?:ssh|ecdsa)-\S+ )$")
_KNOWN_BLOCK = re.compile(r"-----BEGIN (CERTIFICATE|PUBLIC KEY|X509 CRL|CERTIFICATE REQUEST)-----")
_KINDS = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", "l" * 26 + "u" * 26 + "d" * 10, "_+/-="
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Where something looks like a secret.

    Attributes:
        file: Name of the file, relative to the folder that was scanned.
        line: Line number, from 1.
        rule: What it looks like.
    """

    file: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}"


def scan_text(text: str, file: str) -> list[Finding]:
    """Return what looks like a secret in a text, one finding per line and rule, in order."""
    found = {(line, rule) for rule, place in _places(text) for line in [text.count("\n", 0, place) + 1]}
    return [Finding(file=file, line=line, rule=rule) for line, rule in sorted(found)]


def scan_folder(path: Path) -> list[Finding]:
    """Return what looks like a secret in the text files of a folder and the folders in it, by file and line.

    Raises:
        RunbookError: the folder or a file in it cannot be read.
    """
    if not path.is_dir():
        raise RunbookError(
            where=str(path), observed="no such folder", expected="the folder of a run", next_step="Check the path."
        )
    found: list[Finding] = []
    for file in sorted(item for item in path.rglob("*") if item.is_file() and not item.is_symlink()):
        try:
            data = file.read_bytes()
        except OSError as error:
            raise RunbookError(
                where=str(file),
                observed=f"cannot be read ({error.strerror})",
                expected="a readable file",
                next_step="Check its permissions: what cannot be read cannot be called free of secrets.",
            ) from error
        found += scan_text(data.decode("utf-8", errors="replace"), str(file.relative_to(path)))
    return found


def _places(text: str) -> Iterator[tuple[str, int]]:
    lowered = text.lower()
    for name, hint, pattern in _rules():
        if hint in lowered:
            yield from ((name, match.start()) for match in pattern.finditer(text))
    public = [(block.start(), text.find("-----END", block.end())) for block in _KNOWN_BLOCK.finditer(text)]
    for match in _CANDIDATE.finditer(text):
        if any(start <= match.start() < end for start, end in public):
            continue
        if _is_random(match[0]) and not _PUBLIC_BEFORE.search(text, max(0, match.start() - 40), match.start()):
            yield "random string", match.start()


@cache
def _rules() -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    rules = data_file("secret_scan.yml").each("rules")
    return tuple(
        (rule.text("name"), (rule.optional_text("hint") or "").lower(), re.compile(rule.text("pattern")))
        for rule in rules
    )


@lru_cache(maxsize=65536)
def _is_random(text: str) -> bool:
    """Return whether small letters, capitals and digits are mixed as only random strings mix them."""
    limits = _limits()
    text = _IDS.sub("", text)
    kinds = text.translate(_KINDS)
    if len(kinds) < limits.integer("shortest") or _PUBLIC_LEAD.match(text) or _says_something(text):
        return False
    few = min(kinds.count("l"), kinds.count("u")) < limits.integer("letters") or kinds.count("d") < limits.integer(
        "digits"
    )
    if few or len(set(text)) < limits.integer("distinct"):
        return False
    return sum(a != b for a, b in pairwise(kinds)) >= limits.number("changes") * (len(kinds) - 1)


def _says_something(text: str) -> bool:
    """Return whether this is base64 of printable text: what it says is then looked at, not what it looks like."""
    try:
        plain = base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except binascii.Error:
        return False
    return all(32 <= byte < 127 or byte in b"\r\n\t" for byte in plain) and b"PRIVATE KEY" not in plain


@cache
def _limits() -> Fields:
    return data_file("secret_scan.yml").fields("entropy")
