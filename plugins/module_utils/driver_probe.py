"""What a host says of its NVIDIA driver and GPUs. Runs on the node, as host_probe does, and asks through its Probe."""

from __future__ import annotations

import csv
import os
import re

_NVRM_VERSION = re.compile(r"Kernel Module(?P<open> for \S+)?\s+(?P<version>\d+(?:\.\d+)+)")


def _module_on_disk(probe):
    answer = probe.command("modinfo", "nvidia")
    if answer is None or answer[0] != 0:
        return {}
    return {
        name.strip(): value.strip()
        for name, separator, value in (line.partition(":") for line in answer[1].splitlines())
        if separator and name.strip() in ("version", "license", "description")
    }


def _loaded_version(probe):
    match = _NVRM_VERSION.search(probe.text("/proc/driver/nvidia/version") or "")
    if match:
        return match["version"], "open" if match["open"] else "proprietary"
    return (probe.text("/sys/module/nvidia/version") or "").strip() or None, None


def _userspace_version(probe):
    for pattern in ("/usr/lib/*/libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1", "/usr/lib/libnvidia-ml.so.1"):
        for link in probe.glob(pattern):
            version = link.resolve().name.partition(".so.")[2]
            if "." in version:
                return version
    return None


def _device_holders(probe):
    holders = {}
    for entry in probe.glob("/proc/[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            pid = int(entry.parent.parent.name)
            holders[pid] = {"pid": pid, "name": (probe.text(f"/proc/{pid}/comm") or "?").strip()}
    return [holders[pid] for pid in sorted(holders)]


def _headers_present(probe):
    """Whether a module can be built for the running kernel; None on a host that has no kernel of its own."""
    modules = f"/lib/modules/{os.uname().release}"
    if not probe.path(modules).is_dir():
        return None  # a container, or a kernel that no package of this host brought
    return probe.path(f"{modules}/build").exists()  # follows the link, which outlives removed headers


def _secure_boot(probe):
    """Whether Secure Boot is on; None when mokutil, the only one asked, cannot tell."""
    answer = probe.command("mokutil", "--sb-state")
    said = "" if answer is None else answer[1] + answer[2]
    if "SecureBoot enabled" in said:
        return True
    if "SecureBoot disabled" in said or not probe.path("/sys/firmware/efi").is_dir():
        return False
    return None


# Where dkms leaves the public key it signs with: its own default, and Ubuntu's.
_SIGNING_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")


def _key_enrolled(probe):
    """Whether a key of local modules is enrolled; None when there is none or mokutil does not tell.

    mokutil exits 1 for an enrolled key and 0 for one that is not, so its words count. A key that waits for the
    confirmation at the console is called "already in the enrollment request".
    """
    enrolled = None
    for key in _SIGNING_KEYS:
        answer = probe.command("mokutil", "--test-key", key) if probe.path(key).exists() else None
        said = "" if answer is None else answer[1] + answer[2]
        if "is already enrolled" in said:
            return True
        if "is not enrolled" in said or "in the enrollment request" in said:
            enrolled = False
    return enrolled


def _runfile(probe):
    """Whether an uninstaller lies there that no package owns: the trace of an installation by .run file."""
    found = [*probe.glob("/usr/bin/nvidia-uninstall"), *probe.glob("/usr/lib/nvidia/*uninstall")]
    for path in found:
        name = f"/{path.relative_to(probe.root)}"
        for question in (("dpkg-query", "--search", name), ("rpm", "--query", "--file", name)):
            answer = probe.command(*question)
            if answer is not None:
                if answer[0] == 1:
                    return True
                break
    return False


def driver(probe):
    """Return the driver as packaged on disk, as loaded, and as the userspace library.

    With it goes what can keep a change from working: Secure Boot, missing headers, a .run file. Not looked at, since
    neither can be read cheaply: the module's version inside the initramfs, and parameters that differ from the loaded.
    """
    on_disk = _module_on_disk(probe)
    loaded, flavour = _loaded_version(probe)
    smi = probe.command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    secure_boot = _secure_boot(probe)
    if flavour is None and on_disk.get("license"):
        flavour = "open" if "GPL" in on_disk["license"] else "proprietary"
    return {
        "on_disk": on_disk.get("version"),
        "loaded": loaded,
        "flavour": flavour,
        "userspace": _userspace_version(probe),
        "smi_rc": None if smi is None else smi[0],
        "smi_message": "" if smi is None or smi[0] == 0 else (smi[1] + smi[2]).strip().replace("\n", " "),
        "standin": "stand-in" in on_disk.get("description", "").lower(),
        "holders": _device_holders(probe) if loaded else [],
        "secure_boot": secure_boot,
        "key_enrolled": _key_enrolled(probe) if secure_boot else None,
        "headers_present": _headers_present(probe),
        "runfile": _runfile(probe),
    }


_GPU_FIELDS = "index,name,uuid,memory.total,memory.used"


def gpus(probe):
    """Return one row per GPU; memory in MiB. Empty when nvidia-smi cannot answer."""
    answer = probe.command("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    if answer is None or answer[0] != 0:
        return []

    def number(text):
        return int(text) if text.strip().isdigit() else None

    return [
        {
            "index": number(row[0]),
            "name": row[1].strip(),
            "uuid": row[2].strip(),
            "memory_total_mib": number(row[3]),
            "memory_used_mib": number(row[4]),
        }
        for row in csv.reader(answer[1].splitlines())
        if len(row) == 5
    ]
