"""NVIDIA's two JSON files about drivers, read from files: what a driver version comes with, and which versions exist.

``redistrib_<version>.json`` lies under developer.download.nvidia.com/compute/nvidia-driver/redist/. Its shape is that
of NVIDIA's other redistrib files: ``release_*`` texts, and one mapping per component with ``version`` and one mapping
per platform (``linux-x86_64``, ``linux-sbsa``) that has ``relative_path``, ``sha256``, ``md5`` and ``size``. Read in
redistrib_13.0.2.json, which carries a whole driver set [V]; that the driver's own file has the same shape is [S].

``releases.json`` lies under docs.nvidia.com/datacenter/tesla/drivers/: branch to ``type`` and ``driver_info``, a list
of ``release_version``, ``release_date`` (may be empty), ``architectures`` (machine names) and addresses [S, excerpt of
2026-09-28]. Everything not needed is left unread, so a newer file with more keys stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock.refusal import dotted
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.versions import is_driver_version

_DOWNLOAD = "Download the file again for the version in the lock, or write the value into the template."


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a driver release: its version, and the platforms it exists for (``linux-x86_64``)."""

    version: str
    platforms: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRelease:
    """What one redistrib JSON says.

    Attributes:
        source: The file.
        version: The driver's version.
        components: Key in the file to component, the driver included.
    """

    source: str
    version: str
    components: Mapping[str, Component]

    def component(self, key: str, machine: str | None) -> Component:
        """Return one component; RunbookError when the file has none of it, or none for the machine (``aarch64``)."""
        found = self.components.get(key)
        if found is None:
            raise RunbookError(
                where=f"{self.source}: {key}",
                observed="absent",
                expected=f"the component; the file has {', '.join(sorted(self.components))}",
                next_step=_DOWNLOAD,
            )
        platform = data_file("lock_rules.yml").text_map("redistrib_platform").get(machine or "")
        if platform is not None and platform not in found.platforms:
            raise RunbookError(
                where=f"{self.source}: {key}.{platform}",
                observed="absent",
                expected=f"{key} for {machine}; it exists for {', '.join(sorted(found.platforms)) or 'no platform'}",
                next_step="Remove that package from driver.companions of this platform.",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One driver release: version, date (None where the file has none), machines it exists for (empty: not said)."""

    version: str
    date: str | None
    machines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """What releases.json says: branch to its class (None when not known here) and releases, in file order."""

    source: str
    classes: Mapping[str, str | None]
    releases: Mapping[str, tuple[Release, ...]]

    def find(self, version: str, machine: str | None) -> Release:
        """Return one release.

        Raises:
            RunbookError: the branch or the version is not there, or it does not exist for the machine; the message
                names what is there, since the choice is the platform's and never this program's.
        """
        branch = version.partition(".")[0]
        if branch not in self.releases:
            known = ", ".join(sorted(self.releases, key=int))
            raise self._wrong(branch, "absent", f"driver branch {branch}; the file has {known}")
        for release in self.releases[branch]:
            if release.version == version:
                if machine is not None and release.machines and machine not in release.machines:
                    have = ", ".join(release.machines)
                    raise self._wrong(f"{branch}.{version}.architectures", have, f"{machine} among them")
                return release
        raise self._wrong(branch, f"no release {version}", f"one of {self.choices(branch)}")

    def choices(self, branch: str, most: int = 4) -> str:
        """Return the newest releases of a branch with their dates, as words."""
        shown = [f"{release.version} ({release.date or 'no date'})" for release in self.releases.get(branch, ())]
        return ", ".join(shown[:most]) or "none"

    def _wrong(self, path: str, observed: str, expected: str) -> RunbookError:
        step = "Download releases.json again, or correct driver.version in the template."
        return RunbookError(where=f"{self.source}: {path}", observed=observed, expected=expected, next_step=step)


def read_redistrib(data: object, source: str) -> DriverRelease:
    """Read a redistrib JSON; RunbookError names the path of the key that is missing or wrong."""
    try:
        return _redistrib(data, source)
    except RunbookError as error:
        raise dotted(error, source) from error


def read_releases(data: object, source: str) -> Releases:
    """Read releases.json; RunbookError names the path of the key. Keys that are no branch are left out."""
    try:
        return _releases(data, source)
    except RunbookError as error:
        raise dotted(error, source) from error


def _redistrib(data: object, source: str) -> DriverRelease:
    root = Fields(data, source, _DOWNLOAD)
    components = {
        name: _component(Fields(root.raw(name), f"{source}: {name}", _DOWNLOAD))
        for name in root.names()
        if isinstance(root.raw(name), Mapping)
    }
    keys = data_file("lock_rules.yml").texts("driver_components")
    driver = next((components[key].version for key in keys if key in components), None)
    label = None if root.optional_text("release_product") == "cuda" else root.optional_text("release_label")
    version = driver or label
    if version is None or not is_driver_version(version):
        raise RunbookError(
            where=f"{source}: {keys[0]}.version",
            observed=version or "absent, and so is release_label",
            expected="the driver's version, e.g. 580.178.04",
            next_step="Give the file redistrib_<driver version>.json of NVIDIA's nvidia-driver/redist folder.",
        )
    return DriverRelease(source=source, version=version, components=components)


def _releases(data: object, source: str) -> Releases:
    root = Fields(data, source, _DOWNLOAD)
    branches = [name for name in root.names() if name.isdigit()]
    if not branches:
        raise RunbookError(
            where=source,
            observed=f"keys {', '.join(root.names()[:5]) or 'none'}",
            expected="driver branches, e.g. 580",
            next_step=_DOWNLOAD,
        )
    types = data_file("lock_rules.yml").text_map("release_types")
    classes: dict[str, str | None] = {}
    releases: dict[str, tuple[Release, ...]] = {}
    for name in branches:
        branch = root.fields(name)
        classes[name] = types.get(branch.text("type").strip().lower())
        if branch.optional_sequence("driver_info") is None:
            raise RunbookError(
                where=f"{branch.where}.driver_info",
                observed="absent",
                expected="a list of releases",
                next_step=_DOWNLOAD,
            )
        releases[name] = tuple(_release(entry) for entry in branch.each("driver_info"))
    return Releases(source=source, classes=classes, releases=releases)


def _component(fields: Fields) -> Component:
    platforms = (name for name in fields.names() if isinstance(fields.raw(name), Mapping))
    return Component(version=fields.text("version"), platforms=frozenset(platforms))


def _release(entry: Fields) -> Release:
    return Release(
        version=entry.text("release_version"),
        date=entry.optional_text("release_date") or None,
        machines=entry.texts("architectures"),
    )
