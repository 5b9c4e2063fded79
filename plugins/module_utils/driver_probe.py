"""What a host says of its NVIDIA driver. Runs on the node, as host_probe does, and asks through its Probe."""

from __future__ import annotations

import json
import re

from ansible.module_utils.gpu_probe import gpus, smi
from ansible.module_utils.host_probe import release
from ansible.module_utils.initramfs_probe import initramfs
from ansible.module_utils.kernel_log_probe import driver_loaded_s
from ansible.module_utils.kernel_probe import headers, next_kernel
from ansible.module_utils.network_probe import open_devices

__all__ = ["driver", "gpus", "open_devices"]

_NVRM_VERSION = re.compile(r"Kernel Module(?P<open> for \S+)?\s+(?P<version>\d+(?:\.\d+)+)")
_MODPROBE = (
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/usr/lib/modprobe.d",
    "/lib/modprobe.d",
)
_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
# Where dkms leaves the public key it signs with: its own default, and Ubuntu's.
_SIGNING_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")
_DKMS_ROW = re.compile(
    r"^(?P<module>[\w.-]+)[/,]\s*(?P<version>[^,:\s]+)(?:,\s*(?P<kernel>[^,:\s]+),\s*[^:]+)?:\s*(?P<state>\w+)"
)


def _module_on_disk(probe, kernel=None):
    """Return version, license and description of the module for a kernel (the running one); empty without one."""
    question = ("modinfo", "-k", kernel, "nvidia") if kernel else ("modinfo", "nvidia")
    answer = probe.command(*question)
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
    return probe.line("/sys/module/nvidia/version"), None


def _library_versions(probe, soname):
    """Return the versions of a library's files in the system's folders, the one its soname leads to first."""
    found = []
    for folder in _LIBRARIES:
        names = [name for name in probe.names(folder) if name.startswith(f"{soname}.so.")]
        link = probe.path(f"{folder}/{soname}.so.1")
        first = [link.resolve().name] if link.is_symlink() else []
        found += [name.partition(".so.")[2] for name in [*first, *names]]
    return list(dict.fromkeys(version for version in found if re.fullmatch(r"\d+(\.\d+)+", version)))


def _headers_present(probe):
    """Whether a module can be built for the running kernel; None on a host that has no kernel of its own."""
    running = release(probe)
    if not running or not probe.path(f"/lib/modules/{running}").is_dir():
        return None  # a container, or a kernel that no package of this host brought
    return headers(probe, running)


def _secure_boot(probe):
    """Whether Secure Boot is on; None when mokutil, the only one asked, cannot tell."""
    answer = probe.command("mokutil", "--sb-state")
    said = "" if answer is None else answer[1] + answer[2]
    if "SecureBoot enabled" in said:
        return True
    if "SecureBoot disabled" in said or not probe.path("/sys/firmware/efi").is_dir():
        return False
    return None


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


def _run_installers(probe):
    """Return the uninstallers that no package owns: the trace of an installation by .run file."""
    found = [*probe.glob("/usr/bin/nvidia-uninstall"), *probe.glob("/usr/lib/nvidia/*uninstall")]
    strangers = []
    for name in map(probe.shown, found):
        for question in (("dpkg-query", "--search", name), ("rpm", "--query", "--file", name)):
            answer = probe.command(*question)
            if answer is not None:
                if answer[0] == 1:
                    strangers.append(name)
                break
    return strangers


def _dkms(probe):
    """Return the rows of ``dkms status``; empty where dkms is not installed, None when it fails."""
    answer = probe.command("dkms", "status")
    if answer is None:
        # Not installed is an answer; no answer in time is none, and has been kept as an error.
        return None if any(error["probe"] == "dkms" for error in probe.errors) else []
    if answer[0] != 0:
        probe.refused(answer, "dkms", "status")
        return None
    rows = [_DKMS_ROW.match(line.strip()) for line in answer[1].splitlines()]
    if answer[1].strip() and not any(rows):
        probe.error("dkms status", "printed no row of a module")
        return None
    return [row.groupdict() for row in rows if row][:100]


def modprobe_lines(probe):
    """Return the lines of modprobe's configuration, files of one name taken from the first folder that has one."""

    def read():
        files = {}
        for folder in _MODPROBE:
            for name in probe.names(folder):
                if name.endswith(".conf"):
                    files.setdefault(name, f"{folder}/{name}")
        texts = (probe.text(files[name]) or "" for name in sorted(files))
        joined = (line for text in texts for line in text.replace("\\\n", " ").splitlines())
        return [line.split() for line in joined if line.strip() and not line.lstrip().startswith("#")]

    return probe.once("modprobe.d", read)


