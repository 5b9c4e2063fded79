"""Step 3: what the prefix cache supplies is what was computed before the first request, to the token.

Lengths come from the engine's own block size: the shared part is two blocks and a piece, the private part stays under
one block, and no prompt is a multiple of a block. The expectation is written to the run directory, then the requests
go out one after the other. Two witnesses are compared with it and never averaged: the engine's counters over all
engines, and the ``cached_tokens`` each answer carries. A first prompt of its own is the control that must show 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.counters import read_until
from kimi_runbook.acceptance.expectation import Expected, NoRuleError, common_prefix, expect
from kimi_runbook.acceptance.geometry import Geometry, UnknownGeometryError, read_geometry
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.metrics import HITS, QUERIES, Reading, delta, why_void
from kimi_runbook.acceptance.prompts import LengthError, Messages, Prompt, chat, fit, new_salt, words
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown, verify

STEP = 3
NAME = "shared prefix"

_WHOLE_BLOCKS_SHARED = 2
_ASKS = ("Why?", "How so?")  # the private parts: well under a block
_DRAWS = 10
_AGAIN = "Repeat with no other traffic: run playbooks/accept.yml."
_METRICS = "Open the metrics URLs of acceptance.json: every engine has to answer there, not a router."
_CACHE = "Compare --enable-prefix-caching, block size and retention in the launch with cache_config_info in /metrics."
_WORDS = "No draw of words fits this tokenizer and block size: change the words in acceptance/prompts.py."
_DETAILS = "Start the engine with --enable-prompt-tokens-details."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of the protocol as it went: what was expected, the answer, and how far the counters moved."""

    expected: Expected
    answer: Answer
    hits: float | None
    queries: float | None
    void: str


