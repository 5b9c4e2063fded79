"""Every way in which a request can end without an answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kimi_runbook.acceptance.answer import Answer

_MOST_SAID = 200  # characters of a refusal, which stand on one line of a report


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error body; empty when the body is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else ""


class EngineError(Exception):
    """A request that did not end as HTTP and the OpenAI API promise.

    Attributes:
        where: Method and URL.
        detail: What was seen.
        partial: What had come of a stream before it broke; None when nothing had, or when it was no stream.
    """

    def __init__(self, where: str, detail: str) -> None:
        super().__init__(f"{where}: {detail}")
        self.where = where
        self.detail = detail
        self.partial: Answer | None = None


class NotReachableError(EngineError):
    """No connection could be opened: name, network, proxy or certificate."""


class ConnectionDroppedError(EngineError):
    """The server closed the connection before any byte of the answer came.

    Attributes:
        idle_s: How long the connection had been idle when the request was sent; 0 for a new one.
        reused: Whether an earlier request had used it, so that a keep-alive limit explains the close.
    """

    def __init__(self, where: str, detail: str, *, idle_s: float, reused: bool) -> None:
        super().__init__(where, detail)
        self.idle_s = idle_s
        self.reused = reused


class TimedOutError(EngineError):
    """The request's deadline passed.

    Attributes:
        last_byte_s: Seconds from send to the last byte that came; None when none came or nothing was sent.
        stalled: Whether the answer had fallen silent long before the deadline. A slow one was still arriving.
    """

    def __init__(self, where: str, detail: str, *, last_byte_s: float | None = None, stalled: bool = True) -> None:
        super().__init__(where, detail)
        self.last_byte_s = last_byte_s
        self.stalled = stalled


class TruncatedError(EngineError):
    """The answer ended before its end: a body shorter than announced or a stream without its closing event."""


class BadAnswerError(EngineError):
    """An answer that is not what the API promises: no JSON, a key missing, or an error inside a 200."""


class BadStatusError(EngineError):
    """A status outside 2xx where success was asked for; what the server says to it is told on one line.

    Attributes:
        status: HTTP status.
        body: The answer's body.
    """

    def __init__(self, where: str, status: int, body: bytes) -> None:
        said = " ".join((error_message(body) or body[: 4 * _MOST_SAID].decode("utf-8", "replace")).split())
        text = said if len(said) <= _MOST_SAID else f"{said[: _MOST_SAID - 1]}\N{HORIZONTAL ELLIPSIS}"
        super().__init__(where, f"HTTP {status}: {text}" if text else f"HTTP {status}")
        self.status = status
        self.body = body
