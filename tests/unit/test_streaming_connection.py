"""Connections: certificates, proxies, keys, names; and what is said when one cannot be had."""

import contextlib
import select
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Ca,
    Script,
    ScriptedServer,
    answering,
    chunk,
    closed_port,
    json_answer,
    make_ca,
    read_request,
    word,
)

from kimi_runbook.acceptance.client import EngineClient, PlannedRequest
from kimi_runbook.acceptance.http import (
    BadAnswerError,
    BadStatusError,
    ConnectionDroppedError,
    NotReachableError,
    TimedOutError,
    fetch,
)
from kimi_runbook.acceptance.plan import Access
from kimi_runbook.acceptance.streaming import connection as connection_module
from kimi_runbook.acceptance.streaming.origin import Origin
from kimi_runbook.errors import RunbookError

VERSION = json_answer(b'{"version": "0.32.0"}')
STREAM = STREAM_HEAD + word("Hel") + word("lo") + chunk(DONE) + LAST_CHUNK
CHAT = {"model": "m", "messages": []}
KEY = "sk-very-secret"
PLANNED = PlannedRequest(label="one", path="/v1/chat/completions", body=CHAT)


@pytest.fixture
def ca(tmp_path: Path) -> Ca:
    return make_ca(tmp_path / "ca")


def test_tls_with_a_ca_of_ones_own(ca: Ca) -> None:
    with ScriptedServer(answering(VERSION, STREAM, STREAM), tls=ca.server) as server:
        client = EngineClient(server.url, timeout_s=5, access=Access(ca_file=str(ca.file)))
        assert client.version() == "0.32.0"
        assert client.stream_chat(CHAT).text == "Hello"
        load = client.run([PLANNED], concurrency=1)
    assert server.connections == 1, "a kept TLS connection was not used again"
    answer = load.outcomes[0].answer
    assert answer is not None
    assert answer.text == "Hello"
    assert load.lag.samples > 0


def test_a_large_request_and_a_large_answer_over_tls(ca: Ca) -> None:
    large = b'{"version": "%b"}' % (b"x" * 3_000_000)
    received: list[int] = []

    def script(sock: socket.socket) -> None:
        received.append(len(read_request(sock)[1]))
        sock.sendall(json_answer(large))

    with ScriptedServer(script, tls=ca.server) as server:
        response = fetch(
            "POST", f"{server.url}/x", body=b"y" * 3_000_000, timeout_s=20, access=Access(ca_file=str(ca.file))
        )
    assert received == [3_000_000]
    assert response.body == large


def test_a_wrong_ca_is_refused_with_its_remedy(ca: Ca, tmp_path: Path) -> None:
    other = make_ca(tmp_path / "other", name="another CA")
    for trusted in (str(other.file), ""):
        with ScriptedServer(answering(VERSION), tls=ca.server) as server:
            client = EngineClient(server.url, timeout_s=5, access=Access(ca_file=trusted))
            with pytest.raises(NotReachableError, match=r"not trusted.*--ca-file") as caught:
                client.version()
            assert caught.value.where == f"GET {server.url}/version"


def test_a_certificate_for_another_name_is_refused_with_its_remedy(tmp_path: Path) -> None:
    ca = make_ca(tmp_path / "ca", server_name="engine.example")
    with ScriptedServer(answering(VERSION), tls=ca.server) as server:
        client = EngineClient(server.url, timeout_s=5, access=Access(ca_file=str(ca.file)))
        with pytest.raises(NotReachableError, match=r"not for 127\.0\.0\.1.*in the URL"):
            client.version()


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_ca_file_that_is_none_is_told_before_anything_is_sent(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RunbookError, match="cannot be used as CA file") as caught:
        EngineClient("https://127.0.0.1:1", access=Access(ca_file=str(file)))
    assert caught.value.where == str(file)


