"""Packages that come with a driver: their names without the branch that some of them carry."""

from __future__ import annotations

import re

from kimi_runbook.reading import data_file


def companion_of(package: str) -> str | None:
    """Return the name without its branch of a package that comes with the driver, None for any other."""
    bare = re.sub(r"-\d{3}$", "", package)
    return bare if bare in data_file("lock_rules.yml").fields("companions").names() else None
