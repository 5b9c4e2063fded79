"""Keys of the kernel lab and the ssh configuration that leads to its machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.files import write_atomically
from lab.kernel.settings import VIRTUAL_MACHINES, VirtualMachine
from lab.keys import make_pair
from lab.standin.repository import create_signing_key

HOST_ALIAS = "kernel-lab"  # one image, so one host key for all machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The kernel lab's keys: those of the lab, and the machines' host key.

    Attributes:
        private: The private ssh key.
        public: The public ssh key, one line.
        host_key: Private and public host key.
        gnupg_home: Home of the key that signs packages.
        archive: That key's public part, armored.
    """

    private: str
    public: str
    host_key: tuple[str, str]
    gnupg_home: Path
    archive: str


def ensure_access(keys: Path) -> Access:
    """Return the keys under the lab's key folder; those that are missing are made."""
    private, public = make_pair(keys / "id_ed25519", "kimi-runbook-lab")
    gnupg_home = keys / "gnupg"
    return Access(
        private=private,
        public=public.strip(),
        host_key=make_pair(keys / f"host-{HOST_ALIAS}", HOST_ALIAS),
        gnupg_home=gnupg_home,
        archive=create_signing_key(gnupg_home).read_text(),
    )


def publish(state: Path, access: Access) -> None:
    """Write what Ansible and people need to reach the machines."""
    write_atomically(state / "id_ed25519", access.private, mode=0o600)
    write_atomically(state / "lab-archive.asc", access.archive)
    kind, key = access.host_key[1].split()[:2]
    write_atomically(state / "known_hosts", f"{HOST_ALIAS} {kind} {key}\n")
    write_atomically(state / "ssh_config", ssh_config(state))


def ssh_config(state: Path, machines: Iterable[VirtualMachine] = VIRTUAL_MACHINES) -> str:
    """Return the ssh configuration that reaches the machines by name, with the lab's key and no other."""
    stanzas = [
        "\n".join(
            [
                f"Host {machine.name}",
                "  HostName 127.0.0.1",
                f"  Port {machine.ssh_port}",
                f"  HostKeyAlias {HOST_ALIAS}",
                "  User root",
                f'  IdentityFile "{state / "id_ed25519"}"',
                "  IdentitiesOnly yes",
                f'  UserKnownHostsFile "{state / "known_hosts"}"',
                "  StrictHostKeyChecking yes",
                "  ConnectTimeout 10",
            ]
        )
        for machine in machines
    ]
    return "\n\n".join(stanzas) + "\n"
