"""What the virtual machines are called and where they are reached. Facts only, nothing runs here."""

from __future__ import annotations

from dataclasses import dataclass

MANAGEMENT_INTERFACE, RAIL_INTERFACE = "eth0", "eth1"
CONTROLLER = "10.0.2.2"  # how QEMU's user network shows the loopback address of the machine it runs on
REPOSITORY_PORT = 22480
DISK_SIZE = "4G"  # of the root file system; the file is sparse
MEMORY_MIB = 1536
CPUS = 2
# Of lab/standin/packages.yml: the one machines start with, the one they are brought to, and one between them.
DRIVER_VERSIONS = ("570.133.20", "580.167.08", "580.178.04")
FIRST_DRIVER = DRIVER_VERSIONS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualMachine:
    """One virtual machine.

    Attributes:
        name: Host name and ssh alias.
        ssh_port: Port on the loopback address that leads to its sshd.
        rail_port: UDP port on the loopback address where its end of the rail is.
        rail_mac: Ethernet address on the rail, by which it knows its own IP address.
        rail_address: IPv4 address on the rail.
    """

    name: str
    ssh_port: int
    rail_port: int
    rail_mac: str
    rail_address: str


VIRTUAL_MACHINES = (
    VirtualMachine(
        name="kernel-a", ssh_port=22401, rail_port=22411, rail_mac="52:54:00:6b:33:0a", rail_address="172.31.241.11"
    ),
    VirtualMachine(
        name="kernel-b", ssh_port=22402, rail_port=22412, rail_mac="52:54:00:6b:33:0b", rail_address="172.31.241.12"
    ),
)
