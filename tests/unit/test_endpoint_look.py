"""What answers at the URL, before anything is asked of a model: each way to be wrong is told with its next step."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kimi_runbook.acceptance.endpoint import Options, Seen, checked
from kimi_runbook.acceptance.endpoint_look import look
from kimi_runbook.acceptance.plan import Access
from kimi_runbook.errors import RunbookError
from tests.faults.engine.fake_engine import MODEL, VERSION, FakeEngine, Fault

KEY = "sk-hunter2-0123456789"
MODELS = json.dumps({"object": "list", "data": [{"id": "k3"}, {"id": "k3-lora"}]})
METRICS = '# TYPE vllm:prefix_cache_queries_total counter\nvllm:prefix_cache_queries_total{engine="0"} 1\n'
Answers = dict[str, tuple[int, str, str]]
VLLM: Answers = {
    "/v1/models": (200, "application/json", MODELS),
    "/version": (200, "application/json", '{"version": "0.33.0"}'),
    "/metrics": (200, "text/plain; version=1.0.0", METRICS),
}
PAGE = (200, "text/html; charset=utf-8", "<!doctype html><title>Welcome</title>")


@contextmanager
def serving(answers: Answers, *, key: str = "", tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve fixed answers by path; "" answers for every other path; /v1 wants the key where there is one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, text = answers.get(self.path) or answers.get("") or (404, "text/plain", "not found")
            told = self.headers.get("Authorization", "")
            if key and self.path.startswith("/v1") and told != f"Bearer {key}":
                status, kind, text = 401, "application/json", json.dumps({"error": f"Unauthorized: {told}"})
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if 300 <= status < 400:
                self.send_header("Location", text)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing about handshakes that were refused on purpose."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def seen(url: str, *metrics: str, **access: str) -> Seen:
    return look(checked(Options(endpoint=url, metrics=metrics, access=Access(**access)), os.environ))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that nobody else trusts, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    file.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return file


def test_a_vllm_endpoint_says_what_it_is() -> None:
    with FakeEngine() as engine:
        assert seen(f"{engine.url}/v1") == Seen(models=(MODEL,), version=VERSION, engines=1, longest={MODEL: 4096})
        assert engine.requests == []


@pytest.mark.parametrize(("faults", "engines"), [((), 1), ((Fault.SECOND_ENGINE,), 2)])
def test_engines_are_counted_by_their_labels(faults: tuple[Fault, ...], engines: int) -> None:
    with FakeEngine(*faults) as engine:
        assert seen(engine.url).engines == engines


def test_several_metrics_urls_are_read() -> None:
    second = METRICS.replace('engine="0"', 'engine="1"')
    with serving(VLLM) as one, serving({"/metrics": (200, "text/plain", second)}) as other:
        assert seen(one, f"{one}/metrics", f"{other}/metrics").engines == 2
        assert seen(one).models == ("k3", "k3-lora")


def test_replicas_that_share_a_label_are_counted_apart() -> None:
    """Two servers behind a router are both engine 0: taken for one, half of the hits would seem to be missing."""
    with serving(VLLM) as one, serving(VLLM) as other:
        assert seen(one, f"{one}/metrics", f"{other}/metrics").engines == 2


def test_broken_metrics_are_the_engines_fault_and_left_to_the_chain() -> None:
    with FakeEngine(Fault.METRICS_500) as engine:
        looked = seen(engine.url)
    assert (looked.engines, looked.metrics_problem) == (None, "HTTP 500")


@pytest.mark.parametrize(
    ("answers", "where", "observed", "next_step"),
    [
        pytest.param({"": PAGE}, "/v1/models", "text/html, no JSON", "base URL", id="a-web-page"),
        pytest.param({}, "/v1/models", "HTTP 404", "base URL", id="something-else"),
        pytest.param(
            VLLM | {"/v1/models": (200, "application/json", "[]")}, "/v1/models", "a JSON list", "base URL", id="a-list"
        ),
        pytest.param(
            VLLM | {"/v1/models": (200, "application/json", "{}")},
            "/v1/models",
            "without a list of models",
            "base URL",
            id="no-models",
        ),
        pytest.param(
            VLLM | {"/version": (404, "text/plain", "")}, "/version", "HTTP 404", "router", id="a-router-for-v1-only"
        ),
        pytest.param(
            VLLM | {"/version": (200, "application/json", '{"build": 1}')},
            "/version",
            "JSON without a version",
            "base URL",
            id="another-server",
        ),
        pytest.param(
            VLLM | {"/v1/models": (503, "text/plain", "")}, "/v1/models", "HTTP 503", "Wait until", id="not-yet-up"
        ),
        pytest.param(
            VLLM | {"/v1/models": (308, "text/plain", "https://elsewhere/v1/models")},
            "/v1/models",
            "HTTP 308 to https://elsewhere/v1/models",
            "redirects are not followed",
            id="a-redirect",
        ),
        pytest.param(
            VLLM | {"/metrics": (404, "text/plain", "")}, "/metrics", "HTTP 404", "--metrics URL", id="no-metrics"
        ),
        pytest.param(VLLM | {"/metrics": PAGE}, "/metrics", "", "--metrics URL", id="metrics-are-a-page"),
        pytest.param(
            VLLM | {"/metrics": (200, "text/plain", "# TYPE up gauge\nup 1\n")},
            "/metrics",
            "1 metric families, none of them vLLM's",
            "--metrics URL",
            id="metrics-of-something-else",
        ),
    ],
)
def test_what_is_not_vllm_is_named(answers: Answers, where: str, observed: str, next_step: str) -> None:
    with serving(answers) as url, pytest.raises(RunbookError) as caught:
        seen(url)
    assert caught.value.where == f"GET {url}{where}"
    assert observed in caught.value.observed
    assert next_step in caught.value.next_step


def test_an_answer_that_cannot_be_read_is_no_closed_port() -> None:
    """A proxy that compresses unasked is reached: host and port are right."""
    with FakeEngine(Fault.GZIP_ANYWAY) as engine, pytest.raises(RunbookError, match="gzip") as caught:
        seen(engine.url)
    assert caught.value.expected == "an answer as HTTP and vLLM write it"
    assert "base URL" in caught.value.next_step


def test_a_closed_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RunbookError, match=r"(?i)refused; expected a connection\. Check host and port"):
        seen(f"http://127.0.0.1:{port}")


def test_a_key_is_sent_and_its_absence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(VLLM, key=KEY) as url:
        with pytest.raises(RunbookError, match=r"HTTP 401; expected HTTP 200\. Put the key into an environment"):
            seen(url)
        monkeypatch.setenv("TEST_VLLM_KEY", KEY)
        assert seen(url, api_key_env="TEST_VLLM_KEY").version == "0.33.0"
        monkeypatch.setenv("TEST_VLLM_KEY", f"{KEY}-old")
        with pytest.raises(RunbookError, match="The key in TEST_VLLM_KEY is not taken") as caught:
            seen(url, api_key_env="TEST_VLLM_KEY")
    assert KEY not in str(caught.value)


def test_a_certificate_nobody_trusts_is_told_from_a_wrong_scheme(certificate: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with serving(VLLM, tls=tls) as url:
        with pytest.raises(RunbookError, match=r"certificate is not trusted.*expected TLS with a certificate"):
            seen(url)
        assert seen(url, ca_file=str(certificate)).version == "0.33.0"
        with pytest.raises(RunbookError, match=r"expected an answer\. Compare http:// with what the port speaks"):
            seen(url.replace("https", "http"))
    with serving(VLLM) as url, pytest.raises(RunbookError, match=r"answers TLS with something else"):
        seen(url.replace("http", "https"))
