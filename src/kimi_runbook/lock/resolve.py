"""From a template to a lock: fill in what only NVIDIA's files and the image's index know, and say what was derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_runbook.errors import RunbookError
from kimi_runbook.image_index import Manifest
from kimi_runbook.lock.model import Lock
from kimi_runbook.lock.packaging import Distribution
from kimi_runbook.lock.parse import parse_lock, refuse_latest
from kimi_runbook.lock.refusal import dotted, refused
from kimi_runbook.lock.rules import check_new, companion_rule, floating
from kimi_runbook.lock.vendor import DriverRelease, Releases
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.versions import branch_of, is_driver_version, upstream_of

Fetch = Callable[..., Manifest]
"""``registry.fetch_manifest``, or something that behaves like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A new lock, and one sentence for each value that was derived from a table instead of read from a file."""

    lock: Lock
    notes: tuple[str, ...]


def resolve_lock(
    template: Mapping[str, Any],
    fetch: Fetch,
    source: str = "lock template",
    *,
    release: DriverRelease | None = None,
    releases: Releases | None = None,
) -> Resolved:
    """Return the lock a template resolves to.

    Args:
        template: A lock that may leave out ``image.digest``, ``image.manifests``, ``image.size_bytes``,
            ``driver.branch`` and ``driver.package_version``, and may write null for the version of a companion. What
            it does have is checked against the files and the registry and must agree.
        fetch: Returns the image's manifest.
        source: Where the template came from, for messages.
        release: What the driver's redistrib JSON says; None leaves the driver unchecked.
        releases: What releases.json says; None leaves branch class and existence to the facts built in.

    Raises:
        RunbookError: as ``parse_lock``; or a value is missing and cannot be derived, or contradicts a file; or the
            tag is pushed again and no digest says which image is meant.
    """
    refuse_latest(template, source)
    root = Fields(template, source, "Correct the template.")
    notes: list[str] = []
    try:
        driver = _Driver(root, source, release, releases).resolved(notes)
        image = _image(root.fields("image"), fetch, source)
    except RunbookError as error:
        raise dotted(error, source) from error
    lock = parse_lock({**template, "driver": driver, "image": image}, source)
    check_new(lock, source)
    return Resolved(lock=lock, notes=tuple(notes))


def _image(image: Fields, fetch: Fetch, source: str) -> dict[str, Any]:
    repository, tag, pinned = image.text("repository"), image.text("tag"), image.optional_text("digest")
    moving = floating(tag)
    if moving and pinned is None:
        raise refused(
            source,
            "image.tag",
            f"{tag}, a tag that is pushed again and again",
            "a release tag, e.g. v0.29.0",
            "Take one, or write the digest you mean into image.digest of the template.",
        )
    reference = pinned if moving and pinned is not None else tag
    manifest = fetch(repository, reference, insecure=image.flag("insecure", False))
    found: dict[str, object] = {"digest": manifest.digest, "manifests": dict(manifest.manifests)}
    if set(manifest.sizes) == set(manifest.manifests):
        found["size_bytes"] = max(manifest.sizes.values(), default=0)
    elif image.raw("size_bytes") is None:
        raise refused(
            source,
            "image.size_bytes",
            f"absent, and no manifest was given for {', '.join(sorted(set(manifest.manifests) - set(manifest.sizes)))}",
            "the size of the image's layers, in bytes",
            "Save each architecture's manifest too (docker buildx imagetools inspect --raw REPOSITORY@DIGEST) and "
            "give it with --image-manifest, or write the size.",
        )
    for key, value in found.items():
        given = image.raw(key)
        if given is not None and given != value:
            raise refused(
                source,
                f"image.{key}",
                f"{repository}:{tag} resolves to {value}",
                str(given),
                "The tag has moved: remove the pinned value to accept the new image, or correct the tag.",
            )
    return {**image.mapping(), **found}


@dataclass(frozen=True, slots=True)
class _Driver:
    root: Fields
    source: str
    release: DriverRelease | None
    releases: Releases | None

    def resolved(self, notes: list[str]) -> dict[str, Any]:
        driver = self.root.fields("driver")
        version = self._version(driver)
        branch = driver.optional_text("branch") or branch_of(version)
        distribution = Distribution.of(self.root.optional_text("os"))
        given = driver.optional_text("package_version")
        return {
            **driver.mapping(),
            "branch": branch,
            "version": version,
            "package_version": given or self._package_version(version, distribution, notes),
            "companions": {
                name: self._companion(name, branch, version, distribution, notes) for name in self._companions(driver)
            },
        }

    def _machine(self) -> str | None:
        hardware = data_file("hardware.yml").optional_fields(self.root.text("platform"))
        return hardware.optional_text("arch") if hardware else None

    def _version(self, driver: Fields) -> str:
        version, branch = driver.optional_text("version"), driver.optional_text("branch")
        if version is None:
            have = f": {self.releases.source} has {self.releases.choices(branch)}" if self.releases and branch else ""
            raise refused(
                self.source,
                "driver.version",
                "absent",
                f"the exact version the platform is qualified for{have}",
                "Write it: which build is right depends on the platform, so none is chosen here.",
            )
        if not is_driver_version(version):
            raise refused(self.source, "driver.version", version, "two or three numbers, e.g. 580.178.04")
        if self.releases is not None:
            self._check_class(version, driver.flag("allow_feature_branch", False), self.releases)
        if self.release is not None and self.release.version != version:
            raise refused(
                self.source,
                "driver.version",
                version,
                f"{self.release.version}, the driver of {self.release.source}",
                f"Give redistrib_{version}.json, or lock the version of the file.",
            )
        return version

    def _check_class(self, version: str, allowed: bool, releases: Releases) -> None:
        releases.find(version, self._machine())
        branch = branch_of(version)
        if releases.classes[branch] == "New Feature" and not allowed:
            raise refused(
                self.source,
                "driver.branch",
                f"{branch}, a new feature branch by {releases.source}",
                "an LTS or production branch",
                "Take one, or write allow_feature_branch: true and plan the next change within a quarter.",
            )

    def _package_version(self, version: str, distribution: Distribution | None, notes: list[str]) -> str:
        derived = distribution.driver_package_version(version) if distribution else None
        if derived is None or distribution is None:
            raise self._ask("driver.package_version", version, "nvidia-modprobe", distribution)
        notes.append(_derived("driver.package_version", derived, distribution, "nvidia-modprobe"))
        return derived

    def _companions(self, driver: Fields) -> tuple[str, ...]:
        companions = driver.optional_fields("companions")
        return companions.names() if companions else ()

    def _companion(
        self, name: str, branch: str, version: str, distribution: Distribution | None, notes: list[str]
    ) -> str | None:
        """Return one companion's package version: the template's, checked, or the file's with a known revision."""
        path = f"driver.companions.{name}"
        given = self.root.fields("driver").fields("companions").optional_text(name)
        rule = companion_rule(name, branch)
        if rule is None:
            return given  # parse_lock refuses the name
        wanted = self._companion_upstream(rule, version)
        if given is not None:
            if wanted is not None and self.release is not None and _upstream(given) != wanted:
                key = rule.text("component")
                raise refused(self.source, path, given, f"a build of {wanted}, {key} of {self.release.source}")
            return given
        if wanted is None:
            raise refused(
                self.source,
                path,
                "absent",
                f"the number of {name} that belongs to driver {version}, which is its own",
                f"Give the driver's JSON: --driver-json redistrib_{version}.json, or write the number.",
            )
        derived = distribution.companion_package_version(wanted) if distribution else None
        if derived is None or distribution is None:
            raise self._ask(path, wanted, name, distribution)
        notes.append(_derived(path, derived, distribution, name))
        return derived

    def _companion_upstream(self, rule: Fields, version: str) -> str | None:
        key = rule.optional_text("component")
        if self.release is not None and key is not None:
            found = self.release.component(key, self._machine()).version
            if rule.text("version") == "driver" and found != version:
                raise RunbookError(
                    where=f"{self.release.source}: {key}.version",
                    observed=found,
                    expected=f"{version}, the driver's version",
                    next_step="The file contradicts itself: download it again.",
                )
            return found
        return version if rule.text("version") == "driver" else None

    def _ask(self, path: str, version: str, package: str, distribution: Distribution | None) -> RunbookError:
        if distribution is None:
            return refused(
                self.source,
                path,
                "absent, and os is left open",
                f"{version} with the revision the distribution's packages have",
                'Write os, e.g. "ubuntu 24.04", or the full version.',
            )
        return refused(
            self.source,
            path,
            f"absent, and its revision for {distribution.name} is not known here",
            f"{version} with the revision the repository has",
            f"Look on a host: {distribution.question(package)}; then write it into the template.",
        )


def _upstream(text: str) -> str:
    try:
        return upstream_of(text)
    except ValueError:  # parse_lock says what is wrong with it
        return text


def _derived(path: str, value: str, distribution: Distribution, package: str) -> str:
    return (
        f"{path}: {value} is derived from how NVIDIA's repository for {distribution.name} names its builds;"
        f" check with: {distribution.question(package)}"
    )
