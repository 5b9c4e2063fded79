"""Rules about the GPU driver: the verdict, and what forbids acting on it."""

from __future__ import annotations

import re

from kimi_runbook.driver_state import stale_initramfs
from kimi_runbook.driver_verdict import DriverVerdict, activation_after, driver_verdict, foreign_holders
from kimi_runbook.findings import Finding
from kimi_runbook.hardware_facts import DriverFacts
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown

_SMI = "nvidia-smi"


def decide(case: Case) -> DriverVerdict | None:
    """Return the driver verdict of this host; None where no driver is asked for, or nobody could tell what is there."""
    target = case.expected.driver_version
    if target is None or unanswered(case):
        return None
    wanted = _wanted(case)
    return driver_verdict(case.snapshot, wanted, case.lock.driver.flavour)


def unanswered(case: Case) -> str:
    """Return why nobody could tell which module is on disk, in words; empty where it was told."""
    return case.failed("modinfo") if case.snapshot.driver.on_disk is None else ""


def _wanted(case: Case) -> dict[str, object]:
    """Return what is wanted of the driver as the verdict reads it."""
    expected = case.expected
    return {
        "version": expected.driver_version,
        "activation": expected.driver_activation,
        "parameters": dict(expected.driver_parameters),
    }


def settled(case: Case) -> bool:
    """Whether the locked driver is on disk and loaded, so that what depends on it can be judged."""
    decided = decide(case)
    return decided is not None and decided.name == "ok"


def _verdict(case: Case) -> Outcome:
    """Yield the driver's finding, the activation that follows an installation, and stop codes."""
    target, driver = case.expected.driver_version, case.snapshot.driver
    decided = decide(case)
    if target is not None and unanswered(case):
        yield case.unanswered("which driver is on disk", unanswered(case))
    if target is None or decided is None:
        return
    wanted = _wanted(case)
    if decided.name == "ok":
        yield from _smi(case, driver)
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


def _smi(case: Case, driver: DriverFacts) -> Outcome:
    """With driver and library right, nvidia-smi has to answer; one that hangs is what a GPU about to be lost does."""
    silent = [error for error in case.snapshot.errors if error.probe.partition(" ")[0] == _SMI]
    if driver.smi_rc not in (None, 0):
        observed = f"nvidia-smi exit status {driver.smi_rc}: {driver.smi_message or 'no message'}"
    elif driver.smi_rc is None and silent:
        observed = f"{silent[0].probe}: {silent[0].message or 'no answer'}"
    else:
        if driver.smi_rc is None and case.complete:
            yield Unknown("driver: smi_rc")
        return
    yield case.finding("driver.smi_failed", observed=observed, expected="exit status 0")


def _stops(case: Case, decided: DriverVerdict) -> Outcome:
    driver = case.snapshot.driver
    if decided.name in ("install", "repair"):
        if not _precompiled(case):
            yield from _built_here(case)
        traces = run_traces(case)
        if traces:
            yield case.finding(
                "driver.runfile",
                observed=f"an installation by .run file ({traces})",
                expected="packages of the locked version",
            )
    elif driver.loaded != case.expected.driver_version and _refused_at_load(case):
        yield _untrusted(case, "not enrolled")
    container = case.snapshot.container
    own = (container.pid,) if container and container.pid else ()
    for holder in foreign_holders(driver.holders, own):
        yield case.finding(
            "driver.foreign_holder",
            observed=f"{holder.name} (pid {holder.pid}) holds a GPU",
            expected="only services that the roles stop",
            subject=f"{holder.name} (pid {holder.pid})",
        )


def _refused_at_load(case: Case) -> bool:
    """Whether the module on disk was built on the host and its key is not enrolled: no boot would load it."""
    driver = case.snapshot.driver
    return bool(driver.secure_boot) and driver.key_enrolled is False and driver.dkms != () and not _precompiled(case)


def _untrusted(case: Case, key: str) -> Finding:
    return case.finding(
        "driver.secure_boot",
        observed=f"Secure Boot on, signing key {key}",
        expected="the key of local modules enrolled, or Secure Boot off",
    )


def _built_here(case: Case) -> Outcome:
    """Judge what a module that is built on the host needs: a key the firmware trusts, and headers."""
    enabled, enrolled = case.snapshot.driver.secure_boot, case.snapshot.driver.key_enrolled
    if enabled and not enrolled:
        yield _untrusted(case, "unknown" if enrolled is None else "not enrolled")
    elif enabled is None and case.complete:
        yield case.finding(
            "driver.secure_boot_unknown", observed="whether Secure Boot is on could not be told", expected="an answer"
        )
    running = case.snapshot.os.kernel
    if case.snapshot.driver.headers_present is False or _headers(case, running) is False:
        yield case.finding(
            "driver.headers_missing",
            observed=f"no headers of kernel {running or 'running'}",
            expected="headers of the running kernel",
        )


