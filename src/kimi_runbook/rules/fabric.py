"""Rules about the NVLink fabric: services, state, domain, IMEX. What a host needs follows from what it has.

An HGX host runs the fabric manager, with NVLink 5 switches nvlsm too; a tray of an NVL72 rack runs IMEX, its fabric is
managed on the switch trays; any other host needs nothing. Sources: NVIDIA/gpu-driver-container; Fabric Manager User
Guide.
"""

from __future__ import annotations

from kimi_runbook.companions import companion_of
from kimi_runbook.driver_verdict import same_version
from kimi_runbook.fabric import NODES_FILE, kind_of, needs, started_by_another
from kimi_runbook.hardware_facts import FabricService, GpuFabric
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.driver import settled
from kimi_runbook.rules.driver_parts import name_at

_READY = ("completed", "success")
_ROLE = "fabric_services"
_IMEX_READY = "READY"  # NVIDIA/DCGM dcgmlib/dcgm_fields.h, DCGM_FI_IMEX_DAEMON_STATUS
_ABSENT = ("", "0", "n/a", "[n/a]", "none", "00000000-0000-0000-0000-000000000000")


def _kind(case: Case) -> str:
    """Return nvswitch, nvlink5, rack or none: the locked platform's, or what the host shows."""
    fabric = case.snapshot.fabric
    return kind_of(case.hardware.text("fabric"), nvswitches=fabric.nvswitches, sw_mng=fabric.sw_mng)


def _without_a_unit(case: Case, name: str) -> bool:
    """Whether a service is started by another one: the fabric manager's start script starts nvlsm itself."""
    unit = case.snapshot.units.get(f"{name}.service")
    return started_by_another(name) and unit is not None and unit.load == "not-found"


def _services(case: Case) -> Outcome:
    fabric, kind = case.snapshot.fabric, _kind(case)
    if kind == "none":
        return
    if not fabric.services or case.failed("packages"):
        yield Unknown("fabric: services")
        return
    units = {unit.name for unit in case.expected.units}
    for name in needs(kind).texts("services"):
        service = fabric.services.get(name, FabricService())
        if service.package is None:
            if name in {companion_of(package.name) for package in case.expected.packages}:
                continue  # a role installs it, and says so
            right = name_at(case.lock.driver, name)
            version = case.lock.driver.companions.get(right)
            yield case.finding(
                "fabric.package_missing",
                observed=f"{name} not installed",
                expected=f"{right} {version}, as the lock has it"
                if version
                else f"{name}, as {kind} hosts need it; the lock names none",
                subject=f"{right}={version}" if version else f"{name}, and name it in the lock's companions,",
            )
        elif f"{name}.service" in units or _without_a_unit(case, name):
            continue  # a role starts it, and says so
        elif service.active in (None, "unknown"):
            yield Unknown(f"fabric: {name}")
        elif service.active != "active":
            yield case.finding(
                "fabric.service",
                observed=f"{name} {service.active}",
                expected="active",
                subject=name,
            )


def _switches(case: Case) -> Outcome:
    fabric, kind = case.snapshot.fabric, _kind(case)
    if kind not in ("nvswitch", "nvlink5"):
        return
    switches, managed = fabric.nvswitches, fabric.sw_mng
    if switches is None and managed is None:
        yield Unknown("fabric: nvswitches")
        return
    if not switches and not managed and settled(case):
        yield case.finding(
            "fabric.undetected", observed="no NVSwitch and no SW_MNG function", expected=f"those of a {kind} host"
        )
    umad = case.snapshot.modules.get("ib_umad")
    declared = {module.name.replace("-", "_") for module in case.expected.modules}
    if managed and umad is not None and not umad.loaded and "ib_umad" not in declared:
        yield case.finding(
            "fabric.umad", observed=f"ib_umad not loaded, {managed} SW_MNG functions", expected="ib_umad loaded"
        )


def _state(case: Case) -> Outcome:
    fabric, kind = case.snapshot.fabric, _kind(case)
    if kind == "none":
        return
    rows = fabric.gpus
    if not rows:
        if settled(case):
            yield Unknown("fabric: gpus")
        return
    bad = [row for row in rows if ((row.state or "").lower(), (row.status or "").lower()) != _READY]
    if bad:
        told = sorted({f"{row.state or 'unknown'}/{row.status or 'unknown'}" for row in bad})
        yield case.finding(
            "fabric.state" if settled(case) and not _due(case) else "fabric.pending",
            observed=f"{len(bad)} of {len(rows)} GPUs are {', '.join(told)}",
            expected="Completed/Success on every GPU",
        )
    elif kind == "rack":
        yield from _domain(case, rows)
    if len(rows) < len(case.snapshot.gpus):
        yield Unknown("fabric: gpus")


