"""What the engine answered, read out of JSON and streams. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kimi_runbook.acceptance.streaming.errors import BadAnswerError
from kimi_runbook.acceptance.streaming.sse import DONE, Event
from kimi_runbook.acceptance.streaming.wire import Read

_NS = 1_000_000_000
_DECODE = json.JSONDecoder().decode  # json.loads without its checks of arguments, a tenth of the time per token

OTHER_SHAPE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""What taking a JSON value apart raises when it is not what the API promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts the server charged; ``cached_tokens`` is None when the server did not say, which is not 0."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished completion.

    Attributes:
        text: Content of the first choice.
        reasoning: Its reasoning channel, empty where the model has none.
        tool_calls: Tool calls of the first choice; the pieces that a stream brings are put together.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ... or None when the server gave none.
        usage: Token counts, or None when a stream did not carry them.
        first_token_s: Seconds from send to the first event with text; None when not streamed or no text came.
        total_s: Seconds from send to the end.
        chunks: Events with text; a chunk is not a token.
        gaps_s: Seconds between successive events with text, so one fewer than ``chunks``; empty when not streamed.
    """

    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str | None
    usage: Usage | None
    first_token_s: float | None
    total_s: float
    chunks: int
    gaps_s: tuple[float, ...] = ()


class StreamedAnswer:
    """An answer being put together from a stream's events."""

    def __init__(self, where: str, sent_ns: int, late_ns: list[int]) -> None:
        """Begin with nothing.

        Args:
            where: Method and URL, for messages.
            sent_ns: When the request was sent.
            late_ns: Takes how late each event was read.
        """
        self._where = where
        self._sent_ns = sent_ns
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._arrived_ns: list[int] = []
        self._late_ns = late_ns

    def take(self, events: Iterable[Event]) -> None:
        """Take events up to ``[DONE]``, and the source's own complaint after it.

        Raises:
            BadAnswerError: When an event is an error, or no JSON object.
            EngineError: As the source of the events does.
        """
        current: Read | None = None
        count = 0
        try:
            for name, data, read in events:
                if read is not current:
                    self._read_late(current, count)
                    current, count = read, 0
                count += 1
                if data != DONE:
                    self._take(name, data, read[1])
        finally:
            self._read_late(current, count)

    def _take(self, name: bytes, data: bytes, arrived_ns: int) -> None:
        if name == b"error":
            raise BadAnswerError(self._where, f"an error event inside the stream: {_shown(data)}")
        value = parse_json(self._where, data)
        refuse_error(self._where, value, "an error event inside the stream")
        try:
            self._add(value, arrived_ns)
        except OTHER_SHAPE as error:
            raise BadAnswerError(self._where, f"an event of another shape: {_shown(data)}") from error

    def _read_late(self, read: Read | None, count: int) -> None:
        """Note how late the events of one read were read.

        The kernel's stamp is that of the read's last packet. It is exact for a read with one event; of several events
        the first ones may have waited for as long as the loop did not look.
        """
        if read is None:
            return
        at_ns, arrived_ns, late_ns, _ = read
        if count == 1 and arrived_ns < at_ns:
            self._late_ns.append(at_ns - arrived_ns)
        else:
            self._late_ns.extend([late_ns] * count)

    def partial(self, total_s: float) -> Answer | None:
        """Return what has come of a stream that broke off, or None when no text had."""
        return self.answer(total_s) if self._arrived_ns else None

    def answer(self, total_s: float) -> Answer:
        """Return what has come so far."""
        stamps = self._arrived_ns
        return Answer(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._tool_calls[index] for index in sorted(self._tool_calls)),
            finish_reason=self._finish_reason,
            usage=self._usage,
            first_token_s=(stamps[0] - self._sent_ns) / _NS if stamps else None,
            total_s=total_s,
            chunks=len(stamps),
            gaps_s=tuple([(later - earlier) / _NS for earlier, later in pairwise(stamps)]),
        )

    def _add(self, value: Mapping[str, Any], arrived_ns: int) -> None:
        if value.get("usage") is not None:
            self._usage = usage_of(value["usage"]) or self._usage
        for choice in value.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index"):
                continue  # only the first choice is an answer's text
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = choice.get("delta") or {"content": choice.get("text")}
            text, reasoning, calls = delta.get("content"), reasoning_of(delta), delta.get("tool_calls")
            if text:
                self._text.append(str(text))
            if reasoning:
                self._reasoning.append(reasoning)
            if calls:
                self._add_tool_calls(calls)
            if text or reasoning or calls:
                self._arrived_ns.append(arrived_ns)

    def _add_tool_calls(self, pieces: Iterable[Any]) -> None:
        """Put the pieces of tool calls together: by index, arguments appended, anything else as it first came."""
        for piece in pieces:
            if not isinstance(piece, dict):
                raise BadAnswerError(self._where, f"a tool call that is no object: {piece!r:.120}")
            call = self._tool_calls.setdefault(int(piece.get("index") or 0), {})
            for key, value in piece.items():
                if key != "function":
                    call.setdefault(key, value)
            told = piece.get("function")
            if isinstance(told, dict):
                function = call.setdefault("function", {})
                for key, value in told.items():
                    if key == "arguments" and isinstance(value, str):
                        function[key] = str(function.get(key) or "") + value
                    elif value is not None:
                        function.setdefault(key, value)


def whole_answer(where: str, body: bytes, total_s: float) -> Answer:
    """Return the answer in the body of a request that was not streamed; raises BadAnswerError."""
    value = parse_json(where, body)
    refuse_error(where, value, "an error inside a 200")
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswerError(where, "the answer has no choices")
    choice = choices[0]
    message = choice.get("message") or {"content": choice.get("text")}
    try:
        return Answer(
            text=str(message.get("content") or ""),
            reasoning=reasoning_of(message),
            tool_calls=tuple(message.get("tool_calls") or ()),
            finish_reason=choice.get("finish_reason"),
            usage=usage_of(value.get("usage")),
            first_token_s=None,
            total_s=total_s,
            chunks=0,
        )
    except OTHER_SHAPE as error:
        raise BadAnswerError(where, f"an answer of another shape: {_shown(body)}") from error


def parse_json(where: str, body: bytes) -> Any:
    """Return the value; raises BadAnswerError when it is not JSON."""
    try:
        return _DECODE(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(where, f"the answer is not JSON: {_shown(body)}") from error


def refuse_error(where: str, value: Any, kind: str) -> None:
    """Raise BadAnswerError when the value is no object, or one that tells an error."""
    if not isinstance(value, dict):
        raise BadAnswerError(where, f"the answer is a {type(value).__name__}: {value!r:.120}")
    if value.get("error") or value.get("object") == "error":  # the second is how older vLLM wrote errors
        raise BadAnswerError(where, f"{kind}: {json.dumps(value.get('error') or value)[:300]}")


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning channel; vLLM calls it ``reasoning``, older versions ``reasoning_content``."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


def usage_of(value: Any) -> Usage | None:
    """Return token counts, or None when there are none."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(
        prompt_tokens=int(value.get("prompt_tokens") or 0),
        completion_tokens=int(value.get("completion_tokens") or 0),
        total_tokens=int(value.get("total_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
    )


def _shown(data: bytes) -> str:
    return repr(data[:120])
