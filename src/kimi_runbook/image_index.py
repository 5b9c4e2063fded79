"""What an image's index, manifests and configurations say, from their bytes: no network, no files.

Sources of the shapes: OCI image specification 1.1 (image-index.md, manifest.md, config.md) and "Image Manifest Version
2, Schema 2" of the Docker distribution project.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file, parse_json

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)

Kind = Literal["index", "manifest", "config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a reference resolves to.

    Attributes:
        digest: Digest of the content read, computed here.
        media_type: Its media type.
        manifests: Architecture to manifest digest; for an image without an index, its one architecture.
        sizes: Architecture to the sum of its compressed layers, in bytes; an architecture whose own manifest was not
            read is left out.
    """

    digest: str
    media_type: str
    manifests: Mapping[str, str]
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One JSON document of an image, with its digest and the place it came from."""

    kind: Kind
    digest: str
    media_type: str
    fields: Fields


def oci_architecture(machine: str) -> str:
    """Return the OCI name of an architecture: ``x86_64`` gives ``amd64``; OCI names pass through."""
    return data_file("platform.yml").text_map("oci_architecture").get(machine, machine)


def digest_of_bytes(content: bytes) -> str:
    """Return ``sha256:<hex>`` of some bytes."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def read_document(content: bytes, source: str, media_type: str | None = None) -> Document:
    """Return what the bytes are: an index, a manifest or an image configuration.

    Args:
        content: The document exactly as the registry holds it; its digest depends on every byte.
        source: Where it came from, for messages.
        media_type: What the registry called it; the document's own ``mediaType`` goes first.

    Raises:
        RunbookError: no JSON, or no document of an image; a schema 1 manifest is named as such.
    """
    fields = Fields(parse_json(content.decode("utf-8", "replace"), source), source, _SAVE_AGAIN)
    said = fields.optional_text("mediaType") or media_type
    kind = _kind(fields, said)
    if kind is None:
        old = " (schema 1, which no current client writes)" if "fsLayers" in fields.names() else ""
        raise RunbookError(
            where=source,
            observed=f"media type {said}{old}" if said or old else f"a mapping of {', '.join(fields.names()[:5])}",
            expected="an OCI or Docker index or manifest",
            next_step=_SAVE_AGAIN,
        )
    default = {"index": INDEX_TYPES[0], "manifest": MANIFEST_TYPES[0], "config": "application/json"}[kind]
    return Document(kind=kind, digest=digest_of_bytes(content), media_type=said or default, fields=fields)


_SAVE_AGAIN = "Save it again: docker buildx imagetools inspect --raw IMAGE > FILE, or skopeo inspect --raw."


def _kind(fields: Fields, media_type: str | None) -> Kind | None:
    if media_type in INDEX_TYPES:
        return "index"
    if media_type in MANIFEST_TYPES:
        return "manifest"
    if media_type is not None and media_type.startswith("application/vnd."):
        return None
    # OCI documents may leave mediaType out: image-index.md says SHOULD.
    for key, kind in _TELLING_KEYS.items():
        if key in fields.names():
            return kind
    return None


_TELLING_KEYS: dict[str, Kind] = {"manifests": "index", "layers": "manifest", "rootfs": "config"}


def layer_bytes(document: Document) -> int:
    """Return the sum of a manifest's compressed layers, in bytes."""
    return sum(layer.integer("size") for layer in document.fields.each("layers"))


def linux_manifests(index: Document) -> dict[str, str]:
    """Return architecture to manifest digest of an index's Linux images; attestations say "unknown" and are left out.

    The first entry of an architecture counts, as clients take it.
    """
    manifests: dict[str, str] = {}
    for entry in index.fields.each("manifests"):
        platform = entry.optional_fields("platform")
        if platform and platform.optional_text("os") == "linux":
            manifests.setdefault(platform.text("architecture"), entry.text("digest"))
    return manifests


