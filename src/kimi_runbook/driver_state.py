"""What lies around the driver and decides how it is loaded: initramfs, module parameters, nouveau. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_runbook.hardware_facts import DriverFacts
from kimi_runbook.reading import data_file
from kimi_runbook.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What decides how a driver on disk is loaded; everything that is not known counts as not there.

    Attributes:
        initramfs: Versions of the module, other than the target, in the initramfs of the running or the next kernel.
        parameters: Names of parameters that modprobe.d sets otherwise than they are loaded.
        nouveau: Whether nouveau is loaded.
        nvml: The version NVML itself answers with.
        loaded_flavour: The flavour of the loaded module, where that of the one on disk is known apart from it.
    """

    initramfs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    nouveau: bool = False
    nvml: str | None = None
    loaded_flavour: str | None = None

    @property
    def boot_parameters(self) -> tuple[str, ...]:
        """Those of the parameters that take effect at a boot only."""
        return tuple(name for name in self.parameters if name in data_file("platform.yml").texts("boot_parameters"))


def around(snapshot: Snapshot, target: str) -> Around:
    """Return what lies around the driver of one host."""
    nouveau = snapshot.driver.nouveau
    return Around(
        initramfs=stale_initramfs(snapshot, target) or (),
        parameters=pending_parameters(snapshot.driver) or (),
        nouveau=nouveau is not None and nouveau.loaded is True,
        nvml=snapshot.driver.nvml,
        loaded_flavour=None if snapshot.driver.license is None else snapshot.driver.flavour,
    )


def stale_initramfs(snapshot: Snapshot, target: str) -> tuple[str, ...] | None:
    """Return the other versions an initramfs holds that may be booted next; None when it could not be told."""
    if snapshot.driver.initramfs is None:
        return None
    kernels = {snapshot.kernel.running, snapshot.kernel.next} - {None}
    versions = (
        version
        for image in snapshot.driver.initramfs
        if not kernels or image.kernel in kernels
        for version in image.versions
    )
    return tuple(dict.fromkeys(version for version in versions if version != target))


def pending_parameters(driver: DriverFacts) -> tuple[str, ...] | None:
    """Return the parameters that modprobe.d sets otherwise than they are loaded; None when it could not be told.

    A parameter that the loaded module does not report is left out: not every driver version knows every name.
    """
    wanted, loaded = driver.params_wanted, driver.params
    if wanted is None or loaded is None:
        return None
    return tuple(name for name, value in wanted.items() if name in loaded and not _same(value, loaded[name]))


def disk_flavour(driver: DriverFacts) -> str | None:
    """Return the flavour of the module on disk by its licence, else what the snapshot says of the flavour.

    Source: NVIDIA Driver Installation Guide, kernel modules: "Dual MIT/GPL" is the open one, "NVIDIA" the proprietary.
    """
    if driver.license is None:
        return driver.flavour
    return "open" if "GPL" in driver.license else "proprietary"


def _same(wanted: str, loaded: str) -> bool:
    left, right = wanted.strip().strip("\"'"), loaded.strip().strip("\"'")
    return left == right or (_number(left) is not None and _number(left) == _number(right))


def _number(text: str) -> int | None:
    """Return a number as the kernel reads one: decimal, 0x hexadecimal, leading 0 octal."""
    try:
        return int(text, 8) if text.startswith("0") and text.isdigit() else int(text, 0)
    except ValueError:
        return None
