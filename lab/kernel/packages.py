"""NVIDIA's packages for a real kernel: the lab's stand-ins, with modules where those had facts about modules."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from lab.files import digest_of
from lab.standin.kimi_standin import NOTICE
from lab.standin.plan import LIBRARY, REVISION, FilePlan, PackagePlan
from lab.standin.repository import STAMP, create_signing_key, fill, index, require_tools, swap

REPOSITORY = "cuda"
TOOLS = "kimi-standin-tools"
MODULE_PACKAGE = "nvidia-kernel-open-dkms"
_TOOLS_VERSION = f"1.0{REVISION}"
_DRIVER_SET = (
    TOOLS,
    MODULE_PACKAGE,
    "libcuda1",
    "libnvidia-cfg1",
    "libnvidia-ml1",
    "nvidia-driver-cuda",
    "nvidia-modprobe",
    "nvidia-persistenced",
)

# As DKMS leaves a module it has built: found by modprobe, not loaded, and the initramfs as it was.
_MODULE_POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
  depmod -a {kernel}
fi
"""
_MODULE_POSTRM = """\
#!/bin/sh
set -e
if [ "$1" = remove ]; then
  depmod -a {kernel}
fi
"""
# The real ones are loaded by udev, which sees the GPU.
_MODULES_LOAD = "nvidia\nnvidia_uvm\n"
_NVIDIA_MODPROBE = f"""\
#!/bin/sh
# {NOTICE}: the kernel makes the device nodes, so loading is all there is to do.
set -e
modprobe nvidia
for option in "$@"; do
  case "$option" in
    -u) modprobe nvidia_uvm ;;
    -m) modprobe nvidia_modeset ;;
  esac
done
"""


def kernel_packages(
    plans: Iterable[PackagePlan], kernel: str, modules: Mapping[str, Iterable[FilePlan]], persistenced: bytes
) -> list[PackagePlan]:
    """Return the driver's packages as a host with a kernel of its own needs them.

    Args:
        plans: The stand-in packages of the lab's containers.
        kernel: Version of the kernel the modules were built for.
        modules: {driver version: its modules as files of a package}.
        persistenced: The program nvidia-persistenced.
    """
    chosen = []
    for given in plans:
        plan = given
        version = plan.version.removesuffix(REVISION)
        if plan.repository != REPOSITORY or (plan.name != TOOLS and version not in modules):
            continue
        if plan.name == TOOLS:
            # Its library is what nvidia-smi runs on; its programs would stand before the real modprobe and modinfo.
            plan = replace(plan, scripts=(), files=tuple(file for file in plan.files if _is_library(file)))
        elif plan.name == MODULE_PACKAGE:
            plan = _with_modules(plan, kernel, modules[version])
        elif plan.name == "nvidia-persistenced":
            plan = _with_program(plan, "/usr/bin/nvidia-persistenced", persistenced)
        elif plan.name == "nvidia-modprobe":
            plan = _with_program(plan, "/usr/bin/nvidia-modprobe", _NVIDIA_MODPROBE.encode())
        chosen.append(plan)
    return chosen


def driver_set(plans: Iterable[PackagePlan], version: str) -> list[PackagePlan]:
    """Return the packages a host has at a driver version: the pin, the compute-only driver and what it needs."""
    names = {f"nvidia-driver-pinning-{version}", *_DRIVER_SET}
    return [plan for plan in plans if plan.name in names and plan.version in (version + REVISION, _TOOLS_VERSION)]


def _is_library(file: FilePlan) -> bool:
    return file.path.startswith((f"{LIBRARY}/kimi_standin/", "/usr/share/doc/"))


def _with_modules(plan: PackagePlan, kernel: str, modules: Iterable[FilePlan]) -> PackagePlan:
    kept = tuple(file for file in plan.files if not file.path.startswith(f"{LIBRARY}/modules/"))
    return replace(
        plan,
        files=(*kept, *modules, FilePlan("/usr/lib/modules-load.d/nvidia.conf", _MODULES_LOAD.encode())),
        scripts=(
            ("postinst", _MODULE_POSTINST.format(kernel=kernel)),
            ("postrm", _MODULE_POSTRM.format(kernel=kernel)),
        ),
    )


def _with_program(plan: PackagePlan, path: str, content: bytes) -> PackagePlan:
    files = tuple(replace(file, content=content) if file.path == path else file for file in plan.files)
    return replace(plan, files=files)


def module_files(kernel: str, modules: Iterable[Path]) -> tuple[FilePlan, ...]:
    """Return modules as files of a package, where DKMS would put them."""
    return tuple(FilePlan(f"/lib/modules/{kernel}/updates/dkms/{path.name}", path.read_bytes()) for path in modules)


def build_repository(output: Path, gnupg_home: Path, plans: list[PackagePlan]) -> bool:
    """Build and sign the repository ``output/cuda``; return whether it had to be built.

    Raises:
        RunbookError: A program is missing or failed.
    """
    require_tools()
    public = create_signing_key(gnupg_home)
    place = output / REPOSITORY
    wanted = digest_of(public.read_bytes(), repr(plans))
    stamp = place / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=f".{REPOSITORY}-") as workplace:
        fresh = Path(workplace) / "new"
        fill(fresh / "pool", plans, [])
        index(fresh, REPOSITORY, gnupg_home)
        (fresh / STAMP).write_text(wanted)
        swap(fresh, place, aside=Path(workplace) / "old")
    return True
