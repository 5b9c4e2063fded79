"""Kernels of a host: running, next to boot, installed; their headers; command line, lockdown, IOMMU and ACS."""

from __future__ import annotations

import os
import re

from ansible.module_utils.host_probe import assignments, release
from ansible.module_utils.redaction import kernel_command_line

_MOST_KERNELS = 24


def kernel(probe):
    """Return the kernels, what each can build against, and what the running one was told at boot."""
    running = release(probe)
    installed = installed_kernels(probe)
    lockdown = re.search(r"\[(\w+)\]", probe.text("/sys/kernel/security/lockdown") or "")
    return {
        "running": running,
        "next": next_kernel(probe),
        "installed": installed,
        # Of a kernel without a folder of modules nothing can be told: in a container it is the machine's.
        "headers": {
            name: headers(probe, name)
            for name in dict.fromkeys([*installed, running])
            if name and probe.path(f"/lib/modules/{name}").is_dir()
        },
        "lockdown": lockdown[1] if lockdown else None,
        "cmdline": kernel_command_line(probe.line("/proc/cmdline") or "") or None,
    }


def installed_kernels(probe):
    """Return the releases with an image in /boot or whole modules in /lib/modules, oldest first."""
    images = {name[8:] for name in probe.names("/boot") if re.match(r"vmlinu[xz]-\d", name)}
    whole = {
        name
        for name in probe.names("/lib/modules")
        # What remains of a removed kernel is a folder with modules that dkms built, without the kernel's own.
        if any(probe.path(f"/lib/modules/{name}/{part}").exists() for part in ("kernel", "modules.order", "vmlinuz"))
    }
    return sorted({name for name in images | whole if "rescue" not in name}, key=by_version)[-_MOST_KERNELS:]


def by_version(name):
    """Return a sort key that orders kernel releases as their numbers do."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[a-z]+", name)]


def headers(probe, name):
    """Return whether a module can be built for a kernel: its ``build`` leads to a folder that is there."""
    return resolved(probe, f"/lib/modules/{name}/build").exists()


def resolved(probe, absolute):
    """Return where a path leads below the root, a link with an absolute target followed inside it."""
    path = probe.path(absolute)
    for _ in range(8):
        if not path.is_symlink():
            break
        target = os.readlink(path)  # noqa: PTH115 - the text of the link, not a path yet
        path = probe.path(target) if target.startswith("/") and not _below(probe, target) else path.parent / target
    return path


def _below(probe, target):
    return probe.tree and target.startswith(f"{probe.root}/")


def next_kernel(probe):
    """Return the release the boot loader would start; None when its configuration does not say.

    Read are GRUB's environment and menu, boot loader entries (RHEL, systemd-boot), and where there is neither, the
    newest image in /boot.
    """
    return probe.once("next kernel", lambda: _next(probe))


def _next(probe):
    environment = {}
    for place in ("/boot/grub2/grubenv", "/boot/grub/grubenv", "/boot/efi/EFI/redhat/grubenv"):
        environment.update(assignments(probe.text(place)))
    entries = {path.name[:-5]: path for path in probe.glob("/boot/loader/entries/*.conf")}
    return _by_entries(probe, entries, environment) if entries else _by_menu(probe, environment)


def _by_entries(probe, entries, environment):
    """Return the kernel of the chosen boot loader entry; without a choice, or with number 0, of the newest."""
    chosen = environment.get("next_entry") or environment.get("saved_entry")
    if chosen in entries:
        return _entry_kernel(probe, entries[chosen])
    if chosen not in (None, "", "0"):
        return None
    found = [name for name in (_entry_kernel(probe, path) for path in entries.values()) if name]
    return max((name for name in found if "rescue" not in name), key=by_version, default=None)


def _by_menu(probe, environment):
    """Return the kernel of GRUB's default: the one it names, or the first of the menu."""
    wanted = assignments(probe.text("/etc/default/grub")).get("GRUB_DEFAULT", "0")
    if wanted == "saved":
        wanted = environment.get("saved_entry") or "0"
    wanted = environment.get("next_entry") or wanted
    named = re.search(r"gnulinux-(\d\S*?)-(?:advanced|recovery)|with Linux (\d\S+)", wanted)
    if named or wanted != "0":
        return (named[1] or named[2]) if named else None
    menu = probe.text("/boot/grub/grub.cfg", limit=256 << 10) or probe.text("/boot/grub2/grub.cfg", limit=256 << 10)
    first = re.search(r"^\s*linux(?:efi|16)?\s+\S*?vmlinu[xz]-(\S+)", menu or "", re.MULTILINE)
    images = [name for name in installed_kernels(probe) if probe.path(f"/boot/vmlinuz-{name}").exists()]
    return first[1] if first else images[-1] if images else None


def _entry_kernel(probe, path):
    text = probe.text(probe.shown(path)) or ""
    found = re.search(r"^linux\s+\S*?(?:vmlinu[xz]|linux)-?(\d\S*)", text, re.MULTILINE) or re.search(
        r"^version\s+(\S+)", text, re.MULTILINE
    )
    return found[1] if found else None


def iommu(probe):
    """Return whether an IOMMU is on, whether devices pass through it, and whether a PCIe bridge redirects peers."""
    told = (probe.line("/proc/cmdline") or "").split()
    groups = probe.names("/sys/kernel/iommu_groups") if probe.path("/sys/kernel/iommu_groups").is_dir() else None
    enabled = None if groups is None else bool(groups or probe.names("/sys/class/iommu"))
    passing = None
    if enabled:
        types = {probe.line(f"/sys/kernel/iommu_groups/{name}/type") for name in groups[:200]} - {None}
        passing = types == {"identity"} if types else bool({"iommu=pt", "iommu.passthrough=1"} & set(told))
    return {"enabled": enabled, "passthrough": passing, "acs": access_control(probe)}


_BRIDGE = "0x0604"
_ACS = 0x000D  # PCI Express extended capability Access Control Services; its control register lies 6 bytes in
_REDIRECTS = 0b1101  # source validation, peer request redirect, peer completion redirect: what keeps peers apart


def access_control(probe):
    """Return whether any PCIe bridge has access control switched on; None where no bridge could be read.

    Only root may read past the first 64 bytes of a device's configuration.
    """
    answers = [
        _acs_of(probe.path(f"/sys/bus/pci/devices/{address}/config"))
        for address in probe.names("/sys/bus/pci/devices")
        if (probe.line(f"/sys/bus/pci/devices/{address}/class") or "").startswith(_BRIDGE)
    ]
    told = [answer for answer in answers if answer is not None]
    return any(told) if told else None


def _acs_of(path):
    """Return whether a bridge's ACS control is on; None when its extended configuration cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        at, seen = 0x100, 0
        while at >= 0x100 and seen < 48:
            head = os.pread(descriptor, 8, at)
            if len(head) < 8:
                return None if at == 0x100 else False
            word = int.from_bytes(head[:4], "little")
            if word & 0xFFFF == _ACS:
                return bool(int.from_bytes(head[6:8], "little") & _REDIRECTS)
            at, seen = word >> 20 & 0xFFC, seen + 1
        return False
    except OSError:
        return None
    finally:
        os.close(descriptor)
