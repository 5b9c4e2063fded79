"""Loading and unloading: the only place that moves facts from disk into the loaded state and back."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from . import NOTICE
from .state import Host, Module, canonical

DEVICE_NODES = {"nvidia_uvm": ("nvidia-uvm", "nvidia-uvm-tools"), "nvidia_modeset": ("nvidia-modeset",)}


class LoadError(Exception):
    """The kernel's refusal, in the words the real tools print after "could not insert"."""


class NotFoundError(Exception):
    """No such module on disk."""


class BusyError(Exception):
    """The module is in use; ``args[0]`` lists the modules on top of it and may be empty."""


def machine() -> str:
    """Return the architecture as the kernel names it."""
    return os.uname().machine


def kernel() -> str:
    """Return the release of the running kernel."""
    return os.uname().release


def version_text(module: Module) -> str:
    """Return /proc/driver/nvidia/version for a loaded nvidia module.

    Line shapes: NVIDIA's open module prints "Open Kernel Module for <arch>  <version>  Release Build", the proprietary
    one "<arch> Kernel Module  <version>  <date>".
    """
    if module.flavour == "open":
        first = f"NVRM version: NVIDIA UNIX Open Kernel Module for {machine()}  {module.version}  Release Build"
        first += f"  ({NOTICE})"
    else:
        first = f"NVRM version: NVIDIA UNIX {machine()} Kernel Module  {module.version}  ({NOTICE})"
    return f"{first}\nGCC version:  none ({NOTICE})\n"


def load(host: Host, name: str) -> list[str]:
    """Load a module and what it depends on; return the names that were newly loaded.

    Raises:
        NotFoundError: No package brought the module.
        LoadError: No such hardware, or a loaded dependency is of another version.
    """
    if host.is_loaded(name):
        return []
    module = host.on_disk(name)
    if module is None or not built_for(host, module, kernel()):
        raise NotFoundError(canonical(name))
    if module.name == "nvidia" and not host.gpus():
        raise LoadError("No such device")
    newly: list[str] = []
    for needed in module.depends:
        newly += load(host, needed)
        present = host.loaded_version(needed)
        if present and module.version and present != module.version:
            raise LoadError("Invalid argument")  # the kernel log: "disagrees about version of symbol"
    _write_loaded(host, module)
    return [*newly, module.name]


def built_for(host: Host, module: Module, release: str) -> bool:
    """Say whether the module exists for a kernel; hardware.json's ``dkms_failed_for`` lists those DKMS failed for."""
    return module.flavour == "kernel" or release not in host.names("dkms_failed_for")


def _write_loaded(host: Host, module: Module) -> None:
    folder = host.path(f"/sys/module/{module.name}")
    (folder / "holders").mkdir(parents=True, exist_ok=True)
    if module.version:
        (folder / "version").write_text(f"{module.version}\n")
    (folder / "refcnt").write_text("0\n")
    (folder / "initstate").write_text("live\n")
    for needed in module.depends:
        link = host.path(f"/sys/module/{needed}/holders/{module.name}")
        link.symlink_to(f"../../{module.name}")
    if module.name == "nvidia":
        _write_proc(host, module)
    make_nodes(host, module.name)
    host.refresh()


def _write_proc(host: Host, module: Module) -> None:
    folder = host.path("/proc/driver/nvidia")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version").write_text(version_text(module))
    for gpu in host.gpus():
        address = gpu.pci.lower().removeprefix("0000")
        information = folder / "gpus" / address / "information"
        information.parent.mkdir(parents=True, exist_ok=True)
        information.write_text(
            f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\nBus Location: \t {address}\n"
            f"Device Minor: \t {gpu.index}\nGPU Firmware: \t {module.version}\n"
        )


def make_nodes(host: Host, name: str) -> None:
    """Make a loaded module's device nodes, which holders can keep open like the real ones.

    On a host they are character devices that behave as /dev/null, so that containers can be given them; under a root of
    one's own they are plain files, which need no privilege.
    """
    if name == "nvidia":
        nodes: tuple[str, ...] = ("nvidiactl", *(f"nvidia{gpu.index}" for gpu in host.gpus()))
    else:
        nodes = DEVICE_NODES.get(name, ())
    for node in nodes:
        path = host.path(f"/dev/{node}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            continue
        if host.root == Path("/"):
            os.mknod(path, stat.S_IFCHR, os.makedev(1, 3))
        else:
            path.write_text(f"{NOTICE}\n")
        path.chmod(0o666)


def below(host: Host, name: str) -> list[str]:
    """Return the loaded modules that this one sits on."""
    return [other for other in host.loaded() if name in host.users(other)]


def unload(host: Host, name: str) -> None:
    """Unload one module.

    Raises:
        NotFoundError: It is not loaded.
        BusyError: Modules or processes use it.
    """
    name = canonical(name)
    if not host.is_loaded(name):
        raise NotFoundError(name)
    host.refresh()
    if host.refcnt(name) > 0:
        raise BusyError(host.users(name))
    for needed in below(host, name):
        host.path(f"/sys/module/{needed}/holders/{name}").unlink()
    shutil.rmtree(host.path(f"/sys/module/{name}"))
    if name == "nvidia":
        shutil.rmtree(host.path("/proc/driver/nvidia"))
    host.refresh()


def unload_with_dependencies(host: Host, name: str) -> None:
    """Unload a module, then what it needed as far as nothing else uses it, as ``modprobe -r`` does."""
    name = canonical(name)
    candidates = below(host, name)
    unload(host, name)
    for needed in candidates:
        if host.is_loaded(needed) and host.refcnt(needed) == 0:
            unload_with_dependencies(host, needed)


def blacklisted(host: Host) -> set[str]:
    """Return the modules that modprobe.d keeps from being loaded by themselves."""
    found: set[str] = set()
    for folder in ("/usr/lib/modprobe.d", "/run/modprobe.d", "/etc/modprobe.d"):
        for path in host.path(folder).glob("*.conf"):
            words = (line.split() for line in path.read_text().splitlines())
            found |= {canonical(line[1]) for line in words if len(line) == 2 and line[0] == "blacklist"}
    return found


def modules_load_names(host: Host) -> list[str]:
    """Return the modules named in modules-load.d, a file in /etc hiding its namesake in /usr/lib."""
    files: dict[str, Path] = {}
    for folder in ("/usr/lib/modules-load.d", "/run/modules-load.d", "/etc/modules-load.d"):
        files |= {path.name: path for path in host.path(folder).glob("*.conf")}
    lines = (line.strip() for name in sorted(files) for line in files[name].read_text().splitlines())
    return [canonical(line) for line in lines if line and line[0] not in "#;"]