def test_http_asked_of_a_tls_port_names_the_scheme(ca: Ca) -> None:
    told = pytest.raises(ConnectionDroppedError, match="does not speak http there")
    with ScriptedServer(answering(VERSION), tls=ca.server) as server, told:
        EngineClient(server.url.replace("https", "http"), timeout_s=5).version()

    def alerts(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(b"\x15\x03\x01\x00\x02\x02\x46")

    with ScriptedServer(alerts) as server, pytest.raises(BadAnswerError, match="use https://"):
        EngineClient(server.url, timeout_s=5).version()


def test_tls_asked_of_a_plain_port_names_the_scheme(ca: Ca) -> None:
    def says_hello(sock: socket.socket) -> None:
        sock.recv(1)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with ScriptedServer(says_hello) as server:
        client = EngineClient(server.url.replace("http", "https"), timeout_s=5, access=Access(ca_file=str(ca.file)))
        with pytest.raises(NotReachableError, match="use http:// in the URL"):
            client.version()


def test_a_handshake_that_never_ends_runs_into_the_deadline(ca: Ca) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimedOutError, match="TLS handshake"):
            EngineClient(url, timeout_s=0.2, access=Access(ca_file=str(ca.file))).version()


def test_a_server_that_leaves_during_the_handshake_is_named(ca: Ca) -> None:
    def leaves(sock: socket.socket) -> None:
        sock.recv(1 << 16)

    with ScriptedServer(leaves) as server:
        client = EngineClient(server.url.replace("http", "https"), timeout_s=5, access=Access(ca_file=str(ca.file)))
        with pytest.raises(NotReachableError, match="TLS handshake"):
            client.version()


def test_http_goes_through_a_proxy_in_absolute_form() -> None:
    heads: list[bytes] = []

    def proxy(sock: socket.socket) -> None:
        while True:
            heads.append(read_request(sock)[0])
            sock.sendall(VERSION)

    with ScriptedServer(proxy) as server:
        client = EngineClient("http://engine.invalid:8000", timeout_s=5, access=Access(proxy=server.url))
        assert client.version() == "0.32.0"
    lines = heads[0].split(b"\r\n")
    assert lines[0] == b"GET http://engine.invalid:8000/version HTTP/1.1"
    assert b"Host: engine.invalid:8000" in lines


def tunnel(port: int, asked: list[bytes], *, wait_s: float = 0) -> Script:
    """Return a proxy's script that connects to a port, whatever it is asked for, and carries bytes both ways."""

    def script(sock: socket.socket) -> None:
        asked.append(read_request(sock)[0].split(b"\r\n")[0])
        time.sleep(wait_s)
        sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with socket.create_connection(("127.0.0.1", port)) as onward:
            while True:
                ready, _, _ = select.select([sock, onward], [], [])
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    (onward if source is sock else sock).sendall(data)

    return script


def test_https_goes_through_a_proxy_as_a_tunnel(ca: Ca) -> None:
    asked: list[bytes] = []
    with (
        ScriptedServer(answering(VERSION, STREAM), tls=ca.server) as server,
        ScriptedServer(tunnel(server.port, asked)) as hop,
    ):
        client = EngineClient(server.url, timeout_s=5, access=Access(ca_file=str(ca.file), proxy=hop.url))
        assert client.version() == "0.32.0"
        assert client.stream_chat(CHAT).text == "Hello"
    assert asked == [b"CONNECT 127.0.0.1:%d HTTP/1.1" % server.port]


