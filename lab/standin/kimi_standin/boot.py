"""What happens at boot: fresh /proc/driver and /sys/module, then the modules the hardware asks for, from disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .loading import LoadError, NotFoundError, blacklisted, load, modules_load_names
from .modtools import error, told_what_it_is
from .state import Host, root_from_environment

MOUNT_POINTS = ("/proc/driver", "/sys/module")
MARKER = "/sys/module/.kimi-standin-booted"


def mounted(point: str) -> bool:
    """Say whether a stand-in tmpfs lies on a mount point."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == point and " - tmpfs kimi-standin " in line for line in lines)


def prepare(host: Host) -> None:
    """Make empty places for the loaded state: tmpfs mounts on a host, plain folders under a root of one's own."""
    for point in MOUNT_POINTS:
        if host.root != Path("/"):
            host.path(point).mkdir(parents=True, exist_ok=True)
        elif not mounted(point):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755,size=4m", "kimi-standin", point], check=True)


def load_all(host: Host, names: list[str], report_missing: bool) -> int:
    """Load modules one by one; return 1 when one could not be loaded although it should have been."""
    status = 0
    for name in names:
        try:
            load(host, name)
        except NotFoundError:
            if report_missing:
                error(f"Failed to find module '{name}'")
                status = 1
        except LoadError as refusal:
            error(f"Failed to insert module '{name}': {refusal}")
            status = 1
    return status


def boot(arguments: list[str]) -> int:
    """Bring the loaded state up once per boot; a second call leaves what is loaded as it is.

    ``modules-load`` instead loads what modules-load.d names (it stands in for systemd-modules-load). ``reboot`` empties
    the loaded state first and is refused on a real root, where rebooting the host does it.
    """
    if told_what_it_is("kimi-standin-boot", arguments):
        return 0
    host = Host(root_from_environment())
    wish = arguments[0] if arguments else "boot"
    if wish == "modules-load":
        prepare(host)
        with host.lock():
            return load_all(host, modules_load_names(host), report_missing=True)
    if wish == "reboot":
        if host.root == Path("/"):
            error("kimi-standin-boot: reboot works only under KIMI_STANDIN_ROOT; here, reboot the host")
            return 2
        for folder in map(host.path, (*MOUNT_POINTS, "/dev", "/run", "/var/run/cdi")):
            if folder.exists():
                shutil.rmtree(folder)
    prepare(host)
    with host.lock():
        if host.path(MARKER).exists():
            return 0
        hidden = blacklisted(host)
        if not host.hardware():
            return 0  # not set up yet; the next boot, or a restart of the unit, does it
        status = load_all(host, [n for n in host.names("autoload") if n not in hidden], report_missing=False)
        host.path(MARKER).write_text("")
    if wish == "reboot":
        with host.lock():
            status = max(status, load_all(host, modules_load_names(host), report_missing=True))
    if status:
        print("kimi-standin-boot: not every module was loaded", file=sys.stderr)
    return status
