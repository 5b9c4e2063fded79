"""The judgement of step 3: counters and answers compared with the expectation and with each other, never averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.metrics import HITS, QUERIES
from kimi_runbook.acceptance.result import Check, State, unknown, verify
from kimi_runbook.acceptance.shared_prefix.engine_side import CACHE
from kimi_runbook.acceptance.shared_prefix.protocol import FAMILIES
from kimi_runbook.acceptance.shared_prefix.sending import Sent

_COUNTERS = "counters of every engine, before and after each request"
_CACHED = "usage.prompt_tokens_details.cached_tokens"
_AGAIN = "Repeat with no other traffic on the engine."
_FLAG = "--enable-prompt-tokens-details"


def windows(context: Context, sent: Sequence[Sent]) -> list[Check]:
    """Return whether each request's window holds that request alone; the first that does not is named."""
    return [_prompt_tokens(sent), _counters_move(sent), _window(context, sent)]


def witnesses(context: Context, sent: Sequence[Sent]) -> list[Check]:
    """Return whether the engine's counters and its answers agree, and then whether they are what was computed."""
    checks = [_cached_tokens(context, sent), _agree(sent)]
    families = [(family, [one for one in sent if one.expected.family == family]) for family in FAMILIES]
    return checks + [_family(family, series, sent) for family, series in families if series]


def _prompt_tokens(sent: Sequence[Sent]) -> Check:
    wrong = next((one for one in sent if one.prompt_tokens != one.expected.prompt_tokens), None)
    return verify(
        "prompt-tokens",
        wrong is None,
        observed=f"{wrong.expected.label}: usage says {wrong.prompt_tokens} prompt tokens"
        if wrong
        else f"as expected in {len(sent)} answers",
        expected=f"{wrong.expected.prompt_tokens if wrong else 'the number'} /tokenize counts for the same chat",
        evidence="POST /tokenize, usage",
        next_step="Chat rendering and /tokenize differ: compare chat_template_kwargs (model_limits).",
        otherwise=State.INCONCLUSIVE,
    )


def _counters_move(sent: Sequence[Sent]) -> Check:
    still = next((one for one in sent if one.counters_stand_still and not one.void), None)
    return verify(
        "counters-move",
        still is None,
        observed=f"{still.expected.label}: an answer of {still.prompt_tokens} prompt tokens came, {QUERIES} moved by 0"
        if still
        else f"{QUERIES} moved with each of {len(sent)} answers",
        expected="each prompt to be counted where its answer comes from: counters and answers disagree otherwise",
        evidence=_COUNTERS,
        next_step="Check that the metrics URLs are those of the engine that answers (vllm-ascend#16639).",
    )


def _window(context: Context, sent: Sequence[Sent]) -> Check:
    for one in sent:
        label, wanted = one.expected.label, one.expected.prompt_tokens
        if one.void:
            return unknown("window", f"{label}: {one.void}", expected="no restart", next_step=_restart(context))
        if one.queries != wanted and not one.counters_stand_still:
            return unknown(
                "window",
                f"{label}: the cache was asked for {_tokens(one.queries)}",
                expected=f"{wanted} tokens, this request alone",
                next_step=_AGAIN,
                evidence=QUERIES,
            )
    return verify(
        "window",
        True,
        observed=f"no restart and no other traffic around {len(sent)} requests",
        expected="each request alone",
        evidence=_COUNTERS,
    )


def _cached_tokens(context: Context, sent: Sequence[Sent]) -> Check:
    """Absent counts as 0 only where 0 is right: vLLM's Rust front end leaves the field out then."""
    silent = next((one for one in sent if one.cached_tokens is None and one.expected.hit_tokens), None)
    told = sum(one.cached_tokens is not None for one in sent)
    asked = any(_FLAG in launch.argv for launch in context.plan.launch.values())
    remedy = "The launch asks for it: look for a proxy that drops it." if asked else f"Start the engine with {_FLAG}."
    return verify(
        "cached-tokens",
        silent is None,
        observed=f"{silent.expected.label}: the answer has no cached_tokens"
        if silent
        else f"told in {told} of {len(sent)} answers, and wherever hits were expected",
        expected=f"{silent.expected.hit_tokens if silent else 'the cached'} tokens in the answer, as a second witness",
        evidence=_CACHED,
        next_step=remedy,
        otherwise=State.FAIL if asked else State.INCONCLUSIVE,
    )


def _agree(sent: Sequence[Sent]) -> Check:
    first = next((one for one in sent if one.cached_tokens is not None and one.cached_tokens != one.hits), None)
    if first is None:
        return verify(
            "witnesses-agree",
            True,
            observed="counters and cached_tokens say the same of every answer that carries it",
            expected="the same from both",
            evidence=f"{HITS}, {_CACHED}",
        )
    expected = first.expected
    if first.cached_tokens == expected.hit_tokens:
        next_step = "The answers are as computed: check that the metrics URLs are those of the engine that answers."
    elif first.hits == expected.hit_tokens:
        next_step = "The counters are as computed: look for a proxy that changes answers, or a defect of this version."
    else:
        next_step = "Neither is as computed: compare both with another version of the engine."
    return verify(
        "witnesses-agree",
        False,
        observed=f"{expected.label}: {HITS} moved by {_tokens(first.hits)}, cached_tokens says {first.cached_tokens}: "
        "counters and cached_tokens disagree",
        expected=f"{expected.hit_tokens} tokens from both ({expected.rule}; expectation.json)",
        evidence=f"{HITS}, {_CACHED}",
        next_step=next_step,
    )


def _family(family: str, series: Sequence[Sent], sent: Sequence[Sent]) -> Check:
    wrong = next((one for one in series if one.hits != one.expected.hit_tokens), None)
    if wrong is None:
        return verify(
            f"{family}.counted-hits",
            True,
            observed=f"{_listed(one.hits for one in series)} tokens in {len(series)} sightings",
            expected=f"{_listed(one.expected.hit_tokens for one in series)} tokens (expectation.json)",
            evidence=_COUNTERS,
        )
    expected = wrong.expected
    return verify(
        f"{family}.counted-hits",
        False,
        observed=f"{expected.label}: {HITS} moved by {_tokens(wrong.hits)}",
        expected=f"{expected.hit_tokens} tokens ({expected.rule}; expectation.json)",
        evidence=_COUNTERS,
        next_step=_why(wrong, sent),
    )


def _why(wrong: Sent, sent: Sequence[Sent]) -> str:
    """Return where to look, by what the whole run shows."""
    if (wrong.hits or 0) > wrong.expected.hit_tokens:
        return "More was found than was kept: look for a cache in front of the engine, then suspect wrong answers."
    if not any(one.hits for one in sent):
        return f"Nothing was found at all. {CACHE}"
    return f"Less was found than was kept: look for eviction (kv_usage) and the engine's known defects. {CACHE}"


def _listed(values: Iterable[float | None]) -> str:
    return ", ".join("?" if value is None else f"{value:g}" for value in values)


def _restart(context: Context) -> str:
    unit = context.plan.engine.unit
    return f"Find the first cause: journalctl -u {unit}." if unit else "Find why the engine restarted in its log."


def _tokens(value: float | None) -> str:
    return "an unknown number of tokens" if value is None else f"{value:g} tokens"
