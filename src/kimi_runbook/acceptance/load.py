"""A load: many requests in a closed loop, and what became of each. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kimi_runbook.acceptance.answer import Answer
from kimi_runbook.acceptance.streaming.errors import EngineError

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a load. The client adds ``stream`` and ``stream_options``.

    Attributes:
        label: What the caller calls it; not sent.
        path: Route, e.g. ``/v1/chat/completions``.
        body: The request's body.
    """

    label: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request; exactly one of ``answer`` and ``error`` is there.

    Attributes:
        label: The request's label.
        intended_s: When it was to be sent: the load's start, or the end of the request whose place it took.
        sent_s: When its first byte was written; the same as ``ended_s`` if it never was.
        ended_s: When its last byte arrived, or when it failed. All three in seconds since the load's start.
        answer: The whole answer.
        error: Why there is none. A stream that broke off has what came of it in ``error.partial``.
    """

    label: str
    intended_s: float
    sent_s: float
    ended_s: float
    answer: Answer | None
    error: EngineError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How late this client read what had arrived: its own share in every latency it tells.

    Attributes:
        p50_s: Median over all events, in seconds.
        p99_s: 99th percentile.
        max_s: The longest.
        samples: Events; 0 when nothing was read, and the figures mean nothing.
        source: ``user``: from when the loop could first have known of the bytes, were it neither busy nor waiting for
            its CPU, to their read. ``kernel``: from the kernel's receive stamp to the read; of a read that brought
            several events, where the stamp is that of the last packet, the longer of the two. So it rather overstates
            than understates.
    """

    p50_s: float
    p99_s: float
    max_s: float
    samples: int
    source: Literal["kernel", "user"]

    @classmethod
    def of(cls, late_ns: Sequence[int], *, kernel: bool) -> Lag:
        """Return the lag of events that were read late by so many nanoseconds."""
        ordered = sorted(late_ns)
        return cls(
            p50_s=percentile(ordered, 50) / _NS,
            p99_s=percentile(ordered, 99) / _NS,
            max_s=percentile(ordered, 100) / _NS,
            samples=len(ordered),
            source="kernel" if kernel else "user",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load that has ended.

    Attributes:
        outcomes: One per request, in the requests' order.
        lag: How late the client itself was.
        most_in_flight: The highest number of requests sent and not ended.
        wall_s: Seconds from its start to the last end.
    """

    outcomes: tuple[Outcome, ...]
    lag: Lag
    most_in_flight: int
    wall_s: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least so many percent do not exceed (nearest rank); 0 when there is none."""
    if not ordered:
        return 0.0
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]
