"""The loop: many requests at once in the calling thread, nothing but sockets and stamps while they run.

Requests are bytes before the clock starts; a read is stamped, kept, and looked at only for the answer's end. Parsing
comes after the run. That keeps the client an order of magnitude below the cost at which it would read late what it
measures (docs/performance.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_runbook.acceptance.streaming.connection import Address, Connection, OpenError, Stage
from kimi_runbook.acceptance.streaming.exchange import Exchange, Job
from kimi_runbook.acceptance.streaming.origin import Origin, idle_limit_s
from kimi_runbook.acceptance.streaming.poller import POLLIN, POLLOUT, Poller, Timers
from kimi_runbook.acceptance.streaming.rounds import Rounds
from kimi_runbook.acceptance.streaming.wire import WireError
from kimi_runbook.reading import data_file

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a drive.

    Attributes:
        exchanges: One per job, in the order of the jobs; each ended.
        started_ns: When the clock started, on the monotonic clock.
        ended_ns: When the last exchange had ended.
        most_in_flight: The highest number of requests sent and not ended.
    """

    exchanges: tuple[Exchange, ...]
    started_ns: int
    ended_ns: int
    most_in_flight: int


def drive(
    origin: Origin,
    jobs: Sequence[Job],
    *,
    concurrency: int,
    timeout_s: float,
    tell: Callable[[int], None] = lambda ended: None,
) -> Run:
    """Send the jobs, at most so many at once; the next one goes out when one ends.

    The first ones start together, once their connections stand. Nothing is raised for a job that fails.

    Args:
        origin: The server.
        jobs: What to send, in order.
        concurrency: Most jobs in flight.
        timeout_s: Seconds for each: opening its connection, and waiting for the common start, included.
        tell: Is told how many jobs have ended. It holds up the loop, so it has to be quick.

    An interrupt gets through at once and leaves no connection open.
    """
    loop = _Loop(origin, jobs, concurrency, timeout_s, tell)
    try:
        return loop.run()
    finally:
        loop.close()


