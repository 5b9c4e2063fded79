"""Pushing to a registry over its HTTP API (OCI distribution specification v1.1): ask first, stream what is missing."""

from __future__ import annotations

import hashlib
import http.client
import urllib.parse
from collections.abc import Callable
from types import TracebackType

from kimi_runbook.errors import RunbookError
from lab.oci import INDEX_TYPE, MANIFEST_TYPE, Blob, Writer

_CHUNK_BYTES = 4 << 20
_TIMEOUT_S = 300


class Registry:
    """One repository of a registry that speaks plain HTTP."""

    def __init__(self, address: str, repository: str) -> None:
        self._address = address
        self._repository = repository

    def has_blob(self, digest: str) -> bool:
        """Return whether the registry has a blob."""
        return self._request("HEAD", f"blobs/{digest}")[0] == 200

    def manifest_digest(self, reference: str) -> str | None:
        """Return the digest of a manifest or index by tag or digest, or None when there is none."""
        status, headers, _ = self._request(
            "HEAD", f"manifests/{reference}", headers={"Accept": f"{INDEX_TYPE}, {MANIFEST_TYPE}"}
        )
        return headers.get("Docker-Content-Digest") if status == 200 else None

    def put_blob(self, data: bytes) -> Blob:
        """Push a small blob, unless it is there."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if not self.has_blob(digest):
            with Upload(self._address, self._repository, lambda _count: None) as upload:
                upload.write(data)
                upload.commit()
        return Blob(digest, len(data))

    def upload(self, on_bytes: Callable[[int], None]) -> Upload:
        """Begin a blob whose digest is known only at its end; ``on_bytes`` hears how many bytes are sent."""
        return Upload(self._address, self._repository, on_bytes)

    def put_manifest(self, reference: str, media_type: str, data: bytes) -> None:
        """Push a manifest or index under a tag or its digest."""
        status, _, body = self._request("PUT", f"manifests/{reference}", data, {"Content-Type": media_type})
        if status != 201:
            raise _refused(self._address, f"manifest {reference}", status, body)

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/v2/{self._repository}/{path}", body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        except OSError as error:
            raise _unreachable(self._address, error) from error
        finally:
            connection.close()


class Upload(Writer):
    """One blob on its way: write() sends, commit() names it by the digest of what was sent. Left early, it is void."""

    def __init__(self, address: str, repository: str, on_bytes: Callable[[int], None]) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()
        self._sent = 0
        self._buffer = bytearray()
        self._repository = repository

    def __enter__(self) -> Upload:
        """Open the upload."""
        try:
            self._connection.request("POST", f"/v2/{self._repository}/blobs/uploads/", headers={"Content-Length": "0"})
            location = self._answer(202)
            self._connection.putrequest("PATCH", location)
            self._connection.putheader("Content-Type", "application/octet-stream")
            self._connection.putheader("Transfer-Encoding", "chunked")
            self._connection.endheaders()
        except OSError as error:
            raise _unreachable(self._address, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection; the registry drops what was not committed."""
        self._connection.close()

    def write(self, data: bytes, /) -> int:
        """Send some bytes."""
        self._buffer += data
        if len(self._buffer) >= _CHUNK_BYTES:
            self._flush()
        return len(data)

    def commit(self) -> Blob:
        """End the blob and return it.

        Raises:
            RunbookError: When the registry does not take it.
        """
        self._flush()
        blob = Blob(f"sha256:{self._digest.hexdigest()}", self._sent)
        try:
            self._connection.send(b"0\r\n\r\n")
            location = self._answer(202)
            separator = "&" if "?" in location else "?"
            query = urllib.parse.urlencode({"digest": blob.digest})
            self._connection.request("PUT", f"{location}{separator}{query}", headers={"Content-Length": "0"})
            self._answer(201)
        except OSError as error:
            raise _unreachable(self._address, error) from error
        return blob

    def _flush(self) -> None:
        if not self._buffer:
            return
        data = bytes(self._buffer)
        self._buffer.clear()
        try:
            self._connection.send(b"%x\r\n" % len(data) + data + b"\r\n")
        except OSError as error:
            raise _unreachable(self._address, error) from error
        self._digest.update(data)
        self._sent += len(data)
        self._on_bytes(self._sent)

    def _answer(self, expected: int) -> str:
        response = self._connection.getresponse()
        body = response.read()
        if response.status != expected:
            raise _refused(self._address, "blob upload", response.status, body)
        location = urllib.parse.urlsplit(response.headers.get("Location", ""))
        return f"{location.path}?{location.query}" if location.query else location.path


def _refused(address: str, what: str, status: int, body: bytes) -> RunbookError:
    return RunbookError(
        where=f"registry {address}",
        observed=f"{what} refused with {status}: {body.decode(errors='replace')[:300]}",
        expected="201 or 202",
        next_step="Read `docker exec kimi-lab-depot journalctl -u kimi-lab-registry`.",
    )


def _unreachable(address: str, error: OSError) -> RunbookError:
    return RunbookError(
        where=f"registry {address}",
        observed=f"no connection: {error}",
        expected="an answer over HTTP",
        next_step="Look at the depot (`python -m lab status`), then run `make lab` again.",
    )
