"""Lock: what must be true on every host. Resolved once, asserted everywhere, never "latest"."""

from __future__ import annotations

from kimi_runbook.lock.model import (
    SCHEMA_VERSION,
    DriverLock,
    EngineLock,
    ImageLock,
    Lock,
    ModelLock,
    RuntimeLock,
    ToolkitLock,
)
from kimi_runbook.lock.parse import load_lock, parse_lock
from kimi_runbook.lock.resolve import Fetch, Resolved, resolve_lock
from kimi_runbook.lock.rules import lock_warnings, open_fields

__all__ = [
    "SCHEMA_VERSION",
    "DriverLock",
    "EngineLock",
    "Fetch",
    "ImageLock",
    "Lock",
    "ModelLock",
    "Resolved",
    "RuntimeLock",
    "ToolkitLock",
    "load_lock",
    "lock_warnings",
    "open_fields",
    "parse_lock",
    "resolve_lock",
]
