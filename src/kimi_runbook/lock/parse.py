"""From the JSON form to a Lock: types, forms, and nothing unknown; what belongs together is in rules.py."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock.model import (
    SCHEMA_VERSION,
    DriverLock,
    EngineLock,
    ImageLock,
    Lock,
    ModelLock,
    RuntimeLock,
    ToolkitLock,
)
from kimi_runbook.lock.refusal import RESOLVE, dotted, refused
from kimi_runbook.lock.rules import check_lock
from kimi_runbook.reading import Fields, data_file, parse_yaml, read_text
from kimi_runbook.versions import is_driver_version, parse

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NO_IMAGE_BYTES = 10**15  # a thousand times the largest image; beyond it is a slip of the keyboard
_LATEST = re.compile(r"(?i)(?:^|[^a-z])latest(?:$|[^a-z])")


def load_lock(path: Path | str) -> Lock:
    """Read a lock file; RunbookError when it is missing, malformed or not allowed."""
    source = str(path)
    try:
        text = read_text(Path(path))
    except RunbookError as error:
        raise refused(error.where, "", error.observed, "a lock file") from error
    return parse_lock(parse_yaml(text, source), source)


def parse_lock(data: object, source: str) -> Lock:
    """Build a Lock from its JSON form.

    It stays cheap, since a run parses its lock once per host: the schema of lock.schema.json, which finds all wrong
    shapes at once, is only used by ``kimi-runbook lock``.

    Raises:
        RunbookError: a field is missing, unknown, of the wrong type, says ``latest``, or the parts do not belong
            together; it names the path of the key. ``source`` is where the data came from.
    """
    try:
        lock = _read(data, source)
    except RunbookError as error:
        raise dotted(error, source) from error
    check_lock(lock, source)
    return lock


def refuse_latest(value: object, source: str, path: str = "") -> None:
    """Raise RunbookError when ``latest`` stands anywhere in a value, also inside a tag or a reference."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_latest(item, source, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            refuse_latest(item, source, f"{path}[{number}]")
    elif isinstance(value, str) and _LATEST.search(value):
        raise refused(source, path, value, "one exact version", "Name the version to be installed.")


def _read(data: object, source: str) -> Lock:
    root = Fields(data, source, RESOLVE)
    root.require_schema(SCHEMA_VERSION)
    _only(root, Lock.__dataclass_fields__)
    refuse_latest(data, source)
    return Lock(
        schema_version=SCHEMA_VERSION,
        platform=_platform(root),
        os=_os(root),
        kernel=root.optional_text("kernel"),
        driver=_driver(root.fields("driver")),
        toolkit=_toolkit(root.fields("toolkit")),
        container_runtime=_runtime(root.fields("container_runtime")),
        image=_image(root.fields("image")),
        model=_model(root.fields("model")),
        recipe_facts_version=root.text("recipe_facts_version"),
    )


def _platform(root: Fields) -> str:
    platform, known = root.text("platform"), data_file("hardware.yml").names()
    if platform not in known:
        raise _wrong(root, "platform", platform, f"hardware known here: {', '.join(known)}")
    return platform


def _os(root: Fields) -> str | None:
    name = root.optional_text("os")
    if name is not None and len(name.split()) not in (1, 2):
        raise _wrong(root, "os", repr(name), 'ID and VERSION_ID of os-release, e.g. "ubuntu 24.04"')
    return name


def _driver(driver: Fields) -> DriverLock:
    _only(driver, DriverLock.__dataclass_fields__)
    lock = DriverLock(
        branch=driver.text("branch"),
        version=driver.text("version"),
        package_version=_version(driver, "package_version"),
        flavour=driver.optional_text("flavour") or "open",
        activation=driver.optional_text("activation") or "reboot",
        allow_feature_branch=driver.flag("allow_feature_branch", False),
        companions=_companions(driver.optional_fields("companions")),
    )
    if not is_driver_version(lock.version):
        raise _wrong(driver, "version", lock.version, "two or three numbers, e.g. 580.178.04")
    if lock.flavour != "open":  # the 620 branch has no other, and Blackwell needs it
        raise _wrong(driver, "flavour", lock.flavour, "open")
    if lock.activation not in ("reboot", "reload"):
        raise _wrong(driver, "activation", lock.activation, "reboot or reload")
    return lock


def _companions(companions: Fields | None) -> dict[str, str]:
    return {} if companions is None else {name: _version(companions, name) for name in companions.names()}


def _toolkit(toolkit: Fields) -> ToolkitLock:
    _only(toolkit, ToolkitLock.__dataclass_fields__)
    packages = toolkit.texts("packages")
    if not packages:
        raise _wrong(toolkit, "packages", "no package", "the toolkit's packages")
    return ToolkitLock(version=_version(toolkit, "version"), packages=packages)


def _runtime(runtime: Fields) -> RuntimeLock:
    _only(runtime, RuntimeLock.__dataclass_fields__)
    open_ = runtime.optional_text("version") is None
    return RuntimeLock(package=runtime.text("package"), version=None if open_ else _version(runtime, "version"))


def _model(model: Fields) -> ModelLock:
    _only(model, ModelLock.__dataclass_fields__)
    return ModelLock(name=model.text("name"), revision=model.text("revision"))


def _image(image: Fields) -> ImageLock:
    _only(image, ImageLock.__dataclass_fields__)
    engine = image.fields("engine")
    _only(engine, EngineLock.__dataclass_fields__)
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
        raise _wrong(image, "repository", lock.repository, "a repository without tag or digest")
    for key, digest in (("digest", lock.digest), *((f"manifests: {a}", d) for a, d in lock.manifests.items())):
        if not _DIGEST.fullmatch(digest):
            raise _wrong(image, key, digest or "nothing", "sha256: and 64 hexadecimal digits")
    if not lock.manifests:
        raise _wrong(image, "manifests", "no architecture", "one manifest digest per architecture")
    if not 0 < lock.size_bytes < _NO_IMAGE_BYTES:
        observed = str(lock.size_bytes) if lock.size_bytes <= 0 else f"{_NO_IMAGE_BYTES} or more"
        raise _wrong(image, "size_bytes", observed, "the size of the image, in bytes")
    if lock.engine.name != "vllm":
        raise _wrong(engine, "name", lock.engine.name, "vllm")
    return lock


def _version(fields: Fields, key: str) -> str:
    text = fields.text(key)
    try:
        parse(text)
    except ValueError:
        raise _wrong(fields, key, text, "one version as the package manager writes it, e.g. 580.178.04-1") from None
    return text


def _only(fields: Fields, known: Collection[str]) -> None:
    for name in fields.names():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            step = f"Did you mean {near[0]}?" if near else "Remove it."
            where = f"{fields.where}: {name}"
            raise RunbookError(
                where=where, observed="unknown key", expected=f"only {', '.join(sorted(known))}", next_step=step
            )


def _wrong(fields: Fields, key: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(where=f"{fields.where}: {key}", observed=observed, expected=expected, next_step=RESOLVE)
