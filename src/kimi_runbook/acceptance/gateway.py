"""What to do about a status that a gateway answers with in the engine's place. Pure."""

from __future__ import annotations

from kimi_runbook.acceptance.streaming.errors import BadStatusError, EngineError

_KEY = "What answers there does not let this key, or a request without one, do this: ask whoever runs it, then repeat."
_STEPS = {
    401: _KEY,
    403: _KEY,
    404: "What answers there does not pass this route on: ask the engine's own port.",
    405: "What answers there does not pass this route on: ask the engine's own port.",
    413: "What answers there refuses a request of this size before the engine sees it: raise its limit.",
    429: "What answers there limits how much may be asked: ask the engine's own port, or have the limit lifted.",
}


def next_step_after(error: EngineError | None, otherwise: str) -> str:
    """Return what to do about an error: another place to look where its status is not the engine's own."""
    return _STEPS.get(error.status, otherwise) if isinstance(error, BadStatusError) else otherwise
