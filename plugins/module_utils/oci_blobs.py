"""An image as blobs in a folder: which ones it needs, read from a registry or an archive, and served again.

Runs on the node. Docker's classic store forgets digests when an image is loaded from an archive (moby/moby#22011). So
images that cannot be pulled from where the lock says are kept here byte for byte, and Docker pulls them from a registry
on the loopback address that lives as long as the pull: what was pulled by digest has its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ansible.module_utils.proved_files import FilesError, Store

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MANIFEST_LIMIT = 4 << 20  # the distribution specification asks registries to take manifests up to this size
_TIMEOUT_S = 60


def hex_of(digest):
    """Return the hexadecimal part of a digest; FilesError where it is none of SHA-256."""
    told = _DIGEST.fullmatch(digest)
    if told is None:
        raise FilesError(f"{digest!r}: expected sha256: and 64 hexadecimal digits")
    return told[1]


def checked(content, digest, where):
    """Return the content when it has the digest; FilesError otherwise."""
    found = hashlib.sha256(content).hexdigest()
    if found != hex_of(digest):
        raise FilesError(f"{where}: content with digest sha256:{found}, expected {digest}")
    return content


def media_type(document):
    """Return what a document is; OCI documents may leave their own type out."""
    return document.get("mediaType") or (INDEX_TYPES[0] if "manifests" in document else MANIFEST_TYPES[0])


def platform_manifest(index, architecture):
    """Return the digest of an index's Linux manifest for an architecture; FilesError names what there is."""
    rows = [row for row in index.get("manifests", []) if (row.get("platform") or {}).get("os") == "linux"]
    for row in rows:
        if row["platform"].get("architecture") == architecture:
            return row["digest"]
    there = ", ".join(sorted({str(row["platform"].get("architecture")) for row in rows})) or "no architecture"
    raise FilesError(f"image.arch_missing: the image exists for {there}, expected {architecture}")


def parse(content, where):
    """Return a manifest or index as a mapping."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise FilesError(f"{where}: no JSON ({error})") from error
    if not isinstance(document, dict):
        raise FilesError(f"{where}: expected an index or a manifest")
    return document


def blobs_of(manifest):
    """Return ``{hex: {"size", "sha256"}}`` of what a manifest names: configuration and layers."""
    rows = [manifest["config"], *manifest["layers"]]
    return {hex_of(row["digest"]): {"size": row["size"], "sha256": hex_of(row["digest"])} for row in rows}


class Registry:
    """The blobs of one repository, read anonymously."""

    def __init__(self, repository, insecure=False, timeout_s=_TIMEOUT_S):
        host, name = _split(repository)
        self.repository = repository
        self.base = f"{'http' if insecure else 'https'}://{host}/v2/{name}"
        self.insecure = insecure
        self.timeout_s = timeout_s
        self._sizes = {}
        self._token = None
        # A plain-HTTP registry is a machine nearby: a proxy set for the internet must not be asked for it.
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if insecure else []))

    def manifest(self, digest):
        """Return the bytes of a manifest or an index."""
        url = f"{self.base}/manifests/{digest}"
        with self._ask(url, {"Accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}) as answer:
            content = answer.read(_MANIFEST_LIMIT + 1)
        if len(content) > _MANIFEST_LIMIT:
            raise FilesError(f"{url}: more than {_MANIFEST_LIMIT} bytes, expected a manifest")
        return checked(content, digest, url)

    def expect(self, blobs):
        """Take the sizes a manifest states."""
        self._sizes.update({name: blob["size"] for name, blob in blobs.items()})

    def size(self, name):
        """Return a blob's size."""
        return self._sizes[name]

    @contextlib.contextmanager
    def open(self, name, offset):
        """Yield ``(read function, offset it begins at)`` of a blob."""
        url = f"{self.base}/blobs/sha256:{name}"
        with self._ask(url, {"Range": f"bytes={offset}-"} if offset else {}) as answer:
            told = (
                re.match(r"bytes (\d+)-", answer.headers.get("Content-Range") or "") if answer.status == 206 else None
            )

            def read(count):
                try:
                    return answer.read(count)
                except HTTPException as error:
                    raise OSError(f"{url}: {error!r}") from error

            yield read, int(told[1]) if told else 0

    def _ask(self, url, headers):
        try:
            return self._request(url, headers, self._token)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise _refusal(url, error) from error
            self._token = self._anonymous_token(url, error.headers.get("WWW-Authenticate", ""))  # new or run out
        try:
            return self._request(url, headers, self._token)
        except urllib.error.HTTPError as error:
            raise _refusal(url, error) from error

    def _request(self, url, headers, token):
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - https, or http by request
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")  # storage must not see it
        try:
            return self._opener.open(request, timeout=self.timeout_s)
        except HTTPException as error:
            raise OSError(f"{url}: {error!r}") from error

    def _anonymous_token(self, url, challenge):
        told = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = told.get("realm", "")
        allowed = realm.startswith("https://") or (self.insecure and realm.startswith("http://"))
        if not challenge.lower().startswith("bearer ") or not allowed:
            raise FilesError(f"{url}: a login is asked for; expected anonymous read access, or a mirror that gives it")
        query = urllib.parse.urlencode({key: told[key] for key in ("service", "scope") if key in told})
        try:
            with self._request(f"{realm}?{query}", {}, None) as answer:
                document = json.loads(answer.read(_MANIFEST_LIMIT))
        except urllib.error.HTTPError as error:
            raise _refusal(realm, error) from error
        return document.get("token") or document.get("access_token")


def _refusal(url, error):
    """Return what an HTTP status means: worth another attempt (OSError) or not (FilesError)."""
    text = f"{url}: HTTP {error.code} {error.reason}"
    return OSError(text) if error.code >= 500 or error.code in (408, 429) else FilesError(text)