def _due(case: Case) -> bool:
    """Whether a fabric service is still to be installed or started, which comes before its state."""
    services = case.snapshot.fabric.services
    for name in needs(_kind(case)).texts("services") if services else ():
        service = services.get(name, FabricService())
        if service.package is None or (service.active != "active" and not _without_a_unit(case, name)):
            return True
    return any(
        package.role == _ROLE and not _as_wished(case, package.name, package.version)
        for package in case.expected.packages
    ) or any(rewritten(case, file.path) for file in case.expected.files)


def rewritten(case: Case, path: str) -> bool:
    """Whether the role is to write a file anew, so that what follows from its content comes after that."""
    wish = next((file for file in case.expected.files if file.path == path and file.role == _ROLE), None)
    present = case.snapshot.files.get(path)
    return wish is not None and (present is None or present.sha256 != wish.sha256)


def _as_wished(case: Case, name: str, version: str | None) -> bool:
    package = case.snapshot.packages.get(name)
    return package is not None and (version is None or same_version(package.version, version))


def _domain(case: Case, rows: tuple[GpuFabric, ...]) -> Outcome:
    for label, values in (
        ("ClusterUUID", {row.cluster_uuid or "" for row in rows}),
        ("CliqueId", {row.clique_id or "" for row in rows}),
    ):
        if any(value.lower() in _ABSENT for value in values):
            yield case.finding(
                "fabric.no_domain",
                observed=f"{label} {', '.join(sorted(values)) or 'unknown'}",
                expected=f"a {label} that is not zero, on every GPU",
            )
        elif len(values) > 1:
            yield case.finding(
                "fabric.split", observed=f"{label} {', '.join(sorted(values))}", expected="one for all GPUs of the host"
            )


def _imex(case: Case) -> Outcome:
    fabric, kind = case.snapshot.fabric, _kind(case)
    nodes, channels = fabric.imex_nodes, fabric.imex_channels
    if kind != "rack":
        if nodes:
            yield case.finding(
                "fabric.imex_unwanted", observed=f"{len(nodes)} addresses in the IMEX node list", expected="none"
            )
        return
    if channels is None:
        yield Unknown("fabric: imex_channels")
    elif not channels and settled(case):
        yield case.finding("fabric.imex_channel", observed="no IMEX channel", expected="channel 0 at least")
    if rewritten(case, NODES_FILE):
        pass  # its content is a finding of the role that writes it
    elif nodes is None:
        yield Unknown("fabric: imex_nodes")
    elif case.expected.address and not own_addresses(case) & set(nodes):
        yield case.finding(
            "fabric.imex_self",
            observed=f"the node list has {_some(list(nodes)) or 'no address'}",
            expected=case.expected.address,
        )
    yield from _imex_domain(case)


def own_addresses(case: Case) -> frozenset[str]:
    """Return every address of the host: IMEX may use another interface than the engine."""
    found = (address for several in case.snapshot.network.addresses.values() for address in several)
    return frozenset({case.expected.address or "", *(address.partition("/")[0] for address in found)}) - {""}


def _imex_domain(case: Case) -> Outcome:
    """What the host's IMEX daemon says of itself and of the others; one that does not run has a finding of its own."""
    domain, service = case.snapshot.fabric.imex_domain, case.snapshot.fabric.services.get("nvidia-imex")
    if domain is None:
        if service is not None and service.active == "active":
            yield Unknown("fabric: imex_domain")
        return
    own = own_addresses(case)
    for node in domain.nodes:
        if node.host in own and node.status != _IMEX_READY:
            yield case.finding(
                "fabric.imex_not_ready" if settled(case) and not _due(case) else "fabric.pending",
                observed=f"IMEX on this host is {node.status or 'unknown'}, the domain {domain.status or 'unknown'}",
                expected=f"{_IMEX_READY}, as nvidia-imex-ctl -N says it",
            )
    if not own & {node.host for node in domain.nodes}:
        yield Unknown("fabric: imex_domain")
    others = [node for node in domain.nodes if node.host not in own]
    away = [f"{node.host} {node.status or 'unknown'}" for node in others if node.status != _IMEX_READY]
    away += [f"{node.host} - {peer}" for node in domain.nodes if node.status == _IMEX_READY for peer in node.apart]
    if away:
        yield case.finding(
            "fabric.imex_peers",
            observed=f"IMEX domain {domain.status or 'unknown'}: {_some(away)}",
            expected=f"{len(domain.nodes)} nodes {_IMEX_READY} and connected to each other",
        )
    versions: dict[str, list[str]] = {}
    for node in domain.nodes:
        if node.version is not None:
            versions.setdefault(node.version, []).append(node.host or "unknown")
    if len(versions) > 1:
        told = sorted(versions.items(), key=lambda item: -len(item[1]))
        yield case.finding(
            "fabric.imex_versions",
            observed="; ".join(f"{version} on {_some(hosts)}" for version, hosts in told),
            expected="one version of nvidia-imex in the domain, the driver's",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


CHECKS = (
    Check("fabric.services", _services),
    Check("fabric.switches", _switches),
    Check("fabric.state", _state),
    Check("fabric.imex", _imex),
)
