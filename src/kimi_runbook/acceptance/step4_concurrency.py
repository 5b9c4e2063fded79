"""Step 4: several streams at once all complete; what that took of the cache, and whether anything was preempted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.metrics import FINISHED, KV_USAGE, PREEMPTIONS, RUNNING, Reading, delta, why_void
from kimi_runbook.acceptance.prompts import chat, new_salt, words
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown, verify

STEP = 4
NAME = "concurrency"

_PROMPT_WORDS = 40
_SAMPLE_EVERY_S = 0.05
# Above this share of the cache one more request of the same size may not fit; a first guess, no measurement.
_KV_WARN = 0.90
_LOG = "Read the engine's log around this moment: run playbooks/diagnose.yml."


@dataclass(slots=True)
class Peaks:
    """The highest values sampled while the streams ran; None when a family was absent."""

    kv_usage: float | None = None
    running: float | None = None
    samples: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, reading: Reading) -> None:
        """Take one reading into the peaks."""
        self.samples += 1
        self.kv_usage = _higher(self.kv_usage, reading.highest(KV_USAGE))
        self.running = _higher(self.running, reading.total(RUNNING))


def run(context: Context) -> StepResult:
    """Return whether every stream completed."""
    count = context.plan.concurrency
    context.requests.append({"step": STEP, "streams": count, "words": _PROMPT_WORDS})
    expected = f"{count} complete streams"
    try:
        before = context.read_metrics()
        peaks, outcomes, in_flight = _drive(context, count)
        after = context.read_metrics()
    except EngineError as error:
        failed = Check(name="metrics", state=State.FAIL, observed=str(error), expected="metrics", next_step=_LOG)
        return StepResult.of(STEP, NAME, [failed], {})
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, EngineError)]
    incomplete = [answer for answer in answers if answer.usage is None or answer.finish_reason is None]
    checks = [
        verify(
            "streams-complete",
            len(answers) == count and not incomplete,
            observed=f"{len(answers) - len(incomplete)} of {count} complete" + (f"; {failures[0]}" if failures else ""),
            expected=expected,
            evidence="POST /v1/chat/completions, streamed",
            next_step=_LOG,
        ),
        verify(
            "in-flight",
            in_flight == count,
            observed=f"{in_flight} requests were in flight at once",
            expected=str(count),
            evidence="the client's own count",
            next_step="The client did not send at once, so the engine was not asked: repeat on a less busy machine.",
            otherwise=State.INCONCLUSIVE,
        ),
        *_engine_side(before, after, peaks),
    ]
    return StepResult.of(STEP, NAME, checks, _figures(before, after, peaks, answers, in_flight))


def _drive(context: Context, count: int) -> tuple[Peaks, list[Answer | EngineError], int]:
    """Send so many streams at once and sample the engine meanwhile; returns peaks, outcomes, most in flight."""
    start = threading.Barrier(count)
    lock = threading.Lock()
    flight = {"now": 0, "most": 0}
    bodies = [context.chat_body(chat(words(new_salt(), _PROMPT_WORDS), "Go on.")) for _ in range(count)]

    def one(body: dict[str, Any]) -> Answer | EngineError:
        start.wait(timeout=30)
        with lock:
            flight["now"] += 1
            flight["most"] = max(flight["most"], flight["now"])
        try:
            return context.client.stream_chat(body)
        except EngineError as error:
            return error
        finally:
            with lock:
                flight["now"] -= 1

    peaks, done = Peaks(), threading.Event()

    def sample() -> None:
        while True:
            try:
                peaks.add(context.read_metrics())
            except EngineError as error:
                peaks.errors.append(str(error))
            if done.wait(_SAMPLE_EVERY_S):
                return

    sampler = threading.Thread(target=sample, name="metrics-sampler")
    sampler.start()
    try:
        with ThreadPoolExecutor(max_workers=count) as pool:
            outcomes = list(pool.map(one, bodies))
    finally:
        done.set()
        sampler.join()
    return peaks, outcomes, flight["most"]


def _engine_side(before: Reading, after: Reading, peaks: Peaks) -> list[Check]:
    void = why_void(before, after)
    if void:
        return [unknown("window", void, expected="no restart while the streams ran", next_step=_LOG)]
    preempted = delta(before, after, PREEMPTIONS)
    failed = _failed(before, after)
    return [
        verify(
            "no-failed-requests",
            failed == 0,
            observed="the counter is absent" if failed is None else f"{failed:g} requests ended in error or abort",
            expected="0",
            evidence=FINISHED,
            next_step=_LOG,
            otherwise=State.INCONCLUSIVE if failed is None else State.FAIL,
        ),
        verify(
            "no-preemption",
            preempted == 0,
            observed="the counter is absent" if preempted is None else f"{preempted:g} preemptions",
            expected="0",
            evidence=PREEMPTIONS,
            next_step="Give the cache more memory, or lower --max-num-seqs.",
            otherwise=State.INCONCLUSIVE if preempted is None else State.WARN,
        ),
        *_headroom(peaks),
    ]


def _headroom(peaks: Peaks) -> list[Check]:
    """A peak is one only if a sample fell between the first stream's start and the last one's end."""
    evidence = f"{KV_USAGE}, {peaks.samples} samples {_SAMPLE_EVERY_S} s apart"
    sampled = verify(
        "sampled-under-load",
        bool(peaks.running),
        observed=f"at most {peaks.running or 0:g} running requests seen in {peaks.samples} samples",
        expected="at least one sample while streams ran, or the peaks are unknown",
        evidence=f"{RUNNING}, {len(peaks.errors)} samples failed",
        next_step="Raise max_tokens (model_limits), so that the streams last longer.",
        otherwise=State.WARN,
    )
    if not peaks.running:
        return [sampled]
    usage = peaks.kv_usage
    headroom = verify(
        "kv-headroom",
        usage is not None and usage < _KV_WARN,
        observed="the gauge is absent" if usage is None else f"peak {usage:.1%} of the KV cache",
        expected=f"below {_KV_WARN:.0%}",
        evidence=evidence,
        next_step="More KV memory, or another replica.",
        otherwise=State.INCONCLUSIVE if usage is None else State.WARN,
    )
    return [sampled, headroom]


def _failed(before: Reading, after: Reading) -> float | None:
    moved = [delta(before, after, FINISHED, finished_reason=reason) for reason in ("error", "abort")]
    return None if None in moved else sum(value for value in moved if value is not None)


def _figures(before: Reading, after: Reading, peaks: Peaks, answers: list[Answer], in_flight: int) -> dict[str, Any]:
    first = sorted(answer.first_token_s for answer in answers if answer.first_token_s is not None)
    return {
        "concurrency": in_flight,
        "complete": len(answers),
        "first_token_s": [round(value, 4) for value in first],
        "total_s": sorted(round(answer.total_s, 4) for answer in answers),
        "completion_tokens": sum(answer.usage.completion_tokens for answer in answers if answer.usage),
        "kv_usage_peak": peaks.kv_usage,
        "running_peak": peaks.running,
        "preemptions": delta(before, after, PREEMPTIONS),
        "failed_requests": _failed(before, after),
        "metrics_samples": peaks.samples,
        "metrics_sample_errors": len(peaks.errors),
    }


def _higher(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)
