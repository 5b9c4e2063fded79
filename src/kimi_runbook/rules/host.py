"""Rules about the host itself: distribution, kernel, address, failed probes."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_runbook.findings import Finding
from kimi_runbook.rules import Case


def judge(case: Case) -> Iterator[Finding]:
    """Yield the findings about operating system, address and the snapshot itself."""
    os_, lock = case.snapshot.os, case.lock
    supported = [(entry.id, version) for entry in case.expected.supported_os for version in entry.versions]
    if lock.os is not None:
        name, _, version = lock.os.partition(" ")
        supported = [(name, version)]
    if not any(os_.id == name and same_release(os_.version_id, version) for name, version in supported):
        yield case.finding(
            "os.unsupported",
            observed=f"{os_.id or 'unknown'} {os_.version_id or ''}".strip(),
            expected=" or ".join(f"{name} {version}".strip() for name, version in supported),
        )
    if lock.kernel is not None and os_.kernel != lock.kernel:
        yield case.finding("host.kernel", observed=os_.kernel or "unknown", expected=lock.kernel)
    yield from _address(case)
    for error in case.snapshot.errors:
        yield case.finding(
            "snapshot.probe_failed",
            observed=f"{error.probe}: {error.message}",
            expected="an answer",
            subject=error.probe,
        )
    if case.snapshot.driver.standin:
        yield case.finding("host.simulated", observed="a stand-in driver", expected="known to the reader")


def same_release(observed: str | None, wanted: str) -> bool:
    """Whether a release is the wanted one: ``9`` covers ``9.4``, and no version covers all."""
    return not wanted or observed == wanted or (observed or "").startswith(f"{wanted}.")


def _address(case: Case) -> Iterator[Finding]:
    interfaces = case.snapshot.network.addresses
    present = {address.partition("/")[0] for addresses in interfaces.values() for address in addresses}
    wanted = case.expected.address
    if wanted and present and wanted not in present:
        yield case.finding("network.address_missing", observed=", ".join(sorted(present)), expected=wanted)
