"""The chain: one layer at a time, and a record that says what was not looked at."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_runbook.acceptance import step0_host
from kimi_runbook.acceptance.chain import STEPS, Chain
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.interrupted import StepInterruptedError
from kimi_runbook.acceptance.progress import Progress
from kimi_runbook.acceptance.result import Check, State, StepResult, worst
from kimi_runbook.environment import reportable
from kimi_runbook.verdict import VerdictName
from tests.faults.engine.fake_engine import FakeEngine
from tests.faults.engine.site import context, nodes


def ending(state: State) -> Callable[[Context], StepResult]:
    def run(_: Context) -> StepResult:
        check = Check(name="x", state=state, observed="seen", expected="wanted")
        return StepResult.of(0, "x", [check], {})

    return run


def chain_of(run_dir: Path, **states: State) -> Chain:
    steps = {number: ending(states.get(f"s{number}", State.PASS)) for number in STEPS}
    return Chain(context("http://127.0.0.1:1", run_dir, *nodes()), steps)


@pytest.mark.parametrize("state", [State.FAIL, State.INCONCLUSIVE])
def test_nothing_stands_on_a_layer_that_does_not_hold(state: State, tmp_path: Path) -> None:
    chain = chain_of(tmp_path, s1=state)
    states = [chain.run(step).state for step in range(6)]
    assert states == [State.PASS, state, *[State.NOT_RUN] * 4]
    assert f"step 1 (start) is {state}" in chain.run(2).note
    assert chain.record().verdict is not None


def test_a_warning_lets_the_next_layer_run(tmp_path: Path) -> None:
    chain = chain_of(tmp_path, s1=State.WARN)
    assert [chain.run(step).state for step in range(6)][2:] == [State.PASS] * 4


def test_a_planned_step_nobody_asked_for_is_not_run_and_no_pass(tmp_path: Path) -> None:
    chain = chain_of(tmp_path)
    for step in (0, 1, 2):
        chain.run(step)
    record = chain.record()
    assert [step.state for step in record.steps] == [State.PASS] * 3 + [State.NOT_RUN] * 3
    assert record.verdict is not None
    assert record.verdict.name is VerdictName.INCONCLUSIVE


def test_a_step_asked_for_before_its_predecessor_is_not_run(tmp_path: Path) -> None:
    assert chain_of(tmp_path).run(3).state is State.NOT_RUN


def test_a_step_is_run_once(tmp_path: Path) -> None:
    chain = chain_of(tmp_path)
    assert chain.run(0) is chain.run(0)


def test_an_interrupted_step_is_in_the_record(tmp_path: Path) -> None:
    def interrupted(_: Context) -> StepResult:
        raise KeyboardInterrupt

    chain = Chain(context("http://127.0.0.1:1", tmp_path, *nodes()), {0: interrupted})
    with pytest.raises(KeyboardInterrupt):
        chain.run(0)
    step = chain.record().steps[0]
    assert (step.state, step.note) == (State.INCONCLUSIVE, "interrupted")


def test_what_an_interrupted_step_had_found_is_kept(tmp_path: Path) -> None:
    partial = ending(State.INCONCLUSIVE)(context("http://127.0.0.1:1", tmp_path, *nodes()))

    def interrupted(_: Context) -> StepResult:
        raise StepInterruptedError(partial)

    chain = Chain(context("http://127.0.0.1:1", tmp_path, *nodes()), {0: interrupted})
    with pytest.raises(KeyboardInterrupt):
        chain.run(0)
    assert chain.record().steps[0].checks == partial.checks


def test_steps_are_timed_and_told(tmp_path: Path) -> None:
    site = context("http://127.0.0.1:1", tmp_path, *nodes())
    told: list[Progress] = []
    site.listener = told.append
    result = Chain(site, {0: ending(State.PASS)}).run(0)
    assert {"wall_s", "in_flight_s"} <= set(result.figures)
    assert [(one.step, one.what) for one in told] == [(0, "begins"), (0, "PASS")]


def test_a_defect_of_the_chain_is_in_the_record_and_not_hidden(tmp_path: Path) -> None:
    def broken(_: Context) -> StepResult:
        raise ZeroDivisionError("division by zero")

    chain = Chain(context("http://127.0.0.1:1", tmp_path, *nodes()), {0: broken})
    with pytest.raises(ZeroDivisionError):
        chain.run(0)
    assert chain.record().steps[0].state is State.INCONCLUSIVE
    assert "ZeroDivisionError" in chain.record().steps[0].checks[0].observed


def test_the_whole_chain_accepts_a_healthy_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step0_host, "judge_host", lambda *_: ())  # it has its own tests
    hosts = nodes()
    for host in hosts:
        moved = iter((0, 500_000, 500_100))
        host.moved = lambda moved=moved: next(moved)  # type: ignore[misc] # binds each host's own readings
    with FakeEngine() as engine:
        chain = Chain(context(engine.url, tmp_path, *hosts, steps=tuple(STEPS), observe_s=60))
        for step in STEPS:
            # How late the client reads is this machine's business, and has tests of its own.
            assert [check for check in chain.run(step).unmet() if check.name != "client-lag"] == []
    record = chain.record()
    assert record.verdict is not None
    assert record.verdict.name is VerdictName.ACCEPT
    assert record.observation == "complete"
    assert (record.fingerprint.driver, record.fingerprint.block_size_tokens) == ("580.178.04", 64)
    assert record.fingerprint.image_digest == "sha256:" + "a" * 64
    assert record.fingerprint.engine_version == "0.32.0"
    assert {"too-short", "short-suffix"} <= {str(item["family"]) for item in record.expectation}
    assert (record.campaign != (), len(record.checklist)) == (True, 10)
    assert record.environment["k3-a"] == {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "172.31.240.11"}


def test_two_runs_of_one_plan_have_the_same_request_set(tmp_path: Path) -> None:
    """Salts differ from run to run and are no part of the hash, nor are the lengths they lead to."""
    hashes = set()
    for _ in range(2):
        with FakeEngine() as engine:
            chain = Chain(context(engine.url, tmp_path, steps=(2, 3, 4)))
            for step in (2, 3, 4):
                chain.run(step)
            hashes.add(chain.record().fingerprint.request_set)
    assert len(hashes) == 1


def test_worst_of_nothing_is_not_run() -> None:
    assert worst([]) is State.NOT_RUN
    assert worst([State.PASS, State.WARN, State.INCONCLUSIVE, State.FAIL]) is State.FAIL


def test_only_listed_variables_are_written() -> None:
    env = {"VLLM_HOST_IP": "1", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "VLLM_API_KEY": "x", "MY_SETTING": "x"}
    assert reportable(env) == {"NCCL_DEBUG": "INFO", "VLLM_HOST_IP": "1"}
