"""The proof after a driver change: every part that has a version says the locked one. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kimi_runbook.driver_state import pending_parameters, stale_initramfs
from kimi_runbook.driver_verdict import SMI_VERSION_MISMATCH, same_version
from kimi_runbook.snapshot import Snapshot


def unequal_of(snapshot: Mapping[str, object], target: str, companions: Mapping[str, str]) -> list[str]:
    """Return :func:`unequal` of a snapshot in its JSON form."""
    return unequal(Snapshot.from_json(snapshot), target, companions)


def unequal(snapshot: Snapshot, target: str, companions: Mapping[str, str]) -> list[str]:
    """Return what is not at the locked version, one sentence each; what could not be seen is no sentence.

    Args:
        snapshot: What was seen after the driver was loaded.
        target: The locked driver version.
        companions: Package name to version as locked; those that are not installed are not looked at.
    """
    driver = snapshot.driver
    parts = {
        "the loaded module": driver.loaded or "none",
        "the module on disk": driver.on_disk or "none",
        "the user-space library": driver.userspace,
        "NVML": driver.nvml,
    }
    found = [f"{name} is {seen}" for name, seen in parts.items() if seen not in (None, target)]
    if driver.smi_rc == SMI_VERSION_MISMATCH:
        found.append(f"nvidia-smi reports a version mismatch (exit status {SMI_VERSION_MISMATCH})")
    found += [f"the initramfs holds {version}" for version in stale_initramfs(snapshot, target) or ()]
    found += [f"parameter {name} is not loaded as its file says" for name in pending_parameters(driver) or ()]
    installed = {name: snapshot.packages.get(name) for name in companions}
    found += [
        f"{name} is {package.version}, locked is {companions[name]}"
        for name, package in installed.items()
        if package is not None and not same_version(package.version, companions[name])
    ]
    return found
