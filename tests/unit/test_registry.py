"""The registry client against a real HTTP server that behaves, misbehaves, or asks for a token."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from lock_cases import image_index, image_manifest

from kimi_runbook.errors import RunbookError
from kimi_runbook.image_index import manifest_from_documents
from kimi_runbook.registry import INDEX_TYPES, MANIFEST_TYPES, _split, fetch_manifest, verify_image

OCI_INDEX, DOCKER_LIST = INDEX_TYPES
OCI_MANIFEST, DOCKER_MANIFEST = MANIFEST_TYPES


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


class Registry:
    """Content by path, and what to do wrong."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.content: dict[str, tuple[str, bytes]] = {}
        self.asked: list[str] = []
        self.token: str | None = None
        self.realm_path = "/token"
        self.announce: str | None = None

    @property
    def repository(self) -> str:
        return f"{self.host}/vllm/vllm-openai"

    def put(self, kind: str, content: dict[str, Any], media_type: str, *names: str) -> str:
        data = json.dumps(content).encode()
        for name in (digest(data), *names):
            self.content[f"/v2/vllm/vllm-openai/{kind}/{name}"] = (media_type, data)
        return digest(data)

    def put_image(
        self, architecture: str, *names: str, media_type: str = OCI_MANIFEST, layers: tuple[int, ...] = (7, 5)
    ) -> str:
        config = self.put("blobs", {"architecture": architecture, "os": "linux"}, "application/octet-stream")
        manifest = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": {"digest": config, "size": 1},
            "layers": [{"digest": "sha256:0", "size": size} for size in layers],
        }
        return self.put("manifests", manifest, media_type, *names)

    def put_index(
        self, *names: str, media_type: str = OCI_INDEX, architectures: tuple[str, ...] = ("amd64", "arm64")
    ) -> str:
        entries = [
            {"digest": self.put_image(name, layers=(n + 1, 10)), "platform": {"architecture": name, "os": "linux"}}
            for n, name in enumerate(architectures)
        ]
        attestation = {"digest": "sha256:" + "0" * 64, "platform": {"architecture": "unknown", "os": "unknown"}}
        index = {"schemaVersion": 2, "mediaType": media_type, "manifests": [*entries, attestation]}
        return self.put("manifests", index, media_type, *names)


