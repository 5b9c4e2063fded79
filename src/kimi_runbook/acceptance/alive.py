"""Whether the engine behind an endpoint is alive, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_runbook.acceptance.client import EngineClient
from kimi_runbook.acceptance.http import EngineError

# A gateway that passes on the OpenAI routes only; the engine itself always has /health and asks no key for it.
_NO_SUCH_ROUTE = (401, 403, 404, 405)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """An engine's health: whether it is well, and what was asked and answered, in words."""

    well: bool
    says: str


def ask_health(client: EngineClient) -> Alive:
    """Return what ``/health`` says; where it is not passed on, whether the models can be asked for."""
    try:
        status = client.health()
        if status in _NO_SUCH_ROUTE:
            client.models()
            return Alive(well=True, says=f"GET /health: HTTP {status}, not passed on; GET /v1/models answers")
    except EngineError as error:
        return Alive(well=False, says=f"GET /health: {error.detail}")
    dead = ", the engine is dead" if status == 503 else ""
    return Alive(well=status == 200, says=f"GET /health: HTTP {status}{dead}")