def manifest_from_documents(contents: Sequence[tuple[str, bytes]], pinned: str | None = None) -> Manifest:
    """Return what saved documents of one image say.

    Args:
        contents: Name and bytes of each file, in any order: the index, if the image has one; any of its manifests,
            which add sizes; for an image without an index its manifest and its configuration, which names the
            architecture.
        pinned: The digest the top document must have; None takes the one that is there.

    Raises:
        RunbookError: no or two top documents, content that is not part of the image, a digest that does not match,
            or bytes that cannot be what the registry holds.
    """
    documents = [read_document(_exact(content, name, pinned), name) for name, content in contents]
    top = _top(documents)
    if pinned is not None and top.digest != pinned:
        raise RunbookError(
            where=top.fields.where,
            observed=f"content with digest {top.digest}",
            expected=pinned,
            next_step=f"It is another image, or was reformatted on the way. {_SAVE_AGAIN}",
        )
    others = {document.digest: document for document in documents if document is not top}
    if top.kind == "manifest":
        return _single(top, others)
    manifests = linux_manifests(top)
    sizes = {name: layer_bytes(others.pop(digest)) for name, digest in manifests.items() if digest in others}
    for stray in others.values():
        if stray.kind != "config":
            raise _not_part(stray, top)
    return Manifest(digest=top.digest, media_type=top.media_type, manifests=manifests, sizes=sizes)


def files_as_registry(contents: Sequence[tuple[str, bytes]], pinned: str | None = None) -> Callable[..., Manifest]:
    """Return a function that answers like ``registry.fetch_manifest`` from saved documents."""

    def fetch(_repository: str, _reference: str, **_options: object) -> Manifest:
        return manifest_from_documents(contents, pinned)

    return fetch


def _exact(content: bytes, name: str, pinned: str | None) -> bytes:
    """Return the bytes the registry holds: a final newline is an editor's or a pretty-printer's, not the registry's."""
    if not content.endswith(b"\n") or digest_of_bytes(content) == pinned:
        return content
    stripped = content.rstrip(b"\r\n")
    if digest_of_bytes(stripped) == pinned:
        return stripped
    raise RunbookError(
        where=name,
        observed="a file that ends in a newline, so its digest may not be the registry's",
        expected="the manifest's exact bytes",
        next_step=f"{_SAVE_AGAIN} Or write the digest you expect into image.digest of the template.",
    )


def _top(documents: Sequence[Document]) -> Document:
    for kind in ("index", "manifest"):
        found = [document for document in documents if document.kind == kind]
        if len(found) == 1:
            return found[0]
        if found:
            raise RunbookError(
                where=", ".join(document.fields.where for document in found),
                observed=f"{len(found)} documents of kind {kind}",
                expected="one index, or one manifest of an image without an index",
                next_step="Give the files of one image; manifests only together with their index.",
            )
    raise RunbookError(
        where=", ".join(document.fields.where for document in documents) or "image manifest",
        observed="no index and no manifest",
        expected="an OCI or Docker index or manifest",
        next_step=_SAVE_AGAIN,
    )


def _single(top: Document, others: Mapping[str, Document]) -> Manifest:
    wanted = top.fields.fields("config").text("digest")
    if wanted not in others:
        raise RunbookError(
            where=top.fields.where,
            observed="one manifest without an index, which does not say its architecture",
            expected=f"its configuration {wanted} beside it",
            next_step="Save that too: skopeo inspect --config --raw docker://IMAGE > FILE, and give both files.",
        )
    architecture = others[wanted].fields.text("architecture")
    return Manifest(
        digest=top.digest,
        media_type=top.media_type,
        manifests={architecture: top.digest},
        sizes={architecture: layer_bytes(top)},
    )


def _not_part(stray: Document, top: Document) -> RunbookError:
    return RunbookError(
        where=stray.fields.where,
        observed=f"a {stray.kind} with digest {stray.digest}",
        expected=f"a manifest that {top.fields.where} names",
        next_step=f"Leave it out, or save the manifest again. {_SAVE_AGAIN}",
    )
