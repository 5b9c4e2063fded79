"""What belongs together in a lock: refusals, and what is allowed but worth a warning.

The facts are in data/lock_rules.yml, data/driver_branches.yml and data/hardware.yml. A lock that was once resolved has
to load again, for a rollback in the middle of the night: what is merely outdated is a warning here, and is refused only
when a new lock is made (``check_new``).
"""

from __future__ import annotations

import re

from kimi_runbook.image_index import oci_architecture
from kimi_runbook.lock.model import Lock
from kimi_runbook.lock.packaging import check_packaging, in_range, packaging_notes
from kimi_runbook.lock.refusal import refused
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.versions import branch_of, upstream_of


def check_lock(lock: Lock, source: str) -> None:
    """Raise RunbookError, naming the path of the key, when the parts of a lock do not belong together."""
    _check_driver(lock, source)
    _check_companions(lock, source)
    _check_toolkit(lock, source)
    _check_architecture(lock, source)
    check_packaging(lock, source)


def check_new(lock: Lock, source: str) -> None:
    """Raise RunbookError for what no new lock should start with, though an older one may still be loaded."""
    dead = dead_branch(lock.driver.branch)
    if dead is not None and branch_class(lock.driver.branch) != "New Feature":
        raise refused(source, "driver.branch", f"{lock.driver.branch}, {dead[0]}", f"a living branch: {dead[1]}")
    if missing := _toolkit_missing(lock):
        raise refused(
            source,
            "toolkit.packages",
            f"without {', '.join(missing)}",
            "all packages of the toolkit, which come in one version",
            "Add them: what is not named is installed in whatever version the repository offers, a mix.",
        )


def lock_warnings(lock: Lock) -> tuple[str, ...]:
    """Return what is allowed but should be known, one sentence each, with the path of its key first."""
    rules = data_file("lock_rules.yml")
    notes: list[str] = []
    if floating(lock.image.tag):
        notes.append(
            f"image.tag: {lock.image.tag} is pushed again and again; only image.digest says which image is meant"
        )
    if lock.model.revision in rules.texts("moving_revisions"):
        notes.append(f"model.revision: {lock.model.revision} is a branch, which moves; pin the commit")
    branch, dead = lock.driver.branch, dead_branch(lock.driver.branch)
    if dead is not None:
        notes.append(f"driver.branch: {branch} gets no more fixes ({dead[0]}); take {dead[1]}")
    elif branch_class(branch) is None:
        notes.append(f"driver.branch: {branch} is not known here, so neither its support nor its end is")
    elif branch_class(branch) == "New Feature":
        notes.append(f"driver.branch: {branch} is a feature branch, supported for about a quarter")
    if missing := _toolkit_missing(lock):
        notes.append(f"toolkit.packages: {', '.join(missing)} not named, so installed in whatever version is offered")
    return (*notes, *packaging_notes(lock), *_runtime_notes(lock))


def open_fields(lock: Lock) -> tuple[str, ...]:
    """Return the paths of what the lock leaves open: any value on a host is accepted there."""
    values = {"os": lock.os, "kernel": lock.kernel, "container_runtime.version": lock.container_runtime.version}
    return tuple(path for path, value in values.items() if value is None)


def floating(tag: str) -> bool:
    """Whether a tag is one that is pushed again, so that it names another image tomorrow."""
    return any(re.fullmatch(pattern, tag) for pattern in data_file("lock_rules.yml").texts("floating_tags"))


def branch_class(branch: str) -> str | None:
    """Return LTS, Production or New Feature; None for a branch that is not known here."""
    known = data_file("driver_branches.yml").fields("branches").optional_fields(branch)
    return known.text("class") if known else None


def dead_branch(branch: str) -> tuple[str, str] | None:
    """Return why a branch gets no more fixes and what to take instead; None for one that lives or is not known."""
    dead = data_file("lock_rules.yml").fields("dead_branches").optional_fields(branch)
    return (dead.text("ended"), dead.text("take")) if dead else None


def supported_branches() -> str:
    """Return the branches a lock may name without asking for a feature branch, as words: ``580, 595 or 620``."""
    branches = data_file("driver_branches.yml").fields("branches")
    names = [name for name in branches.names() if branches.fields(name).text("class") != "New Feature"]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def companion_rule(name: str, branch: str) -> Fields | None:
    """Return what is known of a companion package, whose name may carry the driver's branch; None when unknown."""
    known = data_file("lock_rules.yml").fields("companions")
    return known.optional_fields(name) or known.optional_fields(name.removesuffix(f"-{branch}"))


