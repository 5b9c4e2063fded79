"""The pytest files of tests/acceptance as a user runs them: exit status, record, and refusal without a plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import plan_json

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_chain(
    run_dir: Path, *faults: Fault, steps: tuple[int, ...] = (2, 3, 4), arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    with FakeEngine(*faults) as engine:
        plan = run_dir / "acceptance.json"
        plan.write_text(json.dumps(plan_json(engine.url, run_dir, steps=steps)), encoding="utf-8")
        return run_pytest("tests/acceptance", f"--acceptance-plan={plan}", *arguments)


def record_of(run_dir: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return value


def test_a_healthy_endpoint_is_accepted(tmp_path: Path) -> None:
    done = run_chain(tmp_path)
    assert done.returncode == 0, done.stdout
    assert record_of(tmp_path)["verdict"]["name"] == "accept"  # type: ignore[index] # JSON
    assert "verdict: accept · simulated GPUs · not planned: 0 host, 1 start, 5 multi-node" in done.stdout
    assert "3 passed, 5 deselected" in done.stdout
    assert {"record.json", "report.html", "report.md", "junit.xml", "metrics.prom", "expectation.json"} <= {
        file.name for file in tmp_path.iterdir()
    }


@pytest.mark.parametrize(
    ("fault", "code", "states"),
    [
        pytest.param(Fault.STREAM_CUT, 1, ["FAIL", "NOT_RUN", "NOT_RUN"], id="rejected"),
        pytest.param(Fault.OTHER_TRAFFIC, 3, ["PASS", "INCONCLUSIVE", "NOT_RUN"], id="inconclusive"),
    ],
)
def test_the_verdict_is_the_exit_status(fault: Fault, code: int, states: list[str], tmp_path: Path) -> None:
    done = run_chain(tmp_path, fault)
    assert done.returncode == code, done.stdout
    assert [step["state"] for step in record_of(tmp_path)["steps"]] == states  # type: ignore[attr-defined] # JSON
    assert "NOT_RUN, which is no pass" in done.stdout


def test_leaving_planned_steps_out_is_not_accepted(tmp_path: Path) -> None:
    done = run_chain(tmp_path, arguments=("-k", "short_request"))
    assert done.returncode == 3, done.stdout
    assert "1 passed" in done.stdout


def test_hosts_are_connected_as_the_plan_says(tmp_path: Path) -> None:
    """This machine has no engine container, so step 0 is red and nothing above it is looked at."""
    done = run_chain(tmp_path, steps=(0, 1, 2, 3, 4, 5))
    assert done.returncode == 1, done.stdout
    assert "k3-a.image-digest" in done.stdout


def test_nothing_looked_at_is_an_error(tmp_path: Path) -> None:
    done = run_chain(tmp_path, arguments=("-k", "no_such_test"))
    assert done.returncode == 2, done.stdout
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param([], "needs --acceptance-plan FILE", id="no-plan"),
        pytest.param(["--acceptance-plan=/nonexistent.json"], "no such file", id="plan-missing"),
    ],
)
def test_without_a_usable_plan_it_is_a_usage_error(arguments: list[str], says: str) -> None:
    done = run_pytest("tests/acceptance", *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert says in done.stdout + done.stderr


def test_a_plain_pytest_run_does_not_collect_them() -> None:
    done = run_pytest("--collect-only", "-q", "-k", "test_hosts_are_connected_as_the_plan_says or test_step0")
    assert "tests/acceptance" not in done.stdout
    assert "tests/unit/test_acceptance_pytest.py" in done.stdout
