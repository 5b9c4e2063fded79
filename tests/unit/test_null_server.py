"""The null server: its schedule, its API, its word on itself."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kimi_runbook.acceptance.client import EngineClient, PlannedRequest
from kimi_runbook.acceptance.http import BadStatusError
from kimi_runbook.acceptance.null_server import NullServer, Phasing, Schedule

MS = 1_000_000
CHAT = {"model": "null", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[NullServer]:
    """A running server; the parameter is its phasing."""
    phasing = getattr(request, "param", Phasing.ARRIVAL)
    made = NullServer(Schedule(phasing=phasing, first_token_ns=10 * MS, interval_ns=10 * MS))
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join()


@pytest.mark.parametrize(
    ("phasing", "read_ns", "token", "due_ns"),
    [
        (Phasing.ARRIVAL, 1003, 0, 1023),
        (Phasing.ARRIVAL, 1003, 7, 1093),
        (Phasing.STEP, 1003, 0, 1030),
        (Phasing.STEP, 1009, 0, 1030),
        (Phasing.STEP, 1010, 0, 1030),
        (Phasing.STEP, 1011, 2, 1060),
    ],
)
def test_a_schedule_is_absolute_and_a_step_falls_on_the_grid(
    phasing: Phasing, read_ns: int, token: int, due_ns: int
) -> None:
    assert Schedule(phasing=phasing, first_token_ns=20, interval_ns=10).due_ns(read_ns, token) == due_ns


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streamed_and_whole_answers_are_the_same(server: NullServer, path: str) -> None:
    client = EngineClient(server.url, timeout_s=10)
    body = {**CHAT, "prompt": "hi", "max_tokens": 3}
    whole, streamed = (
        (client.chat(body), client.stream_chat(body))
        if "chat" in path
        else (client.complete(body), client.stream_complete(body))
    )
    assert whole.text == streamed.text == " word word word"
    assert streamed.chunks == 3
    for answer in (whole, streamed):
        assert answer.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        assert answer.total_s >= 0.03


def test_the_other_routes(server: NullServer) -> None:
    client = EngineClient(server.url, timeout_s=10)
    assert (client.health(), client.version()) == (200, "null")
    assert [card.name for card in client.models()] == ["null"]
    assert client.raw("GET", "/nothing").status == 404


@pytest.mark.parametrize("body", [{"max_tokens": -1}, {"max_tokens": "many"}, [1]])
def test_a_bad_request_is_refused(server: NullServer, body: Any) -> None:
    assert EngineClient(server.url, timeout_s=10).raw("POST", "/v1/completions", body).status == 400
    with pytest.raises(BadStatusError):
        EngineClient(server.url, timeout_s=10).stream_chat({**CHAT, "max_tokens": -1})


@pytest.mark.parametrize("server", list(Phasing), indirect=True)
def test_events_come_on_schedule_and_carry_their_stamps(server: NullServer) -> None:
    client = EngineClient(server.url, timeout_s=10)
    planned = [
        PlannedRequest(label=str(n), path="/v1/chat/completions", body={**CHAT, "max_tokens": 8}) for n in range(4)
    ]
    run = client.send(planned, concurrency=4)
    schedule = server._schedule
    for exchange in run.exchanges:
        stamps = [
            [int(stamp) for stamp in json.loads(event.data)["system_fingerprint"].split("-")]
            for event in exchange.events()
            if b"system_fingerprint" in event.data
        ]
        assert len(stamps) == 8
        assert len({arrived_ns for arrived_ns, _ in stamps}) == 1
        arrived_ns = stamps[0][0]
        assert exchange.sent_ns <= arrived_ns <= exchange.sent_ns + 100 * MS
        sent_ns = [sent for _, sent in stamps]
        assert sent_ns[0] >= arrived_ns + schedule.first_token_ns
        if schedule.phasing is Phasing.STEP:
            assert min(sent % schedule.interval_ns for sent in sent_ns) < 2 * MS, "not on the grid"
        # Absolute: the last token is due seven intervals after the first, whatever happened between.
        assert sent_ns[-1] - sent_ns[0] == pytest.approx(7 * schedule.interval_ns, abs=8 * MS)
    told = server.report()
    assert (told["requests"], told["events"], told["phasing"]) == (4, 32, str(schedule.phasing))
    assert 0 <= told["late_ms"]["p50"] <= told["late_ms"]["p99"] <= told["late_ms"]["max"]


def test_requests_cut_anywhere_and_two_at_once_are_answered_in_turn(server: NullServer) -> None:
    body = b'{"max_tokens": 1}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        for byte in request[:-1]:
            sock.sendall(bytes([byte]))
        sock.sendall(request[-1:] + request + b"GET /version HTTP/1.1\r\n\r\n")
        received = b""
        while b'"version"' not in received:
            received += sock.recv(65536)
    assert received.count(b" word") == 2


def test_a_client_that_leaves_and_one_that_does_not_read_hold_nobody_up(server: NullServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    asked = json.dumps({"stream": True, "max_tokens": 10_000}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(asked), asked)
    leaving = socket.create_connection((host, int(port)))
    leaving.sendall(request)
    leaving.close()
    with socket.create_connection((host, int(port))) as lazy:
        lazy.sendall(request)
        answer = EngineClient(server.url, timeout_s=10).stream_chat({**CHAT, "max_tokens": 5})
    assert answer.chunks == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_reports_its_lateness_when_it_is_stopped(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "kimi_runbook.acceptance.null_server", "--phasing", "step", "--interval-ms", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            url = json.loads(program.stdout.readline())["url"]
            since_s = time.monotonic()
            assert EngineClient(url, timeout_s=10).stream_chat({**CHAT, "max_tokens": 10}).chunks == 10
            assert time.monotonic() - since_s >= 0.06
            program.send_signal(number)
            told = json.loads(program.stdout.readline())
            assert program.wait(5) == 0
        finally:
            program.kill()
    assert (told["requests"], told["events"]) == (1, 10)
    assert told["late_ms"]["max"] >= told["late_ms"]["p50"] >= 0