def _headers(case: Case, kernel: str | None) -> bool | None:
    return None if kernel is None else case.snapshot.kernel.headers.get(kernel)


def _precompiled(case: Case) -> bool:
    """Whether the wanted module comes built and signed, so that the host needs neither headers nor a key of its own."""
    pattern = re.compile(data_file("platform.yml").text("precompiled_module_pattern"))
    return any(pattern.search(package.name) for package in case.expected.packages)


def run_traces(case: Case) -> str:
    """Return what an installation by .run file has left, in words; empty when there is nothing."""
    paths = case.snapshot.driver.run_installer or ()
    return ", ".join(paths) or ("its uninstaller" if case.snapshot.driver.runfile else "")


def _run_left(case: Case) -> Outcome:
    traces = run_traces(case)
    if traces and settled(case):
        yield case.finding("driver.runfile_left", observed=traces, expected="packages alone", subject=traces)
    if case.snapshot.driver.run_installer is None:
        yield Unknown("driver: run_installer")


def _initramfs(case: Case) -> Outcome:
    target, decided = case.expected.driver_version, decide(case)
    if target is None or decided is None or decided.name in ("install", "repair"):
        return  # an installation rebuilds the initramfs
    stale = stale_initramfs(case.snapshot, target)
    if stale is None:
        yield Unknown("driver: initramfs")
    elif stale:
        yield case.finding(
            "driver.initramfs", observed=f"the initramfs holds {', '.join(stale)}", expected=f"{target}, or no driver"
        )


def _nouveau(case: Case) -> Outcome:
    if case.expected.driver_version is None:
        return
    nouveau = case.snapshot.driver.nouveau
    if nouveau is None or nouveau.loaded is None:
        yield Unknown("driver: nouveau")
    elif nouveau.loaded and not nouveau.blacklisted:
        yield case.finding("driver.nouveau", observed="nouveau loaded, not blacklisted", expected="blacklisted")


def _next_kernel(case: Case) -> Outcome:
    """Judge what the next boot brings; it weighs more when a boot is planned."""
    kernel, decided = case.snapshot.kernel, decide(case)
    running, following = kernel.running or case.snapshot.os.kernel, kernel.next
    target = case.expected.driver_version
    if target is None or decided is None:
        return
    if following is None:
        yield Unknown("kernel: next")
        return
    if following == running:
        return
    wanted = _wanted(case)
    reboots = "reboot" in (decided.name, activation_after(case.snapshot, wanted).name)
    due = reboots and decided.name != "ok"
    if case.lock.kernel != following:
        yield case.finding(
            "kernel.next" if due else "kernel.next_later",
            observed=f"{running} runs, the next boot is {following}",
            expected=case.lock.kernel or "the kernel that runs, or one the lock names",
        )
    yield from _next_module(case, following, target, due=due, built=decided.name in ("install", "repair"))


def _next_module(case: Case, following: str, target: str, *, due: bool, built: bool) -> Outcome:
    module, headers = case.snapshot.driver.on_disk_next, _headers(case, following)
    if module is None and headers is None:
        yield Unknown("driver: on_disk_next")
        return
    present = module is not None and module.version == target
    if present or (built and headers is not False):
        return  # an installation builds it for every kernel whose headers are there
    version = (module.version if module else None) or "no module"
    yield case.finding(
        "driver.next_kernel" if due else "driver.next_kernel_later",
        observed=f"{version} for kernel {following}" + (", and no headers" if headers is False else ""),
        expected=f"{target} for every kernel that may be booted",
        subject=following,
    )


def _dkms(case: Case) -> Outcome:
    target, rows = case.expected.driver_version, case.snapshot.driver.dkms
    if target is None or not settled(case):
        return
    if rows is None:
        yield Unknown("driver: dkms")
        return
    running = case.snapshot.os.kernel
    for row in rows:
        ours = (row.module, row.version, row.kernel) == ("nvidia", target, running)
        state = row.state or "unknown"
        if ours and not state.startswith("installed"):
            yield case.finding("driver.dkms", observed=f"nvidia/{target}, {running}: {state}", expected="installed")


CHECKS = (
    Check("driver.verdict", _verdict),
    Check("driver.initramfs", _initramfs),
    Check("driver.nouveau", _nouveau),
    Check("driver.next_kernel", _next_kernel),
    Check("driver.dkms", _dkms),
    Check("driver.run_installer", _run_left),
)
