"""Rules about the host itself: distribution, kernel, address, failed probes."""

from __future__ import annotations

from kimi_runbook.rules import Case, Check, Outcome, Unknown


def _kernel(case: Case) -> Outcome:
    locked, running = case.lock.kernel, case.snapshot.os.kernel
    if locked is not None and running != locked:
        yield case.finding("host.kernel", observed=f"kernel {running or 'unknown'} runs", expected=locked)


def _probes(case: Case) -> Outcome:
    """What the host could not be asked, and whether it is real."""
    for error in case.snapshot.errors:
        yield case.finding(
            "snapshot.probe_failed",
            observed=f"{error.probe}: {error.message}",
            expected="an answer",
            subject=error.probe,
        )
    if case.snapshot.driver.standin:
        yield case.finding("host.simulated", observed="a stand-in driver", expected="known to the reader")


def _distribution(case: Case) -> Outcome:
    """A host has to run what the roles know and, where the lock names one, that distribution: it can only narrow."""
    os_, locked = case.snapshot.os, case.lock.os
    known = [(entry.id, version) for entry in case.expected.supported_os for version in entry.versions]
    accepted = [release for release in known if locked is None or _narrows(locked, release)]
    right = any(os_.id == name and same_release(os_.version_id, version) for name, version in accepted)
    if right and locked is not None:
        name, _, version = locked.partition(" ")
        right = os_.id == name and same_release(os_.version_id, version)
    if right:
        return
    roles_know = " or ".join(f"{name} {version}".strip() for name, version in known)
    if locked is None:
        expected = roles_know
    else:
        expected = locked if accepted else f"{roles_know}, which the roles know; the lock names {locked}"
    yield case.finding(
        "os.unsupported", observed=f"{os_.id or 'unknown'} {os_.version_id or ''}".strip(), expected=expected
    )


def _narrows(locked: str, release: tuple[str, str]) -> bool:
    """Whether the lock's ``id version`` and a release the roles know have hosts in common."""
    name, _, version = locked.partition(" ")
    return name == release[0] and (same_release(version, release[1]) or same_release(release[1], version))


def same_release(observed: str | None, wanted: str) -> bool:
    """Whether a release is the wanted one: ``9`` covers ``9.4``, and no version covers all."""
    return not wanted or observed == wanted or (observed or "").startswith(f"{wanted}.")


def _address(case: Case) -> Outcome:
    interfaces = case.snapshot.network.addresses
    present = {address.partition("/")[0] for addresses in interfaces.values() for address in addresses}
    wanted = case.expected.address
    if wanted and not present:
        yield Unknown("network: addresses")
    elif wanted and wanted not in present:
        yield case.finding(
            "network.address_missing", observed=f"the host has {', '.join(sorted(present))}", expected=wanted
        )


CHECKS = (
    Check("host.os", _distribution),
    Check("host.kernel", _kernel),
    Check("host.address", _address),
    Check("host.probes", _probes),
)
