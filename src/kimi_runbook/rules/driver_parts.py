"""Rules about what belongs to the driver's version: packages, libraries, daemons, CDI files; a toolkit does not."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kimi_runbook.companions import companion_of
from kimi_runbook.lock import DriverLock
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.driver import settled
from kimi_runbook.versions import is_driver_version, same_build, upstream_of

_BRANCH = re.compile(r"[3-9]\d\d\.")  # below 300 it is no driver's: kernels, tools, other libraries have such numbers
_GENERATED = ("/var/run/cdi/", "/run/cdi/")  # what nvidia-ctk writes; /etc/cdi is written by hand (CDI, pkg/cdi/doc.go)


def driver_version_of(text: str) -> str | None:
    """Return the driver version a package version names, None when it names none."""
    try:
        upstream = upstream_of(text)
    except ValueError:
        return None
    return upstream if is_driver_version(upstream) and _BRANCH.match(upstream) else None


def name_at(driver: DriverLock, name: str) -> str:
    """Return what a companion is called at the locked driver: as the lock names it, else with the lock's branch."""
    bare = companion_of(name)
    named = [one for one in driver.companions if companion_of(one) == bare]
    return name if name in named else next(iter(named), re.sub(r"-\d{3}$", f"-{driver.branch}", name))


def _strays(case: Case) -> Outcome:
    target = case.expected.driver_version
    if target is None or not settled(case):
        return
    pattern = re.compile(data_file("platform.yml").text("driver_package_pattern"))
    declared = {package.name for package in case.expected.packages}
    for name, package in sorted(case.snapshot.packages.items()):
        if package is None or name in declared or not pattern.search(name) or companion_of(name):
            continue
        if driver_version_of(package.version) not in (None, target):
            yield case.finding(
                "driver.stray_package", observed=f"{name} {package.version}", expected=target, subject=name
            )


def _families(case: Case) -> Outcome:
    if case.expected.driver_version is None:
        return
    installed = [name for name, package in sorted(case.snapshot.packages.items()) if package is not None]
    found = {
        family: [name for name in installed if re.search(pattern, name)]
        for family, pattern in data_file("platform.yml").text_map("driver_families").items()
    }
    if all(found.values()):
        told = "; ".join(f"{family}: {', '.join(names[:3])}" for family, names in found.items())
        yield case.finding("driver.mixed_families", observed=told, expected="packages of one family")


def _libraries(case: Case) -> Outcome:
    target, versions = case.expected.driver_version, case.snapshot.driver.libcuda
    if target is None or not settled(case):
        return
    if versions is None:
        yield Unknown("driver: libcuda")
        return
    for version in versions:
        if version != target:
            yield case.finding(
                "driver.stray_library",
                observed=f"libcuda.so.{version}",
                expected=target,
                subject=f"libcuda.so.{version}",
            )


def _companions(case: Case) -> Outcome:
    """Packages that have to be of the driver's version, and the daemons that go on running from before."""
    target = case.expected.driver_version
    if target is None:
        return
    declared = {package.name for package in case.expected.packages}
    facts = data_file("lock_rules.yml").fields("companions")
    for name, package in sorted(case.snapshot.packages.items()):
        bare = companion_of(name)
        if package is None or bare is None or name in declared:
            continue
        right = name_at(case.lock.driver, name)
        if right in declared:
            continue  # a role puts it in the place of this one
        locked = case.lock.driver.companions.get(right)
        wanted = locked or (target if facts.fields(bare).text("version") == "driver" else None)
        if wanted is not None and not same_build(package.version, wanted):
            yield case.finding(
                "driver.companion",
                observed=f"{name} {package.version}",
                expected=wanted if right == name else f"{right} {wanted}",
                subject=name if right == name else f"{right} in place of {name}",
            )
    yield from _processes(case)


def _processes(case: Case) -> Outcome:
    """A daemon whose program was replaced under it; the driver's own packages are declared and restart theirs."""
    services = case.snapshot.fabric.services
    if not services:
        yield Unknown("fabric: services")
    for name, service in services.items():
        if service.active == "active" and service.replaced:
            yield case.finding(
                "driver.companion_process",
                observed=f"{name} runs since {service.started_at or 'before'}, its program was replaced since",
                expected=f"{service.package or name} {service.version or ''}".strip(),
                subject=name,
            )


def _cdi(case: Case) -> Outcome:
    """CDI files name library files by version; while the driver is to be changed they are about to be written anew."""
    target, files = case.expected.driver_version, case.snapshot.cdi
    if target is None or not settled(case):
        return
    if files is None:
        yield Unknown("cdi")
        return
    if not files and _cdi_wanted(case):
        yield case.finding(
            "cdi.missing", observed="no CDI file in /etc/cdi or /var/run/cdi", expected="one written by nvidia-ctk"
        )
    for file in files:
        path = file.path
        others = [version for version in file.versions if driver_version_of(version) not in (None, target)]
        missing = file.missing
        if not others and not missing:
            continue
        told = [f"names {', '.join(others)}"] if others else []
        told += [f"names {missing[0]}, which is missing ({len(missing)} in all)"] if missing else []
        yield case.finding(
            "cdi.stale" if path.startswith(_GENERATED) else "cdi.foreign",
            observed=f"{path} {' and '.join(told)}",
            expected=f"files of {target} that are there",
            subject=path,
        )


def _cdi_wanted(case: Case) -> bool:
    """Whether Docker is told to inject devices by CDI, and the toolkit that writes the files is there."""
    told = (case.expected.daemon_settings, case.snapshot.runtime.daemon or {})
    features = [settings.get("features") for settings in told]
    asked = any(isinstance(one, Mapping) and one.get("cdi") is True for one in features)
    return asked and any(name.startswith("nvidia-container-toolkit") for name in case.snapshot.runtime.toolkit or {})


def _toolkit(case: Case) -> Outcome:
    rows = case.snapshot.driver.toolkit
    if rows is None:
        yield Unknown("driver: toolkit")
        return
    for row in rows:
        yield case.finding(
            "driver.toolkit",
            observed=f"CUDA Toolkit {row.version or 'of unknown version'} at {row.path}",
            expected="known to the reader",
        )


CHECKS = (
    Check("driver.packages", _strays),
    Check("driver.families", _families),
    Check("driver.libraries", _libraries),
    Check("driver.companions", _companions),
    Check("driver.cdi", _cdi),
    Check("driver.toolkit", _toolkit),
)
