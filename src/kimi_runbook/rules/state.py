"""Rules about what roles declare: packages, files, units, kernel modules, Docker's settings."""

from __future__ import annotations

from collections.abc import Mapping

from kimi_runbook.driver_verdict import same_version
from kimi_runbook.expected import ExpectedFile, ExpectedPackage, ExpectedUnit
from kimi_runbook.host_facts import PackageFacts
from kimi_runbook.reading import canonical_json, data_file
from kimi_runbook.rules import Case, Check, Outcome

# States in which a unit is there after a boot; "enabled-runtime" is not. Source: systemctl(1), is-enabled.
_STARTS_AT_BOOT = ("enabled", "static", "alias", "indirect", "generated")
_MOST_NAMED = 3  # settings of one file that a finding names


def _packages(case: Case) -> Outcome:
    silent = case.failed("packages")
    if silent and case.expected.packages:
        yield case.unanswered("which packages are installed", silent)
        return
    for package in case.expected.packages:
        yield from _package(case, package)


def _files(case: Case) -> Outcome:
    for file in case.expected.files:
        yield from _file(case, file)


def _units(case: Case) -> Outcome:
    silent = [unit.name for unit in case.expected.units if _load(case, unit) == "unknown"]
    if silent:
        told = case.failed("systemctl") or f"systemctl says nothing of {', '.join(silent[:_MOST_NAMED])}"
        yield case.unanswered("the state of units", told)
    for unit in case.expected.units:
        if unit.name not in silent:
            yield from _unit(case, unit)


def _load(case: Case, unit: ExpectedUnit) -> str | None:
    present = case.snapshot.units.get(unit.name)
    return None if present is None else present.load or "unknown"


def _modules(case: Case) -> Outcome:
    modules = {name.replace("-", "_"): module for name, module in case.snapshot.modules.items()}
    for module in case.expected.modules:
        found = modules.get(module.name.replace("-", "_"))
        if found is None:
            yield case.not_asked(f"module {module.name}")
        elif not found.loaded:
            yield case.finding(
                "module.unloaded",
                observed=f"{module.name} not loaded",
                expected="loaded",
                subject=module.name,
                role=module.role,
            )


def _package(case: Case, package: ExpectedPackage) -> Outcome:
    name = package.name
    toolkit = case.snapshot.runtime.toolkit
    if name in case.snapshot.packages:
        installed = case.snapshot.packages[name]
    elif toolkit is not None and name in data_file("lock_rules.yml").texts("toolkit_packages"):
        installed = PackageFacts(version=toolkit[name]) if name in toolkit else None
    else:
        yield case.not_asked(f"package {name}")
        return
    wanted = package.version or "any version"
    if installed is None:
        yield case.finding(
            "package.missing", observed=f"{name} not installed", expected=wanted, subject=name, role=package.role
        )
        return
    if package.version is not None and not same_version(installed.version, package.version):
        yield case.finding(
            "package.version", observed=f"{name} {installed.version}", expected=wanted, subject=name, role=package.role
        )
    elif package.held and not installed.held:
        yield case.finding(
            "package.unheld", observed=f"{name} not held", expected="held", subject=name, role=package.role
        )


def _file(case: Case, file: ExpectedFile) -> Outcome:
    path = file.path
    if path not in case.snapshot.files:
        yield case.not_asked(f"file {path}")
        return
    present = case.snapshot.files[path]
    if present is None:
        yield case.finding("file.missing", observed=f"{path} missing", expected="present", subject=path, role=file.role)
        return
    if file.sha256 is not None and present.sha256 != file.sha256:
        observed, expected = told_apart(present.settings, file.settings) or (
            f"sha256 {(present.sha256 or 'unknown')[:12]}",
            f"sha256 {file.sha256[:12]}",
        )
        yield case.finding(
            "file.content",
            observed=f"{path} {observed}",
            expected=expected,
            subject=path,
            role=file.role,
        )
    if file.mode is not None and (present.mode or "").lstrip("0") != file.mode.lstrip("0"):
        yield case.finding(
            "file.mode",
            observed=f"{path} mode {present.mode or 'unknown'}",
            expected=f"mode {file.mode}",
            subject=path,
            role=file.role,
        )


def told_apart(observed: Mapping[str, str] | None, wanted: Mapping[str, str] | None) -> tuple[str, str] | None:
    """Return the settings that differ in words, as observed and as wanted; None where none does or is known."""
    if observed is None or wanted is None:
        return None
    names = sorted(name for name in {*observed, *wanted} if observed.get(name) != wanted.get(name))
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    left, right = (
        ", ".join(f"{name}={side[name]}" if name in side else f"{name} not set" for name in names[:_MOST_NAMED])
        for side in (observed, wanted)
    )
    return left + more, right


def _unit(case: Case, unit: ExpectedUnit) -> Outcome:
    name = unit.name
    present = case.snapshot.units.get(name)
    if present is None:
        yield case.not_asked(f"unit {name}")
        return
    if present.load == "not-found":
        if unit.enabled or unit.active:
            yield case.finding(
                "unit.missing", observed=f"{name} not found", expected="present", subject=name, role=unit.role
            )
        return
    if unit.enabled is not None and (present.enabled in _STARTS_AT_BOOT) != unit.enabled:
        yield case.finding(
            "unit.enablement",
            observed=f"{name} {present.enabled or 'unknown'}",
            expected="enabled" if unit.enabled else "disabled",
            subject=name,
            role=unit.role,
        )
    if unit.active is not None and (present.active == "active") != unit.active:
        yield case.finding(
            "unit.inactive" if unit.active else "unit.active",
            observed=f"{name} {present.active or 'unknown'}",
            expected="active" if unit.active else "inactive",
            subject=name,
            role=unit.role,
        )


def _daemon(case: Case) -> Outcome:
    runtime, role = case.snapshot.runtime, case.expected.daemon_role
    if runtime.daemon_error:
        yield case.finding(
            "daemon.unreadable",
            observed=f"daemon.json: {runtime.daemon_error}",
            expected="a JSON object",
            subject="daemon.json",
            role=role,
        )
        return
    present = runtime.daemon or {}
    for key, wanted in case.expected.daemon_settings.items():
        if not contains(present.get(key), wanted):
            observed = canonical_json(present[key]) if key in present else "not set"
            yield case.finding(
                "daemon.setting",
                observed=f"daemon.json {key}: {observed}",
                expected=canonical_json(wanted),
                subject=key,
                role=role,
            )


def contains(present: object, wanted: object) -> bool:
    """Whether a setting holds the wanted one: mappings and lists may hold more, other values must be equal."""
    if isinstance(wanted, Mapping):
        return isinstance(present, Mapping) and all(
            key in present and contains(present[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(present, list | tuple) and all(
            any(contains(have, want) for have in present) for want in wanted
        )
    return isinstance(present, bool) == isinstance(wanted, bool) and present == wanted  # True == 1 in Python


CHECKS = (
    Check("settings.packages", _packages),
    Check("settings.files", _files),
    Check("settings.units", _units),
    Check("settings.modules", _modules),
    Check("settings.daemon", _daemon),
)
