"""How a distribution's packages write a version: derived where a table knows it, asked for where none does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kimi_runbook.lock.model import Lock
from kimi_runbook.lock.refusal import refused
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.versions import compare_upstream, parse

_RPM_RELEASE = re.compile(r"\.(el|fc|amzn|azl)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution a lock names, as far as packaging depends on it.

    Attributes:
        name: ``id`` and version, as in the lock.
        kind: ``deb`` or ``rpm``; None for a distribution that is not known here.
    """

    name: str
    kind: str | None
    version: str
    facts: Fields | None

    @classmethod
    def of(cls, name: str | None) -> Distribution | None:
        """Return the distribution of a lock's ``os``, or None where the lock leaves it open."""
        if name is None:
            return None
        identity, _, version = name.partition(" ")
        facts = data_file("lock_rules.yml").fields("packaging").optional_fields(identity)
        return cls(name=name, kind=facts.text("kind") if facts else None, version=version, facts=facts)

    def driver_package_version(self, version: str) -> str | None:
        """Return a driver package's version, e.g. ``3:580.178.04-1.el9``; None where no fact gives its revision."""
        if self.facts is None:
            return None
        for entry in self.facts.each("driver"):
            if in_range(version, entry):
                return self._full(version, entry.text("revision"))
        return None

    def companion_package_version(self, version: str) -> str | None:
        """Return a companion package's version; None where no fact gives its revision."""
        revision = self.facts.optional_text("companions") if self.facts else None
        return None if revision is None else f"{version}-{revision}"

    def question(self, package: str) -> str:
        """Return the command that shows which versions of a package a host's repositories offer."""
        commands = data_file("lock_rules.yml").fields("ask_package_manager")
        if self.kind is None:
            return f"ask the package manager for the versions of {package}"
        return commands.text(self.kind).format(name=package)

    def _full(self, version: str, revision: str) -> str | None:
        major = self.version.partition(".")[0]
        if "{major}" in revision and not major:
            return None
        epoch = self.facts.optional_integer("epoch") if self.facts else None
        return ("" if epoch is None else f"{epoch}:") + f"{version}-{revision.format(major=major)}"


def in_range(version: str, ends: Fields) -> bool:
    """Whether a version lies in a range of the data files: ``since`` and ``until``, both included, either open."""
    since, until = ends.optional_text("since"), ends.optional_text("until")
    return (since is None or compare_upstream(version, since) >= 0) and (
        until is None or compare_upstream(version, until) <= 0
    )


def check_packaging(lock: Lock, source: str) -> None:
    """Raise RunbookError when a driver package's version cannot be one of the lock's distribution."""
    distribution = Distribution.of(lock.os)
    if distribution is None or distribution.kind is None:
        return
    for path, text in _package_versions(lock):
        wrong = _misfit(text, distribution)
        if wrong is not None:
            raise refused(source, path, text, f"a version of {distribution.name}: {wrong}")


def packaging_notes(lock: Lock) -> list[str]:
    """Return warnings about package versions that are possible but not what the repositories are known to carry."""
    distribution = Distribution.of(lock.os)
    known = distribution.driver_package_version(lock.driver.version) if distribution else None
    if distribution is None or known is None or known == lock.driver.package_version:
        return []
    return [
        f"driver.package_version: {lock.driver.package_version}, where NVIDIA's repository for {distribution.name} is"
        f" known to carry {known}; check with: {distribution.question('nvidia-modprobe')}"
    ]


def _package_versions(lock: Lock) -> list[tuple[str, str]]:
    companions = [(f"driver.companions.{name}", text) for name, text in lock.driver.companions.items()]
    return [("driver.package_version", lock.driver.package_version), *companions]


def _misfit(text: str, distribution: Distribution) -> str | None:
    """Return why a package version cannot be one of the distribution, or None."""
    release = parse(text).revision
    if release is None:
        return "with its revision, e.g. -1"
    rpm = _RPM_RELEASE.search(release)
    if "ubuntu" in release and not distribution.name.startswith("ubuntu"):
        return f"{release} is an Ubuntu revision"
    if rpm is not None and distribution.kind == "deb":
        return f"{rpm[0]} is an RPM release"
    major = distribution.version.partition(".")[0]
    if rpm is not None and major and rpm[2] != major:
        return f"{rpm[0]} is a release for version {rpm[2]}"
    return None
