"""Rules about the GPU driver: the verdict, and what forbids acting on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kimi_runbook.driver_verdict import DriverVerdict, activation_after, driver_verdict, foreign_holders
from kimi_runbook.findings import Finding
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case


def judge(case: Case) -> Iterator[Finding]:
    """Yield the driver's finding, the activation that follows an installation, and stop codes."""
    target, driver = case.expected.driver_version, case.snapshot.driver
    if target is None:
        return
    wanted = {"version": target, "activation": case.expected.driver_activation}
    decided = driver_verdict(case.snapshot, wanted, case.lock.driver.flavour)
    if decided.name == "ok":
        if driver.smi_rc not in (None, 0):
            yield case.finding(
                "driver.smi_failed",
                observed=f"nvidia-smi exit status {driver.smi_rc}: {driver.smi_message or 'no message'}",
                expected="exit status 0",
            )
        return
    yield from _stops(case, decided)
    yield case.finding(f"driver.{decided.name}", observed=decided.reason, expected=f"{target} on disk and loaded")
    if decided.name in ("install", "repair") and driver.loaded != target:
        # What the plan has to announce: the new module is not the loaded one until this is done as well.
        yield case.finding(
            f"driver.{activation_after(case.snapshot, wanted).name}",
            observed=f"{driver.loaded or 'no module'} is loaded",
            expected=f"{target} loaded once it is on disk",
        )


def _stops(case: Case, decided: DriverVerdict) -> Iterator[Finding]:
    driver = case.snapshot.driver
    if decided.name in ("install", "repair"):
        built_here = not _precompiled(case)
        if built_here and driver.secure_boot and not driver.key_enrolled:
            yield case.finding(
                "driver.secure_boot",
                observed="Secure Boot on, signing key "
                + ("unknown" if driver.key_enrolled is None else "not enrolled"),
                expected="the key of local modules enrolled, or Secure Boot off",
            )
        if built_here and driver.headers_present is False:
            yield case.finding(
                "driver.headers_missing",
                observed=f"no headers of kernel {case.snapshot.os.kernel or 'running'}",
                expected="headers of the running kernel",
            )
        if driver.runfile:
            yield case.finding(
                "driver.runfile", observed="an installation by .run file", expected="packages of the locked version"
            )
    container = case.snapshot.container
    own = (container.pid,) if container and container.pid else ()
    for holder in foreign_holders(driver.holders, own):
        yield case.finding(
            "driver.foreign_holder",
            observed=f"{holder.name} (pid {holder.pid}) holds a GPU",
            expected="only services that the roles stop",
            subject=f"{holder.name} (pid {holder.pid})",
        )


def _precompiled(case: Case) -> bool:
    """Whether the wanted module comes built and signed, so that the host needs neither headers nor a key of its own."""
    pattern = re.compile(data_file("platform.yml").text("precompiled_module_pattern"))
    return any(pattern.search(package.name) for package in case.expected.packages)
