"""The machines' image: a Debian root with kernel, headers and RDMA tools; stand-in modules built against that kernel.

Two caches under the lab's home: the tree as Debian's packages make it, and what is made from it (disks, modules).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.commands import Purpose, stream
from lab.files import digest_of, remove_others, write_atomically
from lab.images import mirror_from
from lab.kernel.packages import driver_set, kernel_packages, module_files
from lab.kernel.settings import (
    DISK_SIZE,
    DRIVER_VERSIONS,
    FIRST_DRIVER,
    MANAGEMENT_INTERFACE,
    RAIL_INTERFACE,
    VIRTUAL_MACHINES,
)
from lab.progress import Step
from lab.settings import SUITE
from lab.standin.plan import PackagePlan, plan_packages
from lab.standin.repository import build_package

HERE = Path(__file__).parent
_RECIPE = "1"  # raise it when a function below makes something else of the same inputs

PACKAGES = (
    "linux-image-amd64",  # the cloud flavour has no rdma_rxe
    "linux-headers-amd64",
    "make",
    "gcc",
    "libc6-dev",
    "initramfs-tools",
    "kmod",
    "grub-common",
    "grub-pc-bin",
    "systemd",
    "systemd-sysv",
    "udev",
    "dbus",
    "openssh-server",
    "iproute2",
    "procps",
    "psmisc",
    "ca-certificates",
    "python3",
    "python3-apt",
    "rdma-core",
    "ibverbs-providers",
    "ibverbs-utils",
    "ucx-utils",
    "perftest",
)
# A small initramfs, from the kernel's own installation on: software emulation takes minutes for one with every driver.
_ESSENTIAL_HOOKS = (
    'mkdir -p "$1"/etc/initramfs-tools/conf.d "$1"/usr/share/initramfs-tools/modules.d',
    'printf "%s\\n" MODULES=list COMPRESS=gzip >"$1"/etc/initramfs-tools/conf.d/kimi-lab',
    'printf "%s\\n" virtio_pci virtio_blk ext4 crc32c_generic >"$1"/usr/share/initramfs-tools/modules.d/kimi-lab',
)
_HOOKS = (
    'rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',
    ': > "$1/etc/machine-id"',
    'rm -f "$1/etc/hostname"',
    'chroot "$1" systemctl mask apt-daily.timer apt-daily-upgrade.timer systemd-firstboot.service',
    'chroot "$1" systemctl enable ssh.service systemd-networkd.service serial-getty@ttyS0.service',
)
# Grub reads kernel and initramfs from the machine's own disk at each boot, as a host's boot loader does.
GRUB_CONFIG = (
    "set root=(hd1)\n"
    "linux /vmlinuz root=/dev/vdb rw console=ttyS0 net.ifnames=0 panic=-1 mitigations=off\n"
    "initrd /initrd.img\n"
    "boot\n"
)
_GRUB_MODULES = ("biosdisk", "ext2", "linux", "normal")
_IDLE_UNITS = ("e2scrub_reap.service", "e2scrub_all.timer", "getty@tty1.service", "serial-getty@ttyS0.service")
_WORK = "srv/kimi-build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What machines are started from.

    Attributes:
        key: Digest of everything it was made from.
        place: Folder of all of it.
        kernel: Version of the kernel, as ``uname -r`` gives it.
    """

    key: str
    place: Path
    kernel: str

    @property
    def root_disk(self) -> Path:
        """Raw disk with the root file system; machines write to overlays of it."""
        return self.place / "root.img"

    @property
    def boot_disk(self) -> Path:
        """Raw disk with the boot loader."""
        return self.place / "boot.img"

    def packages(self) -> list[PackagePlan]:
        """Return the driver's packages for this image's kernel."""
        return _packages(self.place, self.kernel)


def _packages(place: Path, kernel: str) -> list[PackagePlan]:
    modules = {
        version: module_files(kernel, sorted((place / "modules" / version).glob("*.ko"))) for version in DRIVER_VERSIONS
    }
    return kernel_packages(plan_packages(), kernel, modules, (place / "nvidia-persistenced").read_bytes())


def mmdebstrap_argv(directory: Path, mirror: str | None) -> list[str]:
    """Return the mmdebstrap command that makes ``tree`` in a directory."""
    return [
        "mmdebstrap",
        "--variant=minbase",
        "--format=directory",
        f"--include={','.join(PACKAGES)}",
        '--aptopt=Apt::Install-Recommends "false"',
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        *(f"--essential-hook={hook}" for hook in _ESSENTIAL_HOOKS),
        *(f"--customize-hook={hook}" for hook in _HOOKS),
        SUITE,
        str(directory / "tree"),
        *([mirror] if mirror else []),
    ]


