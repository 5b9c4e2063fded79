"""The engine's image in the lab's registry: three layers, a manifest, an index; pushed only where it is not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.engine import DIST_PACKAGES, OWN_PACKAGES, EngineTrees
from lab.files import write_atomically
from lab.images import RootFileSystem
from lab.oci import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    Blob,
    Entry,
    Writer,
    blob_of,
    config_document,
    index_document,
    manifest_document,
    size_of,
    tree_entries,
    write_layer,
)
from lab.progress import Step
from lab.registry import Registry
from lab.settings import LABEL

ENTRYPOINT = ("vllm", "serve")  # the upstream image's, so that arguments begin with the model here as well
ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    f"PYTHONPATH=/{OWN_PACKAGES}",
    "PYTHONUNBUFFERED=1",  # log lines reach the journal when they are written
    "VLLM_NO_USAGE_STATS=1",  # the lab's hosts reach nothing outside
)
ARCHITECTURE = "amd64"
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedImage:
    """An engine image in the registry.

    Attributes:
        tag: Its tag, ``v<version>``.
        index_digest: What is pinned.
        manifest_digest: Of the one architecture.
        size_bytes: Of its layers, not compressed.
    """

    tag: str
    index_digest: str
    manifest_digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that may have to be sent.

    Attributes:
        key: Digest of what it is made from; its blob is remembered under this key.
        size: About how many bytes it has.
        write: Writes its tar stream.
    """

    key: str
    size: Callable[[], int]
    write: Callable[[Writer], None]


def own_entries(tree: Path) -> Iterator[Entry]:
    """Yield the entries of vLLM's own layer: its packages and the launcher ``vllm``."""
    yield from tree_entries(tree / "tree", OWN_PACKAGES)
    yield Entry("usr/local/bin", None)
    yield Entry("usr/local/bin/vllm", tree / "launcher")


def layers_of(base: RootFileSystem, trees: EngineTrees, version: str) -> list[Layer]:
    """Return the layers of one version, the ones that versions share first."""
    shared, own = trees.shared / "tree", trees.own[version]
    return [
        Layer(base.key, lambda: base.tar.stat().st_size, lambda sink: copy_file(base.tar, sink)),
        Layer(
            trees.keys["shared"],
            lambda: size_of(tree_entries(shared, DIST_PACKAGES)),
            lambda sink: write_layer(tree_entries(shared, DIST_PACKAGES), sink),
        ),
        Layer(trees.keys[version], lambda: size_of(own_entries(own)), lambda sink: write_layer(own_entries(own), sink)),
    ]


def push(registry: Registry, version: str, layers: Sequence[Layer], known: Path, step: Step) -> PushedImage:
    """Bring one version, made of these layers, into the registry and return what to pin.

    ``known`` is the file that remembers which layer key gave which blob, so that an unchanged tree is not read again.

    Raises:
        RunbookError: When the registry does not answer or does not take it.
    """
    blobs = _remembered(known)
    missing = [layer for layer in layers if layer.key not in blobs or not registry.has_blob(blobs[layer.key].digest)]
    total, before = sum(layer.size() for layer in missing), 0
    for layer in missing:
        with registry.upload(lambda sent, before=before: step.update(before + sent, of=total)) as upload:  # type: ignore[misc] # the default binds the value of this turn
            layer.write(upload)
            blobs[layer.key] = upload.commit()
        before += blobs[layer.key].size
        write_atomically(known, json.dumps({key: asdict(blob) for key, blob in blobs.items()}, indent=1) + "\n")
    image, pushed = _documents(registry, version, [blobs[layer.key] for layer in layers])
    changed = bool(missing) or pushed
    step.outcome = f"{'pushed' if changed else 'unchanged'} {image.tag}, {image.index_digest[:19]}"
    return image


def _documents(registry: Registry, version: str, layers: list[Blob]) -> tuple[PushedImage, bool]:
    labels = {f"{LABEL}": "1", "org.opencontainers.image.version": version}
    config_data = config_document(
        layers, architecture=ARCHITECTURE, entrypoint=ENTRYPOINT, env=ENVIRONMENT, labels=labels
    )
    manifest_data = manifest_document(blob_of(config_data), layers)
    manifest = blob_of(manifest_data)
    index_data = index_document({ARCHITECTURE: manifest})
    image = PushedImage(
        tag=f"v{version}",
        index_digest=blob_of(index_data).digest,
        manifest_digest=manifest.digest,
        size_bytes=sum(layer.size for layer in layers),
    )
    if registry.manifest_digest(image.tag) == image.index_digest:
        return image, False
    registry.put_blob(config_data)
    registry.put_manifest(manifest.digest, MANIFEST_TYPE, manifest_data)
    registry.put_manifest(image.tag, INDEX_TYPE, index_data)
    return image, True


def copy_file(path: Path, sink: Writer) -> None:
    """Write a file's bytes."""
    with path.open("rb") as source:
        while data := source.read(_COPY_BYTES):
            sink.write(data)


def _remembered(known: Path) -> dict[str, Blob]:
    if not known.exists():
        return {}
    return {key: Blob(**fields) for key, fields in json.loads(known.read_text()).items()}
