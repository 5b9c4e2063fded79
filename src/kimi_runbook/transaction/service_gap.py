"""How long clients were without answers in a change, and how much of that is not the engine's own start.

Every moment is wall time in seconds by the clock of the replica's head, except that a host's reboot is a duration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kimi_runbook.reading import Fields, parse_json, read_text

FILE_NAME = "service_gap.json"
SCHEMA_VERSION = 1
BAR_S = 20.0
"""What our playbooks may add to the engine's own start, beside one reboot. Source: the project's own aim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceGap:
    """The gap of one replica.

    Attributes:
        head: The replica's head.
        drained_by: Run that took it out of service.
        last_answer_at: When it last answered well.
        first_answer_at: When it first answered well again.
        engine_start_s: From the start of the head's unit to readiness; None where nobody saw it become ready.
        reboot_s: The longest reboot of its hosts; None where none was noted.
        rebooted: Whether the head was booted in between.
        requests_cut: Requests cut at the drain's deadline; None where the engine did not say.
    """

    head: str
    drained_by: str
    last_answer_at: float
    first_answer_at: float
    engine_start_s: float | None
    reboot_s: float | None
    rebooted: bool
    requests_cut: int | None

    @property
    def gap_s(self) -> float:
        """Seconds from the last good answer to the first; never below zero, whatever a clock that was set back says."""
        return max(self.first_answer_at - self.last_answer_at, 0.0)

    @property
    def ours_s(self) -> float | None:
        """The gap without the engine's own start; None where that is not known."""
        return None if self.engine_start_s is None else max(self.gap_s - self.engine_start_s, 0.0)

    @property
    def within_bar(self) -> bool | None:
        """Whether our share is at most BAR_S and one reboot; None where what is known does not decide it."""
        if self.ours_s is None:
            return None
        if self.ours_s <= BAR_S + (self.reboot_s or 0.0):
            return True
        return None if self.rebooted and self.reboot_s is None else False

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, with what follows from it."""
        return {
            **asdict(self),
            "gap_s": round(self.gap_s, 1),
            "ours_s": None if self.ours_s is None else round(self.ours_s, 1),
            "bar_s": BAR_S,
            "within_bar": self.within_bar,
        }

    def __str__(self) -> str:
        start = "not seen" if self.engine_start_s is None else f"{self.engine_start_s:.1f} s"
        ours = "not known" if self.ours_s is None else f"{self.ours_s:.1f} s"
        reboot = (
            f"{self.reboot_s:.1f} s" if self.reboot_s is not None else "time not noted" if self.rebooted else "none"
        )
        judged = {True: "within", False: "over", None: "not judged"}[self.within_bar]
        cut = "an unknown number of" if self.requests_cut is None else str(self.requests_cut)
        return (
            f"{self.head}: service gap {self.gap_s:.1f} s, engine's own start {start}, our share {ours}; "
            f"bar {BAR_S:.0f} s + one reboot ({reboot}): {judged}; {cut} requests cut"
        )


def measure(
    head: str, mark: Mapping[str, object], ready_at: float | None, reboots_s: Sequence[float | None]
) -> ServiceGap:
    """Return the gap of one replica.

    Args:
        head: The replica's head.
        mark: What the head remembers: of the drain, and of the first good answer.
        ready_at: When the engine was seen to become ready; None where it was ready before anybody looked.
        reboots_s: Per host how long its reboot took, None where none was noted.

    Raises:
        RunbookError: The mark lacks a moment.
    """
    fields = Fields(mark, f"{head}: mark of the service gap", "Remove it on that host; the next drain writes it anew.")
    last, first = fields.number("last_answer_at"), fields.number("first_answer_at")
    started = fields.number("unit_started_at") if fields.raw("unit_started_at") is not None else None
    noted = [seconds for seconds in reboots_s if seconds is not None]
    return ServiceGap(
        head=head,
        drained_by=fields.text("run_id"),
        last_answer_at=last,
        first_answer_at=first,
        engine_start_s=_between(started, ready_at, last, first),
        reboot_s=max(noted) if noted else None,
        rebooted=fields.flag("rebooted", default=False),
        requests_cut=fields.optional_integer("requests_cut"),
    )


def _between(started: float | None, ready: float | None, last: float, first: float) -> float | None:
    """Return the engine's start in seconds; None unless it began within the gap and no clock was set back."""
    if started is None or ready is None or not last <= started <= ready or first < last:
        return None
    return min(ready, first) - started


def write(run_dir: Path, gaps: Sequence[ServiceGap]) -> Path:
    """Add gaps to the run's file, one entry per replica, and return its path."""
    path = run_dir / FILE_NAME
    replicas = _earlier(path) | {gap.head: gap.to_json() for gap in gaps}
    path.write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "replicas": replicas}, indent=2, sort_keys=True) + "\n",
        encoding="utf-8",
    )
    return path


def _earlier(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    root = Fields(parse_json(read_text(path), str(path)), str(path), "Move it away, then run serve again.")
    root.require_schema(SCHEMA_VERSION)
    return root.fields("replicas").mapping()
