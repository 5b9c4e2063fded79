"""What the package preflights of apt and dnf have in common: branches, pins, headers. Runs on the node."""

from __future__ import annotations

import re

from ansible.module_utils.host_probe import Probe, release
from ansible.module_utils.kernel_probe import headers, next_kernel

# The driver's own packages. The toolkit, prime and the subnet manager have numbers of their own; so do Canonical's
# modules per kernel, whose version is the kernel's.
_DRIVER = re.compile(
    r"^(?:(?:lib)?nvidia-(?!container|prime|settings|xconfig|driver-pinning|cuda-toolkit|texture)|libcuda\d|cuda-drivers|kmod-nvidia)"
)
_LEAST_BRANCH = 300  # lower first numbers are no driver's


def upstream(version):
    """Return a version without epoch and revision."""
    return version.rpartition(":")[2].partition("-")[0]


def of_another_branch(resolved, branch):
    """Return the driver packages that would come from another branch, as sentences."""
    wrong = []
    for name, version in sorted(resolved.items()):
        first = upstream(version).partition(".")[0]
        if _DRIVER.match(name) and first.isdigit() and int(first) >= _LEAST_BRANCH and first != str(branch):
            wrong.append(f"{name} resolves to {version}, expected branch {branch}")
    return wrong


def drifted(pins, resolved, installed):
    """Return the pins that come out at another version, as sentences; installed ones count where nothing changes."""
    wrong = []
    for pin in pins:
        name, _, version = pin.partition("=")
        found = resolved.get(name, installed.get(name))
        if found != version:
            wrong.append(f"{name} resolves to {found or 'nothing'}, expected {version}")
    return wrong


def without_headers(root="/"):
    """Return the kernels, of the running and the next one, that dkms could not build for.

    A kernel without a folder of modules is left out: in a container it is the machine's.
    """
    probe = Probe(root)
    kernels = dict.fromkeys(name for name in (release(probe), next_kernel(probe)) if name)
    return [name for name in kernels if probe.path(f"/lib/modules/{name}").is_dir() and not headers(probe, name)]


def announcement(resolved, installed):
    """Return what a transaction changes as a difference of versions."""
    names = sorted(name for name in resolved if resolved[name] != installed.get(name))
    return {
        "before": "".join(f"{name} {installed[name]}\n" for name in names if name in installed),
        "after": "".join(f"{name} {resolved[name]}\n" for name in names),
    }
