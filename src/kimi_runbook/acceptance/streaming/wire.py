"""HTTP/1.1 as bytes. Pure: nothing here knows a socket or a clock.

A body is decoded read by read, so that what a read brought keeps the read's stamp. While a run lasts only the end of an
answer is looked for (``EndOfBody``); everything else is decoded afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Bounds of what is kept of an answer that is none.
_MOST_HEAD = 64 * 1024
_MOST_LINE = 4 * 1024
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: ([^\r\n]*))?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n]*?)[ \t]*")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_DONE_AND_LAST_CHUNK = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class WireError(Exception):
    """Bytes that are no HTTP/1.1 answer; the text says what they are."""


class IncompleteError(Exception):
    """A body that ended before its end; the text says how far it came."""


Read = tuple[int, int, int, bytes]
"""What one read of the socket brought: ``(at_ns, arrived_ns, late_ns, data)``.

A plain tuple, because a run makes one per token and the garbage collector stops looking at plain tuples of numbers and
bytes. ``at_ns`` is when it was read, on the monotonic clock; ``arrived_ns`` when the kernel received its last packet,
the same as ``at_ns`` where the kernel does not say; ``late_ns`` how long its first byte may have waited to be read;
``data`` the bytes, of the body only.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status line and headers of an answer.

    Attributes:
        status: HTTP status.
        headers: Lower-case names; values of a repeated header are joined with a comma.
        length: Bytes of the body; None when it is chunked or goes on until the connection is closed.
        chunked: Whether the body comes in chunks.
        keep_alive: Whether the connection may carry another request after the body.
    """

    status: int
    headers: Mapping[str, str]
    length: int | None
    chunked: bool
    keep_alive: bool

    @property
    def event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"


def request_bytes(method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return a request as it goes over the wire; raises ValueError for a line break or a character outside Latin-1."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a line break in the request's target or headers")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def parse_head(data: bytes, *, method: str = "POST") -> tuple[Head, bytes] | None:
    """Return the answer's head and the bytes after it, or None when it is not complete yet.

    Interim answers (1xx) are passed over. Raises WireError when the bytes are no HTTP/1.1 answer.
    """
    while True:
        if data and not b"HTTP/1."[: len(data)] == data[:7]:
            raise WireError(f"{_looks_like(data)} in place of an HTTP/1.1 status line: {data[:40]!r}")
        block, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > _MOST_HEAD:
                raise WireError(f"headers of more than {_MOST_HEAD} bytes")
            return None
        head = _head(block, method)
        if not 100 <= head.status < 200:
            return head, rest
        if head.status == 101:
            raise WireError("HTTP 101: the protocol was switched, which nobody asked for")
        data = rest


def _head(block: bytes, method: str) -> Head:
    first, *lines = block.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise WireError(f"a status line that is none: {first[:80]!r}")
    minor, status = match[1], int(match[2])
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise WireError(f"a header that is none: {line[:80]!r}")
        name, value = header[1].decode("ascii").lower(), header[2].decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    tokens = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    coding = headers.get("transfer-encoding", "").strip().lower()
    if coding not in ("", "identity", "chunked"):
        raise WireError(f"transfer coding {coding!r}, which was not asked for")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise WireError(f"content coding {headers['content-encoding']!r}, which was not asked for")
    chunked = coding == "chunked"
    without_body = method == "HEAD" or status in (204, 304)
    length = 0 if without_body else None if chunked else _length(headers)
    return Head(
        status=status,
        headers=headers,
        length=length,
        chunked=chunked and not without_body,
        keep_alive=("keep-alive" in tokens if minor == b"0" else "close" not in tokens)
        and (chunked or length is not None),
    )


def _length(headers: Mapping[str, str]) -> int | None:
    told = headers.get("content-length")
    if told is None:
        return None
    values = {value.strip() for value in told.split(",")}
    value = values.pop()
    if values or not value.isascii() or not value.isdigit():
        raise WireError(f"Content-Length {told!r}")
    return int(value)


def _looks_like(data: bytes) -> str:
    if data[:2] in (b"\x15\x03", b"\x16\x03"):
        return "TLS (use https:// in the URL)"
    if data[:1] == b"\x00":
        return "HTTP/2 (ask the port that speaks HTTP/1.1)"
    return "something else"


class BodyDecoder:
    """Takes a body apart, read by read: chunked, of a known length, or until the connection is closed.

    Attributes:
        complete: Whether the end has been seen; never True for a body that ends with the connection.
        excess: Bytes that came after the end; the connection is not to be used again.
    """

    def __init__(self, head: Head) -> None:
        self._chunked = head.chunked
        self._length = head.length
        self._taken = 0
        self._left = 0  # bytes of the current chunk still to come
        self._stage = "size"
        self._pending = b""
        self.complete = not head.chunked and head.length == 0
        self.excess = 0

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in one read; raises WireError when the chunks are none."""
        if self.complete:
            self.excess += len(data)
            return b""
        if self._chunked:
            body = self._chunks(data)
        else:
            body = data if self._length is None else data[: self._length - self._taken]
            self.excess += len(data) - len(body)
        self._taken += len(body)
        if self._length is not None:
            self.complete = self._taken >= self._length
        return body

    @property
    def between_chunks(self) -> bool:
        """Whether a chunk has to begin here."""
        return self._chunked and self._stage == "size" and not self._pending and not self.complete

    def skip(self, size: int) -> None:
        """Count a whole chunk that the caller has taken apart itself."""
        self._taken += size

    def finish(self) -> None:
        """Say that the connection was closed; raises IncompleteError when the body had not ended."""
        if self.complete or not (self._chunked or self._length is not None):
            return
        announced = "without the final chunk" if self._chunked else f"of the {self._length} announced"
        raise IncompleteError(f"{self._taken} bytes of the body came, {announced}")

    def _chunks(self, data: bytes) -> bytes:
        rest, at, body = self._pending + data, 0, []
        self._pending = b""
        while at < len(rest) and not self.complete:
            if self._stage == "data":
                piece = rest[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._stage = "end"
                continue
            end = rest.find(b"\r\n", at)
            if end < 0:
                self._wait_for_line(rest[at:])
                at = len(rest)
            else:
                self._line(rest[at:end])
                at = end + 2
        self.excess += len(rest) - at
        return b"".join(body)

    def _wait_for_line(self, rest: bytes) -> None:
        if len(rest) > _MOST_LINE or (self._stage == "end" and rest != b"\r"):
            raise WireError(f"a chunk that does not end where its size says: {rest[:40]!r}")
        self._pending = rest

    def _line(self, line: bytes) -> None:
        if self._stage == "end":
            if line:
                raise WireError(f"a chunk that does not end where its size says: {line[:40]!r}")
            self._stage = "size"
        elif self._stage == "size":
            match = _SIZE.fullmatch(line + b"\r\n")
            if match is None:
                raise WireError(f"a chunk size that is none: {line[:40]!r}")
            self._left = int(match[1], 16)
            self._stage = "data" if self._left else "trailers"
        elif not line:
            self.complete = True


class EndOfBody:
    """Says when an answer is complete, at next to no cost per read: the client has other streams to attend to.

    A stream of the OpenAI API ends with ``[DONE]`` and the final chunk, which its last bytes show. Any other body that
    may have ended is decoded to be sure.
    """

    def __init__(self, head: Head) -> None:
        self._chunked = head.chunked
        self._left = head.length
        self._decoder = BodyDecoder(head)
        self._unfed: list[bytes] = []
        self.excess = False
        self.complete = self._decoder.complete

    def see(self, data: bytes) -> bool:
        """Return whether the body ends with this read; raises WireError when its chunks are none."""
        if self._chunked:
            self._unfed.append(data)
            if data[-4:] != b"\r\n\r\n" and len(data) >= 4:
                return False
            return self._ends()
        if self._left is None:
            return False
        self._left -= len(data)
        self.excess = self._left < 0
        self.complete = self._left <= 0
        return self.complete

    def _ends(self) -> bool:
        wanted, tail = len(_DONE_AND_LAST_CHUNK), b""
        for data in reversed(self._unfed):
            tail = data + tail
            if len(tail) >= wanted:
                break
        if tail.endswith(_DONE_AND_LAST_CHUNK):
            self.complete = True
            return True
        for data in self._unfed:
            self._decoder.feed(data)
        self._unfed.clear()
        self.complete = self._decoder.complete
        self.excess = self._decoder.excess > 0
        return self.complete


def whole_body(head: Head, reads: Iterable[Read]) -> bytes:
    """Return a body; raises IncompleteError when its end is missing and WireError when it cannot be decoded."""
    decoder = BodyDecoder(head)
    body = b"".join([decoder.feed(read[-1]) for read in reads])
    decoder.finish()
    return body
