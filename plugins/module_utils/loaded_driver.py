"""The version of the NVIDIA driver that is loaded, for modules that need nothing else of it."""

from __future__ import annotations

import re

_NVRM = re.compile(r"Kernel Module(?: for \S+)?\s+(?P<version>\d+\.\d+(?:\.\d+)?)")


def loaded_driver(probe):
    """Return the version of the loaded driver, None where none is loaded."""
    match = _NVRM.search(probe.text("/proc/driver/nvidia/version") or "")
    return match["version"] if match else probe.line("/sys/module/nvidia/version")
