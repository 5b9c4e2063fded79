"""The watch: one short request every few seconds and the engine's counters after each, for as long as the plan says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.metrics import (
    FINISHED,
    HITS,
    KV_USAGE,
    PREEMPTIONS,
    QUERIES,
    RUNNING,
    WAITING,
    Reading,
    delta,
    why_void,
)
from kimi_runbook.acceptance.prompts import chat, new_salt, words
from kimi_runbook.reading import Fields, data_file

_ASK = "Go on."
_SCALE_WORDS = 100  # how many words are asked of the tokenizer to learn how long one is


@cache
def settings() -> Fields:
    """Return how the service is watched and judged (data/observation.yml)."""
    return data_file("observation.yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The service at one moment; None where something was not told or not answered.

    Attributes:
        at_s: Seconds since the watch began.
        kv_usage: Share of the KV cache in use, the fullest engine's.
        running, waiting: Requests, over all engines.
        ttft_s: Seconds to the probe's first token.
        hit_tokens, query_tokens: What the cache supplied and was asked for since the watch began, any client's.
        errors: Probes that failed since then.
    """

    at_s: float
    kv_usage: float | None
    running: float | None
    waiting: float | None
    ttft_s: float | None
    hit_tokens: float | None
    query_tokens: float | None
    errors: int

    def to_json(self) -> dict[str, Any]:
        """Return the sample as JSON-ready values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The request that is repeated.

    Attributes:
        body: The request.
        blocks: Whole cache blocks its prompt fills; 0 where the block size is not known, so no hit is due.
    """

    body: Mapping[str, Any]
    blocks: int


@dataclass(slots=True, kw_only=True)
class Watch:
    """What was seen. Grows while it runs, so that an interrupt loses nothing.

    Attributes:
        probe: The repeated request.
        every_s: Seconds between two samples.
        samples: In time order.
        first, last: Every counter at the beginning and at the latest sample that could be read.
        failures: (second, error) of each probe that failed.
        unread: (second, error) of each reading that failed.
        void: Why figures over the whole time say nothing: a restart; empty otherwise.
        gave_up: Why the watch ended early; empty otherwise.
    """

    probe: Probe
    every_s: float
    samples: list[Sample] = field(default_factory=list)
    first: Reading | None = None
    last: Reading | None = None
    failures: list[tuple[float, EngineError]] = field(default_factory=list)
    unread: list[tuple[float, EngineError]] = field(default_factory=list)
    void: str = ""
    gave_up: str = ""

    def moved(self, family: str, **labels: str) -> float | None:
        """Return how far a counter moved over the watch; None where it is absent."""
        if self.first is None or self.last is None:
            return None
        return delta(self.first, self.last, family, **labels)

    def counters(self) -> dict[str, float | None]:
        """Return how far the counters that matter moved."""
        return {
            "hit_tokens": self.moved(HITS),
            "query_tokens": self.moved(QUERIES),
            "preemptions": self.moved(PREEMPTIONS),
            "failed_requests": self.moved(FINISHED, finished_reason="error"),
            "aborted_requests": self.moved(FINISHED, finished_reason="abort"),
        }


def every_s(observe_s: int) -> float:
    """Return the seconds between two samples of an observation of so many seconds."""
    rules = settings().fields("watch")
    wished = observe_s / rules.integer("samples")
    return min(rules.number("most_every_s"), max(rules.number("least_every_s"), wished))


def probe_for(context: Context, *, longest: int | None) -> Probe:
    """Return the request to repeat: long enough for hits where the block size is known and the context allows it.

    Args:
        context: The run; its geometry says how long a block is.
        longest: Tokens of the longest context, None when the server does not say.

    Raises:
        EngineError: When the engine's tokenizer does not answer.
    """
    rules = settings().fields("watch")
    salt, count, blocks = new_salt(), rules.integer("prompt_words"), 0
    if context.geometry is not None and context.geometry.prefix_caching:
        block = context.geometry.block_size
        wished = math.ceil(rules.number("prompt_blocks") * block)
        per_word = len(context.tokenize(chat(words(salt, _SCALE_WORDS), _ASK))) / _SCALE_WORDS
        if longest is None or wished + block + context.plan.max_tokens <= longest:
            count = math.ceil(wished / per_word)
            blocks = len(context.tokenize(chat(words(salt, count), _ASK))) // block
    return Probe(body=context.chat_body(chat(words(salt, count), _ASK)), blocks=blocks)


def watch(context: Context, seen: Watch) -> None:
    """Watch for as long as the plan says, and add what is seen to ``seen``; a failed probe or reading is a finding."""
    began_s, observe_s = context.now(), context.plan.observe_s
    patience = settings().fields("watch").integer("lost_in_a_row")
    lost_in_a_row = 0
    seen.first = seen.last = _read(context, seen, 0.0)
    turn = 0
    while not seen.void:
        at_s = context.now() - began_s
        context.tell("watching", min(observe_s, int(at_s)), observe_s)
        answer = _ask(context, seen, at_s)
        lost_in_a_row = 0 if answer else lost_in_a_row + 1
        _sample(context, seen, context.now() - began_s, answer)
        if lost_in_a_row >= patience:
            seen.gave_up = f"{lost_in_a_row} probes in a row failed"
            return
        if context.now() - began_s >= observe_s:
            return
        turn += 1
        due_s = min(turn * seen.every_s, float(observe_s))
        context.elapse(max(0.0, began_s + due_s - context.now()))


def _ask(context: Context, seen: Watch, at_s: float) -> Answer | None:
    try:
        answer = context.client.stream_chat(seen.probe.body)
    except EngineError as error:
        seen.failures.append((round(at_s, 1), error))
        return None
    return answer


def _read(context: Context, seen: Watch, at_s: float) -> Reading | None:
    try:
        return context.read_metrics()
    except EngineError as error:
        seen.unread.append((round(at_s, 1), error))
        return None


def _sample(context: Context, seen: Watch, at_s: float, answer: Answer | None) -> None:
    reading = _read(context, seen, at_s)
    if reading is not None:
        seen.first = seen.first or reading
        seen.void = why_void(seen.last, reading) if seen.last is not None else ""
        seen.last = reading if not seen.void else seen.last
    seen.samples.append(
        Sample(
            at_s=round(at_s, 3),
            kv_usage=reading.highest(KV_USAGE) if reading else None,
            running=reading.total(RUNNING) if reading else None,
            waiting=reading.total(WAITING) if reading else None,
            ttft_s=None if answer is None or answer.first_token_s is None else round(answer.first_token_s, 5),
            hit_tokens=_since(seen.first, reading, HITS),
            query_tokens=_since(seen.first, reading, QUERIES),
            errors=len(seen.failures),
        )
    )


def _since(first: Reading | None, now: Reading | None, family: str) -> float | None:
    return None if first is None or now is None else delta(first, now, family)
