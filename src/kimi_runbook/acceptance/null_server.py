"""A server that streams tokens on an exact schedule and computes nothing: what a client measures of it is the client.

    python -m kimi_runbook.acceptance.null_server --phasing step --first-token-ms 20 --interval-ms 20

It speaks as much of the OpenAI API as a load needs: streamed and whole chats and completions, models, version, health.
It prints its URL as one JSON line, and on SIGTERM or Ctrl-C a second one that says how late it was itself: figures of
a client are void where this server was late.

Every event carries two stamps of this machine's monotonic clock in ``system_fingerprint``, in nanoseconds, as
``<request arrived>-<event sent>``: on the same machine a client's lag is its own stamp minus the second one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import heapq
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kimi_runbook.acceptance.load import percentile
from kimi_runbook.acceptance.null_answers import STATIC, STREAM_HEAD, Reply, error_answer
from kimi_runbook.acceptance.streaming.stamps import SPACE, ask_for_stamps, stamp_ns

_NS_PER_MS = 1_000_000
_NS = 1_000_000_000
_MOST_EVENTS_KEPT = 4_000_000
_READ_SIZE = 256 * 1024


class Phasing(StrEnum):
    """How the schedules of streams lie to each other."""

    ARRIVAL = "arrival"  # each counts from its own request: events are spread
    STEP = "step"  # all share one grid, as the steps of an engine do: events come in bursts


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When tokens are due, in nanoseconds of the monotonic clock. Absolute: a late token makes no later one late."""

    phasing: Phasing
    first_token_ns: int
    interval_ns: int

    def due_ns(self, read_ns: int, token: int) -> int:
        """Return when a token (counted from 0) of a request that was read at ``read_ns`` is due."""
        first_ns = read_ns + self.first_token_ns
        if self.phasing is Phasing.STEP:
            first_ns = -(-first_ns // self.interval_ns) * self.interval_ns
        return first_ns + token * self.interval_ns


@dataclass(slots=True, eq=False)
class _Client:
    """One connection: what came and is not taken yet, what did not fit into the socket, what it is being answered."""

    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    arrived_ns: int = 0
    reply: Reply | None = None
    gone: bool = False


class NullServer:
    """The loop. ``run`` returns when ``stop`` is called, e.g. from a signal handler or another thread."""

    def __init__(self, schedule: Schedule, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._schedule = schedule
        self._listener = socket.create_server((host, port), backlog=4096)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._wake, self._waker = socket.socketpair()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._clients: dict[int, _Client] = {}
        self._due: dict[int, list[tuple[_Client, Reply]]] = {}  # what is to be sent at which moment
        self._moments: list[int] = []  # the moments, as a heap
        self._stopped = False
        self._late_ns = array("q")
        self._first_request_ns = self._last_event_ns = 0
        self.requests = 0
        self.events = 0

    @property
    def url(self) -> str:
        """Base URL."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def stop(self) -> None:
        """Make ``run`` return."""
        with contextlib.suppress(OSError):  # it has stopped already
            self._waker.send(b"x")
        self._stopped = True

    def run(self) -> None:
        """Serve until stopped, then close everything."""
        try:
            while not self._stopped:
                self._emit()
                left_ns = self._moments[0] - time.monotonic_ns() if self._moments else None
                # select() counts in microseconds where epoll_wait() would round up to milliseconds.
                select.select([self._epoll], [], [], None if left_ns is None else max(0, left_ns) / _NS)
                for fd, mask in self._epoll.poll(0):
                    self._attend(fd, mask)
        finally:
            for client in self._clients.values():
                client.sock.close()
            for sock in (self._listener, self._wake, self._waker):
                sock.close()
            self._epoll.close()

    def report(self) -> dict[str, Any]:
        """Return how much was served, when (on the monotonic clock) and how late.

        Lateness is an event's actual minus its scheduled send time, in milliseconds.
        """
        late = sorted(self._late_ns)
        return {
            "phasing": str(self._schedule.phasing),
            "requests": self.requests,
            "events": self.events,
            "first_request_s": self._first_request_ns / _NS,
            "last_event_s": self._last_event_ns / _NS,
            "late_ms": {
                name: round(percentile(late, percent) / _NS_PER_MS, 4)
                for name, percent in (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100))
            },
            "cpu_s": round(time.process_time(), 3),
        }

    def _emit(self) -> None:
        """Send every event that is due."""
        moments = self._moments
        while moments and moments[0] <= time.monotonic_ns():
            due_ns = heapq.heappop(moments)
            for client, reply in self._due.pop(due_ns):
                if not client.gone:
                    self._emit_one(due_ns, client, reply)

    def _emit_one(self, due_ns: int, client: _Client, reply: Reply) -> None:
        now_ns = time.monotonic_ns()
        if len(self._late_ns) < _MOST_EVENTS_KEPT:
            self._late_ns.append(now_ns - due_ns)
        self.events += 1
        self._last_event_ns = now_ns
        if not reply.streamed:
            self._finish(client, reply.whole())
            return
        reply.sent += 1
        if reply.sent == reply.tokens:
            self._finish(client, reply.event(now_ns) + reply.closing())
        else:
            self._send(client, reply.event(now_ns))
            self._plan(client, reply, reply.sent)

    def _plan(self, client: _Client, reply: Reply, token: int) -> None:
        due_ns = self._schedule.due_ns(reply.read_ns, token)
        due = self._due.get(due_ns)
        if due is None:
            self._due[due_ns] = [(client, reply)]
            heapq.heappush(self._moments, due_ns)
        else:
            due.append((client, reply))

    def _finish(self, client: _Client, data: bytes) -> None:
        client.reply = None
        self._send(client, data)
        self._requests(client)

    def _attend(self, fd: int, mask: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
            return
        client = self._clients.get(fd)
        if client is None:
            return
        if mask & select.EPOLLOUT:
            self._send(client, b"")
        if mask & ~select.EPOLLOUT and not client.gone:
            self._receive(client)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody waits any more, or no descriptor is left
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_stamps(sock)
            self._clients[sock.fileno()] = _Client(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _receive(self, client: _Client) -> None:
        try:
            data, ancillary, _, _ = client.sock.recvmsg(_READ_SIZE, SPACE)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._drop(client)
            return
        stamp = stamp_ns(ancillary)
        client.arrived_ns = time.monotonic_ns() - (time.time_ns() - stamp if stamp else 0)
        client.received += data
        self._requests(client)

    def _requests(self, client: _Client) -> None:
        """Take the next request that has come in whole, if none is being answered."""
        while client.reply is None and not client.gone:
            head, end, rest = bytes(client.received).partition(b"\r\n\r\n")
            if not end:
                return
            length = _content_length(head)
            if len(rest) < length:
                return
            del client.received[: len(head) + 4 + length]
            self._answer(client, head.split(b"\r\n", 1)[0], rest[:length])

    def _answer(self, client: _Client, request_line: bytes, body: bytes) -> None:
        read_ns = time.monotonic_ns()
        method, _, path = request_line.decode("latin-1").rpartition(" ")[0].partition(" ")
        if method == "GET":
            self._send(client, STATIC.get(path) or error_answer(404, f"no route {path}"))
            return
        try:
            reply = Reply.to(path, body, read_ns=read_ns, arrived_ns=client.arrived_ns)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._send(client, error_answer(400, f"{type(error).__name__}: {error}"))
            return
        self.requests += 1
        self._first_request_ns = self._first_request_ns or read_ns
        client.reply = reply
        if reply.streamed:
            self._send(client, STREAM_HEAD)
        self._plan(client, reply, 0 if reply.streamed else reply.tokens - 1)

    def _send(self, client: _Client, data: bytes) -> None:
        if client.unsent:
            client.unsent += data
            data = bytes(client.unsent)
        try:
            sent = client.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(client)
            return
        if sent == len(data) and not client.unsent:
            return
        client.unsent = bytearray(data[sent:])
        self._epoll.modify(client.sock, select.EPOLLIN | (select.EPOLLOUT if client.unsent else 0))

    def _drop(self, client: _Client) -> None:
        client.gone = True
        self._epoll.unregister(client.sock)
        del self._clients[client.sock.fileno()]
        client.sock.close()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _keep_to(cpu: int) -> None:
    """Stay on one CPU, at real-time priority where that is allowed: this server is to be late for nobody."""
    os.sched_setaffinity(0, {cpu})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except PermissionError:
        print("null_server: no real-time priority (it takes CAP_SYS_NICE); its lateness may be higher", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m kimi_runbook.acceptance.null_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default)")
    parser.add_argument("--phasing", type=Phasing, choices=list(Phasing), default=Phasing.ARRIVAL)
    parser.add_argument("--first-token-ms", type=float, default=20.0, help="request read to first token (default: 20)")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="token to token (default: 20)")
    parser.add_argument("--cpu", type=int, help="stay on this CPU, at real-time priority where that is allowed")
    options = parser.parse_args(argv)
    if options.cpu is not None:
        _keep_to(options.cpu)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    schedule = Schedule(
        phasing=options.phasing,
        first_token_ns=int(options.first_token_ms * _NS_PER_MS),
        interval_ns=int(options.interval_ms * _NS_PER_MS),
    )
    server = NullServer(schedule, host=options.host, port=options.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    print(json.dumps({"url": server.url}), flush=True)
    gc.disable()  # a collection would be late for every stream; nothing here makes cycles
    server.run()
    print(json.dumps(server.report()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
