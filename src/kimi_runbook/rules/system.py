"""Rules about what goes on around the driver: kernel log, clock, packages that change by themselves."""

from __future__ import annotations

from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown

_HARDWARE = ("pcie-aer", "iommu", "mlx5")  # kinds of kernel lines that come before slow or hanging collectives
_PROCESSES = ("oom", "segfault")


def _log(case: Case) -> Outcome:
    """Xid lines have a rule of their own; plain NVRM lines tell nothing by themselves."""
    log = case.snapshot.kernel_log
    if log is None or not log.readable:
        yield Unknown("kernel_log")
        return
    for kinds, code in ((_HARDWARE, "kernel.log"), (_PROCESSES, "kernel.log_processes")):
        for kind in kinds:
            lines = [line for line in log.lines if line.kind == kind]
            if lines:
                last = " ".join((lines[-1].text or "").split())[:160]
                count = f"{len(lines)} {kind} lines, last at" if len(lines) > 1 else f"one {kind} line, at"
                yield case.finding(
                    code,
                    observed=f"{count} {lines[-1].at or 'an unknown time'}: {last}",
                    expected="none since the boot",
                    subject=kind,
                )


def _clock(case: Case) -> Outcome:
    clock = case.snapshot.clock
    if clock.synchronized is None:
        yield Unknown("clock: synchronized")
    elif not clock.synchronized:
        yield case.finding(
            "clock.unsynchronized",
            observed=f"not synchronized ({clock.source or 'no time service'})",
            expected="synchronized",
        )


def _updaters(case: Case) -> Outcome:
    """What fetches lists only is let be; a name nobody knows is taken for one that upgrades."""
    updaters, known = case.snapshot.updaters, data_file("platform.yml").fields("updaters")
    if updaters is None:
        yield Unknown("updaters")
        return
    for updater in updaters:
        bare = updater.name.partition(".")[0]
        entry = known.optional_fields(bare)
        if (entry is None or entry.flag("upgrades", True)) and (updater.active or updater.enabled):
            yield case.finding(
                "updates.automatic",
                observed=f"{updater.name} {'active' if updater.active else 'enabled'}",
                expected="neither active nor enabled",
                subject=updater.name,
            )


CHECKS = (
    Check("system.kernel_log", _log),
    Check("system.clock", _clock),
    Check("system.updaters", _updaters),
)
