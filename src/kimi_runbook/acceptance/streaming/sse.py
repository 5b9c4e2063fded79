"""Server-sent events as bytes, as the OpenAI API streams them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kimi_runbook.acceptance.streaming.wire import BodyDecoder, Head, IncompleteError, Read

DONE = b"[DONE]"
"""Data of the event that ends a stream of the OpenAI API."""


class Event(NamedTuple):
    """One server-sent event, with the read that completed it. A NamedTuple, because there is one per token."""

    name: bytes
    data: bytes
    read: Read


class EventParser:
    """Takes a stream of server-sent events apart (WHATWG HTML, "Server-sent events"), read by read.

    Lines end with LF or CRLF. A lone CR, which the standard allows too and no server is known to write, is no line end.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._name = b""

    def feed(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """Return name (empty when it has none) and data of the events that these bytes complete."""
        whole = body[:6] == b"data: " and body[-2:] == b"\n\n" and body.find(b"\n") == len(body) - 2
        if whole and b"\r" not in body and not (self._rest or self._data or self._name):
            return [(b"", body[6:-2])]  # as vLLM writes them: one event of one line per read
        return self._lines(body)

    def finish(self) -> list[tuple[bytes, bytes]]:
        """Return the event whose closing blank line did not come before the body's end, if there is one."""
        return self._lines(b"\n\n" if self._rest else b"\n")

    def _lines(self, body: bytes) -> list[tuple[bytes, bytes]]:
        *lines, self._rest = (self._rest + body).split(b"\n")
        events = []
        for line in lines:
            field, _, value = line.removesuffix(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value
            elif not field and line in (b"", b"\r"):
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                self._data, self._name = [], b""
        return events


def events(head: Head, reads: Iterable[Read]) -> Iterator[Event]:
    """Yield a stream's events up to and with ``[DONE]``, each with the read that completed it.

    Raises IncompleteError after the last event when ``[DONE]`` or the end of the body is missing, WireError when the
    body cannot be decoded.
    """
    decoder, parser = BodyDecoder(head), EventParser()
    last: Read | None = None
    done, count = False, 0
    for read in reads:
        last = read
        for name, data in parser.feed(decoder.feed(read[-1])):
            count += 1
            done = done or data == DONE
            yield Event(name, data, read)
    for name, data in parser.finish():
        if last is not None and data == DONE:  # any other event without its closing line is half an event
            done = True
            yield Event(name, data, last)
    decoder.finish()
    if not done:
        raise IncompleteError(f"the stream ended after {count} events without [DONE]")
