"""Container images without ``docker build``: layers as plain tar streams, documents of the OCI image specification.

Everything here is a function of its input: the same tree gives the same digests on every machine and in every run, so
an image that is there already is recognised by its digest alone. Layers are not compressed: they never leave the
machine (``application/vnd.oci.image.layer.v1.tar``; image specification v1.1, layer.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"

EPOCH = "2026-01-01T00:00:00Z"  # date of every image: a real one would change the digest of the same content
_MTIME_S = 1767225600  # the same moment in seconds


class Writer(Protocol):
    """What takes a stream of bytes."""

    def write(self, data: bytes, /) -> int:
        """Take some bytes."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of content as a registry knows it.

    Attributes:
        digest: ``sha256:<hex>``.
        size: Bytes.
    """

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, directory or link of a layer: its path in the image, and where it is read from (None: directory)."""

    target: str
    source: Path | None


def blob_of(data: bytes) -> Blob:
    """Return digest and size of a document."""
    return Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))


def tree_entries(tree: Path, prefix: str) -> Iterator[Entry]:
    """Yield the entries of a directory under a path of the image, parents first, names in byte order."""
    for depth in range(1, len(PurePosixPath(prefix).parts) + 1):
        yield Entry("/".join(PurePosixPath(prefix).parts[:depth]), None)
    yield from _walk(tree, prefix)


def _walk(directory: Path, prefix: str) -> Iterator[Entry]:
    with os.scandir(directory) as listing:
        found = sorted(listing, key=lambda entry: entry.name.encode())
    for entry in found:
        target = f"{prefix}/{entry.name}"
        yield Entry(target, Path(entry.path))
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), target)


def member(entry: Entry) -> tarfile.TarInfo:
    """Return the tar header of an entry: root's, one date, no more of the mode than whether it may be executed."""
    info = tarfile.TarInfo(entry.target)
    info.mtime = _MTIME_S
    info.mode = 0o755
    if entry.source is None:
        info.type = tarfile.DIRTYPE
        return info
    status = entry.source.lstat()
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = str(entry.source.readlink())
        info.mode = 0o777
    else:
        info.size = status.st_size
        info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    return info


def write_layer(entries: Iterable[Entry], sink: Writer) -> None:
    """Write a layer's tar stream."""
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as archive:  # type: ignore[call-overload] # a sink needs no more than write()
        for entry in entries:
            info = member(entry)
            if info.isreg() and entry.source is not None:
                with entry.source.open("rb") as content:
                    archive.addfile(info, content)
            else:
                archive.addfile(info)


def size_of(entries: Iterable[Entry]) -> int:
    """Return about how many bytes a layer will have, for showing how far it is."""
    total = 0
    for entry in entries:
        info = member(entry)
        total += 512 + -(-info.size // 512) * 512
    return total


def config_document(
    layers: Sequence[Blob], *, architecture: str, entrypoint: Sequence[str], env: Sequence[str], labels: dict[str, str]
) -> bytes:
    """Return an image configuration. A layer that is not compressed is its own diff id."""
    return _document(
        {
            "created": EPOCH,
            "architecture": architecture,
            "os": "linux",
            "config": {
                "Env": list(env),
                "Entrypoint": list(entrypoint),
                "WorkingDir": "/",
                "Labels": labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
            "history": [{"created": EPOCH, "created_by": f"lab layer {number}"} for number in range(len(layers))],
        }
    )


def manifest_document(config: Blob, layers: Sequence[Blob]) -> bytes:
    """Return the manifest of one architecture."""
    return _document(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(CONFIG_TYPE, config),
            "layers": [_descriptor(LAYER_TYPE, layer) for layer in layers],
        }
    )


def index_document(manifests: dict[str, Blob]) -> bytes:
    """Return the index over {architecture: manifest}; its digest is what a lock pins."""
    return _document(
        {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [
                {**_descriptor(MANIFEST_TYPE, blob), "platform": {"architecture": architecture, "os": "linux"}}
                for architecture, blob in sorted(manifests.items())
            ],
        }
    )


def _descriptor(media_type: str, blob: Blob) -> dict[str, object]:
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size}


def _document(content: dict[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
