"""One request on its way, and what became of it. Kept apart from the loop so that reading it needs no socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kimi_runbook.acceptance.streaming.connection import Connection, Stage
from kimi_runbook.acceptance.streaming.errors import (
    BadAnswerError,
    ConnectionDroppedError,
    EngineError,
    NotReachableError,
    TimedOutError,
    TruncatedError,
)
from kimi_runbook.acceptance.streaming.sse import Event, events
from kimi_runbook.acceptance.streaming.wire import (
    EndOfBody,
    Head,
    IncompleteError,
    Read,
    WireError,
    parse_head,
    whole_body,
)
from kimi_runbook.reading import data_file

_NS = 1_000_000_000
_WAITED_FOR = {
    Stage.TCP: "the server did not accept it (a firewall that drops, a wrong address, a full backlog)",
    Stage.PROXY: "the proxy did not answer CONNECT",
    Stage.TLS: "the TLS handshake did not end",
    Stage.READY: "it stood, and the others of the load did not",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, ready to be sent.

    Attributes:
        method: HTTP method.
        url: Whole URL, for messages.
        request: The request as bytes; not shown, since it carries the API key.
        completion: Whether it makes the engine generate, so that it counts as load in flight.
    """

    method: str
    url: str
    request: bytes = field(repr=False)
    completion: bool = False

    @property
    def where(self) -> str:
        """Method and URL."""
        return f"{self.method} {self.url}"


