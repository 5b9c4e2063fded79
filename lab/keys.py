"""Keys made for the lab: its ssh key, the machines' host keys, the key that signs its packages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.commands import Purpose, must
from lab.files import write_atomically
from lab.settings import HOSTS, Machine, Places
from lab.standin.repository import create_signing_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The lab's keys.

    Attributes:
        private: File with the private ssh key.
        public: The public ssh key, one line.
        host: {machine name: (private host key, public host key)}.
        gnupg_home: Home of the signing key.
        archive: The public signing key, armored.
    """

    private: Path
    public: str
    host: dict[str, tuple[str, str]]
    gnupg_home: Path
    archive: str


def ensure_keys(places: Places, machines: Iterable[Machine] = HOSTS) -> Keys:
    """Return the lab's keys; those that are missing are made."""
    user = make_pair(places.keys / "id_ed25519", "kimi-runbook-lab")
    host = {machine.name: make_pair(places.keys / f"host-{machine.name}", machine.name) for machine in machines}
    gnupg_home = places.keys / "gnupg"
    return Keys(
        private=places.keys / "id_ed25519",
        public=user[1],
        host=host,
        gnupg_home=gnupg_home,
        archive=create_signing_key(gnupg_home).read_text(),
    )


def ssh_config(state: Path, machines: Iterable[Machine] = HOSTS) -> str:
    """Return the ssh configuration that reaches the hosts by name, with the lab's key and no other."""
    stanzas = [
        "\n".join(
            [
                f"Host {machine.name}",
                f"  HostName {machine.address}",
                f"  HostKeyAlias {machine.address}",
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


def known_hosts(host_keys: dict[str, tuple[str, str]], machines: Iterable[Machine] = HOSTS) -> str:
    """Return the known_hosts file: each host's key under its address and its name."""
    lines = []
    for machine in machines:
        kind, key = host_keys[machine.name][1].split()[:2]
        lines.append(f"{machine.address},{machine.name} {kind} {key}\n")
    return "".join(lines)


def publish(places: Places, keys: Keys) -> None:
    """Write the checkout's copies: ``.lab/id_ed25519``, ``ssh_config``, ``known_hosts``, ``keys/lab-archive.asc``."""
    write_atomically(places.state / "id_ed25519", keys.private.read_bytes(), mode=0o600)
    write_atomically(places.state / "id_ed25519.pub", keys.public)
    write_atomically(places.state / "known_hosts", known_hosts(keys.host))
    write_atomically(places.state / "ssh_config", ssh_config(places.state))
    write_atomically(places.state / "keys" / "lab-archive.asc", keys.archive)


def make_pair(private: Path, comment: str) -> tuple[str, str]:
    """Return a private and a public ssh key from their files, which are made where one is missing."""
    public = private.with_name(private.name + ".pub")
    if not (private.exists() and public.exists()):
        private.unlink(missing_ok=True)
        private.parent.mkdir(parents=True, exist_ok=True)
        private.parent.chmod(0o700)
        must(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(private)],
            Purpose("ssh key", "Check that the lab's home directory can be written."),
        )
    return private.read_text(), public.read_text()
