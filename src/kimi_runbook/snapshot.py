"""Snapshot: what is true on one host, as the host_snapshot module saw it in one round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kimi_runbook.host_facts import (
    Accelerator,
    BootFacts,
    CdiSpec,
    ClockFacts,
    ContainerFacts,
    DriverFacts,
    EngineFacts,
    FabricFacts,
    FileFacts,
    Gpu,
    Holder,
    ImageFacts,
    IommuFacts,
    KernelFacts,
    KernelLog,
    MemlockFacts,
    ModuleFacts,
    NetworkFacts,
    OsFacts,
    PackageFacts,
    PinFile,
    ProbeError,
    RdmaFacts,
    RdmaPort,
    RuntimeFacts,
    TransactionFacts,
    UnitFacts,
    Updater,
    WeightsFacts,
)
from kimi_runbook.reading import Fields
from kimi_runbook.shapes import read

SCHEMA_VERSION = 1

_ABSENT: Mapping[str, Mapping[str, object]] = {"units": {"load": "not-found"}, "modules": {"loaded": False}}
"""What null says in these mappings: the unit or module is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything judged about one host. A name absent from a mapping was not asked for; one mapped to None is absent.

    Build it with ``Snapshot.from_json``. Of the parts that a snapshot may lack altogether, None says that it came from
    a module that did not ask, or that nobody could tell; ``errors`` says why.

    Attributes:
        accelerators: GPUs of any vendor on the PCI bus, whether or not a driver answers for them.
        holds: Packages held or version-locked. pins: Files that steer versions.
        holders: Processes with a device below /dev/nvidia* open, one row per process and device.
        transaction: What the last run that changed the host left in its state file; None where there is none.
        cut: List to the number of rows left out of it, so that a snapshot stays small.
    """

    hostname: str
    taken_at: str | None = None
    os: OsFacts = field(default_factory=OsFacts)
    boot: BootFacts = field(default_factory=BootFacts)
    kernel: KernelFacts = field(default_factory=KernelFacts)
    packages: Mapping[str, PackageFacts | None] = field(default_factory=dict)
    files: Mapping[str, FileFacts | None] = field(default_factory=dict)
    units: Mapping[str, UnitFacts] = field(default_factory=dict)
    driver: DriverFacts = field(default_factory=DriverFacts)
    gpus: tuple[Gpu, ...] = ()
    accelerators: tuple[Accelerator, ...] | None = None
    fabric: FabricFacts = field(default_factory=FabricFacts)
    cdi: tuple[CdiSpec, ...] | None = None
    kernel_log: KernelLog | None = None
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    rdma_devices: tuple[RdmaPort, ...] = ()
    rdma: RdmaFacts = field(default_factory=RdmaFacts)
    memlock: MemlockFacts = field(default_factory=MemlockFacts)
    iommu: IommuFacts = field(default_factory=IommuFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    clock: ClockFacts = field(default_factory=ClockFacts)
    updaters: tuple[Updater, ...] | None = None
    runtime: RuntimeFacts = field(default_factory=RuntimeFacts)
    image: ImageFacts | None = None
    container: ContainerFacts | None = None
    engine: EngineFacts = field(default_factory=EngineFacts)
    weights: WeightsFacts | None = None
    holds: tuple[str, ...] | None = None
    pins: tuple[PinFile, ...] | None = None
    holders: tuple[Holder, ...] | None = None
    transaction: TransactionFacts | None = None
    cut: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[ProbeError, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, object], source: str = "snapshot") -> Snapshot:
        """Read the JSON form; optional keys may be missing.

        Raises:
            RunbookError: wrong schema version, no hostname, or a field of the wrong type.
        """
        root = Fields(data, source, "Take a new snapshot with this version of the project.")
        root.require_schema(SCHEMA_VERSION)
        root.text("hostname")
        return read(cls, Fields(_flat(root), source, "Take a new snapshot with this version of the project."))

    def to_json(self) -> dict[str, object]:
        """Return the JSON form; ``from_json`` reads it back to an equal value."""
        data: dict[str, object] = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        data["engine"] = {"container": data.pop("container"), **asdict(self.engine)}
        return data


def _flat(root: Fields) -> dict[str, object]:
    """Return the JSON form as the value object has it: the container apart, absent units and modules spelled out."""
    data = {name: root.raw(name) for name in root.names()}
    engine = root.optional_fields("engine")
    if engine is not None:
        data["container"] = engine.raw("container")
    for name, absent in _ABSENT.items():
        section = root.optional_fields(name)
        if section is not None:
            data[name] = {key: absent if section.raw(key) is None else section.raw(key) for key in section.names()}
    return data