def tree_key() -> str:
    """Return the digest of what the tree is made from."""
    return digest_of(_RECIPE, *mmdebstrap_argv(Path("place"), None))


def image_key(files: Mapping[str, str], sources: Sequence[Path]) -> str:
    """Return the digest of what the image is made from: the tree, files put into it, sources compiled in it."""
    parts: list[str | bytes] = [
        _RECIPE,
        tree_key(),
        GRUB_CONFIG,
        *_GRUB_MODULES,
        DISK_SIZE,
        *DRIVER_VERSIONS,
        *_IDLE_UNITS,
    ]
    for path, content in sorted(files.items()):
        parts += [path, content]
    first = driver_set(kernel_packages(plan_packages(), "", {FIRST_DRIVER: ()}, b""), FIRST_DRIVER)
    parts += [repr(plan) for plan in first]
    for source in sources:
        parts += [source.name, source.read_bytes()]
    return digest_of(*parts)


def sources() -> list[Path]:
    """Return the sources that are compiled in the image."""
    return sorted(path for folder in ("modules", "programs") for path in (HERE / folder).iterdir())


def machine_files(authorized_key: str, host_key: tuple[str, str]) -> dict[str, str]:
    """Return the files of the lab's own in the image: access, network, what the stand-in nvidia-smi shows."""
    files = {
        "etc/ssh/ssh_host_ed25519_key": host_key[0],
        "etc/ssh/ssh_host_ed25519_key.pub": host_key[1],
        "etc/ssh/sshd_config.d/kimi-lab.conf": "HostKey /etc/ssh/ssh_host_ed25519_key\nUseDNS no\n",
        "root/.ssh/authorized_keys": authorized_key + "\n",
        "etc/fstab": "/dev/vdb / ext4 defaults 0 1\n",
        "etc/systemd/network/10-management.network": (
            f"[Match]\nName={MANAGEMENT_INTERFACE}\n\n[Network]\nDHCP=ipv4\n"
        ),
        # The driver is in the initramfs, as on hosts that want their console early.
        "etc/initramfs-tools/modules": "nvidia\n",
        # The rail gets its device by itself, as a host with a network card has its own.
        "etc/modules-load.d/kimi-lab-rdma.conf": "rdma_rxe\nib_uverbs\n",
        "etc/rdma/modules/rdma.conf": "ib_umad\nrdma_ucm\n",  # without storage over RDMA, which takes long to load
        "etc/systemd/system/kimi-lab-rail.service": _RAIL_UNIT,
        "var/lib/kimi-standin/hardware.json": _HARDWARE,
    }
    for machine in VIRTUAL_MACHINES:
        files[f"etc/systemd/network/20-rail-{machine.name}.network"] = (
            f"[Match]\nMACAddress={machine.rail_mac}\n\n[Link]\nMTUBytes=1500\n\n"
            f"[Network]\nAddress={machine.rail_address}/24\nLinkLocalAddressing=ipv6\n"
        )
    return files


_RAIL_UNIT = f"""\
[Unit]
Description=Software RDMA device on the rail (kimi-runbook lab)
After=systemd-modules-load.service systemd-networkd.service
Requires=sys-subsystem-net-devices-{RAIL_INTERFACE}.device
After=sys-subsystem-net-devices-{RAIL_INTERFACE}.device

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/rdma link add rxe0 type rxe netdev {RAIL_INTERFACE}

[Install]
WantedBy=multi-user.target
"""
_HARDWARE = """\
{"gpus": [{"name": "NVIDIA B300 (simulated)", "uuid": "GPU-6b696d69-0000-4000-8000-000000000000",
           "pci": "00000000:1B:00.0", "memory_mib": 294912}]}
"""


def ensure_image(cache: Path, files: Mapping[str, str], log: Path, step: Step) -> Image:
    """Return the image, from the cache where it was built before.

    Raises:
        RunbookError: Not root, or a program failed.
    """
    key = image_key(files, sources())
    place = cache / f"kernel-image-{key[:16]}"
    if not (place / "kernel").exists():
        if os.geteuid() != 0:
            raise RunbookError(
                where="kernel image",
                observed="this user is not root",
                expected="root, to own the files of a root file system and to build modules in it",
                next_step="Run `make kernel` as root.",
            )
        tree = _ensure_tree(cache, log, step)
        _make(place, tree, files, log, step)
        remove_others(place, "kernel-image-")
        step.outcome = "built"
    else:
        step.outcome = "unchanged"
    return Image(key=key, place=place, kernel=(place / "kernel").read_text().strip())


