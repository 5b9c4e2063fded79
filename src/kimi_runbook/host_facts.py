"""The parts of a Snapshot about the system: packages, units, network, Docker, image, engine, weights, updates.

Throughout, None says that something could not be told (the snapshot's ``errors`` say why), an empty tuple or mapping
that it was looked for and not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kimi_runbook.hardware_facts import (
    Accelerator,
    CdiSpec,
    DriverFacts,
    FabricFacts,
    Gpu,
    Holder,
    IommuFacts,
    KernelFacts,
    KernelLog,
    ModuleFacts,
    RdmaFacts,
    RdmaPort,
)

__all__ = [
    "Accelerator",
    "BootFacts",
    "CdiSpec",
    "ClockFacts",
    "ContainerFacts",
    "DriverFacts",
    "EngineFacts",
    "FabricFacts",
    "FileFacts",
    "Gpu",
    "Holder",
    "ImageFacts",
    "IommuFacts",
    "KernelFacts",
    "KernelLog",
    "Listener",
    "MemlockFacts",
    "ModuleFacts",
    "NetworkFacts",
    "OsFacts",
    "PackageFacts",
    "PinFile",
    "ProbeError",
    "RdmaFacts",
    "RdmaPort",
    "RuntimeFacts",
    "UnitFacts",
    "Updater",
    "WeightsFacts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OsFacts:
    """The operating system: os-release id and version, machine architecture as ``uname -m`` says it."""

    id: str | None = None
    version_id: str | None = None
    arch: str | None = None
    kernel: str | None = None
    pretty: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootFacts:
    """This boot: the kernel's boot id, the start of PID 1 in clock ticks since the machine booted, its time in UTC."""

    boot_id: str | None = None
    pid1_started_ticks: int | None = None
    booted_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """One installed package: its full version, and whether the package manager holds it."""

    version: str
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One file: SHA-256 in hex, mode as four octal digits; of nccl.conf and ucx.conf also what they set."""

    sha256: str | None = None
    mode: str | None = None
    settings: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """One systemd unit: LoadState (``not-found`` when missing), ActiveState, UnitFileState."""

    load: str | None = None
    active: str | None = None
    enabled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A listening TCP socket; pid, process and container are None when they could not be seen."""

    port: int
    address: str | None = None
    pid: int | None = None
    process: str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """Addresses per interface, listening TCP sockets, MTU in bytes, speed in Mbit/s (None where a link tells none)."""

    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listening: tuple[Listener, ...] = ()
    mtu: Mapping[str, int | None] = field(default_factory=dict)
    speed: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """The Docker engine, the file system of its image store, and its daemon.json.

    Attributes:
        daemon: Parsed daemon.json; None when there is no such file (or it is malformed: then daemon_error says why).
        free_inodes: None where the file system does not count inodes.
        read_only: Whether the image store's file system is mounted read-only, as it is remounted after an error.
        root_read_only: The same of the root file system.
        toolkit: Packages of the NVIDIA container toolkit to their versions.
        storage_driver: Docker's storage driver: overlay2, or overlayfs with containerd's image store.
        cdi_enabled: Whether Docker injects devices by CDI.
    """

    docker_version: str | None = None
    root_dir: str | None = None
    store_path: str | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None
    read_only: bool | None = None
    root_read_only: bool | None = None
    daemon: Mapping[str, object] | None = None
    daemon_error: str | None = None
    toolkit: Mapping[str, str] | None = None
    default_runtime: str | None = None
    storage_driver: str | None = None
    cdi_enabled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One Python distribution installed in the image."""

    name: str
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One shared library in the image; version as its file name has it."""

    path: str
    name: str
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStack:
    """What the image brings, read from its layers on disk; ``torch_cuda`` is ``torch.version.cuda``."""

    python: tuple[Distribution, ...] = ()
    libraries: tuple[Library, ...] = ()
    torch: str | None = None
    torch_cuda: str | None = None
    vllm: str | None = None
    nccl: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The engine image in the host's store."""

    reference: str | None = None
    present: bool = False
    repo_digests: tuple[str, ...] = ()
    architecture: str | None = None
    size_bytes: int | None = None
    stack: ImageStack | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFacts:
    """The engine container: identity, what it really runs, and files as seen inside it.

    Attributes:
        created_at: When it was created, ISO 8601 in UTC; started_at likewise.
        files: Path to SHA-256 in hex; None where the file is not there.
        settings: Path of an nccl.conf or ucx.conf to what it sets.
    """

    name: str
    id: str | None = None
    image_reference: str | None = None
    image_repo_digests: tuple[str, ...] = ()
    created_at: str | None = None
    started_at: str | None = None
    pid: int | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    restart_count: int = 0
    files: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether the container has a process."""
        return bool(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """The engine's first process: its command line as the kernel has it, secrets not shown, and its start in UTC."""

    argv: tuple[str, ...] = ()
    started_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine beside its container: the steering variables of its unit, and its process."""

    unit_env: Mapping[str, str] = field(default_factory=dict)
    process: EngineProcess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFacts:
    """The model's files on this host.

    Attributes:
        revision: As recorded beside the files; None when nothing was recorded.
        files: Files found, hidden ones left out.
        bytes: Their size together.
        checksums: File to SHA-256 as recorded at the download; the files themselves are not hashed.
        proved: One SHA-256 over names and sums of the files that were hashed on a host and have not changed since, as
            :meth:`kimi_runbook.weights.WeightsManifest.digest` computes it of a list; None when none was hashed.
        free_bytes: Room left on their file system.
    """

    path: str
    revision: str | None = None
    files: int | None = None
    bytes: int | None = None
    checksums: Mapping[str, str] | None = None
    proved: str | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLine:
    """One line about memlock and the file it stands in."""

    file: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemlockFacts:
    """The limit on locked memory in each place that sets one; ``infinity``, ``unlimited`` and ``-1`` are no limit.

    ``container`` is what the engine's own process ended up with, which is what counts.
    """

    limits_conf: tuple[LimitLine, ...] | None = None
    systemd_default: str | None = None
    docker_unit: str | None = None
    daemon_json: str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """Whether the kernel's clock is synchronised, and the active service that does it."""

    synchronized: bool | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """Something that changes packages by itself: whether it runs or waits for its time, and whether it is enabled."""

    name: str
    active: bool | None = None
    enabled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinEntry:
    """A pin of NVIDIA's packages: names or globs, ``version 580.*`` or ``stream 580-open``, apt's priority."""

    package: str
    pin: str
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinFile:
    """A file that steers which version the package manager takes, with its SHA-256 in hex."""

    path: str
    sha256: str | None = None
    entries: tuple[PinEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeError:
    """A question the snapshot could not get answered."""

    probe: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """Who works on the host: the run, its owner, how long ago it last renewed the lease and when that runs out.

    Both spans are counted on the host, so that no other clock matters.
    """

    run: str
    owner: str
    age_s: int
    expires_in_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionFacts:
    """What the host's state file says of the last run that changed it.

    Attributes:
        state: open, failed or done; unreadable where the file is there and makes no sense.
        step: The step it stands at, or ended with. begun: Every step that run had begun, in order.
        interrupted: Those of them that have not ended.
        reason: Why it failed, or why the file cannot be read.
        durations: Step to the seconds it has taken here, the newest last.
    """

    state: str
    run: str = ""
    step: str = ""
    begun: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    lock_digest: str = ""
    reason: str = ""
    lease: LeaseFacts | None = None
    durations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