def handler_of(registry: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            registry.asked.append(self.path)
            if registry.token and self.path.startswith(registry.realm_path):
                return self._send(200, "application/json", json.dumps({"token": registry.token}).encode())
            if registry.token and self.headers.get("Authorization") != f"Bearer {registry.token}":
                challenge = (
                    f'Bearer realm="http://{registry.host}{registry.realm_path}",'
                    'service="test",scope="repository:vllm/vllm-openai:pull"'
                )
                return self._send(401, "application/json", b"{}", {"WWW-Authenticate": challenge})
            if self.path not in registry.content:
                body = json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "unknown"}]}).encode()
                return self._send(404, "application/json", body)
            media_type, data = registry.content[self.path]
            announced = {"Docker-Content-Digest": registry.announce} if registry.announce else {}
            return self._send(200, media_type, data, announced)

        def _send(self, status: int, media_type: str, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a plain-HTTP registry must be reached past any proxy
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    registry = Registry(f"127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = handler_of(registry)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield registry
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("media_type", INDEX_TYPES)
def test_index(registry: Registry, media_type: str) -> None:
    pinned = registry.put_index("v1", media_type=media_type)
    manifest = fetch_manifest(registry.repository, "v1", insecure=True)
    assert (manifest.digest, manifest.media_type) == (pinned, media_type)
    assert set(manifest.manifests) == {"amd64", "arm64"}
    assert manifest.sizes == {"amd64": 11, "arm64": 12}
    assert fetch_manifest(registry.repository, pinned, insecure=True) == manifest


@pytest.mark.parametrize("media_type", MANIFEST_TYPES)
def test_single_manifest_takes_its_architecture_from_the_config(registry: Registry, media_type: str) -> None:
    pinned = registry.put_image("arm64", "v1", media_type=media_type)
    manifest = fetch_manifest(registry.repository, "v1", insecure=True)
    assert manifest.manifests == {"arm64": pinned}
    assert manifest.sizes == {"arm64": 12}


def test_token_flow(registry: Registry) -> None:
    registry.token = "anonymous"  # noqa: S105 - handed to anyone who asks
    pinned = registry.put_index("v1")
    assert fetch_manifest(registry.repository, "v1", insecure=True).digest == pinned
    tokens = [path for path in registry.asked if path.startswith("/token")]
    assert tokens == ["/token?service=test&scope=repository%3Avllm%2Fvllm-openai%3Apull"]


def test_unknown_reference(registry: Registry) -> None:
    with pytest.raises(RunbookError, match=r"no such image \(404\)"):
        fetch_manifest(registry.repository, "absent", insecure=True)


def _tampered(registry: Registry) -> str:
    pinned = registry.put_index("v1")
    path = f"/v2/vllm/vllm-openai/manifests/{pinned}"
    media_type, data = registry.content[path]
    registry.content[path] = (media_type, data + b" ")
    return pinned


def _announced(registry: Registry) -> str:
    registry.announce = "sha256:" + "9" * 64
    registry.put_index("v1")
    return "v1"


def _tampered_child(registry: Registry) -> str:
    registry.put_index("v1", architectures=("amd64",))
    for path, (media_type, data) in list(registry.content.items()):
        if media_type == OCI_MANIFEST:
            registry.content[path] = (media_type, data.replace(b'"size": 10', b'"size": 99'))
    return "v1"


@pytest.mark.parametrize("prepare", [_tampered, _announced, _tampered_child])
def test_digest_mismatch(registry: Registry, prepare: Callable[[Registry], str]) -> None:
    reference = prepare(registry)
    with pytest.raises(RunbookError, match=r"content with digest sha256:.*do not pull"):
        fetch_manifest(registry.repository, reference, insecure=True)


def test_answer_that_is_no_manifest(registry: Registry) -> None:
    registry.put("manifests", {"hello": 1}, "text/html", "v1")
    with pytest.raises(RunbookError, match="media type text/html"):
        fetch_manifest(registry.repository, "v1", insecure=True)


def test_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RunbookError, match=r"registry unreachable .*refused"):
        fetch_manifest(f"127.0.0.1:{port}/x", "v1", insecure=True)


def test_https_is_the_default(registry: Registry) -> None:
    with pytest.raises(RunbookError, match=r"https://127.0.0.1:.*registry unreachable.*insecure: true"):
        fetch_manifest(registry.repository, "v1", timeout_s=5)


def test_silent_registry_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RunbookError, match=r"registry unreachable.*timed out"):
            fetch_manifest(f"127.0.0.1:{silent.getsockname()[1]}/x", "v1", insecure=True, timeout_s=0.2)


def test_verify_image(registry: Registry) -> None:
    pinned = registry.put_index(architectures=("amd64",))
    reference = f"{registry.repository}@{pinned}"
    assert verify_image(reference, ["x86_64"], insecure=True).digest == pinned
    with pytest.raises(RunbookError, match=r"image.arch_missing: it exists for amd64; expected amd64, arm64"):
        verify_image(reference, ["x86_64", "aarch64"], insecure=True)
    with pytest.raises(RunbookError, match="a reference without a digest"):
        verify_image(f"{registry.repository}:v1", ["x86_64"], insecure=True)
    with pytest.raises(RunbookError, match="404"):
        verify_image(f"{registry.repository}@sha256:{'0' * 64}", ["x86_64"], insecure=True)


@pytest.mark.parametrize(
    ("repository", "host", "name"),
    [
        ("172.31.240.10:5000/vllm/vllm-openai-cpu", "172.31.240.10:5000", "vllm/vllm-openai-cpu"),
        ("localhost/x", "localhost", "x"),
        ("ghcr.io/a/b", "ghcr.io", "a/b"),
        ("vllm/vllm-openai", "registry-1.docker.io", "vllm/vllm-openai"),
        ("docker.io/vllm/vllm-openai", "registry-1.docker.io", "vllm/vllm-openai"),
        ("debian", "registry-1.docker.io", "library/debian"),
        ("docker.io/debian", "registry-1.docker.io", "library/debian"),
    ],
)
def test_repository_names_are_read_as_docker_reads_them(repository: str, host: str, name: str) -> None:
    assert _split(repository) == (host, name)