def test_a_connection_closed_before_the_common_start_is_opened_again(ca: Ca) -> None:
    """The first connection stands and is closed while the second one is still being opened."""
    with (
        ScriptedServer(answering(STREAM), tls=ca.server) as good,
        ScriptedServer(answering(), tls=ca.server) as closing,
        ScriptedServer(tunnel(closing.port, []), tunnel(good.port, [], wait_s=0.5), tunnel(good.port, [])) as hop,
    ):
        client = EngineClient(good.url, timeout_s=10, access=Access(ca_file=str(ca.file), proxy=hop.url))
        load = client.run([PLANNED] * 2, concurrency=2)
    assert [str(outcome.error) for outcome in load.outcomes if outcome.error] == []
    assert (closing.connections, good.connections, load.most_in_flight) == (1, 2, 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(b"HTTP/1.1 403 Forbidden\r\n\r\n", "CONNECT engine.invalid:8443 with HTTP 403", id="refused"),
        pytest.param(b"", "closed the connection", id="closed"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "SSH-2.0", id="no-proxy"),
    ],
)
def test_a_proxy_that_does_not_connect_is_named(answer: bytes, said: str) -> None:
    with ScriptedServer(answering(answer)) as hop:
        client = EngineClient("https://engine.invalid:8443", timeout_s=5, access=Access(proxy=hop.url))
        with pytest.raises(NotReachableError, match=said):
            client.version()


def test_a_proxy_that_is_not_there_is_named() -> None:
    with closed_port() as port:
        client = EngineClient("http://engine.invalid", access=Access(proxy=f"http://127.0.0.1:{port}"))
        with pytest.raises(NotReachableError, match=f"proxy 127.0.0.1:{port}: Connection refused"):
            client.version()


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with ScriptedServer(answering(VERSION)) as server:
        assert EngineClient(server.url).version() == "0.32.0"


@pytest.mark.parametrize("proxy", ["https://proxy:3128", "proxy:3128", "http://user:pass@proxy:3128", "http://p/path"])
def test_a_proxy_that_cannot_be_used_is_told_before_anything_is_sent(proxy: str) -> None:
    with pytest.raises(RunbookError) as caught:
        EngineClient("http://127.0.0.1:1", access=Access(proxy=proxy))
    assert "pass" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    "url",
    [
        "engine:8000",
        "ftp://engine",
        "http://",
        "http://engine:port",
        "http://engine:99999",
        "http://b\u00fccher",
        "https://.engine",
        "http://a b",
    ],
)
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(RunbookError, match="is no URL"):
        EngineClient(url)
    with pytest.raises(RunbookError, match="is no URL"):
        fetch("GET", url, timeout_s=1)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(RunbookError, match="api_key_env") as caught:
        EngineClient("http://user:hunter2@engine:8000")
    assert "hunter2" not in str(caught.value)


def test_the_key_of_the_environment_goes_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", f" {KEY}\n")
    heads: list[bytes] = []

    def script(sock: socket.socket) -> None:
        for answer in (VERSION, STREAM, STREAM):
            heads.append(read_request(sock)[0])
            sock.sendall(answer)

    with ScriptedServer(script) as server:
        client = EngineClient(server.url, timeout_s=5, access=Access(api_key_env="ENGINE_KEY"))
        client.version()
        client.stream_chat(CHAT)
        client.run([PLANNED], concurrency=1)
    assert [b"Authorization: Bearer sk-very-secret" in head.split(b"\r\n") for head in heads] == [True] * 3


@pytest.mark.parametrize("value", [None, "", "  ", "two\nlines", "\u20ac"])
def test_a_missing_key_is_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("ENGINE_KEY", value)
    access = Access(api_key_env="ENGINE_KEY")
    with ScriptedServer(answering(VERSION)) as server:
        for ask in (lambda: EngineClient(server.url, access=access), lambda: _fetch(server.url, access)):
            with pytest.raises(RunbookError, match="ENGINE_KEY") as caught:
                ask()
            assert value is None or value.strip() == "" or value.strip() not in str(caught.value)
    assert server.connections == 0


def _fetch(url: str, access: Access) -> None:
    fetch("GET", url, timeout_s=5, access=access)


