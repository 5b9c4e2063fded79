"""The plain answers of step 2: a chat and a text completion, each whole and streamed, and the two compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.client import Answer, EngineClient
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.result import Check, State, verify
from kimi_runbook.acceptance.short_request.look import LOG, Look, settings
from kimi_runbook.reading import Fields

_BUFFER = "Something between engine and client collects the stream: switch off its response buffering."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to ask: its name, the request in words, how the client sends it, and which whole answer it repeats."""

    name: str
    evidence: str
    send: Callable[[EngineClient, Mapping[str, Any]], Answer]
    chat: bool
    repeats: str = ""

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.repeats)


KINDS = (
    Kind(name="chat", evidence="POST /v1/chat/completions", send=lambda c, b: c.chat(b), chat=True),
    Kind(
        name="stream",
        evidence="POST /v1/chat/completions, streamed",
        send=lambda c, b: c.stream_chat(b),
        chat=True,
        repeats="chat",
    ),
    Kind(name="completion", evidence="POST /v1/completions", send=lambda c, b: c.complete(b), chat=False),
    Kind(
        name="completion-stream",
        evidence="POST /v1/completions, streamed",
        send=lambda c, b: c.stream_complete(b),
        chat=False,
        repeats="completion",
    ),
)


def messages() -> list[dict[str, Any]]:
    """Return the plain chat of step 2."""
    return [{"role": "user", "content": settings().fields("chat").text("ask")}]


def ask_kind(look: Look, kind: Kind) -> list[Check]:
    """Send one plain request and judge its answer; keeps the answer and its times."""
    plan = look.context.plan
    if kind.chat:
        body = look.context.chat_body(messages())
    else:
        prompt = settings().fields("completion").text("prompt")
        # a base prompt may well end at once by itself; what is asked here is whether the route works
        body = {"model": plan.model, "prompt": prompt, "max_tokens": plan.max_tokens, "temperature": 0}
        body["ignore_eos"] = True
    answer = look.ask(lambda: kind.send(look.context.client, body))
    if isinstance(answer, EngineError):
        expected = "a stream that ends with [DONE]" if kind.streamed else "an answer"
        return [look.failed(f"{kind.name}-answer", answer, expected=expected, evidence=kind.evidence)]
    look.answers[kind.name] = answer
    key = kind.name.replace("-", "_")
    look.figures[f"{key}_total_s"] = round(answer.total_s, 4)
    if answer.first_token_s is not None:
        look.figures[f"{key}_first_token_s"] = round(answer.first_token_s, 4)
    checks = judge(kind, answer, plan.max_tokens)
    if kind.streamed:
        checks += judge_stream(kind, answer, look.answers.get(kind.repeats), plan.max_tokens)
    return checks


def judge(kind: Kind, answer: Answer, limit: int) -> list[Check]:
    """Return whether an answer holds something, ended properly, and was charged for plausibly.

    Args:
        kind: How it was asked for.
        answer: What came.
        limit: ``max_tokens`` of the request.
    """
    finished = settings().fields("chat").texts("finished")
    return [
        verify(
            f"{kind.name}-answer",
            bool(answer.text or answer.reasoning or answer.tool_calls),
            observed=f"{len(answer.text)} characters of content, {len(answer.reasoning)} of reasoning",
            expected="an answer that is not empty",
            evidence=kind.evidence,
            next_step="A model that thinks may need more tokens or chat_template_kwargs (model_limits).",
        ),
        verify(
            f"{kind.name}-finish-reason",
            answer.finish_reason in finished,
            observed=f"finish_reason {answer.finish_reason!r}",
            expected=" or ".join(finished),
            evidence=kind.evidence,
            next_step=LOG,
        ),
        _usage(kind, answer, limit),
    ]


def judge_stream(kind: Kind, answer: Answer, whole: Answer | None, limit: int) -> list[Check]:
    """Return whether a stream means the same as the whole answer, began in time and came piece by piece."""
    rules = settings().fields("stream")
    first_s, allowed_s = answer.first_token_s, rules.number("first_token_s")
    checks = [
        verify(
            f"{kind.name}-first-token",
            first_s is not None and first_s <= allowed_s,
            observed="no first token" if first_s is None else f"first token after {first_s:.2f} s",
            expected=f"within {allowed_s:g} s, for a short prompt to an engine at rest (data/short_request.yml)",
            evidence=kind.evidence,
            next_step="Look for other load, a queue or a late compilation: vllm:num_requests_waiting, the log.",
            otherwise=State.WARN,
        ),
        _in_pieces(kind, answer, rules),
    ]
    return checks if whole is None else [_same_meaning(kind, answer, whole, limit), *checks]


def _usage(kind: Kind, answer: Answer, limit: int) -> Check:
    usage = answer.usage
    if usage is None:
        observed, holds = "no usage", False
    else:
        observed = f"{usage.prompt_tokens} prompt + {usage.completion_tokens} completion = {usage.total_tokens} tokens"
        adds_up = usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
        holds = adds_up and usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= limit
    return verify(
        f"{kind.name}-usage",
        holds,
        observed=observed,
        expected=f"usage that adds up, with 1 to {limit} completion tokens",
        evidence=kind.evidence,
        next_step=LOG,
    )


def _same_meaning(kind: Kind, answer: Answer, whole: Answer, limit: int) -> Check:
    """Compare what must be equal. The text need not be: the first of two equal requests may differ (vllm#40896)."""
    first, second = whole.usage, answer.usage
    if first is None or second is None:
        differs = "usage is missing in one of them"
    elif first.prompt_tokens != second.prompt_tokens:
        differs = f"{second.prompt_tokens} prompt tokens streamed, {first.prompt_tokens} whole"
    elif whole.finish_reason == answer.finish_reason == "length" and not (
        first.completion_tokens == second.completion_tokens == limit
    ):
        differs = f"{second.completion_tokens} tokens streamed, {first.completion_tokens} whole, both ended by length"
    else:
        differs = ""
    same = "the same text" if (answer.text, answer.reasoning) == (whole.text, whole.reasoning) else "another text"
    return verify(
        f"{kind.name}-as-whole",
        not differs,
        observed=differs or f"{answer.chunks} chunks, {same}, finish_reason {answer.finish_reason}",
        expected="the prompt tokens of the whole answer, and max_tokens where both end by length",
        evidence=kind.evidence,
        next_step=LOG,
    )


def _in_pieces(kind: Kind, answer: Answer, rules: Fields) -> Check:
    """A stream of many tokens in one chunk, or with all chunks at one moment, was held back on its way.

    An answer that is over at once says nothing: a busy machine wakes the reader when all of it has come.
    """
    tokens = answer.usage.completion_tokens if answer.usage else answer.chunks
    widest_s = max(answer.gaps_s, default=0.0)
    telling = tokens >= rules.integer("least_tokens") and answer.total_s >= rules.number("least_total_s")
    came_at_once = telling and (answer.chunks <= 1 or widest_s < rules.number("at_once_s"))
    return verify(
        f"{kind.name}-in-pieces",
        not came_at_once,
        observed=f"{tokens} tokens in {answer.chunks} chunks, at most {widest_s * 1000:.1f} ms apart",
        expected="chunks that arrive as they are made",
        evidence=kind.evidence,
        next_step=_BUFFER,
        otherwise=State.WARN,
    )
