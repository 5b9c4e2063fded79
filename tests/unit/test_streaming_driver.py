"""Many requests at once: what is kept of them, and every way in which one can fail while the others go on."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Script,
    ScriptedServer,
    answering,
    chunk,
    closed_port,
    json_answer,
    read_request,
    word,
)

from kimi_runbook.acceptance.client import EngineClient, Outcome, PlannedRequest
from kimi_runbook.acceptance.http import (
    BadAnswerError,
    BadStatusError,
    ConnectionDroppedError,
    EngineError,
    NotReachableError,
    TimedOutError,
    TruncatedError,
)
from kimi_runbook.acceptance.null_server import NullServer, Phasing, Schedule
from kimi_runbook.acceptance.streaming import connection as connection_module
from kimi_runbook.acceptance.streaming.origin import idle_limit_s
from kimi_runbook.acceptance.streaming.wire import Head

VERSION = json_answer(b'{"version": "0.32.0"}')
END = chunk(DONE) + LAST_CHUNK
STREAM = STREAM_HEAD + word("Hel") + word("lo") + END
CHAT = {"model": "m", "messages": []}


def planned(count: int, **body: object) -> list[PlannedRequest]:
    return [
        PlannedRequest(label=f"r{number}", path="/v1/chat/completions", body={**CHAT, **body})
        for number in range(count)
    ]


def only(outcomes: tuple[Outcome, ...]) -> Outcome:
    assert len(outcomes) == 1
    return outcomes[0]


@pytest.fixture
def null_server() -> Iterator[str]:
    """A null server in a thread: 5 ms to the first token, 5 ms between tokens."""
    server = NullServer(Schedule(phasing=Phasing.ARRIVAL, first_token_ns=5_000_000, interval_ns=5_000_000))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.url
    server.stop()
    thread.join()


def test_a_load_keeps_every_outcome_in_order_and_never_exceeds_its_concurrency(null_server: str) -> None:
    told: list[tuple[int, int]] = []
    client = EngineClient(null_server, timeout_s=20)
    load = client.run(planned(20, max_tokens=10), concurrency=4, on_progress=lambda *done: told.append(done))
    assert [outcome.label for outcome in load.outcomes] == [f"r{number}" for number in range(20)]
    assert load.most_in_flight == 4
    assert told[-1] == (20, 20)
    answers = [outcome.answer for outcome in load.outcomes if outcome.answer is not None]
    assert [answer.chunks for answer in answers] == [10] * 20
    assert {len(answer.gaps_s) for answer in answers} == {9}
    for outcome in load.outcomes:
        assert outcome.answer is not None
        assert outcome.answer.usage is not None
        assert outcome.answer.usage.completion_tokens == 10
        assert 0 <= outcome.intended_s <= outcome.sent_s < outcome.ended_s <= load.wall_s
        assert outcome.answer.total_s == pytest.approx(outcome.ended_s - outcome.sent_s, abs=1e-6)
    # The server's schedule is the truth: first token after 5 ms, then one each 5 ms. It is late at times, never early.
    assert min(answer.first_token_s or 0 for answer in answers) > 0.0045
    assert sorted(gap for answer in answers for gap in answer.gaps_s)[90] == pytest.approx(0.005, abs=0.002)
    first, later = load.outcomes[:4], load.outcomes[4:]
    assert {outcome.intended_s for outcome in first} == {0.0}
    ends = {outcome.ended_s for outcome in load.outcomes}
    assert {outcome.intended_s for outcome in later} <= ends, "a place is free when its request has ended"


@pytest.mark.parametrize("source", ["kernel", "user"])
def test_a_client_that_is_held_up_says_so(monkeypatch: pytest.MonkeyPatch, null_server: str, source: str) -> None:
    """Every stream's text comes each 5 ms; what holds the loop up for 80 ms makes it read all of them late."""
    if source == "user":
        monkeypatch.setattr(connection_module, "ask_for_stamps", lambda _sock: None)
    client = EngineClient(null_server, timeout_s=20)
    requests = [*planned(1, max_tokens=2), *planned(7, max_tokens=60)]
    held_up = client.run(requests, concurrency=8, on_progress=lambda ended, _: time.sleep(0.08 if ended == 1 else 0))
    assert held_up.lag.source == source
    assert 0.05 < held_up.lag.max_s < 1
    assert held_up.lag.p99_s > 0.02, "one event in four came while the loop was held up"


