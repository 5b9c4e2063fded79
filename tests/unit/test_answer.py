"""Answers put together from JSON and from streams."""

import json
from typing import Any

import pytest

from kimi_runbook.acceptance.answer import Answer, StreamedAnswer, usage_of, whole_answer
from kimi_runbook.acceptance.http import BadAnswerError
from kimi_runbook.acceptance.load import Lag, percentile
from kimi_runbook.acceptance.streaming.sse import Event

MS = 1_000_000
WHERE = "POST http://h/v1/chat/completions"


def delta(at_ms: int, *, index: int = 0, finish: str | None = None, **parts: Any) -> Event:
    """Return a chat event that arrived at a moment and was read 2 ms later."""
    return event(at_ms, {"choices": [{"index": index, "delta": parts, "finish_reason": finish}]})


def event(at_ms: int, value: Any, name: bytes = b"") -> Event:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Event(name, data, ((at_ms + 2) * MS, at_ms * MS, 2 * MS, b""))


def streamed(*events: Event) -> Answer:
    building = StreamedAnswer(WHERE, 100 * MS, [])
    building.take(events)
    return building.answer(0.5)


def test_times_are_those_of_arrival_and_only_text_counts() -> None:
    late_ns: list[int] = []
    building = StreamedAnswer(WHERE, 100 * MS, late_ns)
    building.take(
        [
            delta(110, role="assistant", content=""),
            delta(120, content="a"),
            delta(145, content="b"),
            delta(150, content="", finish="stop"),
            event(151, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}),
            event(152, b"[DONE]"),
        ]
    )
    answer = building.answer(0.052)
    assert (answer.text, answer.chunks, answer.finish_reason, answer.total_s) == ("ab", 2, "stop", 0.052)
    assert answer.first_token_s == 0.02
    assert answer.gaps_s == (0.025,)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert late_ns == [2 * MS] * 6


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_a_channel_of_its_own_and_its_first_text_is_the_first_token(key: str) -> None:
    answer = streamed(delta(110, **{key: "let me "}), delta(120, **{key: "see"}), delta(130, content="yes"))
    assert (answer.reasoning, answer.text, answer.chunks) == ("let me see", "yes", 3)
    assert answer.first_token_s == 0.01


def test_a_text_completion_is_read_too() -> None:
    answer = streamed(
        event(110, {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
        event(120, {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}),
    )
    assert (answer.text, answer.finish_reason) == ("ab", "length")


def test_only_the_first_choice_is_the_answer() -> None:
    answer = streamed(delta(110, content="a"), delta(111, index=1, content="x", finish="stop"), delta(120, content="b"))
    assert (answer.text, answer.chunks, answer.finish_reason) == ("ab", 2, None)


def test_the_pieces_of_tool_calls_are_put_together() -> None:
    def piece(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        name = more.pop("name", None)
        return {"index": index, "function": {"name": name, "arguments": arguments}, **more}

    answer = streamed(
        delta(110, tool_calls=[piece(0, "", id="c0", type="function", name="look_up")]),
        delta(120, tool_calls=[piece(0, '{"city":')]),
        delta(130, tool_calls=[piece(1, "{}", id="c1", type="function", name="now")]),
        delta(140, tool_calls=[piece(0, ' "Bonn"}')]),
    )
    assert answer.tool_calls == (
        {"index": 0, "id": "c0", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Bonn"}'}},
        {"index": 1, "id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    )
    assert answer.chunks == 4


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (event(110, {"error": {"message": "dead"}}), "an error event inside the stream.*dead"),
        (event(110, {"object": "error", "message": "dead"}), "an error event inside the stream.*dead"),
        (event(110, b"dead", name=b"error"), "an error event inside the stream.*dead"),
        (event(110, b"{"), "not JSON"),
        (event(110, b"\xff\xfe"), "not JSON"),
        (event(110, b"[" * 100_000), "not JSON"),
        (event(110, [1]), "the answer is a list"),
        (delta(110, tool_calls=["x"]), "tool call that is no object"),
        (delta(110, tool_calls=5), "another shape"),
        (event(110, {"choices": [{"delta": "x"}]}), "another shape"),
        (event(110, {"choices": 7}), "another shape"),
        (event(110, {"usage": {"prompt_tokens": "many"}}), "another shape"),
    ],
)
def test_a_bad_event_is_an_error_and_what_came_before_stays(bad: Event, said: str) -> None:
    building = StreamedAnswer(WHERE, 100 * MS, [])
    with pytest.raises(BadAnswerError, match=said) as caught:
        building.take([delta(105, content="a"), bad])
    assert caught.value.where == WHERE
    partial = building.partial(0.1)
    assert partial is not None
    assert partial.text == "a"


def test_nothing_is_no_partial_answer() -> None:
    building = StreamedAnswer(WHERE, 0, [])
    building.take([delta(110, role="assistant", content="")])
    assert building.partial(1.0) is None
    assert building.answer(1.0).first_token_s is None


def test_a_whole_answer_has_no_first_token() -> None:
    message = {"content": None, "reasoning": "hm", "tool_calls": [{"id": "c0"}]}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
    answer = whole_answer(WHERE, body, 1.5)
    assert (answer.text, answer.reasoning, answer.tool_calls) == ("", "hm", ({"id": "c0"},))
    assert (answer.first_token_s, answer.gaps_s, answer.chunks, answer.usage) == (None, (), 0, None)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b'{"choices": []}', b'{"choices": [1]}', b"[]", b'{"error": "x"}'),
        *(b'{"choices": [{"message": "x"}]}', b'{"choices": [{}], "usage": {"total_tokens": [1]}}'),
    ],
)
def test_a_whole_answer_that_is_none_is_told(body: bytes) -> None:
    with pytest.raises(BadAnswerError):
        whole_answer(WHERE, body, 1.0)


@pytest.mark.parametrize(
    ("details", "cached"),
    [(None, None), ({}, None), ({"cached_tokens": None}, None), ({"cached_tokens": 0}, 0), ({"cached_tokens": 5}, 5)],
)
def test_absent_cached_tokens_are_not_zero(details: Any, cached: int | None) -> None:
    usage = usage_of({"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": details})
    assert usage is not None
    assert usage.cached_tokens == cached


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 99.9, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([7.0], 50) == 7
    assert percentile([], 99) == 0


def test_lag_is_in_seconds() -> None:
    lag = Lag.of([3 * MS, 1 * MS, 2 * MS], kernel=True)
    assert (lag.p50_s, lag.p99_s, lag.max_s, lag.samples, lag.source) == (0.002, 0.003, 0.003, 3, "kernel")
    assert (Lag.of([], kernel=False).samples, Lag.of([], kernel=False).source) == (0, "user")
