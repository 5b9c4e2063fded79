"""The engine's HTTP API, as far as the chain needs it: OpenAI routes, tokenize, health, version, models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.http import (
    BadAnswerError,
    BadStatusError,
    Exchange,
    Response,
    TruncatedError,
    exchange,
    fetch,
)

CLIENT_VERSION = "1"
"""Part of every record's fingerprint: figures of two clients are not compared silently."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts the server charged; ``cached_tokens`` is None when the server did not say, which is not 0."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished completion.

    Attributes:
        text: Content of the first choice.
        reasoning: Its reasoning channel, empty where the model has none.
        tool_calls: Tool calls of the first choice, as the server wrote them.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ... or None when the server gave none.
        usage: Token counts, or None when a stream did not carry them.
        first_token_s: Seconds from send to the first event with text; None when not streamed or no text came.
        total_s: Seconds from send to the end.
        chunks: Events with text; a chunk is not a token.
    """

    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str | None
    usage: Usage | None
    first_token_s: float | None
    total_s: float
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One served model; ``max_model_len`` in tokens, None when the server does not say."""

    name: str
    max_model_len: int | None


class EngineClient:
    """Asks one OpenAI-compatible endpoint. Safe to share between threads: it keeps no connection."""

    def __init__(self, endpoint: str, *, timeout_s: float = 300.0, headers: Mapping[str, str] | None = None) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def raw(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Response:
        """Return the whole answer to one request, whatever its status; raises EngineError without an answer."""
        return fetch(
            method,
            self.endpoint + path,
            body=None if body is None else json.dumps(body).encode(),
            headers=self._headers,
            timeout_s=timeout_s or self._timeout_s,
        )

    def health(self) -> int:
        """Return the status of ``GET /health``: 200, or 503 once the engine is dead."""
        return self.raw("GET", "/health", timeout_s=10).status

    def version(self) -> str:
        """Return what ``GET /version`` says."""
        return str(_key(self._json("GET", "/version"), "version", "GET /version"))

    def models(self) -> tuple[ModelCard, ...]:
        """Return the served models."""
        cards = _key(self._json("GET", "/v1/models"), "data", "GET /v1/models")
        return tuple(ModelCard(name=str(card["id"]), max_model_len=card.get("max_model_len")) for card in cards)

    def tokenize(self, model: str, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token ids the server makes of a chat request, template and generation prompt included.

        Args:
            model: Served model name.
            messages: Chat messages.
            options: Further keys that take part in rendering, e.g. ``chat_template_kwargs``.
        """
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True, **options}
        return tuple(int(token) for token in _key(self._json("POST", "/tokenize", body), "tokens", "POST /tokenize"))

    def chat(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to one chat request; raises EngineError."""
        return self._whole("/v1/chat/completions", body)

    def complete(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to one text completion; raises EngineError."""
        return self._whole("/v1/completions", body)

    def stream_chat(self, body: Mapping[str, Any]) -> Answer:
        """Return a streamed chat answer once its stream has ended; raises EngineError (TruncatedError when cut)."""
        return self._streamed("/v1/chat/completions", body)

    def stream_complete(self, body: Mapping[str, Any]) -> Answer:
        """Return a streamed text completion once its stream has ended; raises as ``stream_chat``."""
        return self._streamed("/v1/completions", body)

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        response = self.raw(method, path, body)
        where = f"{method} {self.endpoint}{path}"
        if not 200 <= response.status < 300:
            raise BadStatusError(where, response.status, response.body)
        return _parse(where, response.body)

    def _whole(self, path: str, body: Mapping[str, Any]) -> Answer:
        started_s = time.monotonic()
        value = self._json("POST", path, dict(body))
        where = f"POST {self.endpoint}{path}"
        _refuse_error(where, value)
        choice = _first_choice(where, value)
        message = choice.get("message") or {"content": choice.get("text")}
        return Answer(
            text=str(message.get("content") or ""),
            reasoning=_reasoning(message),
            tool_calls=tuple(message.get("tool_calls") or ()),
            finish_reason=choice.get("finish_reason"),
            usage=_usage(value.get("usage")),
            first_token_s=None,
            total_s=time.monotonic() - started_s,
            chunks=0,
        )

    def _streamed(self, path: str, body: Mapping[str, Any]) -> Answer:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started_s = time.monotonic()
        with exchange(
            "POST",
            self.endpoint + path,
            body=json.dumps(asked).encode(),
            headers=self._headers,
            timeout_s=self._timeout_s,
        ) as answer:
            if not 200 <= answer.status < 300:
                raise BadStatusError(answer.where, answer.status, answer.read())
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                _refuse_error(answer.where, _parse(answer.where, answer.read()))
                raise BadAnswerError(answer.where, "one whole answer where a stream was asked for")
            return _collect(answer, started_s)


def _collect(answer: Exchange, started_s: float) -> Answer:
    """Read a stream to its ``[DONE]``."""
    text: list[str] = []
    reasoning: list[str] = []
    tool_calls: list[Mapping[str, Any]] = []
    finish_reason: str | None = None
    usage: Usage | None = None
    first_token_s: float | None = None
    chunks = 0
    for data in _events(answer):
        if data == b"[DONE]":
            return Answer(
                text="".join(text),
                reasoning="".join(reasoning),
                tool_calls=tuple(tool_calls),
                finish_reason=finish_reason,
                usage=usage,
                first_token_s=first_token_s,
                total_s=time.monotonic() - started_s,
                chunks=chunks,
            )
        value = _parse(answer.where, data)
        _refuse_error(answer.where, value)
        usage = _usage(value.get("usage")) or usage
        for choice in value.get("choices") or ():
            delta = choice.get("delta") or {"content": choice.get("text")}
            finish_reason = choice.get("finish_reason") or finish_reason
            text.append(str(delta.get("content") or ""))
            reasoning.append(_reasoning(delta))
            tool_calls.extend(delta.get("tool_calls") or ())
            if text[-1] or reasoning[-1] or delta.get("tool_calls"):
                chunks += 1
                first_token_s = first_token_s if first_token_s is not None else time.monotonic() - started_s
    raise TruncatedError(answer.where, f"the stream ended after {chunks} chunks without [DONE]")


def _events(answer: Exchange) -> Iterator[bytes]:
    """Yield the data of each server-sent event; vLLM writes one data line per event."""
    for line in answer.lines():
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


def _parse(where: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise BadAnswerError(where, f"the answer is not JSON: {body[:120]!r}") from error


def _key(value: Any, key: str, where: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise BadAnswerError(where, f"the answer has no {key!r}")
    return value[key]


def _refuse_error(where: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise BadAnswerError(where, f"the answer is a {type(value).__name__}")
    if value.get("error"):
        raise BadAnswerError(where, f"an error inside a 200: {json.dumps(value['error'])[:300]}")


def _first_choice(where: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswerError(where, "the answer has no choices")
    return choices[0]


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning channel; vLLM calls it ``reasoning``, older versions ``reasoning_content``."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(
        prompt_tokens=int(value.get("prompt_tokens") or 0),
        completion_tokens=int(value.get("completion_tokens") or 0),
        total_tokens=int(value.get("total_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
    )
