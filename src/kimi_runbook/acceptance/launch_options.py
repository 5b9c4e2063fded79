"""What an engine was started with, as far as its cache goes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """An engine's arguments; ``known`` is False where nobody told, so that a missing flag says nothing."""

    argv: Sequence[str] = ()
    known: bool = False

    def option(self, flag: str) -> str | None:
        """Return the value of the last ``--flag value`` or ``--flag=value``, or None."""
        found = None
        for position, word in enumerate(self.argv):
            if word == flag and position + 1 < len(self.argv):
                found = self.argv[position + 1]
            elif word.startswith(f"{flag}="):
                found = word.partition("=")[2]
        return found

    def number(self, *flags: str) -> int | None:
        """Return the value of the first of the flags that is there as a whole number, or None."""
        values = (self.option(flag) for flag in flags)
        return next((int(value) for value in values if value is not None and value.isdecimal()), None)

    @property
    def prefix_caching(self) -> bool | None:
        """What the last flag says of prefix caching; None when none does."""
        said = {"--enable-prefix-caching": True, "--no-enable-prefix-caching": False}
        return next((said[word] for word in reversed(self.argv) if word in said), None)

    @property
    def draft_method(self) -> str | None:
        """The method of speculation, or None when the launch does not name one."""
        method = self._speculation().get("method") or self.option("--speculative-config.method")
        return None if method is None else str(method)

    @property
    def keeps_drafted_unit(self) -> bool:
        """Whether the drop of the last matched unit was switched off (``disable_eagle_block_drop``)."""
        return bool(self._speculation().get("disable_eagle_block_drop"))

    def _speculation(self) -> Mapping[str, object]:
        try:
            value = json.loads(self.option("--speculative-config") or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}