class _StopError(Exception):
    """Nothing further can be asked; the check says why."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.name)
        self.check = check


def run(context: Context) -> StepResult:
    """Return whether hits equal the expectation."""
    checks: list[Check] = []
    figures: dict[str, Any] = {}
    try:
        geometry = _geometry(context, checks)
        figures |= {"block_size_tokens": geometry.block_size, "num_gpu_blocks": geometry.num_gpu_blocks}
        if any(not check.state.lets_next_layer_run for check in checks):
            return StepResult.of(STEP, NAME, checks, figures)
        prompts, expectation = _expectation(context, geometry)
        _write_expectation(context, geometry, expectation)
        sent = [_send(context, prompt, wanted) for prompt, wanted in zip(prompts, expectation, strict=True)]
    except _StopError as stop:
        return StepResult.of(STEP, NAME, [*checks, stop.check], figures)
    except EngineError as error:
        failed = Check(name="requests", state=State.FAIL, observed=str(error), expected="an answer", next_step=_METRICS)
        return StepResult.of(STEP, NAME, [*checks, failed], figures)
    for one in sent:
        checks += _judge(context, one)
    figures["requests"] = [_figures(one) for one in sent]
    figures["hit_tokens"] = sum(int(one.hits or 0) for one in sent)
    figures["expected_hit_tokens"] = sum(one.expected.hit_tokens for one in sent)
    return StepResult.of(STEP, NAME, checks, figures)


def _geometry(context: Context, checks: list[Check]) -> Geometry:
    try:
        reading = context.read_metrics()
        context.geometry = read_geometry(reading)
    except EngineError as error:
        expected = "HTTP 200 and metrics on every metrics URL"
        raise _StopError(
            Check(name="metrics", state=State.FAIL, observed=str(error), expected=expected, next_step=_METRICS)
        ) from error
    except UnknownGeometryError as error:
        expected = "the engine's block size"
        raise _StopError(unknown("geometry", str(error), expected=expected, next_step=_METRICS)) from error
    checks += _before(context, context.geometry, reading)
    return context.geometry


def _expectation(context: Context, geometry: Geometry) -> tuple[tuple[Prompt, ...], tuple[Expected, ...]]:
    try:
        prompts = make_prompts(context, geometry)
        return prompts, expect(geometry, [(prompt.label, prompt.tokens) for prompt in prompts])
    except NoRuleError as error:
        expected = "a known rule for hits"
        raise _StopError(unknown("expectation", str(error), expected=expected, next_step=_CACHE)) from error
    except LengthError as error:
        expected = "prompts of the wanted length"
        raise _StopError(unknown("prompts", str(error), expected=expected, next_step=_WORDS)) from error


def make_prompts(context: Context, geometry: Geometry) -> tuple[Prompt, ...]:
    """Return the protocol's prompts: a control of its own, then two that share a system message.

    Words are drawn until lengths fit: a prompt that happens to be a multiple of the block is drawn again.

    Raises:
        LengthError: When no draw fits the engine's tokenizer.
        EngineError: When the engine's tokenizer does not answer.
    """
    for _ in range(_DRAWS - 1):
        try:
            return _draw_prompts(context, geometry.block_size)
        except LengthError:
            continue
    return _draw_prompts(context, geometry.block_size)


def _draw_prompts(context: Context, block: int) -> tuple[Prompt, ...]:
    shared_salt, control_salt = new_salt(), new_salt()

    # The system message is grown until the part both prompts share lies in range, as the tokenizer counts it.
    def shared_part(messages: Messages) -> Sequence[int]:
        other = chat(str(messages[0]["content"]), _ASKS[1])
        return _common(context.tokenize(messages), context.tokenize(other))

    least, most = _WHOLE_BLOCKS_SHARED * block + block // 4, _WHOLE_BLOCKS_SHARED * block + block * 3 // 4
    shared, _ = fit(shared_part, lambda n: chat(words(shared_salt, n), _ASKS[0]), at_least=least, at_most=most)
    system = str(shared[0]["content"])
    first, second = (
        Prompt(label=label, messages=messages, tokens=context.tokenize(messages))
        for label, messages in (("first", chat(system, _ASKS[0])), ("second", chat(system, _ASKS[1])))
    )
    messages, tokens = fit(
        context.tokenize,
        lambda n: chat(words(control_salt, n), _ASKS[0]),
        at_least=max(1, len(first.tokens) - block // 4),
        at_most=len(first.tokens) + block // 4,
    )
    control = Prompt(label="control", messages=messages, tokens=tokens)
    for prompt in (control, first, second):
        if len(prompt.tokens) % block == 0:
            raise LengthError(f"prompt {prompt.label} is {len(prompt.tokens)} tokens, a multiple of the block {block}")
    if common_prefix(control.tokens, first.tokens) >= block:
        raise LengthError(f"every chat begins with the same block of {block} tokens, so no prompt is new to the cache")
    return (control, first, second)


def _common(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    return first[: common_prefix(first, second)]


def _before(context: Context, geometry: Geometry, reading: Reading) -> list[Check]:
    """What has to hold before anything is sent."""
    plan = context.plan
    missing = [family for family in (HITS, QUERIES) if reading.total(family) is None]
    engines = len({engine for _, engine in reading.engines()})
    blocks = geometry.block_size
    longest = next((card.max_model_len for card in context.client.models() if card.name == plan.model), None)
    needed = (_WHOLE_BLOCKS_SHARED + 1) * blocks + plan.max_tokens
    return [
        verify(
            "counters-present",
            not missing,
            observed=f"{', '.join(missing)} absent" if missing else f"{HITS} and {QUERIES} present",
            expected="both on every metrics URL",
            evidence=", ".join(plan.metrics),
            next_step=_METRICS,
            otherwise=State.INCONCLUSIVE,
        ),
        verify(
            "engines-reporting",
            engines == plan.engine.engines,
            observed=f"{engines} engines report",
            expected=f"{plan.engine.engines} (plan)",
            evidence=", ".join(plan.metrics),
            next_step=_METRICS,
            otherwise=State.INCONCLUSIVE,
        ),
        verify(
            "one-cache",
            engines <= 1,
            observed=f"{engines} engines, each with a cache of its own",
            expected="one engine: which of several a request reaches is not known, so hits cannot be computed",
            evidence=QUERIES,
            next_step="Point the plan's endpoint at one engine.",
            otherwise=State.INCONCLUSIVE,
        ),
        verify(
            "prefix-caching-on",
            geometry.prefix_caching,
            observed=f"enable_prefix_caching={geometry.labels.get('enable_prefix_caching')}",
            expected="True",
            evidence="vllm:cache_config_info",
            next_step=_CACHE,
        ),
        verify(
            "block-fits-context",
            longest is None or needed <= longest,
            observed=f"block {blocks} needs prompts of {needed} tokens; max_model_len is {longest or 'not told'}",
            expected="room for three blocks in a prompt",
            evidence="vllm:cache_config_info, GET /v1/models",
            next_step="Lower the block size or raise --max-model-len: shorter shared prefixes than a block never hit.",
        ),
    ]


def _write_expectation(context: Context, geometry: Geometry, expectation: Sequence[Expected]) -> None:
    """Write what must happen before it does, so that nobody has to take the record's word for it."""
    context.expectation[:] = [one.to_json() for one in expectation]
    # Lengths differ a little from draw to draw; what makes two runs comparable is the rule they were drawn by.
    context.requests.append(
        {
            "step": STEP,
            "labels": [one.label for one in expectation],
            "block_size_tokens": geometry.block_size,
            "whole_blocks_shared": _WHOLE_BLOCKS_SHARED,
            "asks": list(_ASKS),
        }
    )
    content = {
        "schema_version": 1,
        "block_size_tokens": geometry.block_size,
        "requests": [one.to_json() for one in expectation],
    }
    path = context.plan.run_dir / "expectation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _send(context: Context, prompt: Prompt, wanted: Expected) -> Sent:
    before = context.read_metrics()
    answer = context.client.stream_chat(context.chat_body(prompt.messages))
    charged = answer.usage.prompt_tokens if answer.usage else wanted.prompt_tokens
    after = read_until(context.read_metrics, before, charged)
    return Sent(
        expected=wanted,
        answer=answer,
        hits=delta(before, after, HITS),
        queries=delta(before, after, QUERIES),
        void=why_void(before, after),
    )


