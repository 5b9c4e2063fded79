"""Step 2 against an engine that is healthy or fails in one way, and its pure parts."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance import step2_short_request
from kimi_runbook.acceptance.client import Answer, EngineClient, Usage
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.acceptance.short_request import answers
from kimi_runbook.acceptance.short_request.images import data_uri, png
from kimi_runbook.acceptance.short_request.look import settings
from kimi_runbook.acceptance.short_request.reasoning import marks_in, switched
from kimi_runbook.acceptance.short_request.tools import assembled, judge_call
from kimi_runbook.reading import Fields
from kimi_runbook.verdict import VerdictName, judge_steps
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import context

THINKS: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}, "max_tokens": 16}
TOOL = settings().fields("tools").fields("tool").mapping()


def asked(engine: FakeEngine, run_dir: Path, *, timeout_s: float = 5.0, **limits: Any) -> Context:
    engine.token_delay_s = 0.008 if Fault.STREAM_BUFFERED in engine.faults else 0.002
    run = context(engine.url, run_dir, steps=(2, 3, 4), model_limits={"max_tokens": 16} | limits)
    run.client = EngineClient(engine.url, timeout_s=timeout_s)
    return run


def result_of(run_dir: Path, *faults: Fault, timeout_s: float = 5.0, **limits: Any) -> StepResult:
    with FakeEngine(*faults) as engine:
        return step2_short_request.run(asked(engine, run_dir, timeout_s=timeout_s, **limits))


def named(result: StepResult, name: str) -> Check:
    return next(check for check in result.checks if check.name == name)


def test_a_healthy_engine_passes_and_shows_what_it_can(tmp_path: Path) -> None:
    result = result_of(tmp_path, **THINKS)
    assert result.state is State.PASS, result.unmet()
    assert result.figures["abilities"] == {"reasoning": "present", "tools": "valid", "images": "valid"}
    for key in ("chat_total_s", "stream_total_s", "stream_first_token_s", "completion_total_s"):
        assert result.figures[key] > 0


@pytest.mark.parametrize(
    ("fault", "check", "state", "says"),
    [
        (Fault.UNHEALTHY, "engine-healthy", State.FAIL, "HTTP 503, the engine is dead"),
        (Fault.EMPTY_ANSWER, "chat-answer", State.FAIL, "0 characters"),
        (Fault.FINISH_ERROR, "chat-finish-reason", State.FAIL, "'error'"),
        (Fault.USAGE_WRONG, "chat-usage", State.FAIL, "usage that adds up"),
        (Fault.ERROR_IN_200, "chat-answer", State.FAIL, "an error inside a 200"),
        (Fault.STREAM_CUT, "stream-answer", State.FAIL, "expected a stream that ends with [DONE]"),
        (Fault.NO_STREAM_USAGE, "stream-usage", State.FAIL, "no usage"),
        (Fault.STREAM_BUFFERED, "stream-in-pieces", State.WARN, "chunks that arrive as they are made"),
        (Fault.COMPLETIONS_BROKEN, "completion-answer", State.FAIL, "HTTP 500"),
        (Fault.REASONING_LEAKS, "reasoning", State.FAIL, "<|close|> (Kimi K3, vllm#51412)"),
        (Fault.REASONING_ALWAYS, "reasoning-off", State.FAIL, "with thinking: false"),
        (Fault.TOOL_CALL_MALFORMED, "tool-call-arguments", State.FAIL, "attempt 3: arguments are no JSON"),
        (Fault.TOOL_CALL_WRONG_TYPE, "tool-call-schema", State.FAIL, "rpm: '900' is not of type 'integer'"),
        (Fault.TOOL_CALL_EMPTY, "tool-call", State.FAIL, "no tool call in an answer with finish_reason 'tool_calls'"),
        (Fault.TOOL_STREAM_BROKEN, "tool-call-stream-arguments", State.FAIL, "arguments are no JSON"),
        (Fault.IMAGE_DROPPED, "image-input", State.FAIL, "never reached the model"),
        (Fault.BAD_REQUEST_ACCEPTED, "refuses-unknown-model", State.FAIL, "HTTP 200"),
        (Fault.REFUSAL_WITHOUT_BODY, "refuses-unknown-model", State.FAIL, "without an error body"),
        (Fault.KEEP_ALIVE_CLOSE, "keep-alive", State.FAIL, "without announcing it"),
    ],
)
def test_a_fault_turns_its_check_red(fault: Fault, check: str, state: State, says: str, tmp_path: Path) -> None:
    """The first red check is the one that owns the fault."""
    result = result_of(tmp_path, fault, **THINKS)
    assert result.state is state
    first = result.unmet()[0]
    assert (first.name, first.state) == (check, state), first.sentence()
    assert says in first.sentence()
    assert first.next_step


@pytest.mark.parametrize(
    ("fault", "ability", "check"),
    [
        (Fault.TOOLS_REFUSED, "tools", "tool-call"),
        (Fault.IMAGE_REFUSED, "images", "image-input"),
        (Fault.REASONING_ABSENT, "reasoning", "reasoning"),
    ],
)
@pytest.mark.parametrize("wanted", ["required", "probe", "off"])
def test_an_ability_that_is_not_there(fault: Fault, ability: str, check: str, wanted: str, tmp_path: Path) -> None:
    """It fails where it is required, is told where it is probed, and is not asked for where it is off."""
    result = result_of(tmp_path, fault, abilities={ability: wanted}, **THINKS)
    found = [one for one in result.checks if one.name == check]
    if wanted == "off":
        assert not found
        assert result.figures["abilities"][ability] == "off"
        assert result.state is State.PASS
        return
    assert [one.state for one in found] == [State.FAIL if wanted == "required" else State.PASS]
    assert "not offered" in found[0].observed
    assert result.figures["abilities"][ability] in ("refused", "absent")
    assert bool(found[0].next_step) is (wanted == "required")


def test_a_limit_is_no_refusal_of_an_ability(tmp_path: Path) -> None:
    """A gateway that answers 429 says nothing about the model: nobody may be told that it has no tools."""
    with FakeEngine(Fault.TOOLS_LIMITED) as engine:
        result = step2_short_request.run(asked(engine, tmp_path, **THINKS))
    first = result.unmet()[0]
    assert (first.name, first.state) == ("tool-call-answer", State.FAIL)
    assert result.figures["abilities"]["tools"] == "unknown"
    assert judge_steps([result]).name is VerdictName.FIX_ENVIRONMENT


@pytest.mark.parametrize(
    ("calls", "part", "says"),
    [
        (["set_fan"], "call", "another shape: 'set_fan'"),
        ([{"function": "set_fan"}], "call", "another shape"),
        ([{"function": {"name": ["set_fan"]}}], "call", "no text: ['set_fan']"),
        ([{"function": {"name": "set_fan", "arguments": [1]}}], "arguments", "a JSON array"),
        ([{"index": [], "function": {"name": "set_fan", "arguments": 1}}], "arguments", "a JSON value"),
    ],
)
def test_a_call_of_another_shape_is_the_engines_fault(calls: list[Any], part: str, says: str) -> None:
    verdict = judge_call(answer(*calls), TOOL)
    assert verdict.part == part
    assert says in verdict.text


def test_a_lost_peer_ends_the_step_and_is_told_with_what_health_says(tmp_path: Path) -> None:
    """The first request hangs: the others are not asked, and would each have waited as long."""
    with FakeEngine(Fault.PEER_KILLED) as engine:
        result = step2_short_request.run(asked(engine, tmp_path, timeout_s=0.3))
        assert len(engine.requests) == 1
    first, rest = result.unmet()
    assert first.name == "chat-answer"
    assert "HTTP 503, the engine is dead" in first.observed
    assert (rest.name, rest.state) == ("rest-of-step", State.NOT_RUN)
    assert "tool call" in rest.observed


def test_a_stalled_stream_is_named(tmp_path: Path) -> None:
    result = result_of(tmp_path, Fault.STALL, timeout_s=0.4)
    first = result.unmet()[0]
    assert first.name == "stream-answer"
    assert first.state is State.FAIL
    assert "HTTP 200" in first.observed  # the engine lives, the stream does not


def test_a_first_token_that_is_late_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stricter: dict[str, Any] = settings().mapping()
    stricter["stream"]["first_token_s"] = 0.05
    monkeypatch.setattr(answers, "settings", lambda: Fields(stricter, "stricter"))
    with FakeEngine() as engine:
        engine.first_token_delay_s = 0.1
        result = step2_short_request.run(asked(engine, tmp_path))
    first = result.unmet()[0]
    assert (first.name, first.state) == ("stream-first-token", State.WARN)
    assert "expected within 0.05 s" in first.sentence()


def test_a_tool_call_that_is_valid_later_is_a_warning_that_tells_every_attempt(tmp_path: Path) -> None:
    with FakeEngine(Fault.TOOL_CALL_MALFORMED) as engine:
        run = asked(engine, tmp_path)
        chat = run.client.chat

        def mended_later(body: dict[str, Any]) -> Answer:
            if body.get("seed") == 2:
                engine.faults.clear()
            return chat(body)

        run.client.chat = mended_later  # type: ignore[method-assign, assignment] # mends the engine on its way
        check = named(step2_short_request.run(run), "tool-call")
    assert check.state is State.WARN
    assert "attempt 1: arguments are no JSON" in check.observed
    assert "attempt 2: arguments {" in check.observed


def test_a_model_that_reasons_is_told_not_to_where_it_is_to_call_a_tool(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        step2_short_request.run(asked(engine, tmp_path))
        with_tools = [body for body in engine.requests if body.get("tools")]
    assert [body["chat_template_kwargs"] for body in with_tools] == [{"thinking": False}] * 2
    assert all((body["parallel_tool_calls"], body["temperature"]) == (False, 1) for body in with_tools)
    assert with_tools[0]["tools"][0]["function"]["strict"] is True


def test_bad_requests_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        result = step2_short_request.run(asked(engine, tmp_path))
        longest = max(engine.requests, key=lambda body: len(body.get("prompt", "")))
    assert len(longest["prompt"]) == 4096 + 1
    assert {check.name for check in result.checks} >= {
        "refuses-malformed-json",
        "refuses-negative-max-tokens",
        "refuses-too-long-prompt",
        "healthy-after-refusals",
    }


def test_a_limit_the_server_does_not_tell_is_a_warning(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.max_model_len = None  # as with a router that strips the card
        check = named(step2_short_request.run(asked(engine, tmp_path)), "refuses-too-long-prompt")
    assert check.state is State.WARN
    assert "not told" in check.observed


# --- pure parts


def answer(*calls: dict[str, Any], reason: str = "tool_calls", text: str = "") -> Answer:
    usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2, cached_tokens=None)
    return Answer(
        text=text,
        reasoning="",
        tool_calls=calls,
        finish_reason=reason,
        usage=usage,
        first_token_s=None,
        total_s=0.1,
        chunks=0,
    )


def call(arguments: str, *, name: str = "set_fan", **changes: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}} | changes


GOOD = json.dumps({"fan": "A", "rpm": 900, "on": True})


@pytest.mark.parametrize(
    ("found", "part", "says"),
    [
        pytest.param(answer(call(GOOD)), "", "arguments {", id="valid"),
        pytest.param(answer(call(GOOD[:-1])), "arguments", "no JSON", id="cut"),
        pytest.param(
            answer(call(GOOD[:-1]), reason="length"), "arguments", "cut off at max_tokens", id="out-of-tokens"
        ),
        pytest.param(answer(call("[1]")), "arguments", "no JSON object", id="a-list"),
        pytest.param(
            answer(call('{"fan": "A", "on": true}')), "schema", "'rpm' is a required property", id="lacks-one"
        ),
        pytest.param(answer(call(GOOD.replace("900", "901"))), "schema", "rpm: 901", id="not-in-the-enum"),
        pytest.param(answer(call(GOOD.replace("true", '"true"'))), "schema", "on: 'true'", id="text-for-a-flag"),
        pytest.param(answer(call(GOOD[:-1] + ', "x": 1}')), "schema", "'x' was unexpected", id="one-too-many"),
        pytest.param(answer(call(GOOD, name="set_fans")), "call", "'set_fans', which was not offered", id="other-tool"),
        pytest.param(answer(call(GOOD, id=None)), "call", "id None", id="no-id"),
        pytest.param(answer(call(GOOD), call(GOOD)), "call", "2 calls", id="two-calls"),
        pytest.param(answer(text="Sure.", reason="stop"), "call", "finish_reason 'stop'", id="no-call"),
        pytest.param(answer(text="<tool_call>{", reason="stop"), "call", "<tool_call> (hermes", id="call-as-content"),
    ],
)
def test_judge_call(found: Answer, part: str, says: str) -> None:
    verdict = judge_call(found, TOOL)
    assert verdict.part == part
    assert says in verdict.text


def test_pieces_of_a_stream_make_whole_calls() -> None:
    pieces = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "set_fan", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"fan": '}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "set_fan", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": '"A"}'}},
    ]
    first, second = assembled(pieces)
    assert (first["id"], first["function"]["arguments"]) == ("c1", '{"fan": "A"}')
    assert second["id"] == "c2"
    assert assembled([call(GOOD), call(GOOD)]) == [call(GOOD), call(GOOD)]


def test_the_picture_is_a_png_of_its_size() -> None:
    raw = base64.b64decode(data_uri(png(64)).removeprefix("data:image/png;base64,"))
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", raw[16:24]) == (64, 64)
    position, kinds, data = 8, [], b""
    while position < len(raw):
        (length,) = struct.unpack(">I", raw[position : position + 4])
        kind, body = raw[position + 4 : position + 8], raw[position + 8 : position + 8 + length]
        assert struct.unpack(">I", raw[position + 8 + length : position + 12 + length]) == (zlib.crc32(kind + body),)
        kinds.append(kind)
        data += body if kind == b"IDAT" else b""
        position += 12 + length
    assert kinds == [b"IHDR", b"IDAT", b"IEND"]
    assert len(zlib.decompress(data)) == 64 * (1 + 3 * 64)


@pytest.mark.parametrize(
    ("kwargs", "on"),
    [
        ({}, {"thinking": True}),
        ({"thinking": False}, {"thinking": True}),
        ({"enable_thinking": False, "tone": "dry"}, {"enable_thinking": True, "tone": "dry"}),
    ],
)
def test_the_plans_own_switch_is_used(kwargs: dict[str, Any], on: dict[str, Any]) -> None:
    assert switched(kwargs, on=True) == on


def test_marks_are_told_with_their_source() -> None:
    assert marks_in("fine") == ()
    assert marks_in("x<|close|>think<|sep|>y") == ("<|close|> (Kimi K3, vllm#51412)", "<|sep|> (Kimi K3, vllm#54273)")
