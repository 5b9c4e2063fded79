"""Names of runs: a UTC stamp a person can read, and four hex digits so that two runs of one second differ."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime


def new_run_id(now: datetime | None = None) -> str:
    """Return a run id such as ``20261130T144501Z-7f3a``; ids sort by time.

    Args:
        now: Time the run began; the present when not given.
    """
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