def _nouveau(probe):
    told = (probe.line("/proc/cmdline") or "").split()
    lists = [word.partition("=")[2] for word in told if re.match(r"(modprobe\.|rd\.driver\.|module_)blacklist=", word)]
    return {
        "loaded": probe.path("/sys/module/nouveau").is_dir(),
        "blacklisted": ["blacklist", "nouveau"] in [line[:2] for line in modprobe_lines(probe)]
        or any(line[:2] == ["install", "nouveau"] and "false" in line[2] for line in modprobe_lines(probe) if line[2:])
        or any("nouveau" in names.split(",") for names in lists)
        or "nouveau.modeset=0" in told,
    }


def _params(probe):
    """Return the parameters of the loaded module, and those modprobe.d asks for, without ``NVreg_`` and quotes."""
    text = probe.text("/proc/driver/nvidia/params")
    loaded = None
    if text is not None:
        pairs = (line.partition(":") for line in text.splitlines())
        loaded = {name.strip(): value.strip().strip('"') for name, separator, value in pairs if separator}
    wanted = {}
    for line in modprobe_lines(probe):
        if line[0] == "options" and len(line) > 2 and line[1] in ("nvidia", "nvidia-current"):
            for name, separator, value in (word.partition("=") for word in line[2:]):
                if separator:
                    wanted[name[6:] if name.startswith("NVreg_") else name] = value.strip('"')
    return loaded, wanted


def _cuda_toolkits(probe):
    """Return the CUDA Toolkits below /usr/local and /opt, links left out; they say nothing of the driver."""
    rows = []
    for path in [*probe.glob("/usr/local/cuda-*"), *probe.glob("/usr/local/cuda"), *probe.glob("/opt/cuda*")]:
        if path.is_symlink() or not path.is_dir():
            continue
        place = probe.shown(path)
        text, version = probe.text(f"{place}/version.json"), None
        if text is not None:
            try:
                version = str(json.loads(text)["cuda"]["version"])
            except (ValueError, KeyError, TypeError):
                probe.error(f"{place}/version.json", "does not hold a version")
        if version is None:
            told = re.search(r"\d+(\.\d+)+", probe.text(f"{place}/version.txt") or path.name)
            version = told[0] if told else None
        # Runtime libraries alone come with the toolkit's folder too; only the compiler makes it a toolkit.
        if text is not None or probe.path(f"{place}/bin/nvcc").exists():
            rows.append({"path": place, "version": version})
    return rows


def _nvml(message, library):
    told = re.search(r"NVML library version:\s*(\d+(?:\.\d+)+)", message)
    return told[1] if told else library


def driver(probe, look_into_initramfs=True):
    """Return the driver as packaged on disk, as loaded, and as the userspace library.

    With it goes what can keep a change from working: Secure Boot, missing headers, a .run file. nvidia-smi is asked
    only where the module is loaded: otherwise it has nothing to tell, and asking would load the module.
    """
    on_disk = _module_on_disk(probe)
    loaded, flavour = _loaded_version(probe)
    asked = smi(probe) if loaded else {"rc": None, "message": ""}
    secure_boot = _secure_boot(probe)
    if flavour is None and on_disk.get("license"):
        flavour = "open" if "GPL" in on_disk["license"] else "proprietary"
    libraries = _library_versions(probe, "libnvidia-ml")
    holders = open_devices(probe)[0] if loaded else []
    following, running = next_kernel(probe), release(probe)
    strangers = _run_installers(probe)
    params, wanted = _params(probe)
    return {
        "on_disk": on_disk.get("version"),
        "loaded": loaded,
        "flavour": flavour,
        "userspace": libraries[0] if libraries else None,
        "smi_rc": asked["rc"],
        "smi_message": asked["message"],
        "standin": "stand-in" in on_disk.get("description", "").lower(),
        "holders": list({row["pid"]: {"pid": row["pid"], "name": row["name"]} for row in holders}.values()),
        "secure_boot": secure_boot,
        "key_enrolled": _key_enrolled(probe) if secure_boot else None,
        "key_file": any(probe.path(key).exists() for key in _SIGNING_KEYS),
        "headers_present": _headers_present(probe),
        "runfile": bool(strangers),
        "on_disk_next": _next_on_disk(probe, on_disk, running, following),
        "initramfs": initramfs(probe, [running, following]) if look_into_initramfs else None,
        "license": on_disk.get("license"),
        "nvml": _nvml(asked["message"], libraries[0] if libraries else None),
        "libcuda": _library_versions(probe, "libcuda"),
        "dkms": _dkms(probe),
        "nouveau": _nouveau(probe),
        "run_installer": strangers,
        "params": params,
        "params_wanted": wanted,
        "toolkit": _cuda_toolkits(probe),
        "init_complete_s": driver_loaded_s(probe) if loaded else None,
    }


def _next_on_disk(probe, on_disk, running, following):
    if following is None:
        return None
    module = on_disk if following == running else _module_on_disk(probe, following)
    return {"kernel": following, "version": module.get("version")}
