"""The engine's HTTP API, as far as the chain needs it: OpenAI routes, tokenize, health, version, models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.answer import (
    OTHER_SHAPE,
    Answer,
    StreamedAnswer,
    Usage,
    parse_json,
    refuse_error,
    whole_answer,
)
from kimi_runbook.acceptance.http import Response, ask, job_for, longest_s, response
from kimi_runbook.acceptance.load import Lag, Load, Outcome, PlannedRequest
from kimi_runbook.acceptance.plan import Access
from kimi_runbook.acceptance.streaming.descriptors import require_descriptors
from kimi_runbook.acceptance.streaming.driver import Run, drive
from kimi_runbook.acceptance.streaming.errors import BadAnswerError, BadStatusError, EngineError
from kimi_runbook.acceptance.streaming.exchange import Exchange
from kimi_runbook.acceptance.streaming.origin import Origin, split_url

__all__ = [
    "CLIENT_VERSION",
    "Answer",
    "EngineClient",
    "Lag",
    "Load",
    "Message",
    "ModelCard",
    "Outcome",
    "PlannedRequest",
    "Usage",
]

CLIENT_VERSION = "2"
"""Part of every record's fingerprint: figures of two clients are not compared silently."""

Message = Mapping[str, Any]

_NS = 1_000_000_000
_HEADERS = {"Content-Type": "application/json"}
_TELL_EVERY_S = 0.2  # what a person can follow


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One served model; ``max_model_len`` in tokens, None when the server does not say."""

    name: str
    max_model_len: int | None


class EngineClient:
    """Asks one OpenAI-compatible endpoint. Safe to share between threads.

    Connections are kept between requests, and dropped before vLLM would close them (data/client.yml).
    """

    def __init__(self, endpoint: str, *, timeout_s: float | None = None, access: Access | None = None) -> None:
        """Prepare to ask; nothing is sent.

        Args:
            endpoint: Base URL, without the ``/v1``.
            timeout_s: Seconds for a whole request, where a call does not say otherwise; None: as in data/client.yml.
            access: API key, CA file and proxy; none of them by default.

        Raises:
            RunbookError: When the URL or an access option cannot be used, e.g. the API key's variable is not set.
        """
        self.endpoint = endpoint.rstrip("/")
        self._timeout_s = timeout_s or longest_s("request_s")
        self._prefix = split_url(self.endpoint).path
        self._origin = Origin(self.endpoint, access)

    def raw(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Response:
        """Return the whole answer to one request, whatever its status; raises EngineError without an answer."""
        return response(self._origin, self._ask(method, path, body, timeout_s))

    def health(self) -> int:
        """Return the status of ``GET /health``: 200, or 503 once the engine is dead."""
        return self.raw("GET", "/health", timeout_s=10).status

    def version(self) -> str:
        """Return what ``GET /version`` says."""
        return str(self._key("GET", "/version", None, "version"))

    def models(self) -> tuple[ModelCard, ...]:
        """Return the served models."""
        cards = self._key("GET", "/v1/models", None, "data")
        try:
            return tuple(ModelCard(name=str(card["id"]), max_model_len=longest_of(card)) for card in cards)
        except OTHER_SHAPE as error:
            raise BadAnswerError(f"GET {self.endpoint}/v1/models", f"no list of models: {cards!r:.120}") from error

    def tokenize(self, model: str, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token ids the server makes of a chat request, template and generation prompt included.

        Args:
            model: Served model name.
            messages: Chat messages.
            options: Further keys that take part in rendering, e.g. ``chat_template_kwargs``.
        """
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True, **options}
        tokens = self._key("POST", "/tokenize", body, "tokens")
        try:
            return tuple(int(token) for token in tokens)
        except OTHER_SHAPE as error:
            raise BadAnswerError(f"POST {self.endpoint}/tokenize", f"no token ids: {tokens!r:.120}") from error

    def chat(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to one chat request; raises EngineError."""
        return self._whole("/v1/chat/completions", body)

    def complete(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to one text completion; raises EngineError."""
        return self._whole("/v1/completions", body)

    def stream_chat(self, body: Mapping[str, Any]) -> Answer:
        """Return a streamed chat answer once its stream has ended; raises EngineError (TruncatedError when cut)."""
        return self._streamed("/v1/chat/completions", body)

    def stream_complete(self, body: Mapping[str, Any]) -> Answer:
        """Return a streamed text completion once its stream has ended; raises as ``stream_chat``."""
        return self._streamed("/v1/completions", body)

    def run(
        self,
        requests: Sequence[PlannedRequest],
        *,
        concurrency: int,
        timeout_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Load:
        """Send streamed requests in a closed loop: at most so many at once, the next one when one ends.

        The first ones start together, once their connections stand. A request that fails is an outcome, and the others
        go on.

        Args:
            requests: What to send, in order.
            concurrency: Most requests in flight.
            timeout_s: Seconds for each request; the client's own when None.
            on_progress: Is told how many of how many requests have ended, at most five times a second and at the end.

        Raises:
            RunbookError: When this process may not open so many connections; nothing was sent then.
        """
        run = self.send(requests, concurrency=concurrency, timeout_s=timeout_s, on_progress=on_progress)
        return self.read(requests, run)

    def send(
        self,
        requests: Sequence[PlannedRequest],
        *,
        concurrency: int,
        timeout_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Run:
        """Do the sending half of ``run``: what came back is kept as bytes and stamps."""
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}, expected at least 1")
        require_descriptors(min(concurrency, len(requests)))
        jobs = [
            job_for(self._origin, "POST", self._prefix + request.path, _streaming(request.body), _HEADERS)
            for request in requests
        ]
        tell = _Teller(len(jobs), on_progress) if on_progress else _say_nothing
        timeout_s = timeout_s or self._timeout_s
        return drive(self._origin, jobs, concurrency=concurrency, timeout_s=timeout_s, tell=tell)

    def read(self, requests: Sequence[PlannedRequest], run: Run) -> Load:
        """Do the reading half of ``run``: parse what ``send`` kept."""
        late_ns: list[int] = []
        outcomes = [
            self._outcome(request, exchange, run.started_ns, late_ns)
            for request, exchange in zip(requests, run.exchanges, strict=True)
        ]
        return Load(
            outcomes=tuple(outcomes),
            lag=Lag.of(late_ns, kernel=any(exchange.kernel for exchange in run.exchanges)),
            most_in_flight=run.most_in_flight,
            wall_s=(run.ended_ns - run.started_ns) / _NS,
        )

    def in_flight_s(self, since_s: float, until_s: float) -> float:
        """Return the seconds between two moments of ``time.monotonic()`` in which a completion was in flight."""
        return self._origin.flight.seconds(since_s, until_s)

    def close(self) -> None:
        """Close the kept connections; also done when the client is no longer used."""
        self._origin.close()

    def _ask(self, method: str, path: str, body: Any, timeout_s: float | None = None) -> Exchange:
        data = None if body is None else json.dumps(body).encode()
        job = job_for(self._origin, method, self._prefix + path, data, _HEADERS)
        return ask(self._origin, job, timeout_s or self._timeout_s)

    def _key(self, method: str, path: str, body: Any, key: str) -> Any:
        """Return one value of the JSON object that a route answers with."""
        where = f"{method} {self.endpoint}{path}"
        answer = self.raw(method, path, body)
        if not 200 <= answer.status < 300:
            raise BadStatusError(where, answer.status, answer.body)
        value = parse_json(where, answer.body)
        if not isinstance(value, dict) or key not in value:
            raise BadAnswerError(where, f"the answer has no {key!r}")
        return value[key]

    def _whole(self, path: str, body: Mapping[str, Any]) -> Answer:
        exchange = self._ask("POST", path, dict(body))
        try:
            answer = response(self._origin, exchange)
            if not 200 <= answer.status < 300:
                raise BadStatusError(exchange.job.where, answer.status, answer.body)
            return whole_answer(exchange.job.where, answer.body, exchange.total_s)
        except EngineError as error:
            self._origin.redact_error(error)
            raise

    def _streamed(self, path: str, body: Mapping[str, Any]) -> Answer:
        job = job_for(self._origin, "POST", self._prefix + path, _streaming(body), _HEADERS)
        return self._stream(ask(self._origin, job, self._timeout_s))

    def _stream(self, exchange: Exchange, late_ns: list[int] | None = None) -> Answer:
        """Return a streamed answer; an error takes along what had come. Adds how late each event was read."""
        where, head = exchange.job.where, exchange.head
        building = StreamedAnswer(where, exchange.sent_ns, [] if late_ns is None else late_ns)
        try:
            if head is None or not (head.event_stream and 200 <= head.status < 300):
                answer = response(self._origin, exchange)
                if not 200 <= answer.status < 300:
                    raise BadStatusError(where, answer.status, answer.body)
                refuse_error(where, parse_json(where, answer.body), "an error inside a 200")
                raise BadAnswerError(where, "one whole answer where a stream was asked for")
            building.take(exchange.events())
        except EngineError as error:
            error.partial = building.partial(exchange.total_s)
            self._origin.redact_error(error)
            raise
        return building.answer(exchange.total_s)

    def _outcome(self, request: PlannedRequest, exchange: Exchange, started_ns: int, late_ns: list[int]) -> Outcome:
        answer: Answer | None = None
        failed: EngineError | None = None
        try:
            answer = self._stream(exchange, late_ns)
        except EngineError as error:
            failed = error
        ended_ns = exchange.ended_ns
        # Before the clock starts a request can only fail; it then counts as intended, and over, at the start.
        intended_s, sent_s, ended_s = (
            max(0.0, (at_ns - started_ns) / _NS)
            for at_ns in (exchange.intended_ns, exchange.sent_ns or ended_ns, ended_ns)
        )
        return Outcome(
            label=request.label, intended_s=intended_s, sent_s=sent_s, ended_s=ended_s, answer=answer, error=failed
        )


def longest_of(card: Mapping[str, Any]) -> int | None:
    """Return the tokens of a prompt and its answer at most, from a served model's card; None where it tells none."""
    value = card.get("max_model_len")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class _Teller:
    """Passes progress on, seldom enough not to hold the loop up."""

    def __init__(self, total: int, listener: Callable[[int, int], None]) -> None:
        self._total = total
        self._listener = listener
        self._told_s = float("-inf")

    def __call__(self, ended: int) -> None:
        now_s = time.monotonic()
        if ended == self._total or now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._listener(ended, self._total)


def _say_nothing(_ended: int) -> None:
    """Tell nobody."""


def _streaming(body: Mapping[str, Any]) -> bytes:
    return json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
