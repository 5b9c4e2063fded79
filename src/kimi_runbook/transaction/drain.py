"""Which planned work cannot be done under a running engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence


def needs_drain(
    items: Collection[Mapping[str, str]], calls_for: Mapping[str, Sequence[str]], harmless: str = ""
) -> bool:
    """Return whether a part of a plan takes its host out of service; an empty one does.

    Who drains with nothing planned takes up a killed run, which left a step half done that no snapshot shows.

    Args:
        items: The plan's items, each with ``role``, ``action`` and ``what``.
        calls_for: Role to the actions that need a host out of service; a role that is not named needs none.
        harmless: Regular expression over ``what``; an item it matches needs none either. Empty matches nothing.
    """
    return not items or any(
        item["action"] in calls_for.get(item["role"], ()) and not (harmless and re.search(harmless, item["what"]))
        for item in items
    )
