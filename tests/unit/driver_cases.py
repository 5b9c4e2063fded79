"""Cases about the driver, one value away from a healthy HGX host: id, the change, the codes, the host's verdict."""

from __future__ import annotations

from typing import Any

from whole_host import KERNEL, NEXT, OLD, TARGET


def other_kernel(**versions: Any) -> dict[str, Any]:
    return {
        "kernel|next": NEXT,
        "kernel|headers": {KERNEL: True, NEXT: versions.get("headers", True)},
        "driver|on_disk_next": {"kernel": NEXT, "version": versions.get("module")},
    }


def pinned(pin: str, priority: int | None = 1001, *, package: str = "nvidia-* libnvidia-*") -> dict[str, Any]:
    entry = {"package": package, "pin": pin, "priority": priority}
    return {"pins": [{"path": "/etc/apt/preferences.d/site", "sha256": "0" * 64, "entries": [entry]}]}


def untrusted() -> dict[str, Any]:
    return {"driver|secure_boot": True, "driver|key_enrolled": False}


UNLOADED = {"driver|loaded": None, "driver|smi_rc": None, "gpus": []}
LATE = {"driver|loaded": OLD, "driver|smi_rc": 18}
DRIVER: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("healthy", {}, [], "ok"),
    ("mid-upgrade", LATE, ["driver.reboot"], "reboot"),
    (
        "initramfs-when-all-is-right",
        {"driver|initramfs": [{"kernel": KERNEL, "versions": [OLD]}]},
        ["driver.initramfs"],
        "install",
    ),
    (
        "initramfs-of-a-driver-to-be-loaded",
        {**LATE, "driver|initramfs": [{"kernel": KERNEL, "versions": [OLD, TARGET]}]},
        ["driver.reboot", "driver.initramfs"],
        "reboot",
    ),
    ("built-and-not-trusted", {**UNLOADED, **untrusted()}, ["driver.secure_boot", "driver.reboot"], "stop"),
    ("signed-as-it-came", {**UNLOADED, **untrusted(), "driver|dkms": []}, ["driver.reboot"], "reboot"),
    (
        "loaded-all-the-same",
        {"driver|params_wanted": {"CreateImexChannel0": "0"}, **untrusted()},
        ["driver.reboot"],
        "reboot",
    ),
    ("initramfs-of-another-kernel", {"driver|initramfs": [{"kernel": "5.15.0", "versions": [OLD]}]}, [], "ok"),
    ("proprietary-on-disk", {"driver|license": "NVIDIA"}, ["driver.install"], "install"),
    ("proprietary-loaded-open-on-disk", {"driver|flavour": "proprietary"}, ["driver.reboot"], "reboot"),
    ("nvml-of-another-version", {"driver|nvml": OLD}, ["driver.install"], "install"),
    (
        "parameter-in-a-file-only",
        {"driver|params_wanted": {"CreateImexChannel0": "0"}},
        ["driver.reboot"],
        "reboot",
    ),
    ("parameter-written-otherwise", {"driver|params_wanted": {"DeviceFileMode": "0666"}}, [], "ok"),
    ("parameter-in-quotes", {"driver|params_wanted": {"CoherentGPUMemoryMode": "driver"}}, [], "ok"),
    ("parameter-nobody-knows", {"driver|params_wanted": {"NewInAFutureBranch": "1"}}, [], "ok"),
    ("nouveau", {"driver|nouveau": {"loaded": True, "blacklisted": False}}, ["driver.nouveau"], "reboot"),
    (
        "nouveau-gone-at-the-next-boot",
        {**LATE, "driver|loaded": None, "driver|nouveau": {"loaded": True, "blacklisted": True}},
        ["driver.reboot"],
        "reboot",
    ),
    ("kernel-changes-later", other_kernel(module=TARGET), ["kernel.next_later"], "ok"),
    (
        "kernel-changes-with-the-reboot",
        {**LATE, **other_kernel(module=TARGET)},
        ["driver.reboot", "kernel.next"],
        "stop",
    ),
    ("next-kernel-has-no-module", other_kernel(), ["kernel.next_later", "driver.next_kernel_later"], "ok"),
    (
        "reboot-into-a-kernel-without-a-module",
        {**LATE, **other_kernel(headers=False)},
        ["driver.reboot", "kernel.next", "driver.next_kernel"],
        "stop",
    ),
    (
        "installation-builds-it-for-the-next-kernel",
        {"driver|on_disk": OLD, "driver|loaded": OLD, **other_kernel(module=OLD)},
        ["driver.install", "driver.reboot", "kernel.next"],
        "stop",
    ),
    (
        "headers-of-the-running-kernel",
        {"driver|on_disk": OLD, "driver|loaded": OLD, "kernel|headers": {KERNEL: False}},
        ["driver.headers_missing", "driver.install", "driver.reboot"],
        "stop",
    ),
    (
        "secure-boot-not-told",
        {"driver|on_disk": OLD, "driver|loaded": OLD, "driver|secure_boot": None},
        ["driver.secure_boot_unknown", "driver.install", "driver.reboot"],
        "install",
    ),
    (
        "dkms",
        {"driver|dkms": [{"module": "nvidia", "version": TARGET, "kernel": KERNEL, "state": "added"}]},
        ["driver.dkms"],
        "ok",
    ),
    (
        "dkms-of-another-driver",
        {"driver|dkms": [{"module": "nvidia", "version": OLD, "kernel": KERNEL, "state": "added"}]},
        [],
        "ok",
    ),
    ("run-installer-left", {"driver|run_installer": ["/usr/bin/nvidia-uninstall"]}, ["driver.runfile_left"], "ok"),
    (
        "run-installer-in-the-way",
        {"driver|on_disk": OLD, "driver|loaded": OLD, "driver|run_installer": ["/usr/bin/nvidia-uninstall"]},
        ["driver.runfile", "driver.install", "driver.reboot"],
        "stop",
    ),
    (
        "stray-package",
        {"packages|libnvidia-cfg1": {"version": f"3:{OLD}-1"}, "packages|linux-image-x": {"version": "6.8.0-60"}},
        ["driver.stray_package"],
        "ok",
    ),
    ("pin-of-another-version", pinned("version 570.133.20*"), ["driver.pin"], "ok"),
    ("pin-of-another-branch", pinned("version 590.*"), ["driver.pin"], "ok"),
    ("pin-of-the-branch", pinned("version 580.*"), [], "ok"),
    ("pin-of-the-version", pinned(f"version {TARGET}-*"), [], "ok"),
    ("pin-of-a-repository", pinned("release l=NVIDIA CUDA", 600), [], "ok"),
    ("pin-that-forbids", pinned("origin packages.example", -1), ["driver.pin"], "ok"),
    ("pin-that-forbids-another-version", pinned("version 590.*", -1), [], "ok"),
    ("pin-that-forbids-this-version", pinned("version 580.*", -1), ["driver.pin"], "ok"),
    ("pin-that-forbids-a-toolkit", pinned("version *", -1, package="nvidia-container-toolkit*"), [], "ok"),
    ("stream-that-follows-the-newest", pinned("stream open-dkms", None), ["driver.pin"], "ok"),
    ("pin-of-nvlsm", pinned("version 2025.*"), [], "ok"),
    ("stream-of-another-branch", pinned("stream 570-open", None), ["driver.pin"], "ok"),
    ("stream-of-the-branch", pinned("stream 580-open", None), [], "ok"),
    ("versionlock", {"holds": [f"nvidia-driver-cuda-3:{OLD}-1.el9.*"]}, ["driver.pin"], "ok"),
    ("versionlock-as-locked", {"holds": [f"nvidia-driver-cuda-3:{TARGET}-1.el9.*", "nvidia-imex"]}, [], "ok"),
    ("versionlock-of-others", {"holds": ["kernel-0:570.10-1.el9.*", "kernel"]}, [], "ok"),
    ("pins-unknown", {"pins": None}, ["snapshot.unknown"], "ok"),
    (
        "fabric-manager-not-held",
        {"packages|nvidia-fabricmanager": {"version": f"{TARGET}-1", "held": False}},
        ["driver.companion_unheld"],
        "ok",
    ),
    ("fabric-manager-held", {"packages|nvidia-fabricmanager": {"version": f"{TARGET}-1", "held": True}}, [], "ok"),
    ("persistence-daemon-may-go", {"packages|nvidia-persistenced": {"version": f"{TARGET}-1"}}, [], "ok"),
    ("toolkit-package-is-no-driver", {"packages|nvidia-container-toolkit": {"version": "1.19.0-1"}}, [], "ok"),
    (
        "two-families",
        {
            "packages|nvidia-driver-cuda": {"version": f"{TARGET}-1"},
            "packages|nvidia-utils-580-server": {"version": f"{TARGET}-0ubuntu1"},
        },
        ["driver.mixed_families"],
        "stop",
    ),
    ("stray-library", {"driver|libcuda": [TARGET, OLD]}, ["driver.stray_library"], "ok"),
    (
        "fabric-manager-of-another-version",
        {"packages|nvidia-fabricmanager": {"version": f"{OLD}-1", "held": True}},
        ["driver.companion"],
        "install",
    ),
    (
        "companion-with-its-branch",
        {"packages|nvidia-imex-580": {"version": f"{OLD}-1", "held": True}},
        ["driver.companion"],
        "install",
    ),
    ("nvlsm-counts-by-itself", {"packages|nvlsm": {"version": "2025.10.1-1", "held": True}}, [], "ok"),
    (
        "daemon-from-before",
        {"fabric|services|nvidia-persistenced|replaced": True},
        ["driver.companion_process"],
        "reload",
    ),
    (
        "stale-cdi",
        {"cdi": [{"path": "/var/run/cdi/nvidia.yaml", "versions": [OLD], "missing": [f"/usr/lib/libcuda.so.{OLD}"]}]},
        ["cdi.stale"],
        "install",
    ),
    ("foreign-cdi", {"cdi": [{"path": "/etc/cdi/nvidia.yaml", "versions": [OLD]}]}, ["cdi.foreign"], "ok"),
    (
        "stale-cdi-of-a-driver-to-be-loaded",
        {**LATE, "cdi": [{"path": "/var/run/cdi/nvidia.yaml", "versions": [OLD]}]},
        ["driver.reboot"],
        "reboot",
    ),
    ("toolkit", {"driver|toolkit": [{"path": "/usr/local/cuda-12.4", "version": "12.4.1"}]}, ["driver.toolkit"], "ok"),
]