def test_the_key_is_in_no_error_however_the_server_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    told = b'{"error": {"message": "Incorrect API key provided: %b"}}' % KEY.encode()
    refusal = json_answer(told, status=b"401 Unauthorized")
    in_stream = STREAM_HEAD + word() + chunk(b"data: %b\n\n" % told) + chunk(DONE) + LAST_CHUNK
    answers = [refusal, refusal, json_answer(told), json_answer(told), in_stream, json_answer(KEY.encode()), refusal]
    seen: list[str] = []
    with ScriptedServer(answering(*answers)) as server:
        client = EngineClient(server.url, timeout_s=5, access=Access(api_key_env="ENGINE_KEY"))
        for ask, kind in (
            (client.chat, BadStatusError),
            (client.stream_chat, BadStatusError),
            (client.chat, BadAnswerError),
            (client.stream_chat, BadAnswerError),
            (client.stream_chat, BadAnswerError),
            (client.chat, BadAnswerError),
        ):
            with pytest.raises(kind) as caught:
                ask(CHAT)
            seen += ["".join(traceback.format_exception(caught.value)), repr(caught.value), repr(vars(caught.value))]
        response = client.raw("POST", "/v1/chat/completions", CHAT)
        seen += [repr(response), response.body.decode()]
        run = client.send([PLANNED], concurrency=1)  # the script has ended: the connection is dropped
        seen += [repr(client), repr(run), repr(client.read([PLANNED], run))]
    assert [text for text in seen if KEY in text] == []
    assert any("Incorrect API key provided: [API key]" in text for text in seen)


@pytest.mark.parametrize("name", ["engine.invalid", f"{'x' * 64}.invalid"])
def test_a_name_without_an_address_is_not_reachable(name: str) -> None:
    with pytest.raises(NotReachableError, match=f"{name} has no address"):
        EngineClient(f"http://{name}:8000").version()


def test_the_next_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(answering(VERSION, VERSION), answering(VERSION)) as server, closed_port() as port:
        refusing = (socket.AF_INET, ("127.0.0.1", port))
        answering_one = (socket.AF_INET, ("127.0.0.1", server.port))
        unusable = (socket.AF_INET6, ("ff0e::1", server.port, 0, 0))
        origin = Origin(server.url)
        monkeypatch.setattr(origin, "_resolved", (float("inf"), [unusable, refusing, answering_one]))
        client = EngineClient(server.url, timeout_s=5)
        monkeypatch.setattr(client, "_origin", origin)
        assert client.version() == "0.32.0"
        assert origin.addresses(1)[0] == answering_one, "the address that answered is not the first one from now on"


def test_an_address_that_does_not_answer_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(answering(VERSION)) as server, _full_backlog() as silent:
        origin = Origin(server.url)
        addresses = [(socket.AF_INET, ("127.0.0.1", port)) for port in (silent, server.port)]
        monkeypatch.setattr(origin, "_resolved", (float("inf"), addresses))
        client = EngineClient(server.url, timeout_s=10)
        monkeypatch.setattr(client, "_origin", origin)
        assert client.version() == "0.32.0"
        with pytest.raises(TimedOutError, match="no connection within"):
            EngineClient(f"http://127.0.0.1:{silent}", timeout_s=0.2).version()


@contextlib.contextmanager
def _full_backlog() -> Iterator[int]:
    """Give a port that answers no SYN: nobody accepts, and as many as may wait do."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_kernel_that_does_not_stamp_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [PLANNED] * 2
    with ScriptedServer(answering(STREAM, STREAM)) as server:
        stamped = EngineClient(server.url, timeout_s=5).run(requests, concurrency=1)
    monkeypatch.setattr(connection_module, "ask_for_stamps", lambda _sock: None)
    with ScriptedServer(answering(STREAM, STREAM)) as server:
        unstamped = EngineClient(server.url, timeout_s=5).run(requests, concurrency=1)
    assert (stamped.lag.source, unstamped.lag.source) == ("kernel", "user")
    for lag in (stamped.lag, unstamped.lag):
        assert lag.samples > 0
        assert 0 <= lag.p50_s <= lag.p99_s <= lag.max_s < 1
