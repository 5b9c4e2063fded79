"""A tool call: asked for, parsed, and valid against the schema it was asked with, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema

from kimi_runbook.acceptance.client import Answer
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.plan import Ability, Wanted
from kimi_runbook.acceptance.result import Check, State
from kimi_runbook.acceptance.short_request.look import Look, not_offered, refused, settings
from kimi_runbook.acceptance.short_request.reasoning import REASONS, marks_in, switched

_START = "Start the engine with --enable-auto-tool-choice and the model's own --tool-call-parser (Kimi K3: kimi_k3)."
_PARSER = (
    "Compare --tool-call-parser with the model, and whether structured outputs are on: run playbooks/diagnose.yml."
)
_KINDS: Mapping[type, str] = {dict: "object", list: "array"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is wrong with a tool call.

    Attributes:
        part: Which part: ``call`` (none came, or not of the tool asked for), ``arguments`` (no JSON object),
            ``schema`` (JSON that the schema refuses); empty when the call is valid.
        text: What was seen, in words.
    """

    part: str
    text: str


def check_tools(look: Look) -> list[Check]:
    """Return whether a tool call comes and is valid, whole and streamed."""
    wanted = look.wants(Ability.TOOLS)
    if wanted is Wanted.OFF:
        look.abilities[Ability.TOOLS] = "off"
        return []
    client = look.context.client
    checks: list[Check] = []
    for name, send in (("tool-call", client.chat), ("tool-call-stream", client.stream_chat)):
        checks.append(_attempts(look, wanted, name, send))
        if look.abilities[Ability.TOOLS] != "valid":
            break
    return checks


def request(look: Look, seed: int) -> dict[str, Any]:
    """Return the chat that asks for a tool call; what its keys are for is told in data/short_request.yml.

    A model seen to reason is told not to here, or a small ``max_tokens`` ends before the call begins.
    """
    rules = settings().fields("tools")
    body = look.context.chat_body(
        [{"role": "user", "content": rules.text("ask")}], max_tokens=rules.integer("max_tokens")
    )
    if look.abilities.get(Ability.REASONING) in REASONS:
        body["chat_template_kwargs"] = switched(look.context.plan.chat_template_kwargs, on=False)
    return {
        **body,
        "tools": [rules.fields("tool").mapping()],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": seed,
    }


def assembled(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return whole tool calls from those of an answer or the pieces of a stream.

    Pieces carry the call's ``index``; the first names id, type and function, the rest add to the arguments. Calls
    without an index are whole already.
    """
    whole: dict[Any, dict[str, Any]] = {}
    for position, call in enumerate(calls):
        key = str(call.get("index", f"whole {position}"))
        function = call.get("function") or {}
        known = whole.setdefault(key, {"id": None, "type": None, "function": {"name": "", "arguments": ""}})
        known["id"] = known["id"] or call.get("id")
        known["type"] = known["type"] or call.get("type")
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""
    return list(whole.values())


def _misshapen(calls: Iterable[Any]) -> Verdict | None:
    """Return what is wrong with calls that are no calls at all: the API promises objects, and arguments as a text."""
    for call in calls:
        function = (call.get("function") or {}) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return Verdict(part="call", text=f"a call of another shape: {call!r:.80}")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if not isinstance(name, str):
            return Verdict(part="call", text=f"a call whose name is no text: {name!r:.80}")
        if not isinstance(arguments, str):
            return Verdict(
                part="arguments", text=f"arguments are a JSON {_KINDS.get(type(arguments), 'value')}, no text"
            )
    return None


def judge_call(answer: Answer, tool: Mapping[str, Any]) -> Verdict:
    """Return what is wrong with the first tool call of an answer, the least specific part first."""
    misshapen = _misshapen(answer.tool_calls)
    if misshapen is not None:
        return misshapen
    calls = assembled(answer.tool_calls)
    if not calls:
        marks = marks_in(answer.text)
        told = f", and its content holds {', '.join(marks)}" if marks else ""
        return Verdict(part="call", text=f"no tool call in an answer with finish_reason {answer.finish_reason!r}{told}")
    call, wanted = calls[0], tool["function"]
    if len(calls) > 1:
        return Verdict(part="call", text=f"{len(calls)} calls where parallel_tool_calls is false")
    if call["function"]["name"] != wanted["name"]:
        return Verdict(part="call", text=f"a call of {call['function']['name']!r}, which was not offered")
    if not call["id"] or call["type"] != "function":
        return Verdict(part="call", text=f"a call with id {call['id']!r} and type {call['type']!r}")
    return _judge_arguments(call["function"]["arguments"], wanted["parameters"], answer.finish_reason)


def _judge_arguments(text: str, schema: Mapping[str, Any], finish_reason: str | None) -> Verdict:
    cut = ", cut off at max_tokens" if finish_reason == "length" else ""
    try:
        value = json.loads(text)
    except ValueError as error:
        return Verdict(part="arguments", text=f"arguments are no JSON{cut} ({error}): {text[:80]!r}")
    if not isinstance(value, dict):
        return Verdict(part="arguments", text=f"arguments are no JSON object: {text[:80]!r}")
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if problem is not None:
        place = "/".join(map(str, problem.absolute_path)) or "the arguments"
        return Verdict(part="schema", text=f"{place}: {problem.message}")
    return Verdict(part="", text=f"arguments {text}")


def _attempts(look: Look, wanted: Wanted, name: str, send: Callable[[dict[str, Any]], Answer]) -> Check:
    """Ask until a valid call comes, a bounded number of times, with another seed each time; every attempt is told."""
    rules = settings().fields("tools")
    limit, tool = rules.integer("attempts"), rules.fields("tool").mapping()
    evidence = f"POST /v1/chat/completions with tools, tool_choice required{', streamed' if 'stream' in name else ''}"
    seen: list[Verdict] = []
    for seed in range(1, limit + 1):
        body = request(look, seed)
        answer = look.ask(partial(send, body))
        if isinstance(answer, EngineError):
            return _no_answer(look, wanted, name, answer, evidence)
        seen.append(judge_call(answer, tool))
        if not seen[-1].part:
            break
    return _told(look, name, seen, limit, evidence)


def _told(look: Look, name: str, seen: list[Verdict], limit: int, evidence: str) -> Check:
    """A call valid at the first attempt passes, one valid later warns, none fails by the part that was wrong last."""
    wrong = [verdict for verdict in seen if verdict.part]
    valid = len(wrong) < len(seen)
    look.abilities[Ability.TOOLS] = "valid" if valid else "invalid"
    attempts = "; ".join(f"attempt {number}: {verdict.text}" for number, verdict in enumerate(seen, 1))
    return Check(
        name=name if valid else f"{name}-{wrong[0].part}".replace("tool-call-call", "tool-call"),
        state=(State.WARN if wrong else State.PASS) if valid else State.FAIL,
        observed=attempts if wrong else seen[0].text,
        expected=f"one call, its arguments valid against the tool's schema, within {limit} attempts"
        + (" and at the first" if valid and wrong else ""),
        evidence=evidence,
        next_step=_PARSER if wrong else "",
    )


def _no_answer(look: Look, wanted: Wanted, name: str, error: EngineError, evidence: str) -> Check:
    if refused(error):
        look.abilities[Ability.TOOLS] = "refused"
        return not_offered(name, wanted, what="tool calls", observed=str(error), evidence=evidence, next_step=_START)
    look.abilities[Ability.TOOLS] = "unknown"
    return look.failed(f"{name}-answer", error, expected="an answer with a tool call", evidence=evidence)