def _check_driver(lock: Lock, source: str) -> None:
    driver = lock.driver
    if branch_of(driver.version) != driver.branch:
        raise refused(source, "driver.branch", driver.branch, f"the branch of version {driver.version}")
    if upstream_of(driver.package_version) != driver.version:
        raise refused(source, "driver.package_version", driver.package_version, f"a build of {driver.version}")
    if branch_class(driver.branch) == "New Feature" and not driver.allow_feature_branch:
        dead = dead_branch(driver.branch)
        ended = f" that has ended ({dead[0]}): take {dead[1]}" if dead else ""
        raise refused(
            source,
            "driver.branch",
            f"{driver.branch}, a short-lived feature branch{ended}",
            f"an LTS or production branch: {supported_branches()}",
            "Take one of those, or write allow_feature_branch: true and plan the next change within a quarter.",
        )
    _check_cuda(lock, source)


def _check_cuda(lock: Lock, source: str) -> None:
    if lock.image.cuda is None:
        return
    major = lock.image.cuda.split(".")[0]
    minimum = data_file("driver_branches.yml").fields("cuda_minimum_branch").optional_integer(major)
    if minimum is None:
        raise refused(source, "image.cuda", lock.image.cuda, "an image of a CUDA version known here")
    if int(lock.driver.branch) < minimum:
        raise refused(
            source, "driver.version", lock.driver.version, f"branch {minimum} or newer, as CUDA {major} needs"
        )


def _check_companions(lock: Lock, source: str) -> None:
    for name, value in lock.driver.companions.items():
        path = f"driver.companions.{name}"
        rule = companion_rule(name, lock.driver.branch)
        if rule is None:
            known = ", ".join(data_file("lock_rules.yml").fields("companions").names())
            raise refused(source, path, "unknown companion", f"one of {known}", "Remove it, or correct its name.")
        follows = rule.text("version") == "driver"
        if follows and upstream_of(value) != lock.driver.version:
            raise refused(
                source,
                path,
                value,
                f"a build of {lock.driver.version}, the driver's version",
                "Give both one version: the service refuses to work with any other driver.",
            )
        if not follows and upstream_of(value) == lock.driver.version:
            raise refused(
                source,
                path,
                value,
                f"the package's own number: {name} does not follow the driver's",
                f"Take it from the driver's JSON: lock resolve --driver-json redistrib_{lock.driver.version}.json",
            )


def _check_toolkit(lock: Lock, source: str) -> None:
    known = data_file("lock_rules.yml").texts("toolkit_packages")
    seen: set[str] = set()
    for number, item in enumerate(lock.toolkit.packages):
        path, (name, pinned, _) = f"toolkit.packages[{number}]", item.partition("=")
        if pinned:
            raise refused(source, path, item, f"{name} alone: all packages have toolkit.version")
        if name not in known:
            raise refused(source, path, name, f"one of {', '.join(known)}", "Remove it: older packages do not mix.")
        if name in seen:
            raise refused(source, path, f"{name} twice", "each package once", "Remove one of the two.")
        seen.add(name)


def _toolkit_missing(lock: Lock) -> list[str]:
    rules = data_file("lock_rules.yml")
    if set(lock.toolkit.packages) == set(rules.texts("toolkit_cdi_only")):
        return []
    return [name for name in rules.texts("toolkit_packages") if name not in lock.toolkit.packages]


def _check_architecture(lock: Lock, source: str) -> None:
    machine = data_file("hardware.yml").fields(lock.platform).optional_text("arch")
    if machine is not None and oci_architecture(machine) not in lock.image.manifests:
        raise refused(
            source,
            "image.manifests",
            f"only {', '.join(sorted(lock.image.manifests))}",
            f"{oci_architecture(machine)} among them: {lock.platform} hosts are {machine}",
            "Take an image whose index has that architecture.",
        )


def _runtime_notes(lock: Lock) -> list[str]:
    version = lock.container_runtime.version
    if version is None:
        return []
    notes = []
    for entry in data_file("lock_rules.yml").each("runtime_notes"):
        toolkits = entry.texts("toolkit")
        if in_range(upstream_of(version), entry.fields("docker")) and (
            not toolkits or upstream_of(lock.toolkit.version) in toolkits
        ):
            notes.append(f"container_runtime.version: Docker {version} {entry.text('note')}")
    return notes
