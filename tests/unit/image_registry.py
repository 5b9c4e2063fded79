"""An image made of a few bytes, as a registry, an archive or a stage holds it; and a Docker daemon that pulls it."""

from __future__ import annotations

import hashlib
import io
import json
import socketserver
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


class Image:
    """Documents and blobs of an image for some architectures, by digest."""

    def __init__(self, *architectures: str, layer: bytes = b"layer" * 50_000, index: bool = True) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, str] = {}
        for name in architectures:
            rows = [self._add(json.dumps({"architecture": name, "os": "linux"}).encode())]
            rows += [self._add(name.encode() + layer), self._add(layer)]
            manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": rows[0], "layers": rows[1:]}
            self.manifests[name] = self._add(json.dumps(manifest).encode())["digest"]
        platforms = [
            {"digest": digest, "platform": {"os": "linux", "architecture": name}}
            for name, digest in self.manifests.items()
        ]
        attestation = {"digest": "sha256:" + "0" * 64, "platform": {"os": "unknown", "architecture": "unknown"}}
        document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [attestation, *platforms]}
        only = next(iter(self.manifests.values()))
        self.digest: str = self._add(json.dumps(document).encode())["digest"] if index else only
        self.layer = digest_of(layer)

    def _add(self, content: bytes) -> dict[str, Any]:
        self.blobs[digest_of(content)] = content
        return {"digest": digest_of(content), "size": len(content)}

    def of(self, architecture: str) -> set[str]:
        """Return the digests of configuration and layers for one architecture."""
        manifest = json.loads(self.blobs[self.manifests[architecture]])
        return {row["digest"] for row in (manifest["config"], *manifest["layers"])}

    def paths(self, name: str) -> dict[str, bytes]:
        """Return what a registry answers, by path."""
        kinds = {digest: kind for digest in self.blobs for kind in ("manifests", "blobs")}
        return {
            f"/v2/{name}/{kind}/{digest}": self.blobs[digest] for digest in kinds for kind in ("manifests", "blobs")
        }

    def archive(self, path: Path, *, without: str = "") -> Path:
        """Write an OCI archive."""
        with tarfile.open(path, "w") as tar:
            for digest, content in self.blobs.items():
                if digest != without:
                    member = tarfile.TarInfo(f"./blobs/sha256/{digest.partition(':')[2]}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        return path


class Daemon:
    """Docker as the modules see it. Pulls over HTTP from loopback names as a real one does.

    Attributes:
        images: What ``GET /images/json`` answers.
        refuse: Registry host to the words it refuses a pull with; each entry of the list serves one pull.
        silent: Whether a pull says nothing and never ends.
        architecture: Of every image.
        used: References it refuses to remove.
        containers: What ``GET /containers/json`` answers.
        asked: Every request as ``METHOD path?query``.
        logins: The login header of every pull.
    """

    def __init__(self) -> None:
        self.images: list[dict[str, Any]] = []
        self.refuse: dict[str, list[str]] = {}
        self.silent = threading.Event()
        self.release = threading.Event()
        self.architecture = "amd64"
        self.used: set[str] = set()
        self.containers: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.logins: list[str | None] = []
        self.info: dict[str, Any] = {"DockerRootDir": "/", "DriverStatus": [["Backing Filesystem", "extfs"]]}
        self.forgets = False

    def hold(self, *digests: str, tags: tuple[str, ...] = ()) -> None:
        self.images.append({"Id": f"id{len(self.images)}", "RepoDigests": list(digests), "RepoTags": list(tags)})

    def find(self, reference: str) -> dict[str, Any] | None:
        return next((row for row in self.images if reference in row["RepoDigests"] + row["RepoTags"]), None)

    def pull(self, repository: str, digest: str) -> Iterator[dict[str, Any]]:
        words = self.refuse.get(repository.partition("/")[0])
        if words:
            yield {"error": words.pop(0)}
            return
        yield {"status": "Pulling from x", "id": digest}
        yield from self._transfer(repository, digest)
        if not self.forgets:
            self.hold(f"{repository}@{digest}")
        yield {"status": f"Digest: {digest}"}

    def _transfer(self, repository: str, digest: str) -> Iterator[dict[str, Any]]:
        host, _, name = repository.partition("/")
        if not host.startswith("127.0.0.1:"):
            yield {"id": "aaa", "status": "Already exists", "progressDetail": {}}
            yield {"id": "bbb", "status": "Downloading", "progressDetail": {"current": 40, "total": 100}}
            yield {"id": "bbb", "status": "Downloading", "progressDetail": {"current": 100, "total": 100}}
            return

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def get(kind: str, wanted: str) -> bytes:
            with opener.open(f"http://{host}/v2/{name}/{kind}/{wanted}") as answer:
                content: bytes = answer.read()
            if digest_of(content) != wanted:
                raise ValueError(wanted)
            return content

        try:
            document = json.loads(get("manifests", digest))
            if "manifests" in document:
                (chosen,) = (
                    row["digest"]
                    for row in document["manifests"]
                    if row["platform"]["architecture"] == self.architecture
                )
                document = json.loads(get("manifests", chosen))
            for row in (document["config"], *document["layers"]):
                size = len(get("blobs", row["digest"]))
                yield {"id": row["digest"], "status": "Downloading", "progressDetail": {"current": size}}
        except (urllib.error.URLError, ValueError) as error:
            yield {"error": f"pull: {error}"}


def _handler(daemon: Daemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "socket"

        def _answer(self, status: int, document: object) -> None:
            content = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            path = self._path()
            if path == "/images/json":
                return self._answer(200, daemon.images)
            if path == "/containers/json":
                return self._answer(200, daemon.containers)
            if path == "/info":
                return self._answer(200, daemon.info)
            row = daemon.find(path.removeprefix("/images/").removesuffix("/json"))
            if row is None:
                return self._answer(404, {"message": "No such image"})
            return self._answer(200, {**row, "Architecture": daemon.architecture})

        def do_DELETE(self) -> None:
            reference = self._path().removeprefix("/images/")
            row = daemon.find(reference)
            if row is None:
                return self._answer(404, {"message": "No such image"})
            if reference in daemon.used:
                return self._answer(409, {"message": "conflict: container abc is using its referenced image"})
            for names in (row["RepoTags"], row["RepoDigests"]):
                if reference in names:
                    names.remove(reference)
            if not row["RepoTags"] and not row["RepoDigests"]:
                daemon.images.remove(row)
            return self._answer(200, [{"Untagged": reference}])

        def do_POST(self) -> None:
            path = self._path()
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            if path == "/images/create":
                daemon.logins.append(self.headers.get("X-Registry-Auth"))
                return self._pull(query)
            row = daemon.find(path.removeprefix("/images/").removesuffix("/tag"))
            if row is None:
                return self._answer(404, {"message": "No such image"})
            row["RepoTags"].append(f"{query['repo']}:{query['tag']}")
            return self._answer(201, None)

        def _pull(self, query: dict[str, str]) -> None:
            self.send_response(200)
            self.end_headers()
            if daemon.silent.is_set():
                self.wfile.flush()
                daemon.release.wait(10)
                return
            for event in daemon.pull(query["fromImage"], query["tag"]):
                self.wfile.write(json.dumps(event).encode() + b"\r\n")

        def _path(self) -> str:
            daemon.asked.append(f"{self.command} {self.path}")
            return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet: a client that hangs up is what some tests are about."""


@contextmanager
def daemon_at(path: Path, make: Callable[[], Daemon] = Daemon) -> Iterator[Daemon]:
    """Answer on a socket until the ``with`` ends."""
    daemon = make()
    server = _Server(str(path), _handler(daemon))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield daemon
    finally:
        daemon.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