class _Loop:
    """One drive. An exchange is opening, waiting for the common start, sending, or reading; then it has ended."""

    def __init__(
        self, origin: Origin, jobs: Sequence[Job], concurrency: int, timeout_s: float, tell: Callable[[int], None]
    ) -> None:
        facts = data_file("client.yml").fields("connections")
        self._next_address_ns = int(facts.number("next_address_after_s") * _NS)
        self._open_together_ns = int(facts.number("open_together_s") * _NS)
        self._origin = origin
        self._tell = tell
        self._timeout_s = timeout_s
        self._exchanges = tuple(Exchange(job=job, timeout_s=timeout_s) for job in jobs)
        self._waiting = deque(self._exchanges)
        # Places to send from: since when each is free, and the connection that the last answer left behind.
        self._places: deque[tuple[int, Connection | None]] = deque([(0, None)] * concurrency)
        self._poller = Poller()
        self._rounds = Rounds(self._poller)
        self._live: dict[int, Exchange] = {}
        self._timers = Timers()
        self._gate: list[Exchange] = []
        self._addresses: list[Address] = []
        self._started_ns = self._ended = self._in_flight = self._most_in_flight = 0
        self._stamped = False

    def run(self) -> Run:
        """Drive every job to its end."""
        if len(self._exchanges) > 1:
            self._resolve()
        self._fill()
        self._timers.add(time.monotonic_ns() + self._open_together_ns, self._start)
        live, rounds, timers = self._live, self._rounds, self._timers
        while live:
            if not self._started_ns and len(self._gate) == len(live):
                self._start()
            ready = rounds.wait(timers.next_ns, len(live) if self._stamped else 0)
            for fd, mask in ready:
                exchange = live.get(fd)
                if exchange is None:
                    continue
                if mask == POLLIN and exchange.sent_ns:
                    self._read(exchange, rounds.since_ns)
                else:
                    self._attend(exchange, mask, rounds.since_ns)
            if rounds.now_ns >= timers.next_ns:
                timers.run(rounds.now_ns)
            if self._places:
                self._fill()
        ended_ns = time.monotonic_ns()
        return Run(
            exchanges=self._exchanges,
            started_ns=self._started_ns or ended_ns,
            ended_ns=ended_ns,
            most_in_flight=self._most_in_flight,
        )

    def close(self) -> None:
        """Close what is still open; nothing is, unless the run was interrupted."""
        for exchange in self._live.values():
            if exchange.connection is not None:
                exchange.connection.close()
            if exchange.sent_ns and exchange.job.completion:
                self._origin.flight.end(time.monotonic_ns())
        for _, connection in self._places:
            if connection is not None:
                connection.close()
        self._timers.clear()
        self._poller.close()
        self._rounds.close()

    def _fill(self) -> None:
        """Begin waiting jobs in free places."""
        while self._waiting and self._places:
            free_since_ns, connection = self._places.popleft()
            exchange = self._waiting.popleft()
            exchange.begun_ns = time.monotonic_ns()
            exchange.intended_ns = free_since_ns
            if connection is not None and not connection.alive():
                self._drop(connection)
                connection = None
            if connection is None:
                connection = self._origin.take()
                if connection is None:
                    self._open(exchange)
                    continue
                self._poller.add(connection.fileno(), writing=False)
            self._adopt(exchange, connection)
            self._opened(exchange)
        while self._places and not self._waiting:
            connection = self._places.popleft()[1]
            if connection is not None:
                self._poller.remove(connection.fileno())
                self._origin.give(connection)

    def _resolve(self) -> str:
        """Look the server's name up before the clock starts; returns why it has no address."""
        try:
            self._addresses = self._origin.addresses(self._timeout_s)
        except OpenError as error:
            return str(error)
        return ""

    def _open(self, exchange: Exchange) -> None:
        why = "" if self._addresses else self._resolve()
        try:
            if why:
                raise OpenError(why)
            connection = self._origin.open(self._addresses)
        except OpenError as error:
            exchange.not_opened(str(error))
            self._end(exchange, time.monotonic_ns())
            return
        self._adopt(exchange, connection)
        self._watch_opening(exchange, connection)

    def _adopt(self, exchange: Exchange, connection: Connection) -> None:
        exchange.connection = connection
        self._live[connection.fileno()] = exchange
        self._timers.add(exchange.deadline_ns, lambda: self._deadline(exchange))

    def _watch_opening(self, exchange: Exchange, connection: Connection) -> None:
        self._poller.add(connection.fileno(), writing=True)
        if connection.has_next_address:
            address = connection.address
            at_ns = time.monotonic_ns() + self._next_address_ns
            self._timers.add(at_ns, lambda: self._next_address(exchange, address))

    def _next_address(self, exchange: Exchange, given_up: Address) -> None:
        connection = exchange.connection
        if connection is None or connection.address != given_up or not connection.has_next_address:
            return
        self._poller.remove(connection.fileno())
        del self._live[connection.fileno()]
        try:
            connection.next_address()
        except OpenError as error:
            exchange.connection = None
            exchange.not_opened(str(error))
            self._end(exchange, time.monotonic_ns())
            return
        self._live[connection.fileno()] = exchange
        self._watch_opening(exchange, connection)

    def _attend(self, exchange: Exchange, mask: int, since_ns: int) -> None:
        connection = exchange.connection
        if connection is None:
            return
        if exchange.sent_ns:
            if mask & POLLOUT and self._flushed(connection):
                self._poller.change(connection.fileno(), writing=False)
            if mask & ~POLLOUT:
                self._read(exchange, since_ns)
        elif connection.stage is Stage.READY:
            if not connection.alive():
                self._reopen(exchange, connection)
        else:
            self._go_on_opening(exchange, connection)

    def _go_on_opening(self, exchange: Exchange, connection: Connection) -> None:
        try:
            opened = connection.advance()
        except OpenError as error:
            if connection.has_next_address:
                self._next_address(exchange, connection.address)
            else:
                exchange.not_opened(str(error))
                self._end(exchange, time.monotonic_ns())
            return
        self._poller.change(connection.fileno(), writing=connection.wants_write)
        if opened:
            self._origin.prefer(connection.address)
            self._opened(exchange)

    def _opened(self, exchange: Exchange) -> None:
        if self._started_ns:
            self._send(exchange)
        else:
            self._gate.append(exchange)

    def _reopen(self, exchange: Exchange, connection: Connection) -> None:
        """Replace a connection the server closed before anything was sent over it; once."""
        if exchange in self._gate:
            self._gate.remove(exchange)
        if exchange.reopened:
            exchange.not_opened("the server closed the connection before anything was sent, twice")
            self._end(exchange, time.monotonic_ns())
            return
        exchange.reopened = True
        del self._live[connection.fileno()]
        exchange.connection = None
        self._drop(connection)
        self._open(exchange)

    def _start(self) -> None:
        """Start the clock, and everything whose connection stands."""
        if self._started_ns:
            return
        self._started_ns = time.monotonic_ns()
        for exchange in self._live.values():
            exchange.intended_ns = self._started_ns
        gate, self._gate = self._gate, []
        for exchange in gate:
            self._send(exchange)

    def _send(self, exchange: Exchange) -> None:
        connection = exchange.connection
        if connection is None:
            return
        exchange.reused = connection.used > 0
        connection.used += 1
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        if exchange.job.completion:
            self._origin.flight.begin(time.monotonic_ns())
        exchange.sent_ns = time.monotonic_ns()
        exchange.idle_ns = exchange.sent_ns - connection.idle_since_ns if exchange.reused else 0
        try:
            sent = connection.send(exchange.job.request)
        except OSError:  # reading tells what happened, and whether the server said why
            connection.forget_output()
            sent = True
        if not sent:
            self._poller.change(connection.fileno(), writing=True)

    def _flushed(self, connection: Connection) -> bool:
        try:
            return connection.flush()
        except OSError:
            connection.forget_output()
            return True

    def _read(self, exchange: Exchange, since_ns: int) -> None:
        """Read once, stamp, keep. What this costs, times the streams, is the client's lag: see docs/performance.md."""
        connection = exchange.connection
        if connection is None:
            return
        try:
            data, stamp_ns = connection.receive()
        except OSError as error:
            exchange.closed(f"broken ({error.strerror or error})")
            self._end(exchange, time.monotonic_ns())
            return
        now_ns = time.monotonic_ns()
        if data is None:
            return
        if not data:
            exchange.closed()
            self._end(exchange, now_ns)
            return
        arrived_ns, late_ns = now_ns, now_ns - since_ns
        if stamp_ns:
            exchange.kernel = self._stamped = True
            unread_ns = time.time_ns() - stamp_ns
            if 0 < unread_ns < now_ns - exchange.sent_ns:  # unless the wall clock was set meanwhile
                arrived_ns -= unread_ns
                late_ns = max(late_ns, unread_ns)
        try:
            complete = exchange.take_in(data, now_ns, late_ns, arrived_ns)
        except WireError as error:
            exchange.not_http(str(error))
            complete = True
        if complete:
            self._end(exchange, arrived_ns)
        elif connection.ended:
            exchange.closed()
            self._end(exchange, now_ns)

    def _deadline(self, exchange: Exchange) -> None:
        if not exchange.ended_ns:
            now_ns = time.monotonic_ns()
            if exchange in self._gate:
                self._gate.remove(exchange)
            exchange.timed_out(now_ns)
            self._end(exchange, now_ns)

    def _end(self, exchange: Exchange, at_ns: int) -> None:
        exchange.ended_ns = at_ns
        connection, exchange.connection = exchange.connection, None
        if exchange.sent_ns:
            self._in_flight -= 1
            if exchange.job.completion:
                self._origin.flight.end(time.monotonic_ns())
        if connection is not None:
            del self._live[connection.fileno()]
            if exchange.reusable and not connection.wants_write:
                connection.idle_since_ns = time.monotonic_ns()
                connection.idle_limit_s = idle_limit_s(exchange.head)
            else:
                self._drop(connection)
                connection = None
        self._places.append((at_ns, connection))
        self._ended += 1
        self._tell(self._ended)

    def _drop(self, connection: Connection) -> None:
        self._poller.remove(connection.fileno())
        connection.close()
