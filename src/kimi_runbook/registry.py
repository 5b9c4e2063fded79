"""A small reader of the OCI distribution API: what does a registry hold under this tag or digest?"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection
from http.client import HTTPException, HTTPMessage

from kimi_runbook.errors import RunbookError
from kimi_runbook.image_index import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    Document,
    Kind,
    Manifest,
    digest_of_bytes,
    layer_bytes,
    linux_manifests,
    oci_architecture,
)
from kimi_runbook.reading import Fields, parse_json

__all__ = ["INDEX_TYPES", "MANIFEST_TYPES", "Manifest", "fetch_manifest", "oci_architecture", "verify_image"]

_MAX_BYTES = 4 * 1024 * 1024  # the distribution specification asks registries to accept manifests up to this size


def fetch_manifest(repository: str, reference: str, *, insecure: bool = False, timeout_s: float = 20) -> Manifest:
    """Read an index or manifest and, of an index, each Linux manifest.

    Args:
        repository: ``registry:port/name`` or a Docker Hub name such as ``vllm/vllm-openai``.
        reference: A tag or a digest; content is verified against a digest.
        insecure: Speak plain HTTP.
        timeout_s: Seconds to wait for each answer.

    Raises:
        RunbookError: registry unreachable, reference unknown, digest mismatch, or an answer that is no manifest.
    """
    client = _Client(repository, insecure=insecure, timeout_s=timeout_s)
    top = client.manifest(reference)
    if top.kind == "manifest":
        architecture = client.architecture(top)
        return Manifest(
            digest=top.digest,
            media_type=top.media_type,
            manifests={architecture: top.digest},
            sizes={architecture: layer_bytes(top)},
        )
    manifests = linux_manifests(top)
    sizes = {name: layer_bytes(client.manifest(digest)) for name, digest in manifests.items()}
    return Manifest(digest=top.digest, media_type=top.media_type, manifests=manifests, sizes=sizes)


def verify_image(
    reference: str, architectures: Collection[str], *, insecure: bool = False, timeout_s: float = 20
) -> Manifest:
    """Return the manifest of ``repository@sha256:...`` after making sure it exists for each architecture.

    Args:
        reference: The pinned reference.
        architectures: Names as OCI (amd64) or the kernel (x86_64) has them.
        insecure: Speak plain HTTP.
        timeout_s: Seconds to wait for each answer.

    Raises:
        RunbookError: as ``fetch_manifest``, or an architecture is missing (``image.arch_missing``).
    """
    repository, at, digest = reference.partition("@")
    if not at or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise RunbookError(
            where=reference,
            observed="a reference without a digest",
            expected="repository@sha256:<64 hexadecimal digits>",
            next_step="Pin the image: kimi-runbook lock resolve --template TEMPLATE --out LOCK",
        )
    manifest = fetch_manifest(repository, digest, insecure=insecure, timeout_s=timeout_s)
    wanted = {oci_architecture(name) for name in architectures}
    missing = sorted(wanted - set(manifest.manifests))
    if missing:
        raise RunbookError(
            where=reference,
            observed=f"image.arch_missing: it exists for {', '.join(sorted(manifest.manifests)) or 'no architecture'}",
            expected=", ".join(sorted(wanted)),
            next_step=f"Lock an image whose index has {', '.join(missing)}.",
        )
    return manifest


class _Client:
    def __init__(self, repository: str, *, insecure: bool, timeout_s: float) -> None:
        host, name = _split(repository)
        self._repository = repository
        self._base = f"{'http' if insecure else 'https'}://{host}/v2/{name}"
        self._insecure = insecure
        self._timeout_s = timeout_s
        self._token: str | None = None
        # A plain-HTTP registry is a machine nearby: a proxy set for the internet must not be asked for it.
        handlers = [urllib.request.ProxyHandler({})] if insecure else []
        self._opener = urllib.request.build_opener(*handlers)

    def manifest(self, reference: str) -> Document:
        url = f"{self._base}/manifests/{reference}"
        content, headers = self._get(url, ", ".join((*INDEX_TYPES, *MANIFEST_TYPES)))
        digest = self._verified(url, content, reference if reference.startswith("sha256:") else None)
        announced = headers.get("Docker-Content-Digest")
        if announced and announced.startswith("sha256:"):
            self._verified(url, content, announced)
        fields = Fields(parse_json(content.decode("utf-8", "replace"), url), url, "Check what was pushed there.")
        media_type = fields.optional_text("mediaType") or headers.get_content_type()
        if media_type not in (*INDEX_TYPES, *MANIFEST_TYPES):
            raise RunbookError(
                where=url,
                observed=f"media type {media_type}",
                expected="an OCI or Docker index or manifest",
                next_step="Push the image again with a current client.",
            )
        kind: Kind = "index" if media_type in INDEX_TYPES else "manifest"
        return Document(kind=kind, digest=digest, media_type=media_type, fields=fields)

    def architecture(self, manifest: Document) -> str:
        digest = manifest.fields.fields("config").text("digest")
        url = f"{self._base}/blobs/{digest}"
        content, _ = self._get(url, "*/*")
        self._verified(url, content, digest)
        return Fields(parse_json(content.decode("utf-8", "replace"), url), url).text("architecture")

    def _verified(self, url: str, content: bytes, expected: str | None) -> str:
        digest = digest_of_bytes(content)
        if expected is not None and digest != expected:
            raise RunbookError(
                where=url,
                observed=f"content with digest {digest}",
                expected=expected,
                next_step="Something alters content on the way: do not pull from that registry until it is explained.",
            )
        return digest

    def _get(self, url: str, accept: str) -> tuple[bytes, HTTPMessage]:
        try:
            return self._request(url, accept, self._token)
        except urllib.error.HTTPError as error:
            if error.code != 401 or self._token is not None:
                raise self._refused(url, error) from error
            self._token = self._anonymous_token(url, error.headers.get("WWW-Authenticate", ""))
        try:
            return self._request(url, accept, self._token)
        except urllib.error.HTTPError as error:
            raise self._refused(url, error) from error

    def _request(self, url: str, accept: str, token: str | None) -> tuple[bytes, HTTPMessage]:
        request = urllib.request.Request(url, headers={"Accept": accept})  # noqa: S310 - https, or http by request
        if token:
            # Blobs redirect to storage that must not see the token.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                content: bytes = answer.read(_MAX_BYTES + 1)
                headers: HTTPMessage = answer.headers
        except urllib.error.HTTPError:
            raise
        except (OSError, HTTPException) as error:  # URLError is an OSError
            raise RunbookError(
                where=url,
                observed=f"registry unreachable ({getattr(error, 'reason', None) or error!r})",
                expected="an answer of the distribution API",
                next_step="Check address, name resolution and firewall; a plain-HTTP registry needs insecure: true.",
            ) from error
        if len(content) > _MAX_BYTES:
            raise RunbookError(
                where=url,
                observed=f"more than {_MAX_BYTES} bytes",
                expected="a manifest",
                next_step="Check what answers at that address.",
            )
        return content, headers

    def _anonymous_token(self, url: str, challenge: str) -> str:
        parameters = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = parameters.get("realm", "")
        if not challenge.lower().startswith("bearer ") or not self._may_ask(realm):
            raise RunbookError(
                where=url,
                observed=f"a login is asked for ({challenge or 'no challenge'})",
                expected="anonymous read access",
                next_step="Mirror the image to a registry this controller may read.",
            )
        query = {key: parameters[key] for key in ("service", "scope") if key in parameters}
        token_url = f"{realm}?{urllib.parse.urlencode(query)}"
        try:
            content, _ = self._request(token_url, "application/json", None)
        except urllib.error.HTTPError as error:
            raise self._refused(token_url, error) from error
        answer = Fields(parse_json(content.decode("utf-8", "replace"), token_url), token_url)
        return answer.optional_text("token") or answer.text("access_token")

    def _may_ask(self, realm: str) -> bool:
        return realm.startswith("https://") or (self._insecure and realm.startswith("http://"))

    def _refused(self, url: str, error: urllib.error.HTTPError) -> RunbookError:
        if error.code == 404:
            return RunbookError(
                where=url,
                observed="the registry has no such image (404)",
                expected=f"a manifest of {self._repository}",
                next_step="Check repository, tag and digest in the lock; resolve it again if the image was replaced.",
            )
        return RunbookError(
            where=url,
            observed=f"HTTP {error.code} {error.reason}{_registry_message(error)}",
            expected="the manifest",
            next_step="Check that this controller may read the repository, and its pull limits.",
        )


def _registry_message(error: urllib.error.HTTPError) -> str:
    try:
        errors = json.loads(error.read(4096))["errors"]
        return f" ({errors[0]['code']}: {errors[0]['message']})"
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""  # the status line says enough when the body has no error document


def _split(repository: str) -> tuple[str, str]:
    """Return registry host and name; names without a host belong to Docker Hub, as the Docker client reads them."""
    first, slash, rest = repository.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        if first in ("docker.io", "index.docker.io"):
            return "registry-1.docker.io", rest if "/" in rest else f"library/{rest}"
        return first, rest
    return "registry-1.docker.io", repository if slash else f"library/{repository}"