def _judge(context: Context, sent: Sent) -> list[Check]:
    wanted, label = sent.expected, sent.expected.label
    usage = sent.answer.usage
    told = usage.prompt_tokens if usage else None
    counted_alike = verify(
        f"{label}.prompt-tokens",
        told == wanted.prompt_tokens,
        observed=f"usage says {told} prompt tokens",
        expected=f"{wanted.prompt_tokens}, as /tokenize counts the same chat",
        evidence="POST /tokenize, usage",
        next_step="Chat rendering and /tokenize differ: compare chat_template_kwargs (model_limits).",
        otherwise=State.INCONCLUSIVE,
    )
    if counted_alike.state is not State.PASS:
        return [counted_alike]  # the expectation was computed for another prompt
    checks = [counted_alike]
    expected = f"{wanted.hit_tokens} tokens ({wanted.rule}; expectation.json)"
    if sent.void:
        return [*checks, unknown(f"{label}.window", sent.void, expected="no restart", next_step=_restart(context))]
    if sent.queries != wanted.prompt_tokens:
        why = f"the cache was asked for {_tokens(sent.queries)} in this window"
        other = f"{wanted.prompt_tokens} tokens, this request alone"
        return [*checks, unknown(f"{label}.window", why, expected=other, next_step=_AGAIN, evidence=QUERIES)]
    checks.append(
        verify(
            f"{label}.counted-hits",
            sent.hits == wanted.hit_tokens,
            observed=f"{HITS} moved by {_tokens(sent.hits)}",
            expected=expected,
            evidence="counters of every engine, before and after",
            next_step=_CACHE,
        )
    )
    checks.append(_cached_tokens(context, sent, expected))
    return checks


def _cached_tokens(context: Context, sent: Sent, expected: str) -> Check:
    """Absent counts as 0 only where 0 is right: vLLM's Rust front end leaves the field out then."""
    wanted, name = sent.expected, f"{sent.expected.label}.cached-tokens"
    cached = sent.answer.usage.cached_tokens if sent.answer.usage else None
    evidence = "usage.prompt_tokens_details.cached_tokens"
    if cached is None and wanted.hit_tokens:
        asked = any("--enable-prompt-tokens-details" in launch.argv for launch in context.plan.launch.values())
        return verify(
            name,
            False,
            observed="the answer has no cached_tokens",
            expected=expected,
            evidence=evidence,
            next_step="The launch asks for it: look for a proxy that drops it." if asked else _DETAILS,
            otherwise=State.FAIL if asked else State.INCONCLUSIVE,
        )
    return verify(
        name,
        (cached or 0) == wanted.hit_tokens,
        observed=f"cached_tokens is {'absent' if cached is None else cached}",
        expected=expected,
        evidence=evidence,
        next_step=_CACHE,
    )


def _restart(context: Context) -> str:
    unit = context.plan.engine.unit
    return f"Find the first cause: journalctl -u {unit}." if unit else "Find why the engine restarted in its log."


def _tokens(value: float | None) -> str:
    return "an unknown number of tokens" if value is None else f"{value:g} tokens"


def _figures(sent: Sent) -> dict[str, Any]:
    usage = sent.answer.usage
    return {
        **sent.expected.to_json(),
        "counted_hit_tokens": None if sent.hits is None else int(sent.hits),
        "cached_tokens": usage.cached_tokens if usage else None,
        "first_token_s": None if sent.answer.first_token_s is None else round(sent.answer.first_token_s, 4),
        "total_s": round(sent.answer.total_s, 4),
    }
