"""Sending the prompts of step 3 one after the other, with the counters read around each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.counters import read_until
from kimi_runbook.acceptance.expectation import Expected
from kimi_runbook.acceptance.hit_rules import lengths
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.metrics import HITS, QUERIES, Reading, delta, why_void
from kimi_runbook.acceptance.prompts import Messages, Prompt


class SendingError(Exception):
    """A request or a reading that failed; the message names the request and the cause.

    Attributes:
        cause: What failed.
        counters: Whether it was the counters that could not be read.
    """

    def __init__(self, label: str, cause: EngineError, *, counters: bool) -> None:
        super().__init__(f"{label}: {cause}")
        self.cause = cause
        self.counters = counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request as it went.

    Attributes:
        expected: What was computed for it.
        answer: What came.
        hits, queries: Tokens the engine's counters moved by; None when one is absent.
        void: Why nothing can be concluded from its window; empty when it holds.
    """

    expected: Expected
    answer: Answer
    hits: float | None
    queries: float | None
    void: str

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens the server charged, or None when it did not say."""
        return self.answer.usage.prompt_tokens if self.answer.usage else None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens the answer says came from the cache, or None when it does not say."""
        return self.answer.usage.cached_tokens if self.answer.usage else None

    @property
    def counters_stand_still(self) -> bool:
        """Whether an answer came for a prompt the counters know nothing of."""
        return self.queries == 0

    @property
    def holds(self) -> bool:
        """Whether its hits can be judged: the prompt is the one computed for, and nothing else happened meanwhile."""
        wanted = self.expected.prompt_tokens
        return self.prompt_tokens == wanted and not self.void and self.queries == wanted

    def to_json(self) -> dict[str, Any]:
        """Return the request's figures as JSON-ready values."""
        figures = self.expected.to_json()
        expected_hits = figures.pop("hit_tokens")
        first = self.answer.first_token_s
        return {
            **figures,
            "expected_hit_tokens": expected_hits,
            "counted_hit_tokens": None if self.hits is None else int(self.hits),
            "counted_query_tokens": None if self.queries is None else int(self.queries),
            "cached_tokens": self.cached_tokens,
            "first_token_s": None if first is None else round(first, 4),
            "total_s": round(self.answer.total_s, 4),
        }


def body(context: Context, messages: Messages) -> dict[str, Any]:
    """Return a request of step 3: greedy, and no longer an answer than it takes for two to differ."""
    return context.chat_body(messages, max_tokens=min(context.plan.max_tokens, lengths().answer_tokens))


class Sender:
    """Sends prompts and reads the counters; the reading after one request is the reading before the next.

    Attributes:
        sent: What was sent, in order.
        last: The latest reading.
    """

    def __init__(self, context: Context, before: Reading) -> None:
        self._context = context
        self.last = before
        self.sent: list[Sent] = []

    def open(self, prompt: Prompt) -> None:
        """Send a prompt whose hits are not judged; raises SendingError."""
        answer = self._ask(prompt)
        self._read(prompt, answer)

    def send(
        self, prompts: Sequence[Prompt], expectation: Sequence[Expected], *, before_last: Callable[[], None]
    ) -> None:
        """Send prompts in order, up to the first whose window does not hold; raises SendingError.

        Args:
            prompts: What to send.
            expectation: What was computed for each.
            before_last: Called before the last one, if it is sent.
        """
        for number, (prompt, wanted) in enumerate(zip(prompts, expectation, strict=True), start=1):
            self._context.tell(wanted.label, number, len(prompts))
            if number == len(prompts):
                before_last()
            before, answer = self.last, self._ask(prompt)
            self._read(prompt, answer)
            self.sent.append(
                Sent(
                    expected=wanted,
                    answer=answer,
                    hits=delta(before, self.last, HITS),
                    queries=delta(before, self.last, QUERIES),
                    void=why_void(before, self.last),
                )
            )
            if not self.sent[-1].holds:
                return

    def _ask(self, prompt: Prompt) -> Answer:
        try:
            return self._context.client.stream_chat(body(self._context, prompt.messages))
        except EngineError as error:
            raise SendingError(prompt.label, error, counters=False) from error

    def _read(self, prompt: Prompt, answer: Answer) -> None:
        charged = answer.usage.prompt_tokens if answer.usage else len(prompt.tokens)
        told = answer.usage.cached_tokens if answer.usage else None
        try:
            self.last = read_until(self._context.read_metrics, self.last, charged, hit_tokens=told)
        except EngineError as error:
            raise SendingError(prompt.label, error, counters=True) from error
