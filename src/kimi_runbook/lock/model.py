"""The lock's values: plain, frozen, with their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kimi_runbook.reading import digest_of

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLock:
    """The GPU driver and what comes with it.

    Attributes:
        branch: First number of the version, e.g. ``580``.
        version: What the loaded module has to say, e.g. ``580.178.04``; two or three numbers.
        package_version: The same as the package manager writes it, e.g. ``580.178.04-1ubuntu1`` or
            ``3:580.178.04-1.el9``.
        flavour: ``open``; no other is locked.
        activation: ``reboot``, or ``reload`` where a site allows it.
        allow_feature_branch: True accepts a short-lived branch.
        companions: Package name to package version, e.g. nvidia-fabricmanager; all but nvlsm have the driver's.
    """

    branch: str
    version: str
    package_version: str
    flavour: str
    activation: str
    allow_feature_branch: bool
    companions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitLock:
    """The NVIDIA container toolkit: one version for all its packages."""

    version: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLock:
    """The container runtime's package; version None accepts any installed one."""

    package: str
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLock:
    """The engine inside the image."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLock:
    """The engine image, pinned by index digest.

    Attributes:
        digest: Digest of the index (manifest list), the same for every architecture.
        manifests: Architecture (amd64, arm64) to the digest of its manifest.
        size_bytes: Compressed size of the largest architecture's layers.
        cuda: Major CUDA version the image is built for; None when the image uses none of it.
        insecure: True when the registry speaks plain HTTP.
    """

    repository: str
    tag: str
    digest: str
    manifests: Mapping[str, str]
    engine: EngineLock
    size_bytes: int
    cuda: str | None
    insecure: bool

    @property
    def reference(self) -> str:
        """The reference to pull: ``repository@sha256:...``."""
        return f"{self.repository}@{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLock:
    """The served model and its revision."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Everything a host must match. ``os`` is ``"<id> <version>"``, e.g. ``"debian 12"``; None leaves it open."""

    schema_version: int
    platform: str
    os: str | None
    kernel: str | None
    driver: DriverLock
    toolkit: ToolkitLock
    container_runtime: RuntimeLock
    image: ImageLock
    model: ModelLock
    recipe_facts_version: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, which is also the form of the lock file."""
        data = asdict(self)
        data["toolkit"]["packages"] = list(self.toolkit.packages)
        return data

    def digest(self) -> str:
        """Return ``sha256:<hex>`` of the lock's canonical JSON."""
        return digest_of(self.to_json())
