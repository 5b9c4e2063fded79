"""Step 2: the engine answers as the OpenAI API promises: one chat, one stream, and refusals of bad requests."""

from __future__ import annotations

import json
from typing import Any

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.result import Check, State, StepResult, verify

STEP = 2
NAME = "short request"

# What an answer may end with; `error` and `abort` also exist in vLLM and are no answer.
_FINISHED = ("stop", "length", "tool_calls")
_LOG = "Read the engine's log around this request: run playbooks/diagnose.yml."


def run(context: Context) -> StepResult:
    """Return whether chat, streaming and refusal work."""
    figures: dict[str, Any] = {}
    messages = [{"role": "user", "content": "Name three things that are checked before a service goes live."}]
    context.requests.append({"step": STEP, "messages": messages, "max_tokens": context.plan.max_tokens})
    checks = [_model_served(context)]
    checks += _answer(context, "chat", messages, figures)
    checks += _answer(context, "stream", messages, figures)
    checks += _refusals(context, messages)
    return StepResult.of(STEP, NAME, checks, figures)


def _model_served(context: Context) -> Check:
    name, model = "model-served", context.plan.model
    try:
        served = [card.name for card in context.client.models()]
        context.note("engine_version", context.client.version())
    except EngineError as error:
        return Check(name=name, state=State.FAIL, observed=str(error), expected=model, next_step=_LOG)
    return verify(
        name,
        model in served,
        observed=f"serves {', '.join(served) or 'nothing'}",
        expected=model,
        evidence="GET /v1/models",
        next_step="Compare --served-model-name with the inventory's model name.",
    )


def _answer(context: Context, kind: str, messages: list[dict[str, Any]], figures: dict[str, Any]) -> list[Check]:
    body = context.chat_body(messages)
    evidence = f"POST /v1/chat/completions ({kind})"
    try:
        answer = context.client.chat(body) if kind == "chat" else context.client.stream_chat(body)
    except EngineError as error:
        return [
            Check(
                name=f"{kind}-answer",
                state=State.FAIL,
                observed=str(error),
                expected="an answer" if kind == "chat" else "a stream that ends with [DONE]",
                evidence=evidence,
                next_step=_LOG,
            )
        ]
    figures[f"{kind}_total_s"] = round(answer.total_s, 4)
    if answer.first_token_s is not None:
        figures[f"{kind}_first_token_s"] = round(answer.first_token_s, 4)
    return [
        verify(
            f"{kind}-answer",
            bool(answer.text or answer.reasoning or answer.tool_calls),
            observed=f"{len(answer.text)} characters of content, {len(answer.reasoning)} of reasoning",
            expected="an answer that is not empty",
            evidence=evidence,
            next_step="A model that thinks may need more tokens or chat_template_kwargs (model_limits).",
        ),
        verify(
            f"{kind}-finish-reason",
            answer.finish_reason in _FINISHED,
            observed=f"finish_reason {answer.finish_reason!r}",
            expected=" or ".join(_FINISHED),
            evidence=evidence,
            next_step=_LOG,
        ),
        _usage(context, kind, answer, evidence),
    ]


def _usage(context: Context, kind: str, answer: Answer, evidence: str) -> Check:
    usage, limit = answer.usage, context.plan.max_tokens
    if usage is None:
        observed, holds = "no usage", False
    else:
        observed = f"{usage.prompt_tokens} prompt + {usage.completion_tokens} completion = {usage.total_tokens} tokens"
        adds_up = usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
        holds = adds_up and usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= limit
    return verify(
        f"{kind}-usage",
        holds,
        observed=observed,
        expected=f"usage that adds up, with 1 to {limit} completion tokens",
        evidence=evidence,
        next_step=_LOG,
    )


def _refusals(context: Context, messages: list[dict[str, Any]]) -> list[Check]:
    good = context.chat_body(messages)
    return [
        _refusal(context, "unknown-model", {**good, "model": f"{context.plan.model}-not-served"}, (404,)),
        _refusal(context, "negative-max-tokens", {**good, "max_tokens": -1}, (400, 422)),
    ]


def _refusal(context: Context, kind: str, body: dict[str, Any], statuses: tuple[int, ...]) -> Check:
    name = f"refuses-{kind}"
    expected = f"HTTP {' or '.join(map(str, statuses))} with an OpenAI error body"
    try:
        response = context.client.raw("POST", "/v1/chat/completions", body)
    except EngineError as error:
        return Check(name=name, state=State.FAIL, observed=str(error), expected=expected, next_step=_LOG)
    told = _error_message(response.body)
    return verify(
        name,
        response.status in statuses and bool(told),
        observed=f"HTTP {response.status}" + (f": {told[:120]}" if told else " without an error body"),
        expected=expected,
        evidence=f"POST /v1/chat/completions ({kind})",
        next_step="Something between client and engine answers in its place: ask its port directly.",
    )


def _error_message(body: bytes) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return ""
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else ""
