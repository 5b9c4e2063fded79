"""Locks, templates and saved image documents for the lock's tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from judging import lock_data

from kimi_runbook.image_index import INDEX_TYPES, MANIFEST_TYPES
from kimi_runbook.lock.vendor import DriverRelease, Releases, read_redistrib, read_releases
from kimi_runbook.registry import Manifest

DATA = Path(__file__).resolve().parents[1] / "data" / "lock"
TOOLKIT = [
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
]
MANIFEST = Manifest(
    digest="sha256:" + "d" * 64,
    media_type=INDEX_TYPES[0],
    manifests={"amd64": "sha256:" + "e" * 64, "arm64": "sha256:" + "f" * 64},
    sizes={"amd64": 10, "arm64": 20},
)


def full_lock() -> dict[str, Any]:
    """Return a lock that may also be made new: with all toolkit packages."""
    data = lock_data()
    data["toolkit"]["packages"] = list(TOOLKIT)
    return data


def template(**driver: Any) -> dict[str, Any]:
    """Return a template without what the registry knows, with changes to its driver; None removes a key."""
    data = full_lock()
    for key in ("digest", "manifests", "size_bytes"):
        del data["image"][key]
    data["driver"] |= driver
    for key in [key for key, value in driver.items() if value is None]:
        del data["driver"][key]
    return data


def redistrib_json() -> dict[str, Any]:
    """Return the constructed redistrib file, to be spoiled."""
    parsed: dict[str, Any] = json.loads((DATA / "redistrib_580.178.04.json").read_text(encoding="utf-8"))
    return parsed


def releases_json() -> dict[str, Any]:
    """Return the constructed releases file, to be spoiled."""
    parsed: dict[str, Any] = json.loads((DATA / "releases.json").read_text(encoding="utf-8"))
    return parsed


def a_release() -> DriverRelease:
    """Return the constructed redistrib file as read."""
    return read_redistrib(redistrib_json(), "redistrib_580.178.04.json")


def the_releases() -> Releases:
    """Return the constructed releases file as read."""
    return read_releases(releases_json(), "releases.json")


def encoded(document: dict[str, Any]) -> bytes:
    """Return a document's bytes as a registry holds them: no final newline."""
    return json.dumps(document, indent=2).encode()


def digest(content: bytes) -> str:
    """Return the digest of bytes."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def image_manifest(architecture: str, size: int) -> tuple[bytes, bytes]:
    """Return manifest and configuration of one architecture."""
    config = encoded({"architecture": architecture, "os": "linux", "rootfs": {"type": "layers"}})
    layers = [{"digest": "sha256:" + "0" * 64, "size": size}]
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPES[0],
        "config": {"digest": digest(config), "size": 1},
        "layers": layers,
    }
    return encoded(document), config


def image_index(manifests: dict[str, bytes], media_type: str | None = INDEX_TYPES[0]) -> bytes:
    """Return an index of the manifests, with an attestation as buildx adds it."""
    entries = [
        {"digest": digest(content), "platform": {"architecture": name, "os": "linux"}}
        for name, content in manifests.items()
    ]
    entries.append({"digest": "sha256:" + "0" * 64, "platform": {"architecture": "unknown", "os": "unknown"}})
    document: dict[str, Any] = {"schemaVersion": 2, "manifests": entries}
    if media_type is not None:
        document["mediaType"] = media_type
    return encoded(document)
