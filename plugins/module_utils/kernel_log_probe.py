"""Lines of the kernel log since the boot that bear on GPUs, network and memory."""

from __future__ import annotations

import datetime
import re

from ansible.module_utils.redaction import text as shown
from ansible.module_utils.unit_probe import boot_time

_MOST_OF_A_KIND = 40  # a GPU that falls off the bus is followed by thousands of lines of other kinds
_MOST_ASKED = 2000
_LONGEST = 300

# (kind, what its lines hold), tried in order. Sources: NVRM's Xid and driver lines as NVIDIA's XID catalogue shows
# them, mlx5 and AER messages of the kernel's own drivers (drivers/net/ethernet/mellanox/mlx5, drivers/pci/pcie/aer.c),
# the out-of-memory killer's (mm/oom_kill.c), x86's and arm64's fault lines.
KINDS = (
    ("xid", r"NVRM: Xid"),
    ("nvrm", r"NVRM:|nvidia-nvswitch|nvidia-modeset: ERROR"),
    ("module", r"disagrees about version of symbol|[Uu]nknown symbol|version magic"),
    (
        "mlx5",
        r"mlx5_(core|ib).*([Ee]rr(or)?\b|[Ff]ail|[Tt]imeout|fatal|syndrome|[Uu]nplugged|[Hh]ealth|[Ll]ink [Dd]own|AER"
        r"|insufficient|bad status|reset|overheat|[Hh]igh [Tt]emperature)",
    ),
    ("oom", r"Out of memory:|oom-kill:|Memory cgroup out of memory|invoked oom-killer"),
    ("pcie-aer", r"AER:|PCIe Bus Error|pcieport .*(error|Downstream Port Containment)"),
    ("iommu", r"(DMAR|AMD-Vi|arm-smmu[^:]*): .*([Ff]ault|error|timeout|IO_PAGE_FAULT)"),
    ("segfault", r"segfault at|general protection fault|unhandled (level|exception)"),
)
_KIND = tuple((kind, re.compile(pattern)) for kind, pattern in KINDS)
_GREP = "|".join(pattern for _, pattern in KINDS)
_LINE = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,]\d+)?([+-]\d\d:?\d\d|Z)\s+(.*)$")
_LOADED = re.compile(r"NVRM: loading NVIDIA UNIX")
_LEFT_OUT_NEVER = (KINDS[0][1], _LOADED.pattern)


def kernel_log(probe):
    """Return ``{"readable", "lines", "cut"}``: the newest lines that matter, oldest first, and the count of older ones.

    The journal keeps what the kernel's own buffer has long overwritten, so it is asked first. No line and no right to
    read look the same there, so a second question tells them apart.
    """
    return probe.once("kernel log", lambda: _read(probe))


def _read(probe):
    journal = ("journalctl", "--dmesg", "--boot", "--utc", "--output", "short-iso", "--no-pager", "--quiet")
    found = probe.command(*journal, "--lines", str(_MOST_ASKED), "--grep", _GREP)
    if found is not None and (found[1].strip() or _readable(probe, journal)):
        lines = found[1].splitlines()
        if len(lines) >= _MOST_ASKED:  # older ones were left out, and an Xid among them counts
            older = probe.command(*journal, "--lines", str(_MOST_ASKED), "--grep", "|".join(_LEFT_OUT_NEVER))
            lines = list(dict.fromkeys([*(older[1].splitlines() if older else ()), *lines]))
        return _kept([_parsed(line, with_host=True) for line in lines])
    answer = probe.command("dmesg", "--time-format", "iso")
    if answer is not None and answer[0] == 0:
        return _kept([_parsed(line, with_host=False) for line in answer[1].splitlines()])
    said = "no journal and no dmesg" if answer is None else (answer[2] or answer[1]).strip()[:200]
    probe.error("kernel log", said or "it cannot be read")
    return {"readable": False, "lines": [], "cut": 0}


def _readable(probe, journal):
    answer = probe.command(*journal, "--lines", "1")
    return answer is not None and answer[0] == 0 and bool(answer[1].strip())


def _parsed(line, with_host):
    """Return one line as time, kind and text, or None for one of no kind."""
    match = _LINE.match(line)
    if match is None:
        return None
    stamp, zone, text = match.groups()
    if with_host:
        text = text.partition(" ")[2].partition(": ")[2]  # "host kernel: text"
    kind = next((kind for kind, pattern in _KIND if pattern.search(text)), None)
    if kind is None:
        return None
    zone = "+0000" if zone == "Z" else zone.replace(":", "")
    try:
        at = datetime.datetime.strptime(stamp + zone, "%Y-%m-%dT%H:%M:%S%z").astimezone(datetime.timezone.utc)
    except ValueError:
        return None
    return {"at": at.strftime("%Y-%m-%dT%H:%M:%SZ"), "kind": kind, "text": text[:_LONGEST]}


def _kept(rows):
    told = sorted((row for row in rows if row), key=lambda row: row["at"])
    # The load of the driver is not a line of trouble, and a chatty kernel must not push it out.
    loads = [row for row in told if _LOADED.search(row["text"])][-1:]
    kept = [row for kind, _ in _KIND for row in [one for one in told if one["kind"] == kind][-_MOST_OF_A_KIND:]]
    kept += [row for row in loads if row not in kept]
    kept.sort(key=lambda row: row["at"])
    return {
        "readable": True,
        "lines": [{**row, "text": shown(row["text"])} for row in kept],
        "cut": len(told) - len(kept),
    }


def driver_loaded_s(probe):
    """Return how many seconds after the boot the driver was last loaded; None when the kernel log does not say."""
    booted = boot_time(probe)
    times = [row["at"] for row in kernel_log(probe)["lines"] if _LOADED.search(row["text"])]
    if booted is None or not times:
        return None
    at = datetime.datetime.strptime(times[-1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)
    return max(at.timestamp() - booted, 0.0)
