"""An HTTP server that speaks as much of vLLM's API and metrics as the chain asks for, and can be told to fail.

Faults are driven over real HTTP on 127.0.0.1. One byte of text is one token, as with the lab's model. The prefix cache
is a model of its own (cache_model.py); what a request is answered with is in answers.py, the server in handler.py.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.faults.engine import answers, exposition
from tests.faults.engine.cache_model import CacheModel, Flaw
from tests.faults.engine.faults import Fault
from tests.faults.engine.handler import Handler

__all__ = ["MODEL", "VERSION", "FakeEngine", "Fault"]

MODEL = "moonshotai/Kimi-K3"
VERSION = "0.32.0"
_LEAK_PER_REQUEST = 0.004  # share of the KV cache
_FOREIGN_REQUESTS = 3  # that OTHER_TRAFFIC_UNDER_LOAD brings


class EngineGoneError(Exception):
    """The engine's process is gone: the connection is to be dropped without a word."""


class FakeEngine:
    """The server; use it as a context manager, ``url`` is its base URL.

    Attributes set by a test before the first request:
        token_delay_s: Seconds between two tokens.
        first_token_delay_s: Seconds before the first one, on top.
        load_limit: Requests at once above which OOM_UNDER_LOAD and DIES_UNDER_LOAD strike.
        hits_stop_after: Requests after which HITS_STOP strikes.
        max_model_len: Tokens of a prompt and its answer at most; None for a server that does not tell.
        max_num_seqs: Requests that run at once; further ones wait.
        hang_s: Seconds a stalled or hanging answer stays open at most.
    """

    def __init__(
        self,
        *faults: Fault,
        block_size: int = 64,
        version: str = VERSION,
        openmetrics: bool = False,
        cache: CacheModel | None = None,
    ) -> None:
        self.faults = set(faults)
        self.cache = cache or self._cache_of(100_000 if Fault.BLOCK_TOO_LARGE in self.faults else block_size)
        self.version = version
        self.openmetrics = openmetrics
        self.model = MODEL
        self.max_model_len: int | None = 4096
        self.token_delay_s = 0.01
        self.first_token_delay_s = 1.0 if Fault.SLOW_FIRST_TOKEN in self.faults else 0.0
        self.load_limit = 2
        self.hits_stop_after = 12
        self.max_num_seqs = 1 if Fault.FEW_SLOTS in self.faults else 256
        self.hang_s = 30.0
        self.lock = threading.Lock()
        self.slot = threading.Condition(self.lock)
        self.stopping = threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.dead = False
        self.start_engine()
        self._connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"engine": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def _cache_of(self, block_size: int) -> CacheModel:
        return CacheModel(
            block_size=block_size,
            recurrent=Fault.RECURRENT in self.faults,
            caching=Fault.CACHING_OFF not in self.faults,
            flaw=Flaw.NEVER_HITS if Fault.HITS_ZERO in self.faults else None,
        )

    @property
    def block_size(self) -> int:
        """Tokens per block of the cache."""
        return self.cache.block_size

    def start_engine(self) -> None:
        """Begin with an empty cache and counters at zero, as a new process does."""
        self.started = time.time()
        self.cache.clear()
        self.counters = dict.fromkeys(
            (
                "queries",
                "hits",
                "preemptions",
                "prompt_tokens",
                "generation_tokens",
                "length",
                "stop",
                "abort",
                "error",
            ),
            0,
        )
        self.running = 0
        self.waiting = 0
        self.answered = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def healthy(self) -> bool:
        """Whether /health answers 200."""
        killed = Fault.PEER_KILLED in self.faults and bool(self.requests)
        return Fault.UNHEALTHY not in self.faults and not killed

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stopping.set()
        self.die()
        self._thread.join()

    def die(self) -> None:
        """End as a process does: no listener, every connection cut, nothing further sent. Safe to call twice."""
        with self.lock:
            first, self.dead = not self.dead, True
            connections = list(self._connections)
        if not first:
            return
        self._server.shutdown()
        self._server.server_close()
        for connection in connections:
            with _gone_is_fine():
                connection.shutdown(socket.SHUT_RDWR)

    def opened(self, connection: socket.socket) -> None:
        """Know a connection, to cut it when the process ends."""
        with self.lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self.lock:
            self._connections.discard(connection)

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Take part in the batch: wait for a slot, then run; raises EngineGoneError when that is one too many."""
        with self.slot:
            self.waiting += 1
            self.slot.wait_for(lambda: self.running < self.max_num_seqs or self.dead)
            self.waiting -= 1
            self.running += 1
            overloaded = self.running > self.load_limit
        try:
            if overloaded and Fault.DIES_UNDER_LOAD in self.faults:
                self.die()
            if self.dead:
                raise EngineGoneError
            yield
        finally:
            with self.slot:
                self.running -= 1
                self.slot.notify()

    @property
    def out_of_memory(self) -> bool:
        """Whether the GPU has no memory left for what runs now."""
        return Fault.OOM_UNDER_LOAD in self.faults and self.running > self.load_limit

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return a chat's tokens."""
        return answers.render({"messages": messages})

    def look_up(self, tokens: list[int]) -> int:
        """Return the tokens the cache supplies for a prompt, and count them; the cache keeps what the prompt leaves."""
        with self.lock:
            cached = self.cache.look_up(tokens)
            if self._hits_stopped():
                cached = 0
            if Fault.COUNTERS_FROZEN not in self.faults:
                self.counters["hits"] += cached
            self.counters["queries"] += len(tokens)
            self.counters["prompt_tokens"] += len(tokens)
            if Fault.OTHER_TRAFFIC in self.faults:
                self.counters["queries"] += 50
            self.counters["preemptions"] += Fault.PREEMPTS in self.faults
        return cached

    def _hits_stopped(self) -> bool:
        return Fault.HITS_STOP in self.faults and self.answered >= self.hits_stop_after

    def first_token_s(self) -> float:
        """Return the seconds the next first token takes on top of a token's own time."""
        slower = 0.005 * self.answered if Fault.SLOWS_DOWN in self.faults else 0.0
        return self.first_token_delay_s + slower

    def finished(self, reason: str, tokens: int) -> None:
        """Count a request that ended, and begin anew where the fault says so."""
        with self.lock:
            self.counters[reason] += 1
            self.counters["generation_tokens"] += tokens
            self.answered += 1
            if Fault.RESTART_IN_WINDOW in self.faults:
                running, waiting = self.running, self.waiting
                self.start_engine()
                self.running, self.waiting = running, waiting
                self.started += 1

    def metrics(self) -> str:
        """Return the exposition; OpenMetrics when asked for."""
        with self.lock:
            gauges = exposition.Gauges(
                started=self.started,
                running=self.running + self._foreign(),
                waiting=self.waiting,
                kv_usage=self._kv_usage(),
                cache_config=self.cache_config(),
                second_engine=Fault.SECOND_ENGINE in self.faults,
            )
            return exposition.text(dict(self.counters), gauges, model=MODEL, openmetrics=self.openmetrics)

    def _foreign(self) -> int:
        """Return how many requests of others run now."""
        return _FOREIGN_REQUESTS if Fault.OTHER_TRAFFIC_UNDER_LOAD in self.faults and self.running > 1 else 0

    def _kv_usage(self) -> float:
        if Fault.CACHE_FULL in self.faults:
            return 0.97
        leaked = _LEAK_PER_REQUEST * self.answered if Fault.KV_LEAKS in self.faults else 0.0
        return min(1.0, 0.01 * (self.running + self._foreign()) + leaked)

    def cache_config(self) -> dict[str, str]:
        """Return the labels of ``vllm:cache_config_info``; empty where the front end does not publish it."""
        if Fault.GEOMETRY_ABSENT in self.faults:
            return {}
        return self.cache.geometry_labels()


class _Server(ThreadingHTTPServer):
    """A thread per connection, with room for a burst of them."""

    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that went away, or a process that is gone, is part of the tests."""


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except OSError:
        return