def _ensure_tree(cache: Path, log: Path, step: Step) -> Path:
    place = cache / f"kernel-tree-{tree_key()[:16]}"
    if not place.exists():
        partial = _empty(place)
        stream(
            mmdebstrap_argv(partial, mirror_from(os.environ)),
            Purpose(
                "kernel tree",
                "Check that this machine reaches a Debian mirror (KIMI_LAB_APT_MIRROR names another one).",
            ),
            log=log,
            on_line=lambda line: step.say(line.removeprefix("I: ")[:60]) if line.startswith("I: ") else None,
        )
        partial.replace(place)
        remove_others(place, "kernel-tree-")
    return place / "tree"


def _make(place: Path, cached: Path, files: Mapping[str, str], log: Path, step: Step) -> None:
    """Make disks, modules and programs from a copy of the tree into ``place``, whole or not at all."""
    partial = _empty(place)
    step.say("copying the tree")
    _run(log, "cp", "--archive", "--reflink=auto", str(cached), str(partial / "tree"))
    tree = partial / "tree"
    kernel = (tree / "vmlinuz").readlink().name.removeprefix("vmlinuz-")
    work = tree / _WORK
    step.say("compiling the stand-in modules")
    for version in DRIVER_VERSIONS:
        folder = work / version
        shutil.copytree(HERE / "modules", folder)
        build = f"/lib/modules/{kernel}/build"
        where = f"M=/{folder.relative_to(tree)}"
        _in(tree, log, "make", "-C", build, where, f"DRIVER_VERSION={version}", "modules")
        (partial / "modules" / version).mkdir(parents=True)
        for module in folder.glob("*.ko"):
            shutil.copy2(module, partial / "modules" / version / module.name)
    source = work / "nvidia-persistenced.c"
    shutil.copy2(HERE / "programs" / source.name, source)
    _in(tree, log, "gcc", "-O2", "-Wall", "-o", f"/{_WORK}/nvidia-persistenced", f"/{_WORK}/{source.name}")
    shutil.copy2(work / "nvidia-persistenced", partial / "nvidia-persistenced")
    step.say(f"installing driver {FIRST_DRIVER}")
    debs = [build_package(plan, work) for plan in driver_set(_packages(partial, kernel), FIRST_DRIVER)]
    _in(tree, log, "dpkg", "--install", *(f"/{_WORK}/{deb.name}" for deb in debs))
    step.say("making the boot disk")
    (work / "grub.cfg").write_text(GRUB_CONFIG)
    core = f"/{_WORK}/core.img"
    config = ["--config", f"/{_WORK}/grub.cfg", "--prefix", "/boot/grub", "--output", core]
    _in(tree, log, "grub-mkimage", "--format", "i386-pc", *config, *_GRUB_MODULES)
    # A boot sector looks for the rest in the next sector unless grub-install has told it otherwise.
    loader = (tree / "usr/lib/grub/i386-pc/boot.img").read_bytes() + (tree / core.lstrip("/")).read_bytes()
    (partial / "boot.img").write_bytes(loader + b"\0" * (-len(loader) % (1 << 20)))
    shutil.rmtree(work)
    for path, content in files.items():
        write_atomically(tree / path, content, mode=0o600 if path.endswith(("_key", "authorized_keys")) else 0o644)
    (tree / "root/.ssh").chmod(0o700)
    _in(tree, log, "systemctl", "enable", "kimi-lab-rail.service")
    _in(tree, log, "systemctl", "mask", *_IDLE_UNITS)
    _in(tree, log, "systemctl", "set-default", "multi-user.target")
    _in(tree, log, "update-initramfs", "-u", "-k", kernel)
    step.say("making the root disk")
    disk = str(partial / "root.img")
    _run(log, "mke2fs", "-q", "-t", "ext4", "-L", "kimi-root", "-d", str(tree), disk, DISK_SIZE)
    shutil.rmtree(tree)
    (partial / "kernel").write_text(kernel + "\n")
    partial.replace(place)


def _in(tree: Path, log: Path, *argv: str) -> None:
    """Run a program inside the tree."""
    _run(log, "chroot", str(tree), *argv)


def _run(log: Path, *argv: str) -> None:
    stream(argv, Purpose("kernel image", "Check the space under the lab's home."), log=log)


def _empty(place: Path) -> Path:
    """Return an empty folder beside ``place`` to be moved there when it is complete."""
    partial = place.with_name(place.name + ".partial")
    if partial.exists():  # of an interrupted run
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial
