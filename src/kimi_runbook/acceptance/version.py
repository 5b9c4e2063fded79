"""An engine's version as far as facts depend on it: the three numbers of its release, or that it cannot be placed."""

from __future__ import annotations

import re

Release = tuple[int, int, int]

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[a-z.+-]\S*)?")
_UNTAGGED = "0.1.dev"  # what a build without a tag to count from calls itself, e.g. Kimi K3's bring-up image


def parse_version(text: str) -> Release | None:
    """Return the release a version belongs to, or None when it cannot be placed.

    A development build counts as the release it leads to: ``0.33.1.dev5+gabc`` is (0, 33, 1).
    """
    match = _RELEASE.fullmatch(text.strip())
    if match is None or text.strip().startswith(_UNTAGGED):
        return None
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def within(version: Release, since: str, until: str) -> bool:
    """Return whether a release lies in a range, both ends included; an empty end is open.

    ``until: "0.32"`` includes every 0.32.x. Raises ValueError for an end that is no version.
    """
    first, last = _end(since), _end(until)
    if first is not None and version < first:
        return False
    return last is None or version[: until.count(".") + 1] <= last[: until.count(".") + 1]


def _end(text: str) -> Release | None:
    if not text:
        return None
    parsed = parse_version(text)
    if parsed is None:
        raise ValueError(f"{text!r} is no version")
    return parsed
