"""Expected: the judge's typed reading of what inventory, roles and lock ask of one host (assembled by wishes.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kimi_runbook.reading import Fields, data_file, plain
from kimi_runbook.shapes import Value, read


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedOs:
    """A supported distribution: os-release id and versions."""

    id: str
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPackage:
    """A package; version None accepts any installed one, held False leaves holds alone."""

    role: str
    name: str
    version: str | None = None
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFile:
    """A file; sha256 in hex, mode in octal digits; None leaves either open.

    Attributes:
        settings: What an nccl.conf or ucx.conf sets, by name, so that a difference can be named.
    """

    role: str
    path: str
    sha256: str | None = None
    mode: str | None = None
    settings: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedUnit:
    """A systemd unit; None leaves its enablement or activity open."""

    role: str
    name: str
    enabled: bool | None = None
    active: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModule:
    """A kernel module that has to be loaded."""

    role: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedImage:
    """The pinned engine image, its architectures, and the bytes a pull needs (compressed and unpacked)."""

    reference: str
    architectures: tuple[str, ...] = ()
    bytes_needed: int = 0
    inodes_needed: int = 0

    @property
    def digest(self) -> str:
        """The pinned digest."""
        return self.reference.partition("@")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """The model's files a host must have proved: digest of the list's names and sums, number of files."""

    role: str
    proved: str
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEngine:
    """The engine on this host. args (after the entry point) and env (a subset) are compared only where given.

    Attributes:
        ports: TCP ports that must be free or the engine's own, where ``serves_http``: on the head its API and the
            ranks' rendezvous, which no other node listens on. The port alone where none are named.
    """

    container: str
    unit: str
    port: int
    ports: tuple[int, ...]
    serves_http: bool = True
    args: tuple[str, ...] | None = None
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRung:
    """Where the dma-buf ladder ended: rung, state and reason as dmabuf.Decision has them."""

    rung: str = ""
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Everything asked of one host; a part that is None is not asked for.

    Attributes:
        ofed: What ``ofed_info -s`` has to say, ``inbox`` for no OFED.
        dmabuf: Where the dma-buf ladder ended for this host, to be told.
    """

    host: str
    address: str | None = None
    supported_os: tuple[ExpectedOs, ...] = ()
    packages: tuple[ExpectedPackage, ...] = ()
    files: tuple[ExpectedFile, ...] = ()
    units: tuple[ExpectedUnit, ...] = ()
    modules: tuple[ExpectedModule, ...] = ()
    daemon_role: str = "container_runtime"
    daemon_settings: Mapping[str, object] = field(default_factory=dict)
    driver_version: str | None = None
    driver_activation: str = "reboot"
    driver_parameters: Mapping[str, str] = field(default_factory=dict)
    image: ExpectedImage | None = None
    weights: ExpectedWeights | None = None
    engine: ExpectedEngine | None = None
    ofed: str | None = None
    dmabuf: ExpectedRung | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, object], source: str = "expected") -> Expected:
        """Read the JSON form; RunbookError when a field is of the wrong type or unknown."""
        root = Fields(data, source, "Correct the inventory or the role that declares it.")
        root.refuse_unknown(_KEYS)
        daemon = root.optional_fields("daemon")
        settings = daemon.optional_fields("settings") if daemon else None
        driver = root.optional_fields("driver")
        weights = root.optional_fields("weights")
        return cls(
            host=root.text("host"),
            address=root.optional_text("address"),
            supported_os=_supported_os(root),
            packages=_each(ExpectedPackage, root, "packages"),
            files=_each(ExpectedFile, root, "files"),
            units=_each(ExpectedUnit, root, "units"),
            modules=_each(ExpectedModule, root, "modules"),
            daemon_role=(daemon and daemon.optional_text("role")) or "container_runtime",
            daemon_settings={key: plain(settings.raw(key)) for key in settings.names()} if settings else {},
            driver_version=driver.text("version") if driver else None,
            driver_activation=(driver and driver.optional_text("activation")) or "reboot",
            driver_parameters=driver.text_map("parameters") if driver and driver.optional_fields("parameters") else {},
            image=_image(root.optional_fields("image")),
            weights=read(ExpectedWeights, weights) if weights else None,
            engine=_engine(root.optional_fields("engine")),
            ofed=root.optional_text("ofed") or None,
            dmabuf=_rung(root.optional_fields("dmabuf")),
        )


_KEYS = (
    *("schema_version", "host", "address", "supported_os", "packages", "files", "units", "modules"),
    *("daemon", "driver", "image", "weights", "engine", "ofed", "dmabuf"),
)


def _each(kind: type[Value], root: Fields, name: str) -> tuple[Value, ...]:
    return tuple(read(kind, item) for item in root.each(name))


def _supported_os(root: Fields) -> tuple[ExpectedOs, ...]:
    return _each(ExpectedOs, root, "supported_os") or _each(ExpectedOs, data_file("platform.yml"), "supported_os")


def _image(image: Fields | None) -> ExpectedImage | None:
    if image is None:
        return None
    inodes = image.optional_integer("inodes_needed")
    return ExpectedImage(
        reference=image.text("reference"),
        architectures=image.texts("architectures"),
        bytes_needed=image.optional_integer("bytes_needed") or 0,
        inodes_needed=data_file("platform.yml").integer("inodes_needed") if inodes is None else inodes,
    )


def _rung(rung: Fields | None) -> ExpectedRung | None:
    if rung is None or not rung.names():
        return None
    return ExpectedRung(rung=rung.optional_text("rung") or "", state=rung.text("state"), reason=rung.text("reason"))


def _engine(engine: Fields | None) -> ExpectedEngine | None:
    if engine is None:
        return None
    return ExpectedEngine(
        container=engine.text("container"),
        unit=engine.text("unit"),
        port=engine.integer("port"),
        ports=engine.integers("ports") or (engine.integer("port"),),
        serves_http=engine.flag("serves_http", True),
        args=None if engine.optional_sequence("args") is None else engine.texts("args"),
        env=None if engine.optional_fields("env") is None else engine.text_map("env"),
    )
