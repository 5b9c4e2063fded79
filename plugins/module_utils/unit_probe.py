"""systemd units, asked once for all: state, start of the process, environment; and what updates packages by itself."""

from __future__ import annotations

import ctypes
import datetime
import shlex

from ansible.module_utils.host_probe import assignments, whole
from ansible.module_utils.redaction import environment

_PROPERTIES = (
    "Id,Names,LoadState,ActiveState,UnitFileState,MainPID,ExecMainStartTimestampMonotonic,"
    "Environment,EnvironmentFiles,LimitMEMLOCK"
)

# What changes packages without being asked. Sources: Debian and Ubuntu unattended-upgrades and apt, Fedora and RHEL
# dnf-automatic and DNF 5's plugin of that name, PackageKit: unit names as their packages ship them.
UPDATERS = (
    "unattended-upgrades.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dnf-automatic.timer",
    "dnf-automatic-install.timer",
    "dnf5-automatic.timer",
    "packagekit.service",
)
CLOCKS = (
    "chrony.service",
    "chronyd.service",
    "systemd-timesyncd.service",
    "ntpsec.service",
    "ntp.service",
    "ntpd.service",
)


def ask(probe, names):
    """Ask systemd about all these units in one call; the other functions here answer from it."""
    return probe.once("units", lambda: _show(probe, list(dict.fromkeys(names))))


def _show(probe, names):
    """Return ``{unit: {property: value}}``; a property given more than once has its values joined by newlines."""
    if not names:
        return {}
    answer = probe.command("systemctl", "show", "--property", _PROPERTIES, *names, needed=True)
    if answer is None:
        return {}
    blocks = [_properties(block) for block in answer[1].strip().split("\n\n") if block.strip()]
    if not any("LoadState" in block for block in blocks):
        said = (answer[2] or answer[1]).strip() or "nothing"
        probe.error("systemctl show", f"exit {answer[0]}: {said[:200]}")
        return {}
    named = {name: block for block in blocks for name in [block.get("Id"), *block.get("Names", "").split()] if name}
    if named:
        missing = [name for name in names if name not in named]  # one that is not there is shown as not-found
        if missing:
            probe.error("systemctl show", f"said nothing of {', '.join(missing[:5])}")
        return {name: named[name] for name in names if name in named}
    return dict(zip(names, blocks))  # an answer without names follows the order of the question


def _properties(block):
    found = {}
    for line in block.splitlines():
        name, separator, value = line.partition("=")
        if separator:
            found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


def units(probe, wanted):
    """Return ``{unit: {"load", "active", "enabled"}}``."""
    shown = ask(probe, wanted)
    found = {}
    for name in wanted:
        block = shown.get(name)
        found[name] = (
            {"load": "unknown", "active": "unknown", "enabled": "unknown"}
            if block is None
            else {
                "load": block.get("LoadState", "unknown"),
                "active": block.get("ActiveState", "unknown"),
                "enabled": block.get("UnitFileState") or "not-found",
            }
        )
    return found


def main_pid(probe, unit):
    """Return the process id of a running unit, or None."""
    return whole(ask(probe, ()).get(unit, {}).get("MainPID")) or None


def started_at(probe, unit):
    """Return when the running process of a unit was started, ISO 8601 in UTC; None when none runs."""
    block = ask(probe, ()).get(unit, {})
    since_boot = whole(block.get("ExecMainStartTimestampMonotonic"))
    return moment(probe, since_boot / 1e6) if since_boot and main_pid(probe, unit) else None


