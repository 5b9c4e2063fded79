"""One rung driven: requests of one shape in a closed loop, and the engine's gauges read meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kimi_runbook.acceptance.client import Load, PlannedRequest
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.ladder.rungs import Rung, settings
from kimi_runbook.acceptance.metrics import KV_USAGE, RUNNING, WAITING, Reading
from kimi_runbook.acceptance.prompts import chat, new_salt, words

_CHAT = "/v1/chat/completions"
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The engine's gauges at one moment; None where a family is absent.

    Attributes:
        at_s: Seconds since the rung began.
        kv_usage: Share of the KV cache in use, the fullest engine's.
        running, waiting: Requests, over all engines.
    """

    at_s: float
    kv_usage: float | None
    running: float | None
    waiting: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What one rung brought.

    Attributes:
        rung: Which.
        load: Every request's outcome.
        samples: Gauges while it ran, in time order.
        failed_samples: Readings that failed.
        before, after: Every counter around it; ``after`` is None when the engine gave none any more.
        unread: Why ``after`` is None; empty otherwise.
    """

    rung: Rung
    load: Load
    samples: tuple[Sample, ...]
    failed_samples: int
    before: Reading
    after: Reading | None
    unread: str = ""


class Sampler:
    """Reads the gauges in a thread of its own; use it as a context manager.

    Parsing a page of metrics takes a few milliseconds of Python, in which the client's loop would wait for the
    interpreter for up to 5 ms: while samples are taken, threads hand it over sooner.
    """

    def __init__(self, read: Callable[[], Reading], *, first_s: float, every_s: float) -> None:
        """Prepare to read after ``first_s``, then at twice the distance each time, up to every ``every_s`` seconds."""
        self._read = read
        self._first_s = first_s
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="metrics-sampler", daemon=True)
        self._began_s = 0.0
        self._switch_s = sys.getswitchinterval()
        self.samples: list[Sample] = []
        self.failed = 0

    def __enter__(self) -> Sampler:
        """Begin."""
        self._began_s = time.monotonic()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _SWITCH_S))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, after the reading under way."""
        self._done.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _sample(self) -> None:
        pause_s = self._first_s
        while not self._done.wait(pause_s):
            pause_s = min(2 * pause_s, self._every_s)
            try:
                reading = self._read()
            except EngineError:
                self.failed += 1
                continue
            self.samples.append(
                Sample(
                    at_s=round(time.monotonic() - self._began_s, 3),
                    kv_usage=reading.highest(KV_USAGE),
                    running=reading.total(RUNNING),
                    waiting=reading.total(WAITING),
                )
            )


def drive(context: Context, rung: Rung) -> Driven:
    """Send one rung's requests and return what they brought; one request's failure is an outcome, no exception.

    Raises:
        EngineError: When the counters cannot be read before the first request.
    """
    requests, rules = requests_for(context, rung), settings().fields("ladder")
    what = f"{rung.concurrency} at once"
    before = context.read_metrics()
    sampler = Sampler(
        context.read_metrics, first_s=rules.number("first_sample_s"), every_s=rules.number("sample_every_s")
    )
    with sampler:
        load = context.client.run(
            requests,
            concurrency=rung.concurrency,
            on_progress=lambda done, total: context.tell(what, done, total),
        )
    after, unread = None, ""
    try:
        after = context.read_metrics()
    except EngineError as error:
        unread = str(error)
    return Driven(
        rung=rung,
        load=load,
        samples=tuple(sampler.samples),
        failed_samples=sampler.failed,
        before=before,
        after=after,
        unread=unread,
    )


def requests_for(context: Context, rung: Rung) -> tuple[PlannedRequest, ...]:
    """Return a rung's requests: one shape, each with a salt of its own, so that none finds another's prefix cached."""
    count = settings().fields("ladder").integer("prompt_words")
    # equal lengths, whatever the model would have ended with, or rungs could not be compared
    shape = {"ignore_eos": True}
    return tuple(
        PlannedRequest(
            label=f"{rung.label}-{number}",
            path=_CHAT,
            body={**context.chat_body(chat(words(new_salt(), count), "Go on.")), **shape},
        )
        for number in range(rung.requests)
    )
