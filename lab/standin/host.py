"""What a lab host starts with: its simulated hardware and the packages baked into it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

HARDWARE_PATH = "/var/lib/kimi-standin/hardware.json"
BOOT_UNIT = "kimi-standin-boot.service"
INITIAL_DRIVER = "570.133.20"

# The state an upgrade starts from: 570 installed without a pin, no toolkit, no fabric packages.
DRIVER_PACKAGES = (
    "nvidia-driver-cuda",
    "nvidia-kernel-open-dkms",
    "libcuda1",
    "libnvidia-cfg1",
    "libnvidia-ml1",
    "nvidia-persistenced",
    "nvidia-modprobe",
)
GPU_NAME = "NVIDIA B300 (simulated)"
GPU_MEMORY_MIB = 275040  # about what a B300 of 288 GB reports
GPU_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)


def preinstalled(version: str = INITIAL_DRIVER) -> list[str]:
    """Return what apt-get install is given for a new host: exact versions, tools first."""
    return ["kimi-standin-tools", *(f"{name}={version}-1" for name in DRIVER_PACKAGES)]


def preinstalled_debs(cuda_repository: Path, version: str = INITIAL_DRIVER) -> list[Path]:
    """Return the same packages as files of the built ``cuda`` repository, for dpkg --install while making an image."""
    pool = cuda_repository / "pool"
    tools = sorted(pool.glob("kimi-standin-tools_*.deb"))
    return [*tools, *(pool / f"{name}_{version}-1_amd64.deb" for name in DRIVER_PACKAGES)]


def hardware(hostname: str, gpus: int = 4, *, mlx5_devices: int = 0, nvswitch: bool = False) -> dict[str, object]:
    """Return hardware.json of a host, the same for the same name.

    Args:
        hostname: Name the GPUs' UUIDs are derived from.
        gpus: Number of simulated GPUs, at most 8.
        mlx5_devices: Number of simulated ConnectX devices; above zero mlx5_core and mlx5_ib are loaded at boot.
        nvswitch: Whether a fabric manager finds NVSwitches.

    Keys that faults edit: ``dkms_failed_for`` (kernel releases the NVIDIA modules were not built for), ``secure_boot``,
    ``autoload`` (modules loaded at boot) and the list of GPUs.
    """
    autoload = ["nvidia", "nvidia_uvm", "nvidia_modeset"] if gpus else []
    autoload += ["mlx5_core", "mlx5_ib"] if mlx5_devices else []
    return {
        "standin": True,
        "gpus": [
            {
                "name": GPU_NAME,
                "uuid": uuid_of(hostname, index),
                "pci": f"00000000:{GPU_BUSES[index]:02X}:00.0",
                "memory_mib": GPU_MEMORY_MIB,
            }
            for index in range(gpus)
        ],
        "mlx5_devices": mlx5_devices,
        "nvswitch": nvswitch,
        "autoload": autoload,
        "secure_boot": False,
        "dkms_failed_for": [],
    }


def hardware_json(hostname: str, gpus: int = 4, *, mlx5_devices: int = 0, nvswitch: bool = False) -> str:
    """Return the text of hardware.json for :func:`hardware`."""
    return json.dumps(hardware(hostname, gpus, mlx5_devices=mlx5_devices, nvswitch=nvswitch), indent=2) + "\n"


def uuid_of(hostname: str, index: int) -> str:
    """Return a GPU's UUID in NVIDIA's form, derived from host and index."""
    digest = hashlib.sha256(f"{hostname}/{index}".encode()).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