def process_started_at(probe, pid):
    """Return when a process was started, ISO 8601 in UTC, or None."""
    fields = (probe.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    ticks = whole(fields[19]) if len(fields) > 19 else None
    return None if ticks is None else moment(probe, ticks / 100)  # USER_HZ is 100 on x86_64 and aarch64


def moment(probe, seconds):
    """Return a time so many seconds after the boot, ISO 8601 in UTC, or None when the boot's time is unknown."""
    booted = boot_time(probe)
    if booted is None:
        return None
    at = datetime.datetime.fromtimestamp(booted + seconds, datetime.timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def boot_time(probe):
    """Return when the kernel was booted, in seconds since the epoch, or None."""
    lines = (probe.text("/proc/stat") or "").splitlines()
    return next((whole(line.split()[1]) for line in lines if line.startswith("btime ")), None)


def unit_environment(probe, unit):
    """Return the steering variables a unit gives its process, those of its environment files included."""
    block = ask(probe, ()).get(unit, {})
    pairs = []
    for line in block.get("EnvironmentFiles", "").splitlines():
        path = line.partition(" (")[0].strip()
        if path.startswith("/"):
            pairs += [f"{name}={value}" for name, value in assignments(probe.text(path)).items()]
    try:
        pairs += shlex.split(block.get("Environment", "").replace("\n", " "))
    except ValueError as error:
        probe.error(f"environment of {unit}", error)
    return environment(pairs)


def updaters(probe):
    """Return the installed units that change packages by themselves; None when systemd did not tell of each."""
    shown = ask(probe, UPDATERS)
    if not set(UPDATERS) <= set(shown):
        return None
    return [
        {
            "name": name,
            "active": shown[name].get("ActiveState") in ("active", "activating", "reloading"),
            "enabled": shown[name].get("UnitFileState", "").startswith("enabled"),
        }
        for name in UPDATERS
        if shown.get(name, {}).get("LoadState") == "loaded"
    ]


def clock(probe):
    """Return whether the kernel's clock is synchronised, and the active service that does it."""
    shown = ask(probe, CLOCKS)
    source = next((name for name in CLOCKS if shown.get(name, {}).get("ActiveState") == "active"), None)
    return {
        "synchronized": _synchronized(probe),
        "source": source.rpartition(".")[0] if source else None,
    }


_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def _synchronized(probe):
    """Ask the kernel itself, as timedatectl does; a tree answers as timedatectl, in whose words people keep it."""
    if probe.tree:
        answer = probe.command("timedatectl", "show", "--property", "NTPSynchronized", needed=True)
        return {"yes": True, "no": False}.get(assignments(answer[1]).get("NTPSynchronized")) if answer else None
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # zeros: only a question
    if state < 0:
        probe.error("clock", "adjtimex is refused")
        return None
    return state != _TIME_ERROR


def memlock(probe, daemon, engine_pid=None):
    """Return the limit on locked memory in each of its places: shells, systemd, Docker's unit, daemon.json, the engine.

    The last is what the engine's own process has, ``unlimited`` or bytes.
    """
    places = ["/etc/security/limits.conf", *map(probe.shown, probe.glob("/etc/security/limits.d/*.conf"))]
    lines = [
        {"file": place, "line": " ".join(line.split())}
        for place in places
        for line in (probe.text(place) or "").splitlines()
        if "memlock" in line and not line.lstrip().startswith("#")
    ]
    answer = probe.command("systemctl", "show", "--property", "DefaultLimitMEMLOCK")
    ulimits = daemon.get("default-ulimits") if isinstance(daemon, dict) else None
    limit = ulimits.get("memlock") if isinstance(ulimits, dict) else None
    return {
        "limits_conf": lines[:50],
        "systemd_default": (assignments(answer[1]).get("DefaultLimitMEMLOCK") if answer else None) or None,
        "docker_unit": ask(probe, ()).get("docker.service", {}).get("LimitMEMLOCK") or None,
        "container": _locked(probe, engine_pid) if engine_pid else None,
        "daemon_json": f"{limit.get('Soft')}:{limit.get('Hard')}" if isinstance(limit, dict) else None,
    }


def _locked(probe, pid):
    """Return the soft limit of a process on locked memory, as the kernel says it."""
    limits = probe.text(f"/proc/{pid}/limits") or ""
    line = next((line for line in limits.splitlines() if line.startswith("Max locked memory")), "")
    words = line.removeprefix("Max locked memory").split()
    return words[0] if words else None
