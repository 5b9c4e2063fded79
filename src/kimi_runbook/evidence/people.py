"""Account names of people in text, by the places they stand in. Accounts every system has stay. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from kimi_runbook.evidence.rules import is_account, is_empty

_UNITS = "service|socket|target|mount|timer|slice|device"

# What a text must hold for a place to be looked for, and the place, which names the account in its one group.
_PLACES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (hint, re.compile(pattern))
    for hint, pattern in (
        ("/", r"/(?:home|Users)/([A-Za-z_][\w.-]*)"),
        ("for ", r"\bfor (?:invalid user |user )?([a-z_][\w.-]*)(?:\(uid=\d+\))? (?:from|by)\b"),  # sshd, pam_unix
        ("user ", r"\b(?:session (?:opened|closed) for|New session \S+ of|Invalid) user ([a-z_][\w.-]*)"),
        ("sudo", r"\bsudo(?:\[\d+\])?:\s+([a-z_][\w.-]*) :"),
        ("=", r"\b(?:USER|LOGNAME|SUDO_USER)=\"?([A-Za-z_][\w.-]*)"),
        ("=", r"\b(?:uid|euid|ruser|user)=\d*\(?([a-z_][\w.-]*)\)?"),
        # mail and ssh, but not the instance of a unit
        ("@", rf"(?<![\w.:/+-])([A-Za-z][\w.+-]*)@(?=[\w-]+\.[\w.-]*[A-Za-z])(?!\S+\.(?:{_UNITS})\b)"),
    )
)


def hide_people(text: str, tag: Callable[[str, str], str]) -> str:
    """Return the text with stand-ins for people's account names."""
    for hint, place in _PLACES:
        if hint in text:
            text = place.sub(lambda match: _hidden(match, tag), text)
    return text


def _hidden(match: re.Match[str], tag: Callable[[str, str], str]) -> str:
    name = match[1]
    if is_account(name) or is_empty(name) or name.endswith((".service", ".slice")):
        return match[0]
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return match[0][:start] + tag("user", name) + match[0][end:]
