"""Rules about the GPUs: as many as the platform has, of its kind, healthy, and nobody else's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from kimi_runbook.driver_verdict import process_matches
from kimi_runbook.hardware_facts import KernelLine
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.driver import settled

_XID = re.compile(r"Xid \(PCI:(?P<pci>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")
_MAKERS = {"NVIDIA": "0x10de", "AMD": "0x1002"}  # PCI vendor ids of those who make them for servers
_VENDORS = {"amd": _MAKERS["AMD"]}  # by generation, where it is not NVIDIA's
_OF_XID_KIND = {"fatal": "gpu.xid_fatal", "warn": "gpu.xid", "application": "gpu.xid_application"}


def _platform(case: Case) -> Outcome:
    """The host is what the lock was written for. Simulated GPUs are of no platform."""
    if case.simulated:
        return
    hardware, arch = case.hardware, case.snapshot.os.arch
    if not arch:
        yield Unknown("os: arch")
    elif arch != hardware.text("arch"):
        yield case.finding(
            "gpu.arch", observed=f"an {arch} host", expected=f"{hardware.text('arch')}, as {case.lock.platform} has it"
        )
    names = [gpu.name for gpu in case.snapshot.gpus]
    answered = (
        case.snapshot.driver.smi_rc == 0 and settled(case) and case.told("gpus")
    )  # a driver to be changed may see none
    on_bus = case.snapshot.accelerators
    vendor = _VENDORS.get(hardware.text("generation"), _MAKERS["NVIDIA"])
    seen = len(names) if answered else None
    if seen is None and on_bus is not None:
        seen = sum(accelerator.vendor in (vendor, None) for accelerator in on_bus)
    makers = {_MAKERS[name]: name for name in _MAKERS if _MAKERS[name] != vendor}
    foreign = Counter(makers[one.vendor] for one in on_bus or () if one.vendor in makers)
    if seen is None:
        yield Unknown("gpus")
    elif not seen and foreign:
        yield case.finding(
            "gpu.model",
            observed=", ".join(f"{count} GPUs of {maker}" for maker, count in foreign.items()) + " on the PCI bus",
            expected=f"{hardware.integer('gpus')} named {hardware.text('model')}",
        )
    elif seen != hardware.integer("gpus"):
        yield case.finding(
            "gpu.count",
            observed=f"{seen} GPUs" + ("" if answered else " on the PCI bus"),
            expected=f"{hardware.integer('gpus')}, as {case.lock.platform} has them",
            subject=vendor.removeprefix("0x"),
        )
    model = re.compile(rf"(?<![A-Za-z0-9]){re.escape(hardware.text('model'))}(?![A-Za-z0-9]| NVL| PCIe)")
    others = sorted({name for name in names if name is not None and not model.search(name)})
    if others:
        yield case.finding("gpu.model", observed=", ".join(others), expected=f"a GPU named {hardware.text('model')}")


def _memory_errors(case: Case) -> Outcome:
    gpus = case.snapshot.gpus
    if not case.told("gpus") or any(gpu.ecc is None or gpu.ecc.uncorrected_volatile is None for gpu in gpus):
        yield Unknown("gpus: ecc")
    elif any(gpu.remap is None for gpu in gpus):
        yield Unknown("gpus: remap")
    for gpu in gpus:
        name, ecc, remap = f"GPU {gpu.index}", gpu.ecc, gpu.remap
        if ecc is not None and (ecc.mode or "").lower() == "disabled":
            yield case.finding("gpu.ecc_off", observed=f"{name}: ECC off", expected="ECC on", subject=name)
        if ecc is not None and ecc.uncorrected_volatile:
            yield case.finding(
                "gpu.ecc_errors",
                observed=f"{name}: {ecc.uncorrected_volatile} uncorrected since the driver was loaded",
                expected="none",
                subject=name,
            )
        if remap is not None and remap.failed:
            yield case.finding(
                "gpu.remap_failed",
                observed=f"{name}: a row could not be remapped",
                expected="no failure",
                subject=str(gpu.index),
            )
        if remap is not None and remap.pending:
            yield case.finding(
                "gpu.remap_pending", observed=f"{name}: a remapping is pending", expected="none", subject=name
            )


def _users(case: Case) -> Outcome:
    """Memory used by whom: the engine and the driver's own daemons may, nobody else."""
    gpus, idle = case.snapshot.gpus, data_file("platform.yml").integer("idle_gpu_memory_mib")
    if not case.told("gpus") or any(gpu.processes is None for gpu in gpus):
        yield Unknown("gpus: processes")
    if gpus and all(gpu.processes is None for gpu in gpus):
        return
    container = case.snapshot.container
    served = container is not None and container.running
    known = data_file("platform.yml").texts("known_gpu_holders")
    if served:
        known += data_file("platform.yml").texts("engine_server_processes")
    strangers: dict[tuple[str, int], list[str]] = {}
    for gpu in gpus:
        for process in gpu.processes or ():
            name = (process.name or "unknown").rpartition("/")[2]
            if not process_matches(name, known) and not (container and process.pid == container.pid):
                strangers.setdefault((name, process.pid), []).append(str(gpu.index))
        used = gpu.memory_used_mib
        if used is not None and used > idle and not gpu.processes and not served:
            yield case.finding(
                "gpu.memory_taken", observed=f"GPU {gpu.index}: {used} MiB in use", expected=f"at most {idle} MiB idle"
            )
    for (name, pid), indexes in strangers.items():
        yield case.finding(
            "gpu.foreign_process",
            observed=f"{name} (pid {pid}) on GPU {', '.join(indexes)}",
            expected="the engine and the driver's daemons alone",
            subject=f"{name} (pid {pid})",
        )


def _xid(case: Case) -> Outcome:
    log = case.snapshot.kernel_log
    if log is None or not log.readable:
        yield Unknown("kernel_log")
        return
    seen: dict[str, list[tuple[str, KernelLine]]] = {}
    for line in log.lines:
        match = _XID.search(line.text or "") if line.kind == "xid" else None
        if match:
            seen.setdefault(match["code"], []).append((match["pci"], line))
    for code, lines in seen.items():
        entry = data_file("xid.yml").optional_fields(code)
        kind, meaning = (entry.text("kind"), entry.text("meaning")) if entry else ("warn", "not in data/xid.yml")
        worse = entry.optional_text("fatal_when") if entry else None
        if worse is not None and any(re.search(worse, line.text or "") for line in _last_of_each(lines)):
            kind = "fatal"
        yield case.finding(
            _OF_XID_KIND[kind],
            observed=f"Xid {code} ({meaning}) on {', '.join(sorted({pci for pci, _ in lines}))}, "
            + (f"{len(lines)} times, last at " if len(lines) > 1 else "once, at ")
            + (lines[-1][1].at or "an unknown time"),
            expected="no Xid since the boot",
            subject=code,
        )


def _last_of_each(lines: Sequence[tuple[str, KernelLine]]) -> Iterable[KernelLine]:
    """Return the last line about each GPU."""
    return dict(lines).values()


CHECKS = (
    Check("gpus.platform", _platform),
    Check("gpus.memory_errors", _memory_errors),
    Check("gpus.users", _users),
    Check("gpus.xid", _xid),
)
