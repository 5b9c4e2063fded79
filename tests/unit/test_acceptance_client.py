"""The client: answers, and every way an answer can be none."""

import socket
import time
from collections.abc import Callable

import pytest
from scripted_server import ScriptedServer, answering, json_answer, read_request

from kimi_runbook.acceptance.client import EngineClient, longest_of
from kimi_runbook.acceptance.http import (
    BadAnswerError,
    BadStatusError,
    NotReachableError,
    TimedOutError,
    TruncatedError,
)
from tests.faults.engine.fake_engine import MODEL, FakeEngine, Fault

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_chat_stream_and_completion_carry_text_and_usage() -> None:
    with FakeEngine() as engine:
        client = EngineClient(engine.url)
        chat, stream = client.chat(CHAT), client.stream_chat(CHAT)
        complete = client.complete({"model": MODEL, "prompt": "hello", "max_tokens": 3})
        streamed = client.stream_complete({"model": MODEL, "prompt": "hello", "max_tokens": 3})
    assert chat.text == stream.text == "xxxx"
    assert complete.text == "xxx"
    assert chat.usage == stream.usage
    assert stream.chunks == 4
    assert stream.first_token_s is not None
    assert 0 < stream.first_token_s <= stream.total_s
    assert streamed.usage is not None
    assert streamed.usage.prompt_tokens == 5


def test_tokenize_counts_what_the_chat_route_charges() -> None:
    with FakeEngine() as engine:
        client = EngineClient(engine.url)
        usage = client.chat(CHAT).usage
        assert usage is not None
        assert len(client.tokenize(MODEL, [{"role": "user", "content": "hi"}], {})) == usage.prompt_tokens


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        (b'{"data": [{"name": "x"}]}', EngineClient.models),
        (b'{"data": 7}', EngineClient.models),
        (b'{"object": "list"}', EngineClient.models),
        (b'{"tokens": ["a"]}', lambda client: client.tokenize("m", [], {})),
        (b'{"tokens": 7}', lambda client: client.tokenize("m", [], {})),
        (b'{"choices": [{}], "usage": {"prompt_tokens": 1e999}}', lambda client: client.chat(CHAT)),
        (b"not json", EngineClient.version),
        (b"[]", EngineClient.version),
    ],
)
def test_answers_of_another_shape_are_bad_answers(answer: bytes, ask: Callable[[EngineClient], object]) -> None:
    with ScriptedServer(answering(json_answer(answer))) as server, pytest.raises(BadAnswerError) as caught:
        ask(EngineClient(server.url, timeout_s=5))
    assert server.url in caught.value.where


@pytest.mark.parametrize("told", ["4096", None, True, 0, 4096.5])
def test_a_longest_context_that_is_no_number_is_not_told(told: object) -> None:
    assert longest_of({"id": "k3", "max_model_len": told}) is None
    assert longest_of({"id": "k3", "max_model_len": 4096}) == 4096


def test_an_endpoint_below_a_path() -> None:
    paths: list[bytes] = []

    def script(sock: socket.socket) -> None:
        while True:
            paths.append(read_request(sock)[0].split(b" ")[1])
            sock.sendall(json_answer(b'{"version": "1", "choices": [{"text": "a"}]}'))

    with ScriptedServer(script) as server:
        client = EngineClient(f"{server.url}/engine/one/", timeout_s=5)
        client.version()
        since_s = time.monotonic()
        client.complete({"prompt": "x"})
        assert client.in_flight_s(since_s, time.monotonic()) > 0
    assert paths == [b"/engine/one/version", b"/engine/one/v1/completions"]


def test_absent_cached_tokens_are_not_zero() -> None:
    with FakeEngine(Fault.CACHED_TOKENS_MISSING) as engine:
        usage = EngineClient(engine.url).chat(CHAT).usage
    assert usage is not None
    assert usage.cached_tokens is None


def test_questions_about_the_engine() -> None:
    with FakeEngine() as engine:
        client = EngineClient(engine.url)
        assert (client.health(), client.version()) == (200, "0.32.0")
        assert [(card.name, card.max_model_len) for card in client.models()] == [(MODEL, 4096)]


def test_a_cut_stream_is_truncated_and_not_short() -> None:
    with FakeEngine(Fault.STREAM_CUT) as engine, pytest.raises(TruncatedError):
        EngineClient(engine.url).stream_chat(CHAT)


def test_an_error_inside_a_200_is_an_error() -> None:
    with FakeEngine(Fault.ERROR_IN_200) as engine:
        for send in (EngineClient(engine.url).chat, EngineClient(engine.url).stream_chat):
            with pytest.raises(BadAnswerError, match="engine is dead"):
                send(CHAT)


def test_a_refusal_keeps_its_status() -> None:
    with FakeEngine() as engine, pytest.raises(BadStatusError, match="does not exist") as caught:
        EngineClient(engine.url).chat(CHAT | {"model": "other"})
    assert caught.value.status == 404


def test_a_closed_port_is_not_reachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(NotReachableError):
            EngineClient(url).health()


def test_a_silent_engine_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimedOutError):
            EngineClient(url, timeout_s=0.2).chat(CHAT)


def test_a_stream_that_takes_longer_than_its_deadline_times_out() -> None:
    with FakeEngine() as engine, pytest.raises(TimedOutError):
        engine.token_delay_s = 0.1
        EngineClient(engine.url, timeout_s=0.25).stream_chat(CHAT | {"max_tokens": 10})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        pytest.param(
            b'{"error": {"message": "no\\nway", "type": "BadRequestError"}}', "HTTP 400: no way", id="error-body"
        ),
        pytest.param(b'{"detail": [1,\n 2]}', 'HTTP 400: {"detail": [1, 2]}', id="other-json"),
        pytest.param(b"", "HTTP 400", id="nothing"),
        pytest.param(b"x" * 1000, f"HTTP 400: {'x' * 199}\N{HORIZONTAL ELLIPSIS}", id="long"),
    ],
)
def test_a_refusal_is_told_on_one_line(body: bytes, told: str) -> None:
    error = BadStatusError("GET http://k3/metrics", 400, body)
    assert error.detail == told
    assert error.body == body
