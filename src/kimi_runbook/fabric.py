"""What the NVLink fabric of one host needs: its kind, packages, services, and the files of its IMEX domain. Pure.

A host without a switched fabric needs nothing, and gets nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kimi_runbook.companions import companion_of
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file

Json = Mapping[str, Any]

NODES_FILE = "/etc/nvidia-imex/nodes_config.cfg"
CONFIG_FILE = "/etc/nvidia-imex/config.cfg"
_HEADER = "# Written by kimi-runbook, role fabric_services; changes made here are lost.\n"


def kind_of(platform: str, *, nvswitches: int | None, sw_mng: int | None) -> str:
    """Return nvswitch, nvlink5, rack or none: the locked platform's, or what the host shows.

    Args:
        platform: The locked platform's ``fabric`` (hardware.yml).
        nvswitches: NVSwitch devices of the driver; None when not told.
        sw_mng: RDMA functions that manage NVLink switches; None when not told.
    """
    if platform == "none" and sw_mng:
        return "nvlink5"
    if platform == "none" and nvswitches:
        return "nvswitch"
    return platform


def needs(kind: str) -> Fields:
    """Return what data/fabric.yml says of a kind: ``services``, ``companions``, ``tools``, ``modules``."""
    return data_file("fabric.yml").fields("kinds").fields(kind)


def platform_fabric(platform: str) -> str:
    """Return the ``fabric`` of a platform the lock may name."""
    return data_file("hardware.yml").fields(platform).text("fabric")


def started_by_another(service: str) -> bool:
    """Whether another service starts this one where it has no unit of its own."""
    return service in data_file("fabric.yml").texts("started_by_another")


def host_wish(snapshot: Json, lock: Json, imex: Json) -> dict[str, Any]:
    """Return what one host gets of its fabric.

    Args:
        snapshot: The host's snapshot in its JSON form.
        lock: The lock in its JSON form.
        imex: ``nodes`` (addresses of the host's NVLink domain, in their order; empty leaves IMEX's files alone) and
            ``config`` (settings of config.cfg by name).

    Returns:
        ``kind``. ``packages``: wishes with name, version and hold, those of the lock that the kind needs, and those of
        the lock that are installed anyway, so that a new driver leaves none behind. ``replaced``: installed ones of an
        older name. ``bound``: those that must have the driver's version. ``files``, ``services``.
        ``units``: those the host is held to. ``started``: those to start, ``optional_units`` of them where they exist.

    A service is left out whose package the lock does not name and the host does not have: the audit says so. A host of
    a switched platform that shows no switch gets nothing, and a finding (fabric.undetected).
    """
    seen = snapshot["fabric"]
    kind = kind_of(platform_fabric(lock["platform"]), nvswitches=seen.get("nvswitches"), sw_mng=seen.get("sw_mng"))
    if _shows_none(kind, snapshot):
        kind = "none"
    facts = needs(kind)
    installed = {name for name, package in snapshot["packages"].items() if package}
    companions: Json = lock["driver"].get("companions") or {}
    wanted = {name: version for name, version in companions.items() if _belongs(name, facts, installed)}
    have = {companion_of(name) for name in installed | set(wanted)}
    services = [name for name in facts.texts("services") if name in have or _older(name) & have]
    rules = data_file("lock_rules.yml").fields("companions")
    return {
        "kind": kind,
        "packages": [
            *({"name": name, "version": version, "held": True} for name, version in wanted.items()),
            *({"name": name, "version": None, "held": False} for name in (facts.texts("tools") if services else ())),
        ],
        "replaced": sorted(
            name for name in installed - set(wanted) if companion_of(name) in {companion_of(one) for one in wanted}
        ),
        "bound": [name for name in wanted if rules.fields(companion_of(name) or name).text("version") == "driver"],
        "files": imex_files(imex["nodes"], imex["config"]) if kind == "rack" and imex["nodes"] else [],
        "services": services,
        "units": [f"{name}.service" for name in services if _has_a_unit(name, snapshot)],
        "optional_units": [f"{name}.service" for name in services if started_by_another(name)],
        "started": [f"{name}.service" for name in services],
    }


def _shows_none(kind: str, snapshot: Json) -> bool:
    """Whether a host of a switched platform shows no switch although what would show it is loaded."""
    switches, managed = snapshot["fabric"].get("nvswitches"), snapshot["fabric"].get("sw_mng")
    if kind == "nvswitch":
        return switches == 0 and not managed and (snapshot.get("driver") or {}).get("loaded") is not None
    return kind == "nvlink5" and managed == 0 and not switches and bool(snapshot.get("rdma_devices"))


def _belongs(name: str, facts: Fields, installed: Iterable[str]) -> bool:
    bare = companion_of(name)
    if bare is None or bare in data_file("fabric.yml").texts("with_the_driver"):
        return False
    return bare in facts.texts("companions") or bare in {companion_of(one) for one in installed}


def _older(service: str) -> set[str | None]:
    """Return the other names a service's package has or had."""
    rows = data_file("fabric.yml").fields("packages").fields(service)
    return {companion_of(name.format(branch="000")) for family in rows.names() for name in rows.texts(family)}


