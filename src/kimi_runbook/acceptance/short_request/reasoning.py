"""The reasoning channel: there when asked for, silent when told so, and never inside the content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.plan import Ability, Wanted
from kimi_runbook.acceptance.result import Check, verify
from kimi_runbook.acceptance.short_request.look import Look, not_offered, refused, settings

_PARSER = "Compare --reasoning-parser (for Kimi K3: kimi_k3) and --tool-call-parser with the model."
_SENDS = ("whole", "streamed")
REASONS = ("present", "uneven", "leaks")
"""What the channel can be found to do by a model that reasons."""


def check_reasoning(look: Look) -> list[Check]:
    """Return what the reasoning channel does: asked for, whole and streamed, and told to be silent."""
    wanted = look.wants(Ability.REASONING)
    if wanted is Wanted.OFF:
        look.abilities[Ability.REASONING] = "off"
        return []
    rules = settings().fields("reasoning")
    asked = [{"role": "user", "content": rules.text("ask")}]
    body = look.context.chat_body(asked, max_tokens=rules.integer("max_tokens"))
    body["chat_template_kwargs"] = switched(look.context.plan.chat_template_kwargs, on=True)
    client = look.context.client
    found: dict[str, Answer] = {}
    for how, send in zip(_SENDS, (client.chat, client.stream_chat), strict=True):
        answer = look.ask(partial(send, body))
        if isinstance(answer, EngineError):
            return [_unanswered(look, wanted, how, answer)]
        found[how] = answer
        if not answer.reasoning and not marks_in(answer.text) and wanted is Wanted.PROBE:
            break  # nothing to compare: a second request would say the same
    look.abilities[Ability.REASONING] = what_channel_does(found.values())
    return [*_judge(look, wanted, found), *_silent_when_told(look)]


def switched(kwargs: Mapping[str, Any], *, on: bool) -> dict[str, Any]:
    """Return template options with reasoning on or off: by the plan's own switch, or Kimi K3's where it names none."""
    switches = settings().fields("reasoning").texts("switches")
    told = [name for name in switches if name in kwargs] or [switches[0]]
    return {**kwargs, **dict.fromkeys(told, on)}


def marks_in(text: str) -> tuple[str, ...]:
    """Return the marks of a channel that a content holds, each with its source; none of them belongs there."""
    marks = settings().fields("reasoning").each("markers")
    return tuple(f"{mark.text('text')} ({mark.text('source')})" for mark in marks if mark.text("text") in text)


def what_channel_does(answers: Iterable[Answer]) -> str:
    """Return ``leaks``, ``present``, ``uneven`` (one way only) or ``absent``."""
    seen = list(answers)
    if any(marks_in(answer.text) for answer in seen):
        return "leaks"
    present = {bool(answer.reasoning) for answer in seen}
    if present == {True, False}:
        return "uneven"
    return "present" if True in present else "absent"


def check_content(look: Look) -> Check:
    """Return whether the plain chats hold a mark in their content: what a client would show its user."""
    plain = {name: answer for name, answer in look.answers.items() if name in ("chat", "stream")}
    leaks = [f"{name} holds {', '.join(marks)}" for name, answer in plain.items() if (marks := marks_in(answer.text))]
    return verify(
        "content-clean",
        not leaks,
        observed="; ".join(leaks) or f"no mark of a channel in the content of {' and '.join(plain) or 'no answer'}",
        expected="content without the marks of the model's own format",
        evidence="POST /v1/chat/completions, whole and streamed",
        next_step=_PARSER,
    )


def _judge(look: Look, wanted: Wanted, found: Mapping[str, Answer]) -> list[Check]:
    state = look.abilities[Ability.REASONING]
    told = ", ".join(
        f"{how}: {len(answer.reasoning)} characters of reasoning, {len(answer.text)} of content"
        for how, answer in found.items()
    )
    evidence = "POST /v1/chat/completions with chat_template_kwargs that ask for reasoning"
    if state == "absent":
        return [
            not_offered(
                "reasoning",
                wanted,
                what="a reasoning channel",
                observed=told,
                evidence=evidence,
                next_step=_PARSER,
            )
        ]
    marks = sorted({mark for answer in found.values() for mark in marks_in(answer.text)})
    return [
        verify(
            "reasoning",
            state == "present",
            observed=f"{told}; the content holds {', '.join(marks)}" if marks else told,
            expected="reasoning in its own channel, whole and streamed alike",
            evidence=evidence,
            next_step=_PARSER,
        )
    ]


def _silent_when_told(look: Look) -> list[Check]:
    """Where the plan switches reasoning off, the plain chats must not have reasoned."""
    kwargs = look.context.plan.chat_template_kwargs
    off = [name for name in settings().fields("reasoning").texts("switches") if kwargs.get(name) is False]
    if not off:
        return []
    loud = [f"{name}: {len(answer.reasoning)}" for name, answer in look.answers.items() if answer.reasoning]
    return [
        verify(
            "reasoning-off",
            not loud,
            observed=f"characters of reasoning in {', '.join(loud)}" if loud else "no reasoning in the plain chats",
            expected=f"none, with {off[0]}: false (model_limits)",
            evidence="POST /v1/chat/completions with the plan's chat_template_kwargs",
            next_step="The template does not take this switch: compare its name with the model's own documentation.",
        )
    ]


def _unanswered(look: Look, wanted: Wanted, how: str, error: EngineError) -> Check:
    """A template that refuses the switch has no reasoning to switch on; anything else is a failure."""
    evidence = f"POST /v1/chat/completions with chat_template_kwargs that ask for reasoning, {how}"
    if refused(error):
        look.abilities[Ability.REASONING] = "refused"
        return not_offered(
            "reasoning",
            wanted,
            what="a reasoning channel",
            observed=str(error),
            evidence=evidence,
            next_step=_PARSER,
        )
    look.abilities[Ability.REASONING] = "unknown"
    return look.failed("reasoning-answer", error, expected="an answer", evidence=evidence)
