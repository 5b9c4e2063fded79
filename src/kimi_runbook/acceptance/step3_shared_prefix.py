"""Step 3: what the prefix cache supplies is what was computed before the first request, to the token.

The engine says its block size, match unit, retention and draft (geometry.py). Prompts get their lengths from that
(shared_prefix/protocol.py), what each must hit is computed (expectation.py) and written to the run directory, and only
then are they sent, one after the other. Witnesses are compared with the expectation and never averaged: the engine's
counters over all engines, the ``cached_tokens`` of each answer, the time to the first token, and the answers' text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.expectation import Expected, NoRuleError, expect, rule_for
from kimi_runbook.acceptance.gateway import next_step_after
from kimi_runbook.acceptance.geometry import ContradictedGeometryError, Geometry, UnknownGeometryError
from kimi_runbook.acceptance.http import BadStatusError, EngineError
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.metrics import KV_USAGE, Reading
from kimi_runbook.acceptance.prompts import LengthError
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown
from kimi_runbook.acceptance.shared_prefix.engine_side import METRICS, before_requests, find_geometry
from kimi_runbook.acceptance.shared_prefix.first_token import first_token, ratio_of
from kimi_runbook.acceptance.shared_prefix.protocol import Protocol, Sizes, make_protocol
from kimi_runbook.acceptance.shared_prefix.same_answer import same_answer
from kimi_runbook.acceptance.shared_prefix.sending import Sender, SendingError, Sent
from kimi_runbook.acceptance.shared_prefix.witnesses import windows, witnesses

STEP = 3
NAME = "shared prefix"

_GEOMETRY = "Give the engine's log (--engine-log), or what is missing: --block-size, --match-unit, --retention."
_TOLD = "Leave the option out to take the engine's own value, or correct the launch."
_WORDS = "No draw of words fits this tokenizer and block size: change the words in acceptance/prompts.py."
_ANSWER = "Read the engine's log around this request: run playbooks/diagnose.yml."


class _StopError(Exception):
    """Nothing further can be asked; the check says why."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.name)
        self.check = check


def run(context: Context) -> StepResult:
    """Return whether hits equal the expectation.

    Raises:
        StepInterruptedError: On the operator's interrupt, with the requests that were answered until then.
    """
    checks: list[Check] = []
    figures: dict[str, Any] = {}
    try:
        before = _read(context)
        geometry = _geometry(context, before)
        figures |= _geometry_figures(geometry)
        checks += _asking(lambda: before_requests(context, geometry, before))
        if all(check.state.lets_next_layer_run for check in checks):
            checks += _measure(context, geometry, before, figures)
    except _StopError as stop:
        checks.append(stop.check)
    except KeyboardInterrupt as interrupt:
        checks.append(_interrupted(figures.get("requests", ())))
        raise StepInterruptedError(StepResult.of(STEP, NAME, checks, figures)) from interrupt
    return StepResult.of(STEP, NAME, checks, figures)


def _measure(context: Context, geometry: Geometry, before: Reading, figures: dict[str, Any]) -> list[Check]:
    """Compute, write down, send, compare."""
    context.tell("prompts")
    protocol, expectation = _expectation(context, geometry)
    _write_expectation(context, geometry, protocol, expectation)
    figures |= {"rule": rule_for(geometry).name, "left_out": list(protocol.left_out)}
    sender = Sender(context, before)
    try:
        failed, figures["memory"] = _send(context, sender, protocol, expectation)
    finally:
        figures |= _request_figures(sender.sent, before, sender.last)
        context.last_reading = sender.last
    checks = windows(context, sender.sent) if sender.sent else []
    if failed is not None:
        checks.append(failed)
    if not all(check.state.lets_next_layer_run for check in checks):
        return checks
    ratio = ratio_of(sender.sent)
    figures["first_token_ratio"] = ratio.to_json() if ratio else None
    checks += [*witnesses(context, sender.sent), first_token(ratio)]
    return [*checks, *same_answer(context, protocol.prompts, sender.sent)]


def _send(
    context: Context, sender: Sender, protocol: Protocol, expectation: Sequence[Expected]
) -> tuple[Check | None, dict[str, Any]]:
    """Send everything; returns what went wrong, if anything, and the nodes' memory before and after.

    Asking the nodes takes seconds, so they are asked beside the first and the last requests, which are not timed.
    """
    failed = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory") as pool:
        asked: dict[str, Future[Any]] = {"before": pool.submit(context.memory)}

        def ask_again() -> None:
            asked["after"] = pool.submit(context.memory)

        try:
            if protocol.opening is not None:
                sender.open(protocol.opening)
            sender.send(protocol.prompts, expectation, before_last=ask_again)
        except SendingError as error:
            failed = _failed(error)
        if "after" not in asked:
            ask_again()
        return failed, {moment: answer.result() for moment, answer in asked.items()}


def _failed(error: SendingError) -> Check:
    name, expected = ("metrics", "HTTP 200 and metrics") if error.counters else ("requests", "an answer")
    next_step = METRICS if error.counters else next_step_after(error.cause, _ANSWER)
    return Check(name=name, state=State.FAIL, observed=str(error), expected=expected, next_step=next_step)