def test_the_time_in_flight_is_the_union_over_all_threads(null_server: str) -> None:
    client = EngineClient(null_server, timeout_s=20)
    body = {**CHAT, "max_tokens": 20}
    since_s = time.monotonic()
    threads = [threading.Thread(target=client.stream_chat, args=(body,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    between_s = time.monotonic()
    client.version()
    until_s = time.monotonic()
    in_flight_s = client.in_flight_s(since_s, until_s)
    assert 0.1 <= in_flight_s <= between_s - since_s
    assert client.in_flight_s(between_s, until_s) == 0, "GET /version is no completion"
    assert client.in_flight_s(since_s, since_s + 0.05) <= 0.05


def test_a_request_still_in_flight_counts_up_to_now(null_server: str) -> None:
    client = EngineClient(null_server, timeout_s=20)
    since_s = time.monotonic()
    thread = threading.Thread(target=client.chat, args=({**CHAT, "max_tokens": 40},))
    thread.start()
    while client.in_flight_s(since_s, time.monotonic()) < 0.02:
        assert thread.is_alive(), "the request ended and was never seen in flight"
        thread.join(0.005)
    thread.join()


CLOSE = b"Connection: close"  # so that none of these connections is used again
CLOSING_HEAD = STREAM_HEAD[:-2] + CLOSE + b"\r\n\r\n"
FAILING: list[tuple[str, Script, type[EngineError], str]] = [
    ("no-final-chunk", answering(CLOSING_HEAD + word() + chunk(DONE)), TruncatedError, "without the final chunk"),
    ("no-done", answering(CLOSING_HEAD + word() + LAST_CHUNK), TruncatedError, r"after 1 events without \[DONE\]"),
    (
        "cut",
        answering(CLOSING_HEAD + word() + word()[:9]),
        TruncatedError,
        "closed by the server before the answer's end",
    ),
    ("cut-in-head", answering(CLOSING_HEAD[:20]), TruncatedError, "in the headers"),
    ("nothing", answering(b""), ConnectionDroppedError, "new connection was closed by the server"),
    ("not-http", answering(b"SSH-2.0-OpenSSH_9.2\r\n"), BadAnswerError, "SSH-2.0"),
    ("bad-chunk", answering(CLOSING_HEAD + b"zz\r\n\r\n\r\n"), BadAnswerError, "chunk size"),
    (
        "error-in-200",
        answering(json_answer(b'{"error": {"message": "dead"}}', CLOSE)),
        BadAnswerError,
        "inside a 200.*dead",
    ),
    (
        "error-event",
        answering(CLOSING_HEAD + word() + chunk(b'data: {"error": {"message": "dead"}}\n\n') + END),
        BadAnswerError,
        "error event inside the stream.*dead",
    ),
    (
        "named-error-event",
        answering(CLOSING_HEAD + chunk(b"event: error\ndata: dead\n\n") + END),
        BadAnswerError,
        "error event inside the stream.*dead",
    ),
    ("no-json", answering(CLOSING_HEAD + chunk(b"data: {\n\n") + END), BadAnswerError, "not JSON"),
    ("no-stream", answering(json_answer(b'{"choices": []}', CLOSE)), BadAnswerError, "where a stream was asked for"),
    ("status", answering(json_answer(b'{"error": 1}', CLOSE, status=b"503 No")), BadStatusError, "HTTP 503"),
    ("short-body", answering(b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\nabc"), TruncatedError, "3 bytes.*of the 9"),
]


@pytest.mark.parametrize(("script", "kind", "said"), [case[1:] for case in FAILING], ids=[case[0] for case in FAILING])
def test_a_failure_has_its_class_and_names_the_request(script: Script, kind: type[EngineError], said: str) -> None:
    with ScriptedServer(script, script, answering(CLOSING_HEAD + word() + END)) as server:
        client = EngineClient(server.url, timeout_s=5)
        with pytest.raises(kind, match=said) as caught:
            client.stream_chat(CHAT)
        assert type(caught.value) is kind
        load = client.run(planned(4), concurrency=1)
    assert caught.value.where == f"POST {server.url}/v1/chat/completions"
    failed, *others = load.outcomes
    assert type(failed.error) is kind
    assert failed.answer is None
    assert [outcome.answer.text for outcome in others if outcome.answer] == ["word"] * 3, "the others did not go on"


def test_a_broken_stream_keeps_what_had_come() -> None:
    script = answering(STREAM_HEAD + word("Hel") + word("lo"))
    with ScriptedServer(script) as server, pytest.raises(TruncatedError) as caught:
        EngineClient(server.url, timeout_s=5).stream_chat(CHAT)
    partial = caught.value.partial
    assert partial is not None
    assert (partial.text, partial.chunks, partial.finish_reason) == ("Hello", 2, None)
    assert partial.first_token_s is not None


def dripping(interval_s: float, most: int) -> Script:
    """Return a script that sends a word at intervals, until the client has had enough or so many are out."""

    def script(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(STREAM_HEAD)
        for _ in range(most):
            sock.sendall(word())
            time.sleep(interval_s)
        sock.recv(1)

    return script


@pytest.mark.parametrize(
    ("words", "stalled", "said"),
    [
        pytest.param(100, False, "slow: .* bytes", id="slow"),
        pytest.param(2, True, r"stalled: \d+ bytes of the answer within 0.5 s, the last one", id="stalled"),
        pytest.param(0, True, "stalled: headers and nothing else within 0.5 s", id="stalled-before-the-first"),
    ],
)
def test_a_deadline_tells_a_stall_from_a_slow_answer(words: int, stalled: bool, said: str) -> None:
    with ScriptedServer(dripping(0.02, words)) as server:
        began_s = time.monotonic()
        with pytest.raises(TimedOutError, match=said) as caught:
            EngineClient(server.url, timeout_s=0.5).stream_chat(CHAT)
        took_s = time.monotonic() - began_s
    assert 0.5 <= took_s < 1.5
    assert caught.value.stalled is stalled
    if words:
        assert caught.value.last_byte_s is not None
        assert (caught.value.last_byte_s < 0.3) is stalled
        assert caught.value.partial is not None
        assert caught.value.partial.chunks == (2 if stalled else caught.value.partial.chunks)
    else:
        assert caught.value.last_byte_s is None


def test_a_request_that_times_out_leaves_the_others_whole() -> None:
    with ScriptedServer(dripping(0.01, 1), answering(STREAM, STREAM, STREAM)) as server:
        load = EngineClient(server.url).run(planned(3), concurrency=2, timeout_s=0.3)
    assert sorted(type(outcome.error).__name__ for outcome in load.outcomes) == [
        "NoneType",
        "NoneType",
        "TimedOutError",
    ]
    assert load.wall_s < 1


def test_a_kept_connection_is_used_again() -> None:
    with ScriptedServer(answering(VERSION, STREAM, STREAM, STREAM)) as server:
        client = EngineClient(server.url, timeout_s=5)
        client.version()
        client.stream_chat(CHAT)
        assert len(client.run(planned(2), concurrency=1).outcomes) == 2
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(json_answer(b'{"version": "1"}', b"Connection: close"), id="said-so"),
        pytest.param(b'HTTP/1.1 200 OK\r\n\r\n{"version": "1"}', id="ends-with-the-connection"),
    ],
)
def test_a_connection_that_may_not_be_used_again_is_not(answer: bytes) -> None:
    with ScriptedServer(answering(answer)) as server:
        client = EngineClient(server.url, timeout_s=5)
        assert [client.version(), client.version()] == ["1", "1"]
    assert server.connections == 2


@pytest.mark.parametrize(("told_s", "connections"), [(1, 2), (5, 1)])
def test_a_connection_the_server_keeps_for_too_short_is_not_used_again(told_s: int, connections: int) -> None:
    answer = json_answer(b'{"version": "1"}', b"Keep-Alive: timeout=%d" % told_s)
    with ScriptedServer(answering(answer, answer)) as server:
        client = EngineClient(server.url, timeout_s=5)
        assert [client.version(), client.version()] == ["1", "1"]
    assert server.connections == connections


@pytest.mark.parametrize(
    ("told", "limit_s"),
    [("", 4), ("timeout=5, max=100", 4), ("timeout=3", 2), ("max=9, Timeout=2", 1), ("timeout=60", 4)],
)
def test_an_idle_connection_is_given_up_before_the_server_closes_it(told: str, limit_s: float) -> None:
    headers = {"keep-alive": told} if told else {}
    assert idle_limit_s(Head(status=200, headers=headers, length=0, chunked=False, keep_alive=True)) == limit_s
    assert idle_limit_s(None) == 4  # vLLM closes after 5 s


def test_a_connection_closed_while_idle_costs_nothing() -> None:
    with ScriptedServer(answering(VERSION), answering(STREAM)) as server:
        client = EngineClient(server.url, timeout_s=5)
        client.version()
        assert server.ended.wait(5)
        assert client.stream_chat(CHAT).text == "Hello"
    assert server.connections == 2


def closing_on_the_second(sock: socket.socket) -> None:
    """Answer one request, read another one, and leave."""
    answering(VERSION)(sock)
    read_request(sock)


def test_a_post_over_a_connection_closed_at_that_moment_is_told_and_not_repeated() -> None:
    with ScriptedServer(closing_on_the_second, answering(STREAM)) as server:
        client = EngineClient(server.url, timeout_s=5)
        client.version()
        with pytest.raises(ConnectionDroppedError, match=r"idle for 0\.\d+ s.*keep-alive") as caught:
            client.chat(CHAT)
    assert caught.value.reused
    assert 0 < caught.value.idle_s < 4
    assert server.connections == 1, "the request was sent again"


def test_a_get_over_a_connection_closed_at_that_moment_is_sent_again() -> None:
    with ScriptedServer(closing_on_the_second, answering(VERSION)) as server:
        client = EngineClient(server.url, timeout_s=5)
        assert [client.version(), client.version()] == ["0.32.0", "0.32.0"]
    assert server.connections == 2


def test_a_load_over_connections_the_server_closes_says_so_once_each() -> None:
    def script(sock: socket.socket) -> None:
        answering(STREAM)(sock)
        read_request(sock)

    with ScriptedServer(script) as server:
        load = EngineClient(server.url, timeout_s=5).run(planned(4), concurrency=1)
    kinds = [type(outcome.error) for outcome in load.outcomes]
    assert kinds == [type(None), ConnectionDroppedError, type(None), ConnectionDroppedError]
    assert server.connections == 2


def test_a_server_that_closes_each_new_connection_is_given_up() -> None:
    def closes(sock: socket.socket) -> None:
        sock.shutdown(socket.SHUT_RDWR)

    with ScriptedServer(closes) as server, pytest.raises(EngineError) as caught:
        EngineClient(server.url, timeout_s=5).version()
    assert isinstance(caught.value, NotReachableError | ConnectionDroppedError)


def test_an_answer_before_the_request_was_read_is_an_answer() -> None:
    def refuses(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(json_answer(b'{"error": {"message": "too large"}}', status=b"413 Content Too Large"))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass

    with ScriptedServer(refuses) as server, pytest.raises(BadStatusError, match=r"413.*too large"):
        EngineClient(server.url, timeout_s=10).chat({**CHAT, "pad": "x" * 8_000_000})


def test_requests_to_a_closed_port_all_fail_and_end() -> None:
    with closed_port() as port:
        load = EngineClient(f"http://127.0.0.1:{port}", timeout_s=5).run(planned(200), concurrency=8)
    assert {type(outcome.error) for outcome in load.outcomes} == {NotReachableError}
    assert all(outcome.intended_s <= outcome.sent_s == outcome.ended_s for outcome in load.outcomes)
    assert (load.most_in_flight, load.lag.samples) == (0, 0)


def test_no_request_is_a_load_too() -> None:
    load = EngineClient("http://127.0.0.1:9").run([], concurrency=8)
    assert (load.outcomes, load.most_in_flight) == ((), 0)


def test_512_streams_at_once_with_a_low_limit_of_open_files() -> None:
    command = [sys.executable, "-m", "kimi_runbook.acceptance.null_server", "--interval-ms", "50"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split('"')[3]
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            load = EngineClient(url, timeout_s=60).run(planned(512, max_tokens=20), concurrency=512)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            server.terminate()
    assert [str(outcome.error) for outcome in load.outcomes if outcome.error] == []
    assert load.most_in_flight == 512
    assert {outcome.answer.chunks for outcome in load.outcomes if outcome.answer} == {20}


def test_more_connections_than_the_hard_limit_allows_are_refused_before_anything_is_sent() -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from kimi_runbook.acceptance.client import EngineClient, PlannedRequest\n"
        "one = PlannedRequest(label='x', path='/v1/completions', body={})\n"
        "EngineClient('http://127.0.0.1:9').run([one] * 512, concurrency=512)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RunbookError: 512 connections at once: this process may open 200 files" in done.stderr


def test_less_than_one_at_once_is_no_concurrency() -> None:
    with pytest.raises(ValueError, match="concurrency is 0"):
        EngineClient("http://127.0.0.1:9").run(planned(1), concurrency=0)


@pytest.mark.parametrize("what", ["run", "stream_chat"])
def test_an_interrupt_gets_through_at_once_and_closes_the_connections(what: str) -> None:
    with ScriptedServer(dripping(0.02, 10_000)) as server:
        client = EngineClient(server.url, timeout_s=60)
        ask = (lambda: client.run(planned(3), concurrency=3)) if what == "run" else (lambda: client.stream_chat(CHAT))
        since_s = time.monotonic()
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ask()
        took_s = time.monotonic() - since_s
        timer.join()
        assert 0.2 <= took_s < 0.7
        assert server.ended.wait(5), "a connection was left open"
        stopped_s = time.monotonic()
        assert client.in_flight_s(since_s, stopped_s) == pytest.approx(took_s, abs=0.3)
        assert client.in_flight_s(stopped_s, stopped_s + 1) == 0


def test_threads_share_a_client(null_server: str) -> None:
    client = EngineClient(null_server, timeout_s=20)
    texts: list[str] = []

    def ask() -> None:
        for _ in range(5):
            texts.append(client.stream_chat({**CHAT, "max_tokens": 3}).text)
            texts.append(client.chat({**CHAT, "max_tokens": 3}).text)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [" word word word"] * 80


def test_a_client_that_is_dropped_leaves_no_descriptor_open(null_server: str) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    client = EngineClient(null_server, timeout_s=20)
    client.run(planned(8, max_tokens=2), concurrency=8)
    assert descriptors() > before, "no connection was kept"
    client.close()
    del client
    deadline_s = time.monotonic() + 5
    while descriptors() > before and time.monotonic() < deadline_s:  # the server's ends close when it reads the news
        threading.Event().wait(0.01)
    assert descriptors() <= before