def _split(repository):
    """Return registry host and name; names without a host belong to Docker Hub, as the Docker client reads them."""
    first, slash, rest = repository.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        if first in ("docker.io", "index.docker.io"):
            return "registry-1.docker.io", rest if "/" in rest else f"library/{rest}"
        return first, rest
    return "registry-1.docker.io", repository if slash else f"library/{repository}"


class Archive:
    """The blobs of an OCI archive: a tar file with the image layout, as ``skopeo copy ... oci-archive:`` makes it."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            with tarfile.open(self.path) as tar:
                self._members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
        except (OSError, tarfile.TarError) as error:
            raise FilesError(f"{path}: {error}; expected an OCI archive") from error
        if not any(name.startswith("blobs/sha256/") for name in self._members):
            raise FilesError(
                f"{path}: no blobs in it, so it keeps no digest (docker save makes such files, moby/moby#22011); "
                f"expected an OCI archive: skopeo copy --all --preserve-digests docker://IMAGE oci-archive:{path}"
            )

    def manifest(self, digest):
        """Return the bytes of a manifest or an index."""
        member = self._members.get(f"blobs/sha256/{hex_of(digest)}")
        if member is None:
            raise FilesError(
                f"{self.path}: no blob {digest}; expected the locked digest, which only a copy with all architectures "
                "and unchanged digests keeps: skopeo copy --all --preserve-digests"
            )
        with tarfile.open(self.path) as tar:
            return checked(tar.extractfile(member).read(_MANIFEST_LIMIT), digest, str(self.path))

    def expect(self, blobs):
        """Refuse a blob the archive lacks."""
        missing = [name for name in blobs if f"blobs/sha256/{name}" not in self._members]
        if missing:
            raise FilesError(f"{self.path}: {len(missing)} blobs are missing, sha256:{missing[0]} for one")

    def size(self, name):
        """Return a blob's size."""
        return self._members[f"blobs/sha256/{name}"].size

    @contextlib.contextmanager
    def open(self, name, offset):
        """Yield ``(read function, offset it begins at)`` of a blob."""
        try:
            with tarfile.open(self.path) as tar, tar.extractfile(self._members[f"blobs/sha256/{name}"]) as file:
                file.seek(offset)
                yield file.read, offset
        except tarfile.TarError as error:
            raise FilesError(f"{self.path}: {error}") from error


class Blobs(Store):
    """A folder of blobs named by their digest."""

    def __init__(self, folder):
        super().__init__(Path(folder) / "blobs/sha256")

    def path(self, digest):
        """Return where a blob lies."""
        return self.folder / hex_of(digest)

    def keep(self, digest, content):
        """Write a small document that has been checked."""
        path = self.path(digest)
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(content)
        temporary.replace(path)

    def document(self, digest):
        """Return a document that lies here, None where there is none or it is another by now."""
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                return parse(checked(file.read(_MANIFEST_LIMIT), digest, str(path)), str(path))
        except (OSError, FilesError):
            return None

    def needs(self, digest, architecture):
        """Return the blobs an image needs here, None where its documents are not all here."""
        top = self.document(digest)
        if top is not None and "manifests" in top:
            top = self.document(platform_manifest(top, architecture))
        return None if top is None else blobs_of(top)


class Loopback:
    """A registry of one folder of blobs on 127.0.0.1, for as long as the ``with`` lasts."""

    def __init__(self, blobs, port):
        self.asked = []
        self._server = _Server(("127.0.0.1", port), _handler(blobs, self.asked))
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def _handler(blobs, asked):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _TIMEOUT_S

        def do_GET(self):
            self._answer(body=True)

        def do_HEAD(self):
            self._answer(body=False)

        def _answer(self, body):
            asked.append(f"{self.command} {self.path}")
            if self.path.rstrip("/") == "/v2":
                return self._send(200, b"{}", "application/json", body)
            told = re.fullmatch(r"/v2/.+/(manifests|blobs)/(sha256:[0-9a-f]{64})", self.path)
            if told is None or not blobs.path(told[2]).is_file():
                return self._send(404, b'{"errors": [{"code": "NOT_FOUND"}]}', "application/json", body)
            if told[1] == "manifests":
                content = blobs.path(told[2]).read_bytes()
                kind = media_type(parse(content, told[2]))
                return self._send(200, content, kind, body, {"Docker-Content-Digest": told[2]})
            return self._send_blob(told[2], body)

        def _send(self, status, content, kind, body, headers=None):
            self.send_response(status)
            self._headers(len(content), kind, headers or {})
            if body:
                self.wfile.write(content)

        def _headers(self, length, kind, headers):
            for name, value in {"Content-Length": length, "Content-Type": kind, **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()

        def _send_blob(self, digest, body):
            path = blobs.path(digest)
            size = path.stat().st_size
            told = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            begins = int(told[1]) if told else 0
            last = min(int(told[2]), size - 1) if told and told[2] else size - 1
            if begins >= size > 0:
                return self._send(416, b"", "application/json", body, {"Content-Range": f"bytes */{size}"})
            self.send_response(206 if told else 200)
            extra = {"Content-Range": f"bytes {begins}-{last}/{size}"} if told else {}
            self._headers(
                last - begins + 1,
                "application/octet-stream",
                {"Docker-Content-Digest": digest, "Accept-Ranges": "bytes", **extra},
            )
            if body:
                with path.open("rb") as file:
                    file.seek(begins)
                    left = last - begins + 1
                    while left > 0:
                        piece = file.read(min(left, 1 << 20))
                        if not piece:
                            break
                        self.wfile.write(piece)
                        left -= len(piece)
            return None

        def log_message(self, *_):
            pass

    return Handler
