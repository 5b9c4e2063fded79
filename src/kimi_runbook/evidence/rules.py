"""What is a secret by its name and what its value says about it (data/secrets.yml). Pure."""

from __future__ import annotations

import re
from functools import cache

from kimi_runbook.environment import looks_secret, may_report
from kimi_runbook.evidence.randomness import HEX, looks_random
from kimi_runbook.reading import Fields, data_file

_COUNT = re.compile(r"-?\d{1,12}(?:\.\d+)?[kKMGT]?")
_PLACEHOLDER = re.compile(r"\[(?:secret|value|user|host|ip)-[0-9a-f]{8}\]")
_FILE = re.compile(r"(?:/[\w.@+-]+)+/?|[\w.-]+\.(?:pem|crt|key|json|ya?ml|txt|env|conf)")


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is a secret; ``num_key_value_heads`` and ``KeyError`` do not."""
    bare = name.lstrip("-")
    return bool(looks_secret(bare) or _any("further").search(bare)) and not _any("harmless").fullmatch(bare)


def is_secret(name: str, value: str) -> bool:
    """Return whether a value is to be hidden because of its name.

    Kept are what stands where no secret is set (``None``, ``$TOKEN``), counts of tokens, the files a secret lies in,
    and, below a name as wide as ``key``, whatever does not look like one.
    """
    if not is_secret_name(name) or is_empty(value):
        return False
    last = re.split(r"[_.-]", name.lower())[-1]
    if (last.endswith("tokens") or name == "token") and _COUNT.fullmatch(value.rstrip(".")):
        return False
    if _any("weak").fullmatch(name.lstrip("-")):
        return _could_be_secret(value)
    return not (_FILE.fullmatch(value) and not looks_random(value) and "/" in value)


def is_empty(value: str) -> bool:
    """Return whether a value stands for none, or is hidden already."""
    if not value.strip() or _any("empty").fullmatch(value):
        return True
    shown = _PLACEHOLDER.sub("", value)
    return shown != value and not re.search(r"\w{4}", shown)


def may_show(name: str) -> bool:
    """Return whether a variable's value may be written: it steers the engine, or belongs to image or shell."""
    return may_report(name) or bool(_any("public").fullmatch(name) and not looks_secret(name))


def is_account(name: str) -> bool:
    """Return whether this is an account every system has, or a number."""
    return name.isdigit() or bool(_accounts().fullmatch(name))


def worth_following(value: str) -> bool:
    """Return whether a secret is so much its own that it may be searched for elsewhere: no word, file or count."""
    if len(value) < 6 or _COUNT.fullmatch(value) or _FILE.fullmatch(value) or value.startswith("["):
        return False
    return bool(re.search(r"[^a-z]", value)) and bool(re.search(r"[A-Za-z]", value))


def is_public_key(key: str) -> bool:
    """Return whether long hexadecimal numbers below a JSON or YAML key are public: ids, digests, commits."""
    return bool(_hex_keys().search(key))


def _could_be_secret(value: str) -> bool:
    if looks_random(value) or HEX.search(value):
        return True
    return (
        len(value) >= 6 and bool(re.search(r"\d", value)) and bool(re.search(r"[A-Za-z]", value)) and "/" not in value
    )


@cache
def _any(key: str) -> re.Pattern[str]:
    found = _names().optional_text(key) if isinstance(_names().raw(key), str) else "|".join(_names().texts(key))
    return re.compile(found or "(?!)", 0 if key == "public" else re.IGNORECASE)


def _names() -> Fields:
    return data_file("secrets.yml").fields("names")


@cache
def _accounts() -> re.Pattern[str]:
    return re.compile("|".join(data_file("secrets.yml").texts("accounts")))


@cache
def _hex_keys() -> re.Pattern[str]:
    return re.compile(data_file("secrets.yml").fields("public").text("hex_keys"))
