"""Rules about RDMA, pinned memory, the way between GPU and network card, and NCCL and UCX settings that contradict."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kimi_runbook.interconnect import lint, names_port
from kimi_runbook.rules import Case, Check, Outcome, Unknown

_UNLIMITED = ("infinity", "unlimited", "-1", "18446744073709551615")
_RATE = re.compile(r"\d+(\.\d+)?")
# Of what interconnect.lint finds, what holds for the settings a container really runs with; the rest is about files,
# which are compared by their content.
_CONTRADICTIONS = ("needs_cumem", "ib_disabled", "no_gpudirect", "hca_down", "no_gpu_transport")
_CAUTIONS = ("fixed_gid", "hca_prefix")


def _ports(case: Case) -> Outcome:
    """A port that is down among others that are up; a host with none up uses no RDMA, or says so elsewhere."""
    if not case.told("rdma_devices"):
        yield Unknown("rdma_devices")
        return
    ports = case.snapshot.rdma_devices
    up = [port for port in ports if port.state == "ACTIVE"]
    yield from _all_down(case)
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


def _all_down(case: Case) -> Outcome:
    """NCCL or UCX is told to use RDMA, and none of the ports it may use is up: it would not start, or crawl."""
    found = interconnect_settings(case)
    told = _uses_rdma(found)
    if not told:
        return
    named = [name for name in found.get("NCCL_IB_HCA", "").removeprefix("=").split(",") if name]
    exact = found.get("NCCL_IB_HCA", "").startswith("=")
    ports = [
        port
        for port in case.snapshot.rdma_devices
        if not exact or any(names_port(hca, [f"{port.name}:{port.port}"]) for hca in named)
    ]
    if any(port.state == "ACTIVE" for port in ports):
        return
    if any(port.state is None for port in ports):
        yield Unknown("rdma_devices: state")
        return
    states = ", ".join(sorted({f"{port.name}:{port.port} {port.state}" for port in ports})[:4])
    more = f" and {len(ports) - 4} more" if len(ports) > 4 else ""
    what = f"of {', '.join(named)} " if exact else ""
    yield case.finding(
        "rdma.all_down",
        observed=f"no port {what}is up: {states}{more}" if ports else f"no RDMA port {what}on the host",
        expected=f"ACTIVE, as {told} asks for RDMA",
    )


def interconnect_settings(case: Case) -> dict[str, str]:
    """Return the NCCL and UCX settings of a host: those wanted, where they are known, else those it has."""
    wanted = [file.settings for file in case.expected.files if file.settings is not None]
    present = [file.settings for file in case.snapshot.files.values() if file is not None and file.settings]
    merged: dict[str, str] = {}
    for settings in wanted or present:
        merged |= settings
    container = case.snapshot.container
    return merged | dict(container.env if container is not None and container.running else {})


def _uses_rdma(found: Mapping[str, str]) -> str:
    """Return the setting that asks for RDMA, empty where none does or it is switched off."""
    if found.get("NCCL_NET") == "IB":
        return "NCCL_NET=IB"
    if found.get("NCCL_IB_HCA") and found.get("NCCL_IB_DISABLE") != "1" and found.get("NCCL_NET") is None:
        return "NCCL_IB_HCA"
    return "UCX_TLS" if set(found.get("UCX_TLS", "").split(",")) & {"rc", "dc", "ud", "ib"} else ""


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
    else:
        yield from _symbols(case)


def _symbols(case: Case) -> Outcome:
    """A module built against another OFED than the one that runs: it is refused until the driver is built again."""
    log = case.snapshot.kernel_log
    lines = [line.text or "" for line in (log.lines if log else ()) if line.kind == "module"]
    refused = [text for text in lines if "nvidia_peermem" in text and "symbol" in text]
    if refused:
        yield case.finding(
            "rdma.peermem_symbols",
            observed=" ".join(refused[-1].split())[:160],
            expected=f"a module built against {case.snapshot.rdma.ofed}",
            subject=case.expected.driver_version or "VERSION",
        )


def _ofed(case: Case) -> Outcome:
    """The OFED is asserted, never installed: another one means other modules under a driver built against these."""
    wanted, seen = case.expected.ofed, case.snapshot.rdma.ofed
    if wanted is None:
        return
    if not case.complete:
        yield Unknown("rdma: ofed")
    elif (seen or "inbox") != wanted:
        yield case.finding("rdma.ofed", observed=seen or "no OFED, the kernel's own modules", expected=wanted)


def _dmabuf(case: Case) -> Outcome:
    """Which rung of the dma-buf ladder the settings stand on, and why; the ladder itself is climbed in dmabuf.py."""
    rung = case.expected.dmabuf
    if rung is None:
        return
    stays = rung.state in ("passed", "untested")
    yield case.finding(
        "interconnect.dmabuf" if stays else "interconnect.dmabuf_blocked",
        observed=f"rung {rung.rung or 'none'} {rung.state}: {rung.reason}",
        expected="the first rung that passes its test",
    )


def _memlock(case: Case) -> Outcome:
    """The places that set the limit; only where there is something to pin memory for."""
    memlock = case.snapshot.memlock
    if not case.told("rdma_devices"):
        yield Unknown("rdma_devices")
    if not case.snapshot.rdma_devices:
        return
    if memlock.limits_conf is None or memlock.systemd_default is None:
        yield Unknown("memlock")
    places = (
        ("DefaultLimitMEMLOCK of systemd", memlock.systemd_default),
        ("LimitMEMLOCK of docker.service", memlock.docker_unit),
        ("default-ulimits of daemon.json", memlock.daemon_json),
        ("the engine's container", memlock.container),
    )
    for place, value in places:
        if value is not None and not set(value.split(":")) <= set(_UNLIMITED):  # soft:hard, or one for both
            yield case.finding("rdma.memlock", observed=f"{place}: {value}", expected="no limit", subject=place)


def _iommu(case: Case) -> Outcome:
    """On bare metal the IOMMU passes through and PCIe switches do not redirect; Grace needs some of it: left out."""
    iommu = case.snapshot.iommu
    if not case.told("rdma_devices"):
        yield Unknown("rdma_devices")
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
    peermem = case.snapshot.modules.get("nvidia_peermem") or case.snapshot.rdma.modules.get("nvidia_peermem")
    ports = case.snapshot.rdma_devices
    problems = lint(
        (),
        engine_environment=container.env,
        peermem_loaded=None if peermem is None else peermem.loaded,
        active_hcas=[f"{port.name}:{port.port}" for port in ports if port.state == "ACTIVE"] if ports else None,
    )
    for problem in problems:
        if problem.code == "no_gpudirect" and peermem is None:
            yield Unknown("rdma: modules: nvidia_peermem")
            continue
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
    Check("network.ofed", _ofed),
    Check("network.dmabuf", _dmabuf),
    Check("network.memlock", _memlock),
    Check("network.iommu", _iommu),
    Check("network.settings", _settings),
)
