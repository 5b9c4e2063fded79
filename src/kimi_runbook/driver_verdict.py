"""The driver verdict: from the versions on disk and loaded to ok, reload, reboot, install or repair.

It looks only at state, never at what a task reported as changed: a reboot is due exactly when what is loaded differs
from what is on disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kimi_runbook.driver_state import Around, around, disk_flavour
from kimi_runbook.host_facts import DriverFacts, Holder, ModuleFacts, PackageFacts
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.snapshot import Snapshot
from kimi_runbook.versions import same_build

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
        wanted: ``version``, ``activation`` (``reboot`` or ``reload``) and ``parameters``, as in the host's expected
            value. Parameters count although their file may not be written yet: the plan has to announce the reload.
        flavour: The locked module flavour.
    """
    fields = Fields(wanted, "expected driver")
    target = fields.text("version")
    owned = fields.text_map("parameters") if fields.optional_fields("parameters") else {}
    if owned:
        asked = {**(snapshot.driver.params_wanted or {}), **owned}
        snapshot = replace(snapshot, driver=replace(snapshot.driver, params_wanted=asked))
    return judge_driver(
        replace(snapshot.driver, flavour=disk_flavour(snapshot.driver)),
        target=target,
        flavour=flavour,
        activation=fields.optional_text("activation") or "reboot",
        package_at_target=module_package_at(snapshot.packages, target),
        drm=snapshot.modules.get("nvidia_drm"),
        state=around(snapshot, target),
    )


def activation_after(snapshot: Snapshot, wanted: Mapping[str, object]) -> DriverVerdict:
    """Return how the wanted driver would be loaded once an installation has put it on disk.

    The installation rebuilds the initramfs, so what that holds now does not count.
    """
    fields = Fields(wanted, "expected driver")
    target = fields.text("version")
    return judge_driver(
        replace(snapshot.driver, on_disk=target, flavour=None),
        target=target,
        activation=fields.optional_text("activation") or "reboot",
        drm=snapshot.modules.get("nvidia_drm"),
        state=replace(around(snapshot, target), initramfs=()),
    )


def module_package_at(packages: Mapping[str, PackageFacts | None], version: str) -> bool:
    """Whether a package that carries the kernel module is installed in this version."""
    pattern = re.compile(data_file("platform.yml").text("module_package_pattern"))
    return any(
        package is not None and same_version(package.version, version)
        for name, package in packages.items()
        if pattern.search(name)
    )


def same_version(observed: str, wanted: str) -> bool:
    """Whether an installed version is the wanted one; see versions.same_build."""
    return same_build(observed, wanted)


def judge_driver(  # noqa: PLR0913 - the facts the verdict rests on, each by its name
    driver: DriverFacts,
    *,
    target: str,
    flavour: str = "open",
    activation: str = "reboot",
    package_at_target: bool = False,
    drm: ModuleFacts | None = None,
    state: Around | None = None,
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
        state: What else decides how a driver is loaded; nothing of it when not given.
    """
    state = state or Around()
    if driver.on_disk is None and package_at_target:
        return DriverVerdict(
            name="repair", reason="the packages are installed, but the running kernel has no module of theirs"
        )
    if driver.on_disk != target:
        return DriverVerdict(name="install", reason=f"{driver.on_disk or 'no module'} is on disk, {target} is locked")
    if driver.flavour not in (None, flavour):
        return DriverVerdict(name="install", reason=f"the {driver.flavour} module flavour is installed")
    if driver.loaded != target:
        told = f"{target} is on disk, {driver.loaded or 'no module'} is loaded"
        return _activate(driver, told, activation, drm, state)
    return _running(driver, target, activation, drm, state)


def _running(
    driver: DriverFacts, target: str, activation: str, drm: ModuleFacts | None, state: Around
) -> DriverVerdict:
    """Judge a host whose module is right on disk and in the kernel: everything around it has to agree."""
    problems: tuple[tuple[bool, VerdictName, str], ...] = (
        (driver.userspace not in (None, target), "install", f"the user-space library is {driver.userspace}"),
        (
            driver.smi_rc == SMI_VERSION_MISMATCH,
            "repair",
            f"nvidia-smi reports a version mismatch (exit status {SMI_VERSION_MISMATCH})",
        ),
        (state.nvml not in (None, target), "install", f"NVML answers as {state.nvml}"),
    )
    for applies, name, reason in problems:
        if applies:
            return DriverVerdict(name=name, reason=reason)
    if None not in (state.loaded_flavour, driver.flavour) and state.loaded_flavour != driver.flavour:
        told = f"{target} is loaded in the {state.loaded_flavour} flavour, the {driver.flavour} one is on disk"
        return _activate(driver, told, activation, drm, state)
    if state.parameters:
        told = f"{target} is loaded, with another {', '.join(state.parameters)} than its files say"
        return _activate(driver, told, activation, drm, state)
    return DriverVerdict(name="ok", reason=f"{target} is on disk and loaded")


def _activate(driver: DriverFacts, told: str, activation: str, drm: ModuleFacts | None, state: Around) -> DriverVerdict:
    """Choose between reload and reboot: a reload only where the site allows it and nothing speaks against it."""
    strangers = foreign_holders(driver.holders)
    reasons = (
        (drm is not None and drm.loaded and drm.refcnt, "a display uses nvidia_drm"),
        (state.nouveau, "nouveau holds the GPUs"),
        (state.initramfs, f"the initramfs holds {', '.join(state.initramfs)}"),
        (state.boot_parameters, f"{', '.join(state.boot_parameters)} is read at boot"),
        (strangers, f"{strangers[0].name if strangers else ''} cannot be stopped by a role"),
    )
    for applies, reason in reasons:
        if applies:
            return DriverVerdict(name="reboot", reason=f"{told}, and {reason}")
    if activation == "reload":
        return DriverVerdict(name="reload", reason=told)
    return DriverVerdict(name="reboot", reason=f"{told}; a reboot is this site's way to load it")


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
