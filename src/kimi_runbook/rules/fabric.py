"""Rules about the NVLink fabric: services, state, domain, IMEX. What a host needs follows from what it has.

An HGX host runs the fabric manager, with NVLink 5 switches nvlsm too; a tray of an NVL72 rack runs IMEX, its fabric is
managed on the switch trays; any other host needs nothing. Sources: NVIDIA/gpu-driver-container; Fabric Manager User
Guide.
"""

from __future__ import annotations

from kimi_runbook.hardware_facts import FabricService, GpuFabric
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.driver import settled

_READY = ("completed", "success")
_ABSENT = ("", "0", "n/a", "[n/a]", "none", "00000000-0000-0000-0000-000000000000")


def _kind(case: Case) -> str:
    """Return nvswitch, nvlink5, rack or none: the locked platform's, or what the host shows."""
    fabric, platform = case.snapshot.fabric, case.hardware.text("fabric")
    if platform == "none" and fabric.sw_mng:
        return "nvlink5"
    if platform == "none" and fabric.nvswitches:
        return "nvswitch"
    return platform


def _needed(kind: str) -> tuple[str, ...]:
    return {
        "nvswitch": ("nvidia-fabricmanager",),
        "nvlink5": ("nvidia-fabricmanager", "nvlsm"),
        "rack": ("nvidia-imex",),
    }.get(kind, ())


def _services(case: Case) -> Outcome:
    fabric, kind = case.snapshot.fabric, _kind(case)
    if kind == "none":
        return
    if not fabric.services:
        yield Unknown("fabric: services")
        return
    for name in _needed(kind):
        service = fabric.services.get(name, FabricService())
        if service.package is None:
            yield case.finding(
                "fabric.package_missing",
                observed=f"{name} not installed",
                expected=f"{name}, as {kind} hosts need it",
                subject=name,
            )
        elif service.active != "active":
            yield case.finding(
                "fabric.service",
                observed=f"{name} {service.active or 'unknown'}",
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


def _due(case: Case) -> bool:
    """Whether a fabric service is still to be installed or started, which comes before its state."""
    return any(not isinstance(found, Unknown) for found in _services(case))


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
    if nodes is None:
        yield Unknown("fabric: imex_nodes")
    elif case.expected.address and case.expected.address not in nodes:
        yield case.finding(
            "fabric.imex_self", observed=", ".join(nodes) or "an empty list", expected=case.expected.address
        )


CHECKS = (
    Check("fabric.services", _services),
    Check("fabric.switches", _switches),
    Check("fabric.state", _state),
    Check("fabric.imex", _imex),
)
