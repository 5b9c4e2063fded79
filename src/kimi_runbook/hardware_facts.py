"""The parts of a Snapshot about kernel, driver, GPUs, fabric and RDMA.

Throughout, None says that something could not be told (the snapshot's ``errors`` say why), an empty tuple or mapping
that it was looked for and not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """The kernels of a host.

    Attributes:
        running: Release of the running kernel, as ``uname -r`` says it.
        next: Release the boot loader would start; None when its configuration does not say.
        installed: Releases with a kernel image or its modules on disk.
        headers: Release to whether a module could be built for it.
        lockdown: The chosen mode of /sys/kernel/security/lockdown: none, integrity or confidentiality.
        cmdline: The kernel's command line; values of parameters that do not bear on GPUs or RDMA are not shown.
    """

    running: str | None = None
    next: str | None = None
    installed: tuple[str, ...] | None = None
    headers: Mapping[str, bool] = field(default_factory=dict)
    lockdown: str | None = None
    cmdline: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that keeps a GPU device open."""

    pid: int
    name: str = "unknown"
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModuleVersion:
    """The version of the NVIDIA module on disk for one kernel; None when there is no such module."""

    kernel: str
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InitramfsFacts:
    """The versions of the NVIDIA module that lie inside one kernel's initramfs; empty when it holds none."""

    kernel: str
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DkmsModule:
    """One row of ``dkms status``; state is its last word: added, built, installed."""

    module: str
    version: str | None = None
    kernel: str | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nouveau:
    """The kernel's own driver for NVIDIA GPUs: whether it is loaded, and whether it is kept from loading."""

    loaded: bool | None = None
    blacklisted: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitPlace:
    """A CUDA Toolkit on the host, which says nothing of the driver; version as its version.json has it."""

    path: str
    version: str | None = None


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
        key_file: Whether the public key that dkms signs with lies on the host.
        headers_present: Whether headers of the running kernel are installed; None when unknown.
        runfile: True when an installation by .run file, unknown to the package manager, was found.
        standin: True when the driver is the lab's stand-in.
        on_disk_next: The module on disk for the kernel that boots next.
        initramfs: What lies inside the initramfs of the running and of the next kernel.
        license: ``modinfo``'s license: "Dual MIT/GPL" is the open flavour, "NVIDIA" the proprietary one.
        nvml: NVML's version as nvidia-smi names it when library and module differ, else that of the library's file.
        libcuda: Versions of libcuda among the system's libraries.
        run_installer: Uninstallers that no package owns.
        params: Parameters of the loaded module, from /proc/driver/nvidia/params.
        params_wanted: Parameters that modprobe.d asks for, ``NVreg_`` taken off, to compare with ``params``.
        toolkit: CUDA Toolkits found on the host.
        init_complete_s: Seconds after the boot at which the kernel log says that the driver was loaded.
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
    key_file: bool | None = None
    headers_present: bool | None = None
    runfile: bool = False
    on_disk_next: KernelModuleVersion | None = None
    initramfs: tuple[InitramfsFacts, ...] | None = None
    license: str | None = None
    nvml: str | None = None
    libcuda: tuple[str, ...] | None = None
    dkms: tuple[DkmsModule, ...] | None = None
    nouveau: Nouveau | None = None
    run_installer: tuple[str, ...] | None = None
    params: Mapping[str, str] | None = None
    params_wanted: Mapping[str, str] | None = None
    toolkit: tuple[ToolkitPlace, ...] | None = None
    init_complete_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ecc:
    """ECC of one GPU: mode Enabled or Disabled, counts of uncorrected errors since the boot and in its life."""

    mode: str | None = None
    uncorrected_volatile: int | None = None
    uncorrected_aggregate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remap:
    """Row remapping of one GPU: whether a reset is pending, whether remapping failed."""

    pending: bool | None = None
    failed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with memory on a GPU, in MiB; None where the driver does not tell."""

    pid: int
    name: str | None = None
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi lists it; memory in MiB, ``pci`` such as 00000000:1B:00.0."""

    index: int
    name: str | None = None
    uuid: str | None = None
    pci: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    ecc: Ecc | None = None
    remap: Remap | None = None
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU on the PCI bus, whether or not a driver answers for it; vendor 0x10de is NVIDIA, 0x1002 AMD."""

    pci: str
    vendor: str | None = None
    device: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricService:
    """A service of the NVLink fabric or of the driver.

    Attributes:
        package: Name of the package it comes from, None when none is installed.
        version: That package's version.
        active: systemd's ActiveState.
        started_at: Start of the running process, ISO 8601 in UTC; None when it does not run.
        replaced: Whether the running program's file has been replaced on disk since it was started.
    """

    package: str | None = None
    version: str | None = None
    active: str | None = None
    started_at: str | None = None
    replaced: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFabric:
    """The Fabric block of one GPU in ``nvidia-smi -q``."""

    index: int
    state: str | None = None
    status: str | None = None
    cluster_uuid: str | None = None
    clique_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImexNode:
    """One node of an IMEX domain, as the daemon asked sees it.

    Attributes:
        host: Its address in the node list.
        status: READY, or what it waits for; UNAVAILABLE where it does not answer.
        version: Of its daemon.
        apart: Nodes it is not connected to, as ``address status``.
    """

    host: str | None = None
    status: str | None = None
    version: str | None = None
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImexDomain:
    """What ``nvidia-imex-ctl -N`` says of the domain: UP, DEGRADED or DOWN, and each of its nodes."""

    status: str | None = None
    nodes: tuple[ImexNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFacts:
    """NVLink: switches, the services that run the fabric, what each GPU says of it, IMEX.

    Attributes:
        nvswitches: NVSwitch devices of the driver (HGX H100 and H200).
        sw_mng: RDMA functions that manage NVLink switches (HGX B200 and B300).
        services: nvidia-fabricmanager, nvlsm, nvidia-imex and nvidia-persistenced, by name.
        imex_channels: Names below /dev/nvidia-caps-imex-channels.
        imex_nodes: Addresses of the IMEX domain in their order; None without a nodes_config.cfg.
        imex_domain: The domain as this host's daemon sees it; None when none runs or it did not answer.
    """

    nvswitches: int | None = None
    sw_mng: int | None = None
    services: Mapping[str, FabricService] = field(default_factory=dict)
    gpus: tuple[GpuFabric, ...] | None = None
    imex_channels: tuple[str, ...] | None = None
    imex_nodes: tuple[str, ...] | None = None
    imex_domain: ImexDomain | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CdiSpec:
    """One CDI specification: driver versions in its library paths, paths that do not exist, names of its devices."""

    path: str
    versions: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """One line of the kernel log since the boot: time in UTC, kind from the module's table, text."""

    at: str | None = None
    kind: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """The kernel's lines that bear on GPUs, network and memory, newest last; nothing is known when not readable."""

    readable: bool = False
    lines: tuple[KernelLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One kernel module."""

    loaded: bool = False
    version: str | None = None
    refcnt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        state: ACTIVE, DOWN and so on.
        rate: As the kernel words it, e.g. ``400 Gb/sec (4X NDR)``.
        gids: GIDs that are not zero.
        mtu: Active MTU in bytes, from ibv_devinfo.
        fw: Firmware version.
        guid: Node GUID.
        netdev: Network interfaces on the same function.
    """

    name: str
    port: int | None = None
    state: str | None = None
    link_layer: str | None = None
    rate: str | None = None
    gids: int | None = None
    mtu: int | None = None
    fw: str | None = None
    guid: str | None = None
    netdev: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaFacts:
    """RDMA software: the OFED installed (None without one), modules, and whether a GPU driver registered as peer."""

    ofed: str | None = None
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    peer_memory: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IommuFacts:
    """IOMMU: whether it is on, whether devices pass through it, whether a PCIe bridge redirects peers (ACS)."""

    enabled: bool | None = None
    passthrough: bool | None = None
    acs: bool | None = None
