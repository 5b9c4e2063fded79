"""The parts of a Snapshot: operating system, packages, driver, network, Docker, engine container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """Identity of this boot: the kernel's boot id, and the start of PID 1 in clock ticks since the machine booted."""

    boot_id: str | None = None
    pid1_started_ticks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """One installed package: its full version, and whether the package manager holds it."""

    version: str
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One file: SHA-256 in hex, mode as four octal digits."""

    sha256: str | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """One systemd unit: LoadState (``not-found`` when missing), ActiveState, UnitFileState."""

    load: str | None = None
    active: str | None = None
    enabled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that keeps a GPU device open."""

    pid: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The driver versions that may differ, and what stands in the way of changing them.

    Attributes:
        on_disk: Version of the module the running kernel would load; None when there is none.
        loaded: Version the kernel runs; only this one is "the driver".
        userspace: Version of the NVML library.
        smi_rc: Exit status of nvidia-smi, 18 for a version mismatch; None when it was not run or did not answer.
        secure_boot: Whether Secure Boot is on; None when unknown.
        key_enrolled: Whether the key that signs local modules is enrolled; None when unknown.
        headers_present: Whether headers of the running kernel are installed; None when unknown.
        runfile: True when an installation by .run file, unknown to the package manager, was found.
        standin: True when the driver is the lab's stand-in.
    """

    on_disk: str | None = None
    loaded: str | None = None
    flavour: str | None = None
    userspace: str | None = None
    smi_rc: int | None = None
    smi_message: str | None = None
    standin: bool = False
    holders: tuple[Holder, ...] = ()
    secure_boot: bool | None = None
    key_enrolled: bool | None = None
    headers_present: bool | None = None
    runfile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi lists it; memory in MiB."""

    index: int
    name: str | None = None
    uuid: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One kernel module."""

    loaded: bool
    version: str | None = None
    refcnt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device."""

    name: str
    port: int | None = None
    state: str | None = None
    link_layer: str | None = None


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
    """Addresses per interface, and listening TCP sockets."""

    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listening: tuple[Listener, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """The Docker engine, the file system of its image store, and its daemon.json.

    Attributes:
        daemon: Parsed daemon.json; None when there is no such file (or it is malformed: then daemon_error says why).
        free_inodes: None where the file system does not count inodes.
    """

    docker_version: str | None = None
    root_dir: str | None = None
    store_path: str | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None
    daemon: Mapping[str, object] | None = None
    daemon_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The engine image in the host's store."""

    reference: str | None = None
    present: bool = False
    repo_digests: tuple[str, ...] = ()
    architecture: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFacts:
    """The engine container: identity, what it really runs, and the SHA-256 of files as seen inside it."""

    name: str
    id: str | None = None
    image_reference: str | None = None
    image_repo_digests: tuple[str, ...] = ()
    started_at: str | None = None
    pid: int | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    restart_count: int = 0
    files: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether the container has a process."""
        return bool(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeError:
    """A question the snapshot could not get answered."""

    probe: str
    message: str
