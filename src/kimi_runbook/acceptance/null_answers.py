"""What the null server says, as bytes. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MODEL = "null"

_NS = 1_000_000_000
_STAMP = b"%020d"
_STAMP_SIZE = 20


@dataclass(slots=True, kw_only=True)
class Reply:
    """One request being answered.

    Attributes:
        read_ns: When the request was read; the schedule counts from here. Nanoseconds of the monotonic clock.
        arrived_ns: When its last bytes had arrived.
        tokens: Tokens to answer with.
        prompt_tokens: What is told in ``usage``.
        streamed: Whether it was asked for as a stream.
        chat: Whether it is a chat, and not a text completion.
        with_usage: Whether a stream ends with ``usage``.
        begin: What every event has before its send stamp, and its chunk's size.
        end: What it has after it.
        sent: Tokens sent so far.
    """

    read_ns: int
    arrived_ns: int
    tokens: int
    prompt_tokens: int
    streamed: bool
    chat: bool
    with_usage: bool
    begin: bytes = b""
    end: bytes = b""
    sent: int = 0

    @classmethod
    def to(cls, path: str, body: bytes, *, read_ns: int, arrived_ns: int) -> Reply:
        """Return the reply to a request; raises KeyError, TypeError, ValueError or AttributeError for a bad one."""
        if path not in ("/v1/chat/completions", "/v1/completions"):
            raise KeyError(path)
        asked = json.loads(body)
        tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
        if tokens < 1:
            raise ValueError(f"max_tokens is {tokens}, expected at least 1")
        reply = cls(
            read_ns=read_ns,
            arrived_ns=arrived_ns,
            tokens=tokens,
            prompt_tokens=len(body),
            streamed=bool(asked.get("stream")),
            chat=path.endswith("/chat/completions"),
            with_usage=bool((asked.get("stream_options") or {}).get("include_usage")),
        )
        if reply.streamed:
            reply.begin, reply.end = reply._around_the_stamp()
        return reply

    def event(self, now_ns: int) -> bytes:
        """Return the next token's event as a chunk."""
        return b"%b%b%b" % (self.begin, _STAMP % now_ns, self.end)

    def closing(self) -> bytes:
        """Return what follows the last token: finish reason, usage where it was asked for, ``[DONE]``, final chunk."""
        nothing: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        values: list[dict[str, Any]] = [
            {"model": MODEL, "choices": [{"index": 0, "finish_reason": "length", **nothing}]}
        ]
        if self.with_usage:
            values.append({"model": MODEL, "choices": [], "usage": self._usage()})
        events = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values] + [b"data: [DONE]\n\n"]
        return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"

    def whole(self) -> bytes:
        """Return the answer of a request that is not streamed."""
        text = " word" * self.tokens
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, "finish_reason": "length", **content}
        return _json_answer(200, {"model": MODEL, "choices": [choice], "usage": self._usage()})

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}

    def _around_the_stamp(self) -> tuple[bytes, bytes]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        token = '"delta":{"content":" word"}' if self.chat else '"text":" word"'
        begin = (
            f'data: {{"id":"null-{self.read_ns}","object":"{kind}","created":{self.read_ns // _NS},"model":"{MODEL}",'
            f'"system_fingerprint":"{self.arrived_ns:020d}-'
        ).encode()
        end = f'","choices":[{{"index":0,{token},"logprobs":null,"finish_reason":null}}]}}\n\n'.encode()
        return b"%x\r\n%b" % (len(begin) + _STAMP_SIZE + len(end), begin), end + b"\r\n"


def error_answer(status: int, message: str) -> bytes:
    """Return a refusal, 400 or 404, as the OpenAI API words it."""
    return _json_answer(status, {"error": {"message": message, "code": status}})


def _json_answer(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    reason = {200: b"OK", 400: b"Bad Request", 404: b"Not Found"}[status]
    head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, reason, len(body)) + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
"""Status line and headers of every stream."""

_CARD = {"id": MODEL, "object": "model", "max_model_len": 1_000_000}
STATIC = {
    "/health": _json_answer(200, {}),
    "/version": _json_answer(200, {"version": "null"}),
    "/v1/models": _json_answer(200, {"object": "list", "data": [_CARD]}),
}
"""Answers to GET, by path."""
