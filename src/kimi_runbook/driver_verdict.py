"""The driver verdict: from the versions on disk and loaded to ok, reload, reboot, install or repair.

It looks only at state, never at what a task reported as changed: a reboot is due exactly when what is loaded differs
from what is on disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kimi_runbook.host_facts import DriverFacts, Holder, ModuleFacts, PackageFacts
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.snapshot import Snapshot

VerdictName = Literal["ok", "reload", "reboot", "install", "repair"]

SMI_VERSION_MISMATCH = 18
"""nvidia-smi's exit status for "Driver/library version mismatch"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverVerdict:
    """What the driver of one host needs, and why."""

    name: VerdictName
    reason: str

    def to_json(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"name": self.name, "reason": self.reason}


def driver_verdict(snapshot: Snapshot, wanted: Mapping[str, object], flavour: str = "open") -> DriverVerdict:
    """Return the verdict of one host.

    Args:
        snapshot: What was seen.
        wanted: ``version`` and ``activation`` (``reboot`` or ``reload``), as in the host's expected value.
        flavour: The locked module flavour.
    """
    fields = Fields(wanted, "expected driver")
    return judge_driver(
        snapshot.driver,
        target=fields.text("version"),
        flavour=flavour,
        activation=fields.optional_text("activation") or "reboot",
        package_at_target=module_package_at(snapshot.packages, fields.text("version")),
        drm=snapshot.modules.get("nvidia_drm"),
    )


def activation_after(snapshot: Snapshot, wanted: Mapping[str, object]) -> DriverVerdict:
    """Return how the wanted driver would be loaded once an installation has put it on disk."""
    installed = replace(snapshot.driver, on_disk=Fields(wanted, "expected driver").text("version"), flavour=None)
    return driver_verdict(replace(snapshot, driver=installed), wanted)


def module_package_at(packages: Mapping[str, PackageFacts | None], version: str) -> bool:
    """Whether a package that carries the kernel module is installed in this version."""
    pattern = re.compile(data_file("platform.yml").text("module_package_pattern"))
    return any(
        package is not None and same_version(package.version, version)
        for name, package in packages.items()
        if pattern.search(name)
    )


def same_version(observed: str, wanted: str) -> bool:
    """Whether an installed version is the wanted one.

    An epoch or a release the wanted version does not name is left out of the comparison: RPM packages of the driver
    carry the epoch 3, so ``3:580.95.05-1.el9`` is ``580.95.05``.
    """
    if observed == wanted:
        return True
    if ":" not in wanted:
        observed = observed.partition(":")[2] or observed
    if "-" not in wanted:
        observed = observed.rpartition("-")[0] or observed
    return observed == wanted


def judge_driver(  # noqa: PLR0913 - the facts the verdict rests on, each by its name
    driver: DriverFacts,
    *,
    target: str,
    flavour: str = "open",
    activation: str = "reboot",
    package_at_target: bool = False,
    drm: ModuleFacts | None = None,
) -> DriverVerdict:
    """Return the verdict.

    Args:
        driver: What the snapshot saw.
        target: The locked version.
        flavour: The locked module flavour.
        activation: ``reboot`` turns every reload into a reboot, the safe default; ``reload`` allows it.
        package_at_target: Whether the packages are installed at the target; then a missing module means its build
            failed.
        drm: The nvidia_drm module: with references, a console or display owns the GPU and a reload cannot work.
    """
    if driver.on_disk is None and package_at_target:
        return DriverVerdict(
            name="repair", reason="the packages are installed, but the running kernel has no module of theirs"
        )
    if driver.on_disk != target:
        return DriverVerdict(name="install", reason=f"{driver.on_disk or 'no module'} is on disk, {target} is locked")
    if driver.flavour not in (None, flavour):
        return DriverVerdict(name="install", reason=f"the {driver.flavour} module flavour is installed")
    if driver.loaded != target:
        return _activate(driver, target, activation, drm)
    return _running(driver, target)


def _running(driver: DriverFacts, target: str) -> DriverVerdict:
    """Judge a host whose module is right on disk and in the kernel: everything around it has to agree."""
    problems: tuple[tuple[bool, VerdictName, str], ...] = (
        (driver.userspace not in (None, target), "install", f"the user-space library is {driver.userspace}"),
        (
            driver.smi_rc == SMI_VERSION_MISMATCH,
            "repair",
            f"nvidia-smi reports a version mismatch (exit status {SMI_VERSION_MISMATCH})",
        ),
    )
    for applies, name, reason in problems:
        if applies:
            return DriverVerdict(name=name, reason=reason)
    return DriverVerdict(name="ok", reason=f"{target} is on disk and loaded")


def _activate(driver: DriverFacts, target: str, activation: str, drm: ModuleFacts | None) -> DriverVerdict:
    state = f"{target} is on disk, {driver.loaded or 'no module'} is loaded"
    if drm is not None and drm.loaded and drm.refcnt:
        return DriverVerdict(name="reboot", reason=f"{state}, and a display uses nvidia_drm")
    strangers = foreign_holders(driver.holders)
    if strangers:
        return DriverVerdict(name="reboot", reason=f"{state}, and {strangers[0].name} cannot be stopped by a role")
    if activation == "reload":
        return DriverVerdict(name="reload", reason=state)
    return DriverVerdict(name="reboot", reason=f"{state}; a reboot is this site's way to load it")


def foreign_holders(holders: Collection[Holder], own_pids: Collection[int] = ()) -> tuple[Holder, ...]:
    """Return the processes on a GPU that no role knows how to stop."""
    known = data_file("platform.yml").texts("known_gpu_holders")
    return tuple(holder for holder in holders if holder.pid not in own_pids and not process_matches(holder.name, known))


def process_matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a process name is one of the patterns, cut to the 15 characters the kernel keeps."""
    return any(
        name.startswith(pattern[:-1][:15]) if pattern.endswith("*") else name[:15] == pattern[:15]
        for pattern in patterns
    )
