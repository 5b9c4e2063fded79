"""An observation made later completes the record of the run it belongs to, and of no other."""

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_runbook.acceptance.completion import completed, observation_of, pending_run
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.errors import RunbookError
from kimi_runbook.record import Record
from kimi_runbook.verdict import VerdictName
from tests.unit.test_record import record


def step(number: int, state: State = State.PASS) -> StepResult:
    check = Check(name="x", state=state, observed="seen", expected="wanted")
    return StepResult.of(number, "observation" if number == 6 else "short request", [check], {})


def accepted(run_id: str = "20261130T144501Z-0a1b") -> Record:
    return replace(record(step(2), step(3), step(4)), run_id=run_id)


def observed(state: State = State.PASS) -> Record:
    return replace(record(step(6, state)), planned=(6,), run_id="20261130T154501Z-ffff")


def test_an_observation_completes_the_earlier_record() -> None:
    made = completed(accepted(), observed())
    assert (made.run_id, made.observation) == ("20261130T144501Z-0a1b", "complete")
    assert (made.planned, made.not_planned) == ((2, 3, 4, 6), (0, 1, 5))
    assert [s.step for s in made.steps] == [2, 3, 4, 6]
    assert made.verdict is not None
    assert made.verdict.name is VerdictName.ACCEPT


def test_a_failed_observation_takes_the_acceptance_back_and_may_be_repeated() -> None:
    made = completed(accepted(), observed(State.FAIL))
    assert made.observation == "pending"
    assert made.verdict is not None
    assert made.verdict.name is not VerdictName.ACCEPT
    again = completed(made, observed())
    assert (again.observation, len(again.steps)) == ("complete", 4)


@pytest.mark.parametrize(
    ("later", "says"),
    [
        pytest.param(replace(observed(), model="other"), "model is other", id="model"),
        pytest.param(
            replace(observed(), endpoint="http://127.0.0.1:1"), "endpoint is http://127.0.0.1:1", id="endpoint"
        ),
        pytest.param(
            replace(observed(), fingerprint=replace(observed().fingerprint, engine_version="0.33.0")),
            "engine version is 0.33.0",
            id="version",
        ),
    ],
)
def test_another_service_completes_nothing(later: Record, says: str) -> None:
    with pytest.raises(RunbookError, match=says):
        completed(accepted(), later)


def test_a_completed_record_is_not_observed_twice() -> None:
    with pytest.raises(RunbookError, match="was observed already"):
        completed(completed(accepted(), observed()), observed())


def test_the_newest_accepted_run_that_waits_is_found(tmp_path: Path) -> None:
    runs = {
        "20261130T100000Z-0001": accepted("20261130T100000Z-0001"),
        "20261130T110000Z-0002": completed(accepted("20261130T110000Z-0002"), observed()),
        "20261130T120000Z-0003": replace(record(step(2, State.FAIL)), run_id="20261130T120000Z-0003"),
    }
    for name, one in runs.items():
        one.write(tmp_path / name)
    assert pending_run(tmp_path) == tmp_path / "20261130T100000Z-0001"
    assert pending_run(tmp_path, "20261130T120000Z-0003").name == "20261130T120000Z-0003"


def test_without_a_run_that_waits_the_next_step_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunbookError, match=r"playbooks/accept\.yml"):
        pending_run(tmp_path)


def test_observation_of() -> None:
    assert observation_of((step(2),)) == "pending"
    assert observation_of((step(2), step(6, State.INCONCLUSIVE))) == "pending"
    assert observation_of((step(2), step(6, State.WARN))) == "complete"
