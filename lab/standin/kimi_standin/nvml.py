"""What NVML would say: whether the libraries and the loaded module fit, and each GPU's figures."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .state import Gpu, Host

NOT_LOADED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)
NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver "
    "is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH."
)


class NvmlError(Exception):
    """NVML cannot be used; ``code`` is the exit code nvidia-smi gives."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Session:
    """An initialised NVML: the driver version both sides agree on, the CUDA version, and the GPUs."""

    version: str
    cuda: str
    gpus: list[Gpu]
    persistence: bool


def nvml_version(version: str) -> str:
    """Return a driver version as NVML gives its own: the first two numbers."""
    return ".".join(version.split(".")[:2])


def open_session(host: Host) -> Session:
    """Initialise NVML.

    Raises:
        NvmlError: 12 without a library, 9 without a loaded module, 18 when library and loaded module differ,
            6 without a GPU. Codes and texts as nvidia-smi has them.
    """
    library = host.library_version("libnvidia-ml.so.1")
    if library is None:
        raise NvmlError(12, NO_LIBRARY)
    loaded = host.loaded_version("nvidia")
    if loaded is None:
        raise NvmlError(9, NOT_LOADED)
    if loaded != library:
        text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: "
        raise NvmlError(18, text + nvml_version(library))
    gpus = host.gpus()
    if not gpus:
        raise NvmlError(6, "No devices were found")
    persistence = any(holder.name.startswith("nvidia-persiste") for holder in host.gpu_holders())
    return Session(loaded, cuda_version(host), gpus, persistence)


def cuda_version(host: Host) -> str:
    """Return the CUDA version of the installed libcuda, "N/A" without one."""
    path = host.path("/usr/lib/kimi-standin/libcuda.json")
    return str(json.loads(path.read_text())["cuda"]) if path.is_file() else "N/A"


# Every GPU is idle: no program computes on it. Units follow the field, as nvidia-smi prints them.
IDLE = {
    "serial": "[N/A]",
    "vbios_version": "[N/A]",
    "pstate": "P0",
    "temperature.gpu": "30",
    "fan.speed": "[N/A]",
    "utilization.gpu": "0 %",
    "utilization.memory": "0 %",
    "memory.used": "0 MiB",
    "memory.reserved": "0 MiB",
    "power.draw": "140.00 W",
    "power.limit": "1100.00 W",
    "clocks.sm": "120 MHz",
    "clocks.current.sm": "120 MHz",
    "clocks.current.memory": "3996 MHz",
    "clocks_throttle_reasons.active": "0x0000000000000001",
    "compute_mode": "Default",
    "compute_cap": "10.3",
    "display_active": "Disabled",
    "display_mode": "Disabled",
    "accounting.mode": "Disabled",
    "mig.mode.current": "Disabled",
    "mig.mode.pending": "Disabled",
    "ecc.mode.current": "Enabled",
    "ecc.mode.pending": "Enabled",
    "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.corrected.aggregate.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0",
    "retired_pages.pending": "[N/A]",
    "remapped_rows.correctable": "0",
    "remapped_rows.uncorrectable": "0",
    "remapped_rows.pending": "0",
    "remapped_rows.failure": "0",
    "pcie.link.gen.current": "6",
    "pcie.link.gen.max": "6",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "fabric.state": "[N/A]",
    "fabric.status": "[N/A]",
}
ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
    "clocks.gr": "clocks.sm",
    "clocks.mem": "clocks.current.memory",
}


def field(session: Session, gpu: Gpu, name: str) -> str | None:
    """Return one query field of one GPU with its unit, or None for a field this stand-in does not know."""
    name = ALIASES.get(name, name)
    own = {
        "driver_version": session.version,
        "count": str(len(session.gpus)),
        "index": str(gpu.index),
        "minor_number": str(gpu.index),
        "name": gpu.name,
        "uuid": gpu.uuid,
        "pci.bus_id": gpu.pci,
        "pci.domain": "0x" + gpu.pci.split(":")[0][-4:],
        "pci.bus": "0x" + gpu.pci.split(":")[1],
        "persistence_mode": "Enabled" if session.persistence else "Disabled",
        "memory.total": f"{gpu.memory_mib} MiB",
        "memory.free": f"{gpu.memory_mib} MiB",
    }
    return own.get(name, IDLE.get(name))