def _has_a_unit(service: str, snapshot: Json) -> bool:
    """Whether a service is started as a unit: one that another starts has none, unless the host shows one."""
    if not started_by_another(service):
        return True
    unit = snapshot["units"].get(f"{service}.service") or {}
    return unit.get("load") == "loaded"


def asked_packages() -> list[str]:
    """Return the packages a snapshot has to be asked for by name; it tells of NVIDIA's without being asked."""
    kinds = data_file("fabric.yml").fields("kinds")
    return sorted({name for kind in kinds.names() for name in kinds.fields(kind).texts("tools")})


def domain_nodes(hosts: Sequence[str], variables: Mapping[str, Json], domain: str) -> list[str]:
    """Return the addresses of one NVLink domain's hosts, in the inventory's order; empty without a domain.

    Args:
        hosts: Names of the hosts that may belong to it, in the inventory's order, the same on every host.
        variables: Name to the host's variables; ``nvlink_domain`` and ``engine_address`` count.
        domain: The ``nvlink_domain`` asked for.

    Raises:
        RunbookError: A host of the domain has no usable address, two have the same one, or there are too many.
    """
    if not domain:
        return []
    found: dict[str, str] = {}
    for host in hosts:
        if str(variables[host].get("nvlink_domain") or "") != domain:
            continue
        address = str(variables[host].get("engine_address") or "")
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            raise _refused(domain, f"{host} has the address {address!r}", "one IP address per host") from error
        if address in found.values():
            raise _refused(domain, f"{address} belongs to two hosts", "an address of its own per host")
        found[host] = address
    most = data_file("fabric.yml").integer("most_nodes")
    if len(found) > most:
        raise _refused(domain, f"{len(found)} hosts", f"at most {most}, one rack")
    return list(found.values())


def imex_files(nodes: Sequence[str], config: Mapping[str, object]) -> list[dict[str, str]]:
    """Return the two files of IMEX: the node list, the same on every host of the domain, and the daemon's settings.

    Raises:
        RunbookError: A setting's name or value would not stand on a line of its own.
    """
    lines = []
    for name, value in config.items():
        text = str(value)
        if not name.replace("_", "").isalnum() or "\n" in text:
            raise _refused("config.cfg", f"{name}={text!r}", "NAME=value in one line")
        lines.append(f"{name}={text}\n")
    return [
        {"path": NODES_FILE, "mode": "0644", "content": "".join(f"{node}\n" for node in nodes)},
        {"path": CONFIG_FILE, "mode": "0644", "content": _HEADER + "".join(lines)},
    ]


def _refused(where: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(
        where=f"NVLink domain {where}",
        observed=observed,
        expected=expected,
        next_step="Correct nvlink_domain, engine_address or fabric_services_imex_config in the inventory.",
    )