def _interrupted(requests: Sequence[Any]) -> Check:
    return unknown(
        "step-completed",
        f"interrupted from the keyboard after {len(requests)} answers",
        expected="every request of expectation.json to be sent",
        next_step="Run the step again: what was sent is warm now, and a new run draws new words.",
    )


def _read(context: Context) -> Reading:
    try:
        return context.read_metrics()
    except EngineError as error:
        expected = "HTTP 200 and metrics on every metrics URL"
        failed = Check(name="metrics", state=State.FAIL, observed=str(error), expected=expected, next_step=METRICS)
        raise _StopError(failed) from error


def _geometry(context: Context, reading: Reading) -> Geometry:
    try:
        context.geometry = find_geometry(context, reading)
    except UnknownGeometryError as error:
        expected = "what the expectation rests on: block size, cache mode, match unit, retention, draft"
        raise _StopError(unknown("geometry", str(error), expected=expected, next_step=_GEOMETRY)) from error
    except ContradictedGeometryError as error:
        expected = "what was given and what the engine has to be the same"
        failed = Check(name="geometry", state=State.FAIL, observed=str(error), expected=expected, next_step=_TOLD)
        raise _StopError(failed) from error
    return context.geometry


def _asking(checks: Callable[[], list[Check]]) -> list[Check]:
    """Return checks that ask the engine's API for something."""
    try:
        return checks()
    except EngineError as error:
        failed = Check(name="requests", state=State.FAIL, observed=str(error), expected="an answer", next_step=_ANSWER)
        raise _StopError(failed) from error


def _expectation(context: Context, geometry: Geometry) -> tuple[Protocol, tuple[Expected, ...]]:
    """Return what will be sent and what it must hit."""
    try:
        rule_for(geometry)
        protocol = make_protocol(context.tokenize, geometry)
        opening = (protocol.opening,) if protocol.opening else ()
        return protocol, expect(geometry, (*opening, *protocol.prompts))[len(opening) :]
    except NoRuleError as error:
        expected = "a known rule for hits (data/hit_rules.yml)"
        raise _StopError(unknown("expectation", str(error), expected=expected, next_step=_GEOMETRY)) from error
    except LengthError as error:
        expected = "prompts of the wanted length"
        raise _StopError(unknown("prompts", str(error), expected=expected, next_step=_WORDS)) from error
    except EngineError as error:
        raise _StopError(_no_tokens(error)) from error


def _no_tokens(error: EngineError) -> Check:
    """A route that is kept from us says nothing about the cache; an engine that cannot tokenize is at fault."""
    expected, next_step = "tokens", next_step_after(error, _ANSWER)
    if isinstance(error, BadStatusError) and next_step != _ANSWER:
        return unknown("prompts", str(error), expected=expected, next_step=next_step)
    return Check(name="requests", state=State.FAIL, observed=str(error), expected=expected, next_step=next_step)


def _write_expectation(
    context: Context, geometry: Geometry, protocol: Protocol, expectation: Sequence[Expected]
) -> None:
    """Write what must happen before it does, so that nobody has to take the record's word for it."""
    requests = [one.to_json() for one in expectation]
    context.expectation[:] = requests
    sizes, rule = Sizes.of(geometry), rule_for(geometry)
    # Lengths differ a little from draw to draw; what makes two runs comparable is the rule they were drawn by.
    context.requests.append(
        {
            "step": STEP,
            "labels": [one.label for one in expectation],
            "block_size_tokens": sizes.block,
            "match_unit_tokens": sizes.unit,
            "whole_blocks_shared": {"short": sizes.short_blocks, "long": sizes.long_blocks},
        }
    )
    content = {
        "schema_version": 1,
        "rule": {"name": rule.name, "says": rule.says, "source": rule.source},
        "geometry": _geometry_figures(geometry),
        "left_out": list(protocol.left_out),
        "opening_tokens": len(protocol.opening.tokens) if protocol.opening else None,
        "requests": requests,
    }
    path = context.plan.run_dir / "expectation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _geometry_figures(geometry: Geometry) -> dict[str, Any]:
    return {
        "block_size_tokens": geometry.block_size,
        "match_unit_tokens": geometry.match_unit,
        "num_gpu_blocks": geometry.num_gpu_blocks,
        "kv_cache_tokens": geometry.kv_tokens,
        "retention": geometry.retention,
        "cache_mode": geometry.cache_mode,
        "draft_drop": geometry.draft_drop,
        "prefix_caching": geometry.prefix_caching,
        "engines": geometry.engines,
        "front_end": geometry.front_end,
        "witnesses": dict(geometry.witnesses),
    }


def _request_figures(sent: Sequence[Sent], before: Reading, after: Reading) -> dict[str, Any]:
    return {
        "requests": [one.to_json() for one in sent],
        "hit_tokens": sum(int(one.hits or 0) for one in sent),
        "expected_hit_tokens": sum(one.expected.hit_tokens for one in sent),
        "kv_usage": {"before": before.highest(KV_USAGE), "after": after.highest(KV_USAGE)},
    }
