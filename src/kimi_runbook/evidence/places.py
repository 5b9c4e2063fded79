"""Names of hosts and addresses in text, hidden only where a site asks for it. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection

_HOST = re.compile(r"(?:(?<=://)|(?<=@)|(?<=\bmachine )|(?<=\bHost: ))([A-Za-z][\w-]*(?:\.[\w-]+)*)")
_FOUR = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_SIX = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])")


def hide_hosts(text: str, known: Collection[str], tag: Callable[[str, str], str]) -> str:
    """Return the text with stand-ins for host names in URLs, mail and ssh addresses that are not among the known."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        return name if name in known or name.split(".")[0] in known or name == "localhost" else tag("host", name)

    return _HOST.sub(one, text)


def hide_addresses(text: str, tag: Callable[[str, str], str]) -> str:
    """Return the text with stand-ins for IP addresses; loopback, any-address and netmasks say nothing and stay."""
    text = _FOUR.sub(lambda match: _address(match[0], tag), text)
    return _SIX.sub(lambda match: _address(match[0], tag), text)


def _address(text: str, tag: Callable[[str, str], str]) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    quiet = address.is_loopback or address.is_unspecified or text.startswith("255.")
    return text if quiet else tag("ip", str(address))
