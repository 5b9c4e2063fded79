"""One HTTP/1.1 exchange with a deadline, and every way in which it can end.

Proxies from the environment are not used: the engine is on the private network, and a proxy that is wanted is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_runbook.acceptance.plan import Access
from kimi_runbook.acceptance.streaming.driver import drive
from kimi_runbook.acceptance.streaming.errors import (
    BadAnswerError,
    BadStatusError,
    ConnectionDroppedError,
    EngineError,
    NotReachableError,
    TimedOutError,
    TruncatedError,
)
from kimi_runbook.acceptance.streaming.exchange import Exchange, Job
from kimi_runbook.acceptance.streaming.origin import Origin, split_url
from kimi_runbook.reading import data_file

__all__ = [
    "BadAnswerError",
    "BadStatusError",
    "ConnectionDroppedError",
    "EngineError",
    "NotReachableError",
    "Response",
    "TimedOutError",
    "TruncatedError",
    "ask",
    "fetch",
    "longest_s",
]

_SAFE = ("GET", "HEAD")


def longest_s(request: str) -> float:
    """Return how many seconds a kind of request may take in all, e.g. ``request_s`` (data/client.yml)."""
    return data_file("client.yml").fields("timeouts").number(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A whole answer: status, lower-case header names, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def fetch(  # noqa: PLR0913 - the parts of one request, each named by the caller
    method: str,
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    access: Access | None = None,
) -> Response:
    """Return the whole answer to one request over a connection of its own, whatever its status.

    Args:
        method: HTTP method.
        url: Whole URL, http or https.
        body: Bytes to send, or None.
        headers: Extra headers.
        timeout_s: Seconds for the whole exchange, connecting and every read included.
        access: API key, CA file and proxy; none of them by default.

    Raises:
        EngineError: NotReachableError, ConnectionDroppedError, TimedOutError, TruncatedError or BadAnswerError.
        RunbookError: When URL or access options cannot be used; nothing was sent then.
    """
    parts = split_url(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    origin = Origin(url, access)
    job = job_for(origin, method, path, body, {"Connection": "close", **(headers or {})})
    return response(origin, ask(origin, job, timeout_s))


def job_for(
    origin: Origin, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
) -> Job:
    """Return a request to an origin, ready to be sent."""
    return Job(
        method=method,
        url=origin.url + path,
        request=origin.request(method, path, body, headers),
        completion=method == "POST" and path.endswith("/completions"),
    )


def ask(origin: Origin, job: Job, timeout_s: float) -> Exchange:
    """Send one request and return what became of it.

    A kept connection that the server had just closed is no news of the server: a GET is sent once more over a new
    connection. A POST is not, since the server may have read it.
    """
    exchange = drive(origin, [job], concurrency=1, timeout_s=timeout_s).exchanges[0]
    dropped = isinstance(exchange.error, ConnectionDroppedError) and exchange.error.reused
    if not dropped or job.method not in _SAFE:
        return exchange
    origin.close()
    left_s = timeout_s - exchange.total_s
    return drive(origin, [job], concurrency=1, timeout_s=left_s).exchanges[0]


def response(origin: Origin, exchange: Exchange) -> Response:
    """Return an exchange's whole answer; raises EngineError. A refusal does not repeat the API key."""
    head, body = exchange.answer()
    if head.status >= 400:
        body = origin.redact_bytes(body)
    return Response(status=head.status, headers=head.headers, body=body)
