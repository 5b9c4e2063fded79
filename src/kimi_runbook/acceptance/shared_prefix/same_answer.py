"""Whether the hit path gives the same greedy answer twice. Wrong state restored is wrong text, no crash and no log.

A first answer may differ from later ones without corruption, because another number of tokens is computed and another
kernel runs (vllm#40896). So two warm answers are compared with each other: same prompt, same hit, nothing else running,
hence the same work. When they differ, the same prompt is sent twice cold, under a ``cache_salt`` of its own each time.
Cold answers that agree mean that the engine is deterministic and the hit path is not (vllm#53912, ROCm/ATOM#2268):
FAIL. Cold answers that differ too mean that this engine repeats nothing, so nothing can be said: WARN.
"""

from __future__ import annotations

from collections.abc import Sequence

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.prompts import Prompt, new_salt
from kimi_runbook.acceptance.result import Check, State, verify
from kimi_runbook.acceptance.shared_prefix.protocol import RESEND, SHORT
from kimi_runbook.acceptance.shared_prefix.sending import Sent, body

_NAME = "same-answer"
_EVIDENCE = "one chat, greedy, sent three times"
_CORRUPT = "Do not serve from this cache: switch prefix caching off, then try a version with the fix (vllm#53912)."
_NOISY = "Compare with prefix caching off; a model this noisy needs the repeated questions of a quality run."


def same_answer(context: Context, prompts: Sequence[Prompt], sent: Sequence[Sent]) -> list[Check]:
    """Return the check, empty where no prompt that was sent again hit anything."""
    cold = next((one for one in sent if one.expected.family == SHORT), None)
    warm = [one for one in sent if one.expected.family == RESEND and one.hits]
    if cold is None or len(warm) < 2:
        return []
    first, second = _text(warm[0].answer), _text(warm[1].answer)
    expected = "the same text from both warm answers"
    if first == second:
        parts = _parts(_text(cold.answer), first)
        told = "the cold one too" if parts is None else f"the cold one parts from them at character {parts}"
        note = "" if parts is None else ", as it may: other tokens are computed (vllm#40896)"
        return [verify(_NAME, True, observed=f"both are the same, {told}{note}", expected=expected, evidence=_EVIDENCE)]
    prompt = next(prompt for prompt in prompts if prompt.family == RESEND)
    corrupt, reference = _reference(context, prompt)
    return [
        verify(
            _NAME,
            False,
            observed=f"the warm answers part at character {_parts(first, second)}; {reference}",
            expected=expected,
            evidence=_EVIDENCE,
            next_step=_CORRUPT if corrupt else _NOISY,
            otherwise=State.FAIL if corrupt else State.WARN,
        )
    ]


def _reference(context: Context, prompt: Prompt) -> tuple[bool, str]:
    """Return whether the same prompt gives the same answer twice without hits, and that in words."""
    answers = []
    for _ in range(2):
        try:
            answer = context.client.stream_chat(body(context, prompt.messages) | {"cache_salt": new_salt()})
        except EngineError as error:
            return False, f"there is no cold reference ({error})"
        if answer.usage is None or answer.usage.cached_tokens:
            return False, "there is no cold reference: cache_salt does not keep prompts apart here"
        answers.append(_text(answer))
    if answers[0] == answers[1]:
        return True, "two cold answers to the same prompt are the same, so it is the hit path that varies"
    return False, "two cold answers to the same prompt differ as well, so this engine repeats nothing"


def _text(answer: Answer) -> str:
    return f"{answer.reasoning}\0{answer.text}" if answer.reasoning else answer.text


def _parts(first: str, second: str) -> int | None:
    """Return the first position at which two texts differ, or None when they are the same."""
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(first), len(second)))
