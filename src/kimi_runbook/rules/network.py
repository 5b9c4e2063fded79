"""Rules about RDMA, pinned memory, the way between GPU and network card, and NCCL and UCX settings that contradict."""

from __future__ import annotations

import re

from kimi_runbook.interconnect import lint
from kimi_runbook.rules import Case, Check, Outcome, Unknown

_UNLIMITED = ("infinity", "unlimited", "-1", "18446744073709551615")
_RATE = re.compile(r"\d+(\.\d+)?")
# Of what interconnect.lint finds, what holds for the settings a container really runs with; the rest is about files,
# which are compared by their content.
_CONTRADICTIONS = ("needs_cumem", "ib_disabled", "no_gpudirect", "hca_down", "no_gpu_transport")
_CAUTIONS = ("fixed_gid", "hca_prefix")


def _ports(case: Case) -> Outcome:
    """A port that is down among others that are up; a host with none up uses no RDMA, or says so elsewhere."""
    ports = case.snapshot.rdma_devices
    up = [port for port in ports if port.state == "ACTIVE"]
    for port in ports:
        if up and port.state not in ("ACTIVE", None):
            name = f"{port.name}:{port.port}"
            yield case.finding(
                "rdma.port_down", observed=f"{name} {port.state}", expected="ACTIVE, as others are", subject=name
            )
    rates = {f"{port.name}:{port.port}": match[0] for port in up if (match := _RATE.match(port.rate or ""))}
    best = max(rates.values(), key=float, default=None)
    slow = [name for name, rate in rates.items() if rate != best]
    # Storage and management cards are slower by design, so only ports of the fastest one's link layer are compared.
    if slow and len({port.link_layer for port in up}) == 1:
        yield case.finding(
            "network.link_slow",
            observed=", ".join(f"{name} {rates[name]} Gb/s" for name in slow),
            expected=f"{best} Gb/s, as others have",
            subject=", ".join(slow),
        )


def _peermem(case: Case) -> Outcome:
    """nvidia_peermem is asked for by name; beside the kernel's own mlx5 it cannot be loaded."""
    asked = any(module.name.replace("-", "_") == "nvidia_peermem" for module in case.expected.modules)
    loaded = case.snapshot.modules.get("nvidia_peermem")
    if not asked or (loaded is not None and loaded.loaded):
        return
    if not case.complete:
        yield Unknown("rdma: ofed")
    elif case.snapshot.rdma.ofed is None:
        yield case.finding(
            "rdma.peermem",
            observed="no OFED, the kernel's own mlx5",
            expected="DOCA-OFED where nvidia_peermem is asked",
        )


def _memlock(case: Case) -> Outcome:
    """The places that set the limit; only where there is something to pin memory for."""
    memlock = case.snapshot.memlock
    if not case.snapshot.rdma_devices:
        return
    if memlock.limits_conf is None and memlock.systemd_default is None:
        yield Unknown("memlock")
        return
    places = (
        ("DefaultLimitMEMLOCK of systemd", memlock.systemd_default),
        ("LimitMEMLOCK of docker.service", memlock.docker_unit),
        ("default-ulimits of daemon.json", memlock.daemon_json),
    )
    for place, value in places:
        if value is not None and not set(value.split(":")) <= set(_UNLIMITED):  # soft:hard, or one for both
            yield case.finding("rdma.memlock", observed=f"{place}: {value}", expected="no limit", subject=place)


def _iommu(case: Case) -> Outcome:
    """On bare metal the IOMMU passes through and PCIe switches do not redirect; Grace needs some of it: left out."""
    iommu = case.snapshot.iommu
    if not case.snapshot.rdma_devices or case.snapshot.os.arch != "x86_64":
        return
    if iommu.enabled is None:
        yield Unknown("iommu")
    elif iommu.enabled and iommu.passthrough is False:
        yield case.finding("rdma.iommu", observed="IOMMU on, not in pass-through", expected="iommu=pt, or off")
    if iommu.acs:
        yield case.finding("rdma.acs", observed="ACS redirects on a PCIe bridge", expected="no redirection")


def _settings(case: Case) -> Outcome:
    """The settings the engine really runs with; those of the files come with the files' content."""
    container = case.snapshot.container
    if container is None or not container.running:
        return
    peermem = case.snapshot.modules.get("nvidia_peermem")
    ports = case.snapshot.rdma_devices
    problems = lint(
        (),
        engine_environment=container.env,
        peermem_loaded=None if peermem is None else peermem.loaded,
        active_hcas=[f"{port.name}:{port.port}" for port in ports if port.state == "ACTIVE"] if ports else None,
    )
    for problem in problems:
        codes = {**dict.fromkeys(_CONTRADICTIONS, "contradiction"), **dict.fromkeys(_CAUTIONS, "caution")}
        if problem.code in codes:
            yield case.finding(
                f"interconnect.{codes[problem.code]}",
                observed=problem.message,
                expected="settings that go together",
                subject=problem.message.partition("=")[0].partition(" ")[0],
            )


CHECKS = (
    Check("network.rdma_ports", _ports),
    Check("network.peermem", _peermem),
    Check("network.memlock", _memlock),
    Check("network.iommu", _iommu),
    Check("network.settings", _settings),
)
