"""One HTTP/1.1 exchange with a deadline: the thin edge under the engine client and the metrics reader.

A connection per request, so that the engine's 5 s keep-alive (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``) can never cut a
request that was just sent. Proxies from the environment are not used: the engine is on the private network.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


class EngineError(Exception):
    """A request that did not end as HTTP and the OpenAI API promise.

    Attributes:
        where: Method and URL.
        detail: What was seen.
    """

    def __init__(self, where: str, detail: str) -> None:
        super().__init__(f"{where}: {detail}")
        self.where = where
        self.detail = detail


class NotReachableError(EngineError):
    """No connection could be opened, or it was closed before a status line came."""


class TimedOutError(EngineError):
    """The request's deadline passed."""


class TruncatedError(EngineError):
    """The answer ended before its end: a body shorter than announced or a stream without its closing event."""


class BadAnswerError(EngineError):
    """An answer that is not what the API promises: no JSON, a key missing, or an error inside a 200."""


class BadStatusError(EngineError):
    """A status outside 2xx where success was asked for.

    Attributes:
        status: HTTP status.
        body: The answer's body.
    """

    def __init__(self, where: str, status: int, body: bytes) -> None:
        text = body[:300].decode("utf-8", "replace")
        super().__init__(where, f"HTTP {status}: {text}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A whole answer: status, lower-case header names, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """An answer being read: status and headers are there, lines come as they arrive."""

    def __init__(self, where: str, deadline_s: float, sock: socket.socket, response: http.client.HTTPResponse) -> None:
        self.where = where
        self._deadline_s = deadline_s
        self._socket = sock
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def read(self) -> bytes:
        """Return the rest of the body; raises TimedOutError or TruncatedError."""
        with _named_errors(self.where, TruncatedError):
            self._arm()
            return self._response.read()

    def lines(self) -> Iterator[bytes]:
        """Yield the body line by line, without line ends, as it arrives; raises EngineError."""
        while True:
            with _named_errors(self.where, TruncatedError):
                self._arm()
                line = self._response.readline()
            if not line:
                return
            yield line.rstrip(b"\r\n")

    def _arm(self) -> None:
        left = self._deadline_s - time.monotonic()
        if left <= 0:
            raise TimedOutError(self.where, "the deadline passed while the answer was being read")
        self._socket.settimeout(left)


@contextmanager
def exchange(
    method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout_s: float
) -> Iterator[Exchange]:
    """Send one request and give the answer while it is being read; the connection is closed on the way out.

    Args:
        method: HTTP method.
        url: Whole URL, http or https.
        body: Bytes to send, or None.
        headers: Extra headers.
        timeout_s: Seconds for the whole exchange, connecting and every read included.

    Raises:
        NotReachableError: When no connection could be opened or it closed before an answer.
        TimedOutError: When the deadline passed.
    """
    where = f"{method} {url}"
    deadline_s = time.monotonic() + timeout_s
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout_s)
    target = parts.path or "/"
    try:
        with _named_errors(where, NotReachableError):
            connection.request(
                method, f"{target}?{parts.query}" if parts.query else target, body=body, headers=dict(headers or {})
            )
            sock = connection.sock
            response = connection.getresponse()
        yield Exchange(where, deadline_s, sock, response)
    finally:
        connection.close()


def fetch(
    method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout_s: float
) -> Response:
    """Return the whole answer to one request, whatever its status; raises as ``exchange`` and ``Exchange.read`` do."""
    with exchange(method, url, body=body, headers=headers, timeout_s=timeout_s) as answer:
        return Response(status=answer.status, headers=answer.headers, body=answer.read())


@contextmanager
def _named_errors(where: str, broken: type[EngineError]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimedOutError(where, "no answer before the deadline") from error
    except (OSError, http.client.HTTPException) as error:
        raise broken(where, str(error) or type(error).__name__) from error
