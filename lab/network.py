"""The lab's network, and the check that nothing else on the machine has its addresses."""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.docker import Docker, label_arguments
from lab.settings import GATEWAY, LABEL, NETWORK, SUBNET

BRIDGE = NETWORK  # interface name on the machine, so that its routes and counters are recognised


@dataclass(frozen=True, slots=True)
class Taken:
    """A subnet that something on the machine uses: the subnet, and who (``route by eth0``)."""

    subnet: ipaddress.IPv4Network
    owner: str


def parse_routes(text: str) -> list[Taken]:
    """Return the subnets of /proc/net/route (addresses in hexadecimal, host byte order), default routes left out."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        interface, destination, mask = fields[0], _address(fields[1]), _address(fields[7])
        if mask != "0.0.0.0":  # noqa: S104 - a route's mask, nothing is bound
            found.append(Taken(ipaddress.IPv4Network(f"{destination}/{mask}"), f"route by {interface}"))
    return found


def parse_networks(text: str) -> list[tuple[Taken, bool]]:
    """Return the subnets in ``docker network inspect``, each with whether the network is the lab's."""
    found = []
    for network in json.loads(text):
        ours = (network.get("Labels") or {}).get(LABEL) == "1"
        for configuration in (network.get("IPAM") or {}).get("Config") or []:
            subnet = ipaddress.ip_network(configuration.get("Subnet", "::/128"))
            if isinstance(subnet, ipaddress.IPv4Network):
                found.append((Taken(subnet, f"Docker network {network['Name']}"), ours))
    return found


def conflict(taken: Iterable[Taken], wanted: str = SUBNET) -> Taken | None:
    """Return the first subnet that overlaps the lab's, or None."""
    subnet = ipaddress.IPv4Network(wanted)
    return next((entry for entry in taken if entry.subnet.overlaps(subnet)), None)


def foreign(routes: Iterable[Taken], networks: Iterable[tuple[Taken, bool]]) -> list[Taken]:
    """Return what is not the lab's: a route by the lab's bridge counts as its own only where it has a network."""
    known = list(networks)
    own_route = f"route by {BRIDGE}" if any(ours for _, ours in known) else None
    return [
        *(entry for entry in routes if entry.owner != own_route),
        *(entry for entry, ours in known if not ours),
    ]


def refuse_conflict(docker: Docker | None) -> None:
    """Stop while nothing has been made yet when the lab's subnet is in use by something else.

    Without an engine to ask, which may be a lab's own that does not run yet, a route by the lab's bridge is let pass.

    Raises:
        RunbookError: Names the subnet and who has it.
    """
    routes = parse_routes(Path("/proc/net/route").read_text())
    if docker is None:
        found = conflict(entry for entry in routes if entry.owner != f"route by {BRIDGE}")
    else:
        names = docker.must("network", "ls", "--quiet").split()
        networks = parse_networks(docker.must("network", "inspect", *names)) if names else []
        found = conflict(foreign(routes, networks))
    if found is not None:
        raise RunbookError(
            where="lab network",
            observed=f"{found.subnet} is in use ({found.owner})",
            expected=f"{SUBNET} free for the lab",
            next_step="Remove that route or network while the lab is up; nothing has been made yet.",
        )


def create_arguments() -> list[str]:
    """Return the docker arguments that make the network."""
    bridge = f"com.docker.network.bridge.name={BRIDGE}"
    place = ["--driver", "bridge", "--subnet", SUBNET, "--gateway", GATEWAY, "--opt", bridge]
    return ["network", "create", *place, *label_arguments(), NETWORK]


def ensure(docker: Docker) -> bool:
    """Make the network where it is missing; return whether it was."""
    if docker.inspect("network", NETWORK) is not None:
        return False
    docker.must(*create_arguments(), where="lab network")
    return True


def _address(hexadecimal: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(hexadecimal, 16)))
