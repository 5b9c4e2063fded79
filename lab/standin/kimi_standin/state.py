"""What is on disk, what is loaded, and who uses it: the one state behind every stand-in program.

On disk: facts that packages installed (modules, libraries). Loaded: /proc/driver and /sys/module, where the boot unit
has mounted a tmpfs. The two differ after a package change until a reload or a reboot, as on a real host.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import NOTICE

GPU_NODE = re.compile(r"/dev/nvidia\d+$")


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel module as its package left it on disk.

    Attributes:
        name: Name with underscores, as /sys/module has it.
        version: Version, or "" for modules that have none of their own.
        flavour: "open" or "proprietary" for NVIDIA's, "kernel" otherwise.
        license: What ``modinfo -F license`` prints.
        depends: Modules it needs, nearest first.
        description: What it is; always says that it is a stand-in.
    """

    name: str
    version: str
    flavour: str
    license: str
    depends: tuple[str, ...]
    description: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of hardware.json; ``memory_mib`` in MiB, ``pci`` such as 00000000:1B:00.0."""

    index: int
    name: str
    uuid: str
    pci: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a GPU's device node open."""

    pid: int
    name: str


def canonical(name: str) -> str:
    """Return a module's name as the kernel spells it: nvidia-uvm is nvidia_uvm."""
    return name.replace("-", "_")


def root_from_environment() -> Path:
    """Return the directory put in front of every path, "/" unless KIMI_STANDIN_ROOT says otherwise."""
    return Path(os.environ.get("KIMI_STANDIN_ROOT") or "/")


class Host:
    """The stand-in's view of one host under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, absolute: str) -> Path:
        """Return where an absolute path of the host lies under the root."""
        return self.root / absolute.lstrip("/")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other stand-in programs from changing the loaded state meanwhile."""
        path = self.path("/run/kimi-standin.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    # What the machine has, and what packages left on disk.

    def hardware(self) -> dict[str, object]:
        """Return hardware.json, empty where the host has none."""
        path = self.path("/var/lib/kimi-standin/hardware.json")
        loaded = json.loads(path.read_text()) if path.is_file() else {}
        return loaded if isinstance(loaded, dict) else {}

    def gpus(self) -> list[Gpu]:
        """Return the GPUs of hardware.json in index order."""
        listed = self.hardware().get("gpus")
        entries = listed if isinstance(listed, list) else []
        return [
            Gpu(index, str(entry["name"]), str(entry["uuid"]), str(entry["pci"]), int(entry["memory_mib"]))
            for index, entry in enumerate(entries)
        ]

    def names(self, key: str) -> list[str]:
        """Return a list of names from hardware.json, such as its ``autoload``."""
        listed = self.hardware().get(key)
        return [str(name) for name in listed] if isinstance(listed, list) else []

    def on_disk(self, name: str) -> Module | None:
        """Return the module that the next load would take, or None where no package brought one."""
        path = self.path(f"/usr/lib/kimi-standin/modules/{canonical(name)}.json")
        if not path.is_file():
            return None
        facts = json.loads(path.read_text())
        return Module(
            name=facts["name"],
            version=facts["version"],
            flavour=facts["flavour"],
            license=facts["license"],
            depends=tuple(facts["depends"]),
            description=f"{facts['description']} ({NOTICE})",
        )

    def library_version(self, soname: str) -> str | None:
        """Return the version of a userspace library, read from the file its soname points at."""
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"):
            link = self.path(f"{folder}/{soname}")
            if link.is_symlink():
                return link.readlink().name.split(".so.", 1)[1]
        return None

    def library_path(self, soname: str) -> str | None:
        """Return the versioned file behind a soname, as an absolute path of the host."""
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"):
            link = self.path(f"{folder}/{soname}")
            if link.is_symlink():
                return f"{folder}/{link.readlink().name}"
        return None

    # What is loaded.

    def is_loaded(self, name: str) -> bool:
        """Say whether a module is loaded."""
        return self.path(f"/sys/module/{canonical(name)}/initstate").is_file()

    def loaded_version(self, name: str) -> str | None:
        """Return the version of a loaded module, None where it is not loaded or has none."""
        path = self.path(f"/sys/module/{canonical(name)}/version")
        return path.read_text().strip() if path.is_file() else None

    def loaded(self) -> list[str]:
        """Return the names of the loaded stand-in modules, in order."""
        return sorted(path.parent.name for path in self.path("/sys/module").glob("*/initstate"))

    def users(self, name: str) -> list[str]:
        """Return the loaded modules that depend on this one."""
        holders = self.path(f"/sys/module/{canonical(name)}/holders")
        return sorted(path.name for path in holders.iterdir()) if holders.is_dir() else []

    def gpu_holders(self) -> list[Holder]:
        """Return the processes that have a GPU's device node open, this one left out.

        Read from /proc/<pid>/fd as ``fuser`` does, so any process counts, a shell with ``</dev/nvidia0`` included.
        """
        found: list[Holder] = []
        prefix = "" if self.root == Path("/") else str(self.root.resolve())
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            if int(process.name) == os.getpid():
                continue
            try:
                targets = [str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()]
                name = (process / "comm").read_text().strip()
            except OSError:  # it ended meanwhile, or belongs to someone else
                continue
            if any(t.startswith(prefix) and GPU_NODE.match(t.removeprefix(prefix)) for t in targets):
                found.append(Holder(int(process.name), name))
        return found

    def refcnt(self, name: str) -> int:
        """Return a module's reference count: the modules on top of it, and for nvidia the processes using a GPU."""
        return len(self.users(name)) + (len(self.gpu_holders()) if canonical(name) == "nvidia" else 0)

    def refresh(self) -> None:
        """Write every reference count again; holders come and go without telling the stand-in."""
        for name in self.loaded():
            path = self.path(f"/sys/module/{name}/refcnt")
            current = f"{self.refcnt(name)}\n"
            if os.access(path.parent, os.W_OK) and (not path.is_file() or path.read_text() != current):
                path.write_text(current)
