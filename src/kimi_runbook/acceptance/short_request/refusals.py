"""Bad requests are refused as the OpenAI API promises, and the engine is none the worse for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kimi_runbook.acceptance.alive import ask_health
from kimi_runbook.acceptance.http import EngineError, Response, fetch, longest_s
from kimi_runbook.acceptance.result import Check, State, unknown, verify
from kimi_runbook.acceptance.short_request.answers import messages
from kimi_runbook.acceptance.short_request.look import LOG, Look, is_lost, settings
from kimi_runbook.acceptance.streaming.errors import error_message

_CHAT = "/v1/chat/completions"
_BETWEEN = "Something between client and engine answers in its place: ask its port directly."


def check_refusals(look: Look) -> list[Check]:
    """Return whether each kind of bad request is refused, and whether the engine still serves afterwards."""
    context = look.context
    good = context.chat_body(messages())
    unserved = {**good, "model": f"{context.plan.model}-not-served"}
    checks = [
        _refusal(look, "unknown-model", lambda: context.client.raw("POST", _CHAT, unserved)),
        _refusal(look, "negative-max-tokens", lambda: context.client.raw("POST", _CHAT, {**good, "max_tokens": -1})),
        _refusal(look, "malformed-json", lambda: _half_of(look, good)),
        _too_long(look),
    ]
    return [*checks, _still_healthy(look)]


def _half_of(look: Look, body: dict[str, Any]) -> Response:
    """Send the first half of a body as if it were all of it."""
    whole = json.dumps(body).encode()
    plan = look.context.plan
    url = f"{plan.endpoint}{_CHAT}"
    headers = {"Content-Type": "application/json"}
    half, timeout_s = whole[: len(whole) // 2], longest_s("without_model_s")
    return fetch("POST", url, body=half, headers=headers, timeout_s=timeout_s, access=plan.access)


def _too_long(look: Look) -> Check:
    """A prompt of token ids is exactly as long as wanted, without asking the tokenizer for a million tokens."""
    plan, name = look.context.plan, "refuses-too-long-prompt"
    try:
        longest = next(card.max_model_len for card in look.context.client.models() if card.name == plan.model)
    except (EngineError, StopIteration) as error:
        return unknown(name, f"GET /v1/models: {error}", expected="the served model", next_step=LOG)
    if longest is None:
        return Check(
            name=name,
            state=State.WARN,
            observed="max_model_len is not told in GET /v1/models",
            expected="the longest context, which vLLM tells",
            evidence="GET /v1/models",
            next_step=_BETWEEN,
        )
    body = {"model": plan.model, "prompt": [1] * (longest + 1), "max_tokens": 1}
    return _refusal(look, "too-long-prompt", lambda: look.context.client.raw("POST", "/v1/completions", body))


def _refusal(look: Look, kind: str, send: Callable[[], Response]) -> Check:
    statuses = settings().fields("refusals").integers(kind)
    expected = f"HTTP {' or '.join(map(str, statuses))} with an OpenAI error body"
    name = f"refuses-{kind}"
    try:
        response = send()
    except EngineError as error:
        look.lost = f"{error}; then {ask_health(look.context.client).says}" if is_lost(error) else ""
        return look.failed(name, error, expected=expected, evidence=f"POST ({kind})")
    told = error_message(response.body)
    return verify(
        name,
        response.status in statuses and bool(told),
        observed=f"HTTP {response.status}" + (f": {told[:120]}" if told else " without an error body"),
        expected=expected,
        evidence=f"POST ({kind})",
        next_step=_BETWEEN,
    )


def _still_healthy(look: Look) -> Check:
    health = ask_health(look.context.client)
    return verify(
        "healthy-after-refusals",
        health.well,
        observed=health.says,
        expected="HTTP 200",
        evidence="GET /health, after the bad requests",
        next_step=f"A bad request took the engine down: no client may be able to do that. {LOG}",
    )
