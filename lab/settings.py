"""What the lab is called and where it lives: names, addresses, directories. Facts only, nothing runs here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LABEL = "kimi-runbook.lab"  # on every container, network, volume and image the lab makes; `down` removes what has it
SPEC_LABEL = "kimi-runbook.lab.spec"  # digest of everything an object was made from; another one means "make it again"

NETWORK = "kimi-lab"
SUBNET = "172.31.240.0/24"
GATEWAY = "172.31.240.1"
DEPOT_VOLUME = "kimi-lab-depot-data"

REGISTRY_PORT = 5000
REPOSITORY_PORT = 8080
ENGINE_PORT = 8000

SUITE = "bookworm"  # Debian release of the lab's hosts, which is also the smallest machine the lab is made for
ENGINE_REPOSITORY = "vllm/vllm-openai-cpu"
ENGINE_VERSIONS = ("0.32.0",)  # default for `up --engine-version`; 0.27.0 to 0.32.0 have a CPU build
MODEL_DIRECTORY = "/var/lib/models/kimi-k3-lab"
SERVED_MODEL_NAME = "moonshotai/Kimi-K3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One container that stands for a machine.

    Attributes:
        name: Container name, host name and ssh alias.
        address: IPv4 address on the lab network.
        volume: Docker volume of its own.
        mount: Where the volume is mounted.
    """

    name: str
    address: str
    volume: str
    mount: str


DEPOT = Machine(name="kimi-lab-depot", address="172.31.240.10", volume=DEPOT_VOLUME, mount="/srv")
HOSTS = (
    Machine(name="k3-a", address="172.31.240.11", volume="kimi-lab-k3-a-docker", mount="/var/lib/docker"),
    Machine(name="k3-b", address="172.31.240.12", volume="kimi-lab-k3-b-docker", mount="/var/lib/docker"),
)
REGISTRY = f"{DEPOT.address}:{REGISTRY_PORT}"
REPOSITORIES_URL = f"http://{DEPOT.address}:{REPOSITORY_PORT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The directories of one lab.

    Attributes:
        project: Root of the checkout.
        home: Caches and, where the lab starts its own Docker engine, that engine's data; shared by all checkouts.
        state: ``.lab`` of the checkout: ssh configuration, keys, lab.json, logs.
    """

    project: Path
    home: Path
    state: Path

    @property
    def keys(self) -> Path:
        """Directory with the lab's ssh keys, host keys and archive key; the checkout's ``.lab`` gets copies."""
        return self.home / "keys"

    @property
    def cache(self) -> Path:
        """Directory of what is expensive to fetch or build: root file systems, packages, the engine tree."""
        return self.home / "cache"

    @property
    def docker(self) -> Path:
        """Directory of the Docker engine that the lab starts where none answers."""
        return self.home / "docker"


def places(project: Path, environment: Mapping[str, str], *, is_root: bool) -> Places:
    """Return where this lab keeps things: KIMI_LAB_HOME, else a cache directory that fits the user."""
    default = "/var/cache/kimi-runbook-lab" if is_root else "~/.cache/kimi-runbook-lab"
    home = Path(environment.get("KIMI_LAB_HOME") or default).expanduser().resolve()
    return Places(project=project, home=home, state=project / ".lab")


def current_places() -> Places:
    """Return the places of the checkout this package belongs to, for the user who runs it."""
    return places(Path(__file__).resolve().parent.parent, os.environ, is_root=os.geteuid() == 0)


def near(path: Path) -> Path:
    """Return a path as seen from the current directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
