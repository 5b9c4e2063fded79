"""Snapshot: what is true on one host, as the host_snapshot module saw it in one round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kimi_runbook.host_facts import (
    BootFacts,
    ContainerFacts,
    DriverFacts,
    FileFacts,
    Gpu,
    Holder,
    ImageFacts,
    Listener,
    ModuleFacts,
    NetworkFacts,
    OsFacts,
    PackageFacts,
    ProbeError,
    RdmaPort,
    RuntimeFacts,
    UnitFacts,
)
from kimi_runbook.reading import Fields, plain

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything judged about one host. A name absent from a mapping was not asked for; one mapped to None is absent.

    Build it with ``Snapshot.from_json``.
    """

    hostname: str
    taken_at: str | None = None
    os: OsFacts = field(default_factory=OsFacts)
    boot: BootFacts = field(default_factory=BootFacts)
    packages: Mapping[str, PackageFacts | None] = field(default_factory=dict)
    files: Mapping[str, FileFacts | None] = field(default_factory=dict)
    units: Mapping[str, UnitFacts] = field(default_factory=dict)
    driver: DriverFacts = field(default_factory=DriverFacts)
    gpus: tuple[Gpu, ...] = ()
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    rdma_devices: tuple[RdmaPort, ...] = ()
    network: NetworkFacts = field(default_factory=NetworkFacts)
    runtime: RuntimeFacts = field(default_factory=RuntimeFacts)
    image: ImageFacts | None = None
    container: ContainerFacts | None = None
    errors: tuple[ProbeError, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, object], source: str = "snapshot") -> Snapshot:
        """Read the JSON form; optional keys may be missing.

        Raises:
            RunbookError: wrong schema version, no hostname, or a field of the wrong type.
        """
        root = Fields(data, source, "Take a new snapshot with this version of the project.")
        root.require_schema(SCHEMA_VERSION)
        hostname = root.text("hostname")
        return _read(root, hostname)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form; ``from_json`` reads it back to an equal value."""
        data: dict[str, object] = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        data["engine"] = {"container": data.pop("container")}
        return data


def _read(root: Fields, hostname: str) -> Snapshot:
    os_, boot = _section(root, "os"), _section(root, "boot")
    return Snapshot(
        hostname=hostname,
        taken_at=root.optional_text("taken_at"),
        os=OsFacts(**{name: os_.optional_text(name) for name in ("id", "version_id", "arch", "kernel", "pretty")}),
        boot=BootFacts(
            boot_id=boot.optional_text("boot_id"), pid1_started_ticks=boot.optional_integer("pid1_started_ticks")
        ),
        packages=_packages(_section(root, "packages")),
        files=_files(_section(root, "files")),
        units=_units(_section(root, "units")),
        driver=_driver(_section(root, "driver")),
        gpus=tuple(_gpu(gpu) for gpu in root.each("gpus")),
        modules=_modules(_section(root, "modules")),
        rdma_devices=tuple(_rdma_port(device) for device in root.each("rdma_devices")),
        network=_network(_section(root, "network")),
        runtime=_runtime(_section(root, "runtime")),
        image=_image(root.optional_fields("image")),
        container=_container(_section(root, "engine").optional_fields("container")),
        errors=tuple(
            ProbeError(probe=e.text("probe"), message=e.optional_text("message") or "") for e in root.each("errors")
        ),
    )


def _section(root: Fields, key: str) -> Fields:
    return root.optional_fields(key) or Fields({}, f"{root.where}: {key}")


def _packages(section: Fields) -> dict[str, PackageFacts | None]:
    packages: dict[str, PackageFacts | None] = {}
    for name in section.names():
        entry = section.optional_fields(name)
        packages[name] = (
            None if entry is None else PackageFacts(version=entry.text("version"), held=entry.flag("held", False))
        )
    return packages


def _files(section: Fields) -> dict[str, FileFacts | None]:
    files: dict[str, FileFacts | None] = {}
    for path in section.names():
        entry = section.optional_fields(path)
        files[path] = (
            None if entry is None else FileFacts(sha256=entry.optional_text("sha256"), mode=entry.optional_text("mode"))
        )
    return files


def _units(section: Fields) -> dict[str, UnitFacts]:
    units: dict[str, UnitFacts] = {}
    for name in section.names():
        entry = section.optional_fields(name)
        units[name] = (
            UnitFacts(load="not-found")
            if entry is None
            else UnitFacts(**{key: entry.optional_text(key) for key in ("load", "active", "enabled")})
        )
    return units


def _driver(driver: Fields) -> DriverFacts:
    return DriverFacts(
        on_disk=driver.optional_text("on_disk"),
        loaded=driver.optional_text("loaded"),
        flavour=driver.optional_text("flavour"),
        userspace=driver.optional_text("userspace"),
        smi_rc=driver.optional_integer("smi_rc"),
        smi_message=driver.optional_text("smi_message"),
        standin=driver.flag("standin", False),
        holders=tuple(
            Holder(pid=holder.integer("pid"), name=holder.optional_text("name") or "unknown")
            for holder in driver.each("holders")
        ),
        secure_boot=driver.optional_flag("secure_boot"),
        key_enrolled=driver.optional_flag("key_enrolled"),
        headers_present=driver.optional_flag("headers_present"),
        runfile=driver.flag("runfile", False),
    )


def _gpu(gpu: Fields) -> Gpu:
    return Gpu(
        index=gpu.integer("index"),
        name=gpu.optional_text("name"),
        uuid=gpu.optional_text("uuid"),
        memory_total_mib=gpu.optional_integer("memory_total_mib"),
        memory_used_mib=gpu.optional_integer("memory_used_mib"),
    )


def _modules(section: Fields) -> dict[str, ModuleFacts]:
    modules: dict[str, ModuleFacts] = {}
    for name in section.names():
        entry = section.optional_fields(name)
        modules[name] = (
            ModuleFacts(loaded=False)
            if entry is None
            else ModuleFacts(
                loaded=entry.flag("loaded", False),
                version=entry.optional_text("version"),
                refcnt=entry.optional_integer("refcnt"),
            )
        )
    return modules


def _rdma_port(device: Fields) -> RdmaPort:
    return RdmaPort(
        name=device.text("name"),
        port=device.optional_integer("port"),
        state=device.optional_text("state"),
        link_layer=device.optional_text("link_layer"),
    )


def _network(network: Fields) -> NetworkFacts:
    addresses = _section(network, "addresses")
    return NetworkFacts(
        addresses={name: addresses.texts(name) for name in addresses.names()},
        listening=tuple(
            Listener(
                port=listener.integer("port"),
                address=listener.optional_text("address"),
                pid=listener.optional_integer("pid"),
                process=listener.optional_text("process"),
                container=listener.optional_text("container"),
            )
            for listener in network.each("listening")
        ),
    )


def _runtime(runtime: Fields) -> RuntimeFacts:
    daemon = runtime.optional_fields("daemon")
    return RuntimeFacts(
        docker_version=runtime.optional_text("docker_version"),
        root_dir=runtime.optional_text("root_dir"),
        store_path=runtime.optional_text("store_path"),
        free_bytes=runtime.optional_integer("free_bytes"),
        free_inodes=runtime.optional_integer("free_inodes"),
        daemon=None if daemon is None else {key: plain(daemon.raw(key)) for key in daemon.names()},
        daemon_error=runtime.optional_text("daemon_error"),
    )


def _image(image: Fields | None) -> ImageFacts | None:
    if image is None:
        return None
    return ImageFacts(
        reference=image.optional_text("reference"),
        present=image.flag("present", False),
        repo_digests=image.texts("repo_digests"),
        architecture=image.optional_text("architecture"),
        size_bytes=image.optional_integer("size_bytes"),
    )


def _container(container: Fields | None) -> ContainerFacts | None:
    if container is None:
        return None
    files = _section(container, "files")
    return ContainerFacts(
        name=container.text("name"),
        id=container.optional_text("id"),
        image_reference=container.optional_text("image_reference"),
        image_repo_digests=container.texts("image_repo_digests"),
        started_at=container.optional_text("started_at"),
        pid=container.optional_integer("pid"),
        args=container.texts("args"),
        env=container.text_map("env"),
        restart_count=container.optional_integer("restart_count") or 0,
        files={path: files.optional_text(path) for path in files.names()},
    )