@dataclass(slots=True, eq=False)
class Exchange:
    """A job under way. All stamps are nanoseconds of the monotonic clock, 0 where it has not come so far.

    Attributes:
        job: What is asked.
        timeout_s: Seconds from ``begun_ns`` to its deadline.
        begun_ns: When a connection was taken or begun for it.
        intended_ns: When it was to be sent: its place had become free.
        sent_ns: Right before its first byte was written.
        ended_ns: When its last byte came, or when it failed.
        reused: Whether its connection had carried a request before.
        idle_ns: How long that connection had been idle.
        head: Status and headers, once they are complete.
        reads: What each read brought of the body.
        kernel: Whether the kernel stamped the reads.
        error: Why there is no whole answer; errors that show only when the body is decoded are raised by the getters.
    """

    job: Job
    timeout_s: float
    begun_ns: int = 0
    intended_ns: int = 0
    sent_ns: int = 0
    ended_ns: int = 0
    connection: Connection | None = field(default=None, repr=False)
    reused: bool = False
    reopened: bool = False
    idle_ns: int = 0
    head: Head | None = None
    reads: list[Read] = field(default_factory=list, repr=False)
    kernel: bool = False
    error: EngineError | None = None
    _head_bytes: bytes = field(default=b"", repr=False)
    _end: EndOfBody | None = field(default=None, repr=False)

    @property
    def deadline_ns(self) -> int:
        """When it times out."""
        return self.begun_ns + int(self.timeout_s * _NS)

    @property
    def total_s(self) -> float:
        """Seconds from send to its end."""
        return (self.ended_ns - self.sent_ns) / _NS if self.sent_ns else 0.0

    @property
    def reusable(self) -> bool:
        """Whether its connection may carry another request."""
        if self.error is not None or self.head is None or self._end is None:
            return False
        return self.head.keep_alive and self._end.complete and not self._end.excess

    def take_in(self, data: bytes, at_ns: int, late_ns: int, arrived_ns: int) -> bool:
        """Keep what one read brought; returns whether the answer is complete. Raises WireError."""
        if self._end is None:
            self._head_bytes += data
            parsed = parse_head(self._head_bytes, method=self.job.method)
            if parsed is None:
                return False
            self.head, data = parsed
            self._end = EndOfBody(self.head)
            if self._end.complete:
                return True
            if not data:
                return False
        self.reads.append((at_ns, arrived_ns, late_ns, data))
        return self._end.see(data)

    def closed(self, broken: str = "") -> None:
        """Take the end of the connection: the end of the answer, or an error that says how far it had come."""
        where, how = self.job.where, broken or "closed by the server"
        if self.head is not None:
            if broken or self.head.chunked or self.head.length is not None:  # else the body ends with its connection
                self.error = TruncatedError(where, f"the connection was {how} before the answer's end{self._so_far()}")
        elif self._head_bytes:
            self.error = TruncatedError(
                where, f"the connection was {how} within the headers: {self._head_bytes[:60]!r}"
            )
        else:
            idle_s = self.idle_ns / _NS
            scheme = self.job.url.partition(":")[0]
            detail = (
                f"the new connection was {how} before any byte of the answer: the server died, or does not speak "
                f"{scheme} there"
            )
            if self.reused:
                detail = (
                    f"the connection was {how} before any byte of the answer; it had been idle for {idle_s:.3f} s: the "
                    "server's keep-alive limit is shorter than that, or the server died"
                )
            self.error = ConnectionDroppedError(where, detail, idle_s=idle_s, reused=self.reused)

    def timed_out(self, now_ns: int) -> None:
        """Take the deadline: say whether the answer had stalled or was still arriving."""
        where = self.job.where
        if not self.sent_ns:
            stage = self.connection.stage if self.connection else Stage.TCP
            self.error = TimedOutError(where, f"no connection within {self.timeout_s:g} s: {_WAITED_FOR[stage]}")
            return
        last_ns = self.reads[-1][1] if self.reads else 0
        if not last_ns:
            came = "headers and nothing else" if self.head else "part of the headers" if self._head_bytes else ""
            what = f"stalled: {came}" if came else "stalled, or an answer in one piece that takes longer: no byte"
            self.error = TimedOutError(where, f"{what} within {self.timeout_s:g} s")
            return
        facts = data_file("client.yml").fields("stall")
        silent_s = (now_ns - last_ns) / _NS
        stalled = silent_s > min(facts.number("silent_s"), facts.number("silent_share") * self.timeout_s)
        size = sum(len(read[-1]) for read in self.reads)
        self.error = TimedOutError(
            where,
            f"{'stalled' if stalled else 'slow'}: {size} bytes of the answer within {self.timeout_s:g} s, the last one "
            f"{(last_ns - self.sent_ns) / _NS:.3f} s after the request, {silent_s:.3f} s before the deadline",
            last_byte_s=(last_ns - self.sent_ns) / _NS,
            stalled=stalled,
        )

    def not_opened(self, why: str) -> None:
        """Take the failure to open a connection."""
        self.error = NotReachableError(self.job.where, why)

    def not_http(self, why: str) -> None:
        """Take an answer that is no HTTP/1.1."""
        self.error = BadAnswerError(self.job.where, f"the server sent {why}")

    def answer(self) -> tuple[Head, bytes]:
        """Return head and body of a whole answer; raises EngineError when there is none."""
        if self.error is not None:
            raise self.error
        head = self._require_head()
        try:
            return head, whole_body(head, self.reads)
        except WireError as error:
            raise BadAnswerError(self.job.where, f"the server sent {error}") from error
        except IncompleteError as error:
            raise TruncatedError(self.job.where, str(error)) from error

    def events(self) -> Iterator[Event]:
        """Yield the events of a streamed answer, those before its failure included; then raises EngineError."""
        try:
            if self.head is not None:
                yield from events(self.head, self.reads)
        except WireError as error:
            raise self.error or BadAnswerError(self.job.where, f"the server sent {error}") from error
        except IncompleteError as error:
            raise self.error or TruncatedError(self.job.where, str(error)) from error
        if self.error is not None:
            raise self.error
        self._require_head()

    def _require_head(self) -> Head:
        if self.head is None:
            raise BadAnswerError(self.job.where, "no answer was read")
        return self.head

    def _so_far(self) -> str:
        if self.head is None:
            return ""
        try:
            whole_body(self.head, self.reads)
        except (WireError, IncompleteError) as error:
            return f" ({error})"
        return ""
