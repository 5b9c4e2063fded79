"""Server-sent events as bytes, as the OpenAI API streams them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kimi_runbook.acceptance.streaming.wire import BodyDecoder, Head, IncompleteError, Read

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\ndata: ")
_AROUND = len(b"data: \n\n")

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

    @property
    def between_events(self) -> bool:
        """Whether nothing of an event has come yet."""
        return not (self._rest or self._data or self._name)

    def finish(self) -> list[tuple[bytes, bytes]]:
        """Return the event whose closing blank line did not come before the body's end, if there is one."""
        return self.feed(b"\n\n" if self._rest else b"\n")

    def feed(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """Return name (empty when it has none) and data of the events that these bytes complete."""
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


def _one_event(chunk: bytes) -> bytes | None:
    """Return the data of the event that a read consists of as vLLM writes them: one chunk, one event, one line.

    The parsers do the same in twice the time, and everything else.
    """
    match = _SIZE.match(chunk)
    if match is None:
        return None
    start, stop = match.end(), len(chunk) - 2
    one_line = chunk.find(b"\n", start) == stop - 2 and chunk.find(b"\r", start) == stop
    if one_line and chunk[-4:] == b"\n\n\r\n" and int(match[1], 16) == stop - start + len(b"data: "):
        return chunk[start : stop - 2]
    return None


def events(head: Head, reads: Iterable[Read]) -> Iterator[Event]:
    """Yield a stream's events up to and with ``[DONE]``, each with the read that completed it.

    Raises IncompleteError after the last event when ``[DONE]`` or the end of the body is missing, WireError when the
    body cannot be decoded.
    """
    decoder, parser = BodyDecoder(head), EventParser()
    last: Read | None = None
    done, count, between = False, 0, decoder.between_chunks
    for read in reads:
        last = read
        if between:
            data = _one_event(read[-1])
            if data is not None:
                decoder.skip(len(data) + _AROUND)
                count += 1
                done = done or data == DONE
                yield Event(b"", data, read)
                continue
        for name, data in parser.feed(decoder.feed(read[-1])):
            count += 1
            done = done or data == DONE
            yield Event(name, data, read)
        between = parser.between_events and decoder.between_chunks
    for name, data in parser.finish():
        if last is not None and data == DONE:  # any other event without its closing line is half an event
            done = True
            yield Event(name, data, last)
    decoder.finish()
    if not done:
        raise IncompleteError(f"the stream ended after {count} events without [DONE]")
