"""What the sheet and the checklist are made from: a plan, its results, its fingerprint. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kimi_runbook.acceptance.plan import STEP_NAMES, AcceptancePlan
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.figures import Figures, MemorySample
from kimi_runbook.record import Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the chain, seen whole.

    Attributes:
        plan: What was to be done.
        figures: Results by step, with their figures.
        fingerprint: What was observed of the engine.
    """

    plan: AcceptancePlan
    figures: Figures
    fingerprint: Fingerprint

    def step(self, number: int) -> StepResult | None:
        """Return a step's result when it was looked at at all."""
        result = self.figures.steps.get(number)
        return None if result is None or result.state is State.NOT_RUN else result

    def holds(self, number: int) -> bool:
        """Return whether a step ended in PASS or WARN."""
        result = self.step(number)
        return result is not None and result.state.lets_next_layer_run

    def told(self, number: int) -> str:
        """Return how a step ended, in words: ``step 3 (shared prefix) is FAIL``."""
        what = f"step {number} ({STEP_NAMES[number]})"
        result = self.figures.steps.get(number)
        if result is None:
            return f"{what} is not planned"
        return f"{what} was not run" if result.state is State.NOT_RUN else f"{what} is {result.state}"

    def missing(self, number: int) -> str:
        """Return why a step gave no value: it was not planned, not run, or did not see it."""
        return (
            self.told(number) if self.step(number) is None else f"step {number} ({STEP_NAMES[number]}) did not see it"
        )

    def checks(self, number: int, suffix: str) -> tuple[Check, ...]:
        """Return a step's checks of that name, or whose name ends in ``.name``."""
        result = self.step(number)
        found = result.checks if result else ()
        return tuple(check for check in found if check.name == suffix or check.name.endswith(f".{suffix}"))

    def all_pass(self, number: int, suffix: str) -> bool:
        """Return whether there are such checks and every one passed."""
        found = self.checks(number, suffix)
        return bool(found) and all(check.state is State.PASS for check in found)

    def on_every_node(self, number: int, suffix: str) -> bool:
        """Return whether every node of the plan has such a check and it passed."""
        passed = {check.name for check in self.checks(number, suffix) if check.state is State.PASS}
        return bool(self.plan.hosts) and all(f"{host.name}.{suffix}" in passed for host in self.plan.hosts)

    def option(self, *names: str) -> str | None:
        """Return the value of an engine option in the launch, or None when no node's launch names it."""
        for launch in self.plan.launch.values():
            for position, item in enumerate(launch.argv):
                name, equals, value = item.partition("=")
                if name in names:
                    following = launch.argv[position + 1 : position + 2]
                    return value if equals else (following[0] if following else "")
        return None


def agreed(values: Mapping[str, str | None]) -> str | None:
    """Return one value where all nodes have the same, each with its node where they differ, None where no node has one.

    A node without a value is named, since "the same on every node" would be a guess.
    """
    if not any(values.values()):
        return None
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{name}: {value or 'not observed'}" for name, value in values.items())


def fullest_gpu(samples: Iterable[MemorySample]) -> tuple[MemorySample, int] | None:
    """Return the sample with the most memory used on one GPU, and which GPU that is; None without any."""
    found = [(sample, index) for sample in samples for index in range(len(sample.gpu_used_mib))]
    return max(found, key=lambda pair: pair[0].gpu_used_mib[pair[1]], default=None)


def percent(share: float) -> str:
    """Return a share of 1 as percent, one decimal: ``38.7 %``. Small shares do not become zero."""
    shown = share * 100
    return "below 0.1 %" if 0 < shown < 0.1 else f"{shown:.1f} %"


def gib(size: int) -> str:
    """Return bytes as GiB with one decimal, or as MiB where that would be below 1."""
    return f"{size / 1024**3:.1f} GiB" if size >= 1024**3 else f"{size / 1024**2:.1f} MiB"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers with commas between."""
    return ", ".join(str(number) for number in numbers)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 request``, ``2 requests``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
