"""Lock: what must be true on every host. Resolved once, asserted everywhere, never "latest"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file, digest_of, parse_yaml, read_text
from kimi_runbook.registry import Manifest

SCHEMA_VERSION = 1

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NEXT_STEP = "Correct the lock's template, then run: kimi-runbook lock resolve --template TEMPLATE --out LOCK"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLock:
    """The GPU driver: branch, exact version, package version, flavour, how to activate it, same-version companions."""

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


Fetch = Callable[..., Manifest]


def load_lock(path: Path | str) -> Lock:
    """Read a lock file; RunbookError when it is missing, malformed or not allowed."""
    source = str(path)
    try:
        text = read_text(Path(path))
    except RunbookError as error:
        raise RunbookError(
            where=error.where, observed=error.observed, expected="a lock file", next_step=_NEXT_STEP
        ) from error
    return parse_lock(parse_yaml(text, source), source)


def parse_lock(data: object, source: str) -> Lock:
    """Build a Lock from its JSON form.

    Raises:
        RunbookError: a field is missing, unknown, of the wrong type, says ``latest``, or names a driver that is
            not allowed; ``source`` is where the data came from.
    """
    root = Fields(data, source, _NEXT_STEP)
    root.require_schema(SCHEMA_VERSION)
    root.refuse_unknown(Lock.__dataclass_fields__)
    _refuse_latest(data, source)
    image = _image(root.fields("image"))
    return Lock(
        schema_version=SCHEMA_VERSION,
        platform=_platform(root),
        os=root.optional_text("os"),
        kernel=root.optional_text("kernel"),
        driver=_driver(root.fields("driver"), image.cuda),
        toolkit=_toolkit(root.fields("toolkit")),
        container_runtime=_runtime(root.fields("container_runtime")),
        image=image,
        model=_model(root.fields("model")),
        recipe_facts_version=root.text("recipe_facts_version"),
    )


def _platform(root: Fields) -> str:
    platform, known = root.text("platform"), data_file("hardware.yml").names()
    if platform not in known:
        raise _refused(root, "platform", platform, f"hardware known here: {', '.join(known)}")
    return platform


def resolve_lock(template: Mapping[str, Any], fetch: Fetch, source: str = "lock template") -> dict[str, Any]:
    """Return the JSON form of the lock a template resolves to, reading digests and sizes from the registry.

    Args:
        template: A lock without ``image.digest``, ``image.manifests`` and ``image.size_bytes``; one that has them
            is resolved again and must agree.
        fetch: ``registry.fetch_manifest`` or something that behaves like it.
        source: Where the template came from, for messages.
    """
    image = Fields(template, source, "Correct the template.").fields("image")
    repository, tag = image.text("repository"), image.text("tag")
    _refuse_latest(template, source)
    manifest = fetch(repository, tag, insecure=image.flag("insecure", False))
    resolved: dict[str, Any] = {
        "digest": manifest.digest,
        "manifests": dict(manifest.manifests),
        "size_bytes": max(manifest.sizes.values(), default=0),
    }
    for key, value in resolved.items():
        pinned = image.raw(key)
        if pinned is not None and pinned != value:
            raise RunbookError(
                where=f"{source}: image: {key}",
                observed=f"{repository}:{tag} resolves to {value}",
                expected=str(pinned),
                next_step="The tag has moved: remove the pinned value to accept the new image, or correct the tag.",
            )
    return parse_lock({**template, "image": {**template["image"], **resolved}}, source).to_json()


def _driver(driver: Fields, cuda: str | None) -> DriverLock:
    driver.refuse_unknown(DriverLock.__dataclass_fields__)
    lock = DriverLock(
        branch=driver.text("branch"),
        version=driver.text("version"),
        package_version=driver.text("package_version"),
        flavour=driver.optional_text("flavour") or "open",
        activation=driver.optional_text("activation") or "reboot",
        allow_feature_branch=driver.flag("allow_feature_branch", False),
        companions=driver.text_map("companions"),
    )
    if not re.fullmatch(r"\d+(\.\d+){1,2}", lock.version):
        raise _refused(driver, "version", lock.version, "two or three numbers, e.g. 580.178.04")
    if lock.version.split(".")[0] != lock.branch:
        raise _refused(driver, "branch", lock.branch, f"the branch of version {lock.version}")
    if lock.version not in lock.package_version:
        raise _refused(driver, "package_version", lock.package_version, f"a build of {lock.version}")
    if lock.flavour != "open":  # the 620 branch has no other, and Blackwell needs it
        raise _refused(driver, "flavour", lock.flavour, "open")
    if lock.activation not in ("reboot", "reload"):
        raise _refused(driver, "activation", lock.activation, "reboot or reload")
    _check_branch(driver, lock, cuda)
    return lock


def _check_branch(driver: Fields, lock: DriverLock, cuda: str | None) -> None:
    facts = data_file("driver_branches.yml")
    branch = facts.fields("branches").optional_fields(lock.branch)
    if branch and branch.text("class") == "New Feature" and not lock.allow_feature_branch:
        raise _refused(
            driver, "branch", f"{lock.branch}, a short-lived feature branch", "an LTS or production branch, e.g. 580"
        )
    if cuda is None:
        return
    major = cuda.split(".")[0]
    minimum = facts.fields("cuda_minimum_branch").optional_integer(major)
    if minimum is None:
        raise _refused(driver, "version", f"image built for CUDA {cuda}", "an image of a CUDA version known here")
    if int(lock.branch) < minimum:
        raise _refused(driver, "version", lock.version, f"branch {minimum} or newer, as CUDA {major} needs")


def _refused(fields: Fields, key: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(where=f"{fields.where}: {key}", observed=observed, expected=expected, next_step=_NEXT_STEP)


def _toolkit(toolkit: Fields) -> ToolkitLock:
    toolkit.refuse_unknown(ToolkitLock.__dataclass_fields__)
    packages = toolkit.texts("packages")
    if not packages:
        raise _refused(toolkit, "packages", "no package", "the toolkit's packages")
    return ToolkitLock(version=toolkit.text("version"), packages=packages)


def _runtime(runtime: Fields) -> RuntimeLock:
    runtime.refuse_unknown(RuntimeLock.__dataclass_fields__)
    return RuntimeLock(package=runtime.text("package"), version=runtime.optional_text("version"))


def _model(model: Fields) -> ModelLock:
    model.refuse_unknown(ModelLock.__dataclass_fields__)
    return ModelLock(name=model.text("name"), revision=model.text("revision"))


def _image(image: Fields) -> ImageLock:
    image.refuse_unknown(ImageLock.__dataclass_fields__)
    engine = image.fields("engine")
    engine.refuse_unknown(EngineLock.__dataclass_fields__)
    cuda = image.optional_text("cuda")
    lock = ImageLock(
        repository=image.text("repository"),
        tag=image.text("tag"),
        digest=image.text("digest"),
        manifests=image.text_map("manifests"),
        engine=EngineLock(name=engine.text("name"), version=engine.text("version")),
        size_bytes=image.integer("size_bytes"),
        cuda=cuda if "cuda" in image.names() else data_file("driver_branches.yml").text("default_cuda"),
        insecure=image.flag("insecure", False),
    )
    if "@" in lock.repository or ":" in lock.repository.rpartition("/")[2]:
        raise _refused(image, "repository", lock.repository, "a repository without tag or digest")
    for key, digest in (("digest", lock.digest), *((f"manifests: {a}", d) for a, d in lock.manifests.items())):
        if not _DIGEST.fullmatch(digest):
            raise _refused(image, key, digest, "sha256: and 64 hexadecimal digits")
    if not lock.manifests:
        raise _refused(image, "manifests", "no architecture", "one manifest digest per architecture")
    if lock.size_bytes <= 0:
        raise _refused(image, "size_bytes", str(lock.size_bytes), "the size of the image, in bytes")
    if lock.engine.name != "vllm":
        raise _refused(engine, "name", lock.engine.name, "vllm")
    return lock


def _refuse_latest(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_latest(item, f"{where}: {key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_latest(item, where)
    elif isinstance(value, str) and value.strip().lower().rpartition(":")[2] == "latest":
        raise RunbookError(
            where=where, observed=value, expected="one exact version", next_step="Name the version to be installed."
        )
