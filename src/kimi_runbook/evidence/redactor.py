"""Redaction of all files of one host: each by its format, then every secret found wherever else it stands. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from urllib.parse import quote

from kimi_runbook.evidence.places import hide_addresses, hide_hosts
from kimi_runbook.evidence.pseudonyms import Pseudonyms
from kimi_runbook.evidence.rules import worth_following
from kimi_runbook.evidence.structured import redact_environment, redact_json, redact_yaml
from kimi_runbook.evidence.text import redact_text

FORMATS = {"text": redact_text, "json": redact_json, "yaml": redact_yaml, "env": redact_environment}
"""How a part is redacted, by its format; command lines and units are text."""

HIDES = ("users", "hosts", "ips")
"""What may be hidden besides secrets, which always are."""


class Redactor:
    """Redacts texts with one run's pseudonyms and remembers the secrets it saw.

    Args:
        pseudonyms: The run's stand-ins.
        hide: Which of :data:`HIDES` are hidden; account names are unless told otherwise, hosts and addresses are not.
        hosts: Names that are never hidden: those of the inventory.
    """

    def __init__(self, pseudonyms: Pseudonyms, hide: tuple[str, ...] = ("users",), hosts: tuple[str, ...] = ()) -> None:
        self._pseudonyms = pseudonyms
        self._hide = hide
        self._hosts = frozenset(hosts)
        self._secrets: set[str] = set()

    def redact(self, text: str, form: str = "text") -> str:
        """Return one text with stand-ins for what must not be written."""
        text = FORMATS[form](text, self._tag)
        if "hosts" in self._hide:
            text = hide_hosts(text, self._hosts, self._tag)
        return hide_addresses(text, self._tag) if "ips" in self._hide else text

    def redact_all(self, parts: Mapping[str, tuple[str, str]]) -> dict[str, str]:
        """Return every text redacted, by name; a secret told by its name in one is hidden in all of them.

        Args:
            parts: Text and format, by name.
        """
        first = {name: self.redact(text, form) for name, (text, form) in parts.items()}
        return {name: self.follow(text) for name, text in first.items()}

    def follow(self, text: str) -> str:
        """Return the text with every secret seen so far hidden, also where it is percent-encoded or in base64."""
        forms = {form: secret for secret in self._secrets for form in _forms(secret)}
        if not forms:
            return text
        pattern = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))
        return pattern.sub(lambda match: self._pseudonyms.of("secret", forms[match[0]]), text)

    def _tag(self, kind: str, value: str) -> str:
        if kind == "user" and "users" not in self._hide:
            return value
        if kind == "secret" and worth_following(value):
            self._secrets.add(value)
        return self._pseudonyms.of(kind, value)


def _forms(secret: str) -> set[str]:
    data = secret.encode("utf-8", "surrogatepass")
    encoded = base64.b64encode(data).decode() if len(data) >= 8 else secret
    return {secret, quote(data, safe=""), json.dumps(secret)[1:-1], encoded, encoded.rstrip("=") or secret}
