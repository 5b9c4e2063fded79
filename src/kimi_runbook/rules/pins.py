"""Rules about what steers the driver's version beside the lock: preference files, version locks, missing holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from kimi_runbook.companions import companion_of
from kimi_runbook.host_facts import PinEntry
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.driver import settled

_DRIVER_VERSION = re.compile(r"\d{3}(?=[.*-]|$)")  # how a pattern of a driver's version begins; nvlsm counts by years
_STREAM = re.compile(r"stream (?P<branch>\d{3})\b")
# One entry of dnf's versionlock: name-[epoch:]version-release, of which the version may end in a glob.
_LOCKED = re.compile(r"(?P<name>.+?)-(\d+:)?(?P<version>\d{3}\.[\d.]+)(?=[-*]|$)")
_OWN_PIN = "nvidia-driver-pinning"  # NVIDIA's own packages of pins; the next one takes the place of the one before


def _pins(case: Case) -> Outcome:
    """Pins and locks that say another version than the lock: the next transaction would not do what was planned."""
    if case.expected.driver_version is None:
        return
    if case.snapshot.pins is None or case.snapshot.holds is None:
        yield Unknown("pins")
        return
    for place, told in (*_preferences(case), *_locks(case)):
        yield case.finding(
            "driver.pin", observed=f"{place}: {told}", expected=f"{case.lock.driver.version}, or no pin", subject=place
        )
    yield from _unheld(case)


def _preferences(case: Case) -> Iterator[tuple[str, str]]:
    replaced = any(package.name.startswith(_OWN_PIN) for package in case.expected.packages) and not settled(case)
    for file in case.snapshot.pins or ():
        if replaced and file.path.rpartition("/")[2].startswith(_OWN_PIN):
            continue
        for entry in file.entries:
            if _contradicts(case, entry):
                priority = "" if entry.priority is None else f" at priority {entry.priority}"
                yield file.path, f"{entry.package} {entry.pin}{priority}"


def _contradicts(case: Case, entry: PinEntry) -> bool:
    """Whether a pin keeps the locked driver away: another version or branch asked for, or the package forbidden."""
    if entry.priority is not None and entry.priority < 0:
        return _forbids(case, entry)
    stream = _STREAM.match(entry.pin)
    if stream is not None:
        return stream["branch"] != case.lock.driver.branch
    if entry.pin.startswith("stream "):
        return True  # latest-dkms, open-dkms: it follows the newest branch
    kind, _, pattern = entry.pin.partition(" ")
    if kind != "version" or not _DRIVER_VERSION.match(pattern):
        return False
    names = (case.lock.driver.version, case.lock.driver.package_version.rpartition(":")[2])
    return not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}*") for name in names)


def _forbids(case: Case, entry: PinEntry) -> bool:
    """Whether a pin that forbids packages forbids the locked driver: its version, or a place it may come from."""
    known = re.compile(data_file("platform.yml").text("driver_package_pattern"))
    if not any(known.search(name) for name in entry.package.split()):
        return False
    kind, _, pattern = entry.pin.partition(" ")
    if kind == "version":
        versions = (case.lock.driver.version, case.lock.driver.package_version.rpartition(":")[2])
        return any(fnmatchcase(version, pattern) for version in versions)
    return True  # a place it may come from


def _locks(case: Case) -> Iterator[tuple[str, str]]:
    """Yield entries of a version lock about the driver that name another version; nothing while it is to be changed."""
    known = re.compile(data_file("platform.yml").text("driver_package_pattern"))
    for entry in case.snapshot.holds or ():
        match = _LOCKED.match(entry)
        if match and known.search(match["name"]) and match["version"].rstrip(".") != case.lock.driver.version:
            yield "dnf versionlock", entry


def _unheld(case: Case) -> Outcome:
    """A fabric package that is not held beside a driver that is: an update of its own parts the two."""
    held = {name for name, package in case.snapshot.packages.items() if package is not None and package.held}
    if not settled(case) or not any(package.held and package.name in held for package in case.expected.packages):
        return
    facts = data_file("lock_rules.yml").fields("companions")
    for name, package in sorted(case.snapshot.packages.items()):
        bare = companion_of(name)
        if package is None or package.held or bare is None or not facts.fields(bare).flag("fabric", False):
            continue
        yield case.finding(
            "driver.companion_unheld", observed=f"{name} {package.version} not held", expected="held", subject=name
        )


CHECKS = (Check("driver.pins", _pins),)
