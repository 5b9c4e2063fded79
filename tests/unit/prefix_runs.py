"""Running step 3 against the fake engine, and reading what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_runbook.acceptance import step3_shared_prefix
from kimi_runbook.acceptance.result import Check, StepResult
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import context


class Engine(FakeEngine):
    """The fake engine with quick answers: what is counted here is in the prompts."""

    def __init__(self, *faults: Fault, **options: Any) -> None:
        super().__init__(*faults, **options)
        self.token_delay_s = 0.001


def result_of(run_dir: Path, *faults: Fault, plan: dict[str, Any] | None = None, **options: Any) -> StepResult:
    with Engine(*faults, **options) as engine:
        return step3_shared_prefix.run(context(engine.url, run_dir, steps=(2, 3, 4), **plan or {}))


def red(result: StepResult) -> Check:
    """The first check that did not pass."""
    return result.unmet()[0]


def series(result: StepResult) -> dict[str, list[int]]:
    """Counted hits by family, in the order of the sightings."""
    found: dict[str, list[int]] = {}
    for request in sorted(result.figures["requests"], key=lambda one: one["sighting"]):
        found.setdefault(request["family"], []).append(request["counted_hit_tokens"])
    return found