def saved(**sizes: int) -> tuple[bytes, dict[str, bytes]]:
    manifests = {name: image_manifest(name, size)[0] for name, size in sizes.items()}
    return image_index(manifests), manifests


def test_saved_index_with_its_manifests() -> None:
    index, manifests = saved(amd64=11, arm64=12)
    alone = manifest_from_documents([("index.json", index)])
    assert alone.digest == digest(index) and alone.sizes == {}
    assert alone.manifests == {name: digest(content) for name, content in manifests.items()}
    some = manifest_from_documents([("amd64.json", manifests["amd64"]), ("index.json", index)], digest(index))
    assert some.sizes == {"amd64": 11} and some.manifests == alone.manifests


def test_saved_index_without_a_media_type() -> None:
    index = image_index({"amd64": b"x"}, media_type=None)
    assert manifest_from_documents([("index.json", index)]).media_type == OCI_INDEX


def test_saved_manifest_of_one_architecture_needs_its_configuration() -> None:
    content, config = image_manifest("arm64", 12)
    read = manifest_from_documents([("m.json", content), ("config.json", config)])
    assert read.manifests == {"arm64": digest(content)} and read.sizes == {"arm64": 12}
    with pytest.raises(RunbookError, match=r"m.json: one manifest without an index.*skopeo inspect --config --raw"):
        manifest_from_documents([("m.json", content)])


def test_saved_file_with_a_final_newline_counts_only_against_a_known_digest() -> None:
    index, _ = saved(amd64=11)
    assert manifest_from_documents([("index.json", index + b"\n")], digest(index)).digest == digest(index)
    exact = index + b"\n"  # a registry may hold one that does end so
    assert manifest_from_documents([("index.json", exact)], digest(exact)).digest == digest(exact)
    with pytest.raises(RunbookError, match=r"index.json: a file that ends in a newline.*image.digest"):
        manifest_from_documents([("index.json", exact)])


@pytest.mark.parametrize(
    ("contents", "pinned", "message"),
    [
        pytest.param([], None, "no index and no manifest", id="nothing"),
        pytest.param([("i", image_index({}))] * 2, None, "i, i: 2 documents of kind index", id="two-indexes"),
        pytest.param([("i", image_index({}))], "sha256:" + "1" * 64, "i: content with digest sha256:", id="other"),
        pytest.param(
            [("i", image_index({})), ("m", image_manifest("amd64", 1)[0])],
            None,
            "m: a manifest with digest",
            id="stray",
        ),
        pytest.param([("c", image_manifest("amd64", 1)[1])], None, "c: no index and no manifest", id="config-only"),
        pytest.param([("x", b"<html>")], None, "x:1:1: Expecting value", id="html"),
        pytest.param([("x", b"\xff")], None, "x:1:1: Expecting value", id="binary"),
        pytest.param([("x", b"[]")], None, "x: a list; expected a mapping", id="list"),
        pytest.param([("x", b'{"a": 1}')], None, "x: a mapping of a; expected an OCI or Docker index", id="stranger"),
        pytest.param([("x", b'{"mediaType": "application/vnd.x"}')], None, "x: media type application", id="type"),
        pytest.param([("x", b'{"mediaType": 1}')], None, "mediaType: 1; expected a string", id="media-type-number"),
        pytest.param([("x", b'{"manifests": [1]}')], None, r"manifests\[0\]: 1; expected a mapping", id="entry"),
    ],
)
def test_saved_documents_that_cannot_be_used(
    contents: list[tuple[str, bytes]], pinned: str | None, message: str
) -> None:
    with pytest.raises(RunbookError, match=message):
        manifest_from_documents(contents, pinned)
