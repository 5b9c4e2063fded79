"""The acceptance chain as pytest files: one plan in, one record out, and an exit status that says the verdict.

Run by the acceptance role, or by hand:  pytest tests/acceptance --acceptance-plan runs/<run-id>/acceptance.json
The logic is in kimi_runbook.acceptance; these files give it hosts and show its results.

Exit status: 0 accepted, 1 the answer is no, 3 inconclusive, 2 nothing was looked at or pytest itself failed, 130
interrupted, 4 usage (pytest's own).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TextIO

import pytest
import testinfra

from kimi_runbook.acceptance.chain import Chain
from kimi_runbook.acceptance.completion import completed
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.hosts import EngineHost
from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.progress import Listener, Progress
from kimi_runbook.acceptance.result import State
from kimi_runbook.campaign.fill import with_campaign
from kimi_runbook.errors import RunbookError
from kimi_runbook.record import Record, load_record
from kimi_runbook.report import headline, verdict_of, write_reports

_HERE = Path(__file__).parent
_PROGRESS = "progress.log"
_INTERRUPTED, _NOTHING_LOOKED_AT = 130, 2
_CHAIN = pytest.StashKey[Chain]()
_PLAN = pytest.StashKey[AcceptancePlan]()
_RECORD = pytest.StashKey[Record]()


class Show(Protocol):
    """Runs one step, or the drill of step 5, and fails with what did not pass."""

    def __call__(self, step: int, *, drill: bool = False) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--acceptance-plan", metavar="FILE", help="acceptance plan (JSON) of the run to judge")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the planned steps, in their order; refuse to run without a plan."""
    mine = [item for item in items if item.path.parent == _HERE]
    if not mine:
        return
    file = config.getoption("--acceptance-plan", default=None)
    if not file:
        raise pytest.UsageError("tests/acceptance needs --acceptance-plan FILE (the acceptance role writes it)")
    try:
        plan = AcceptancePlan.load(Path(file))
    except RunbookError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_PLAN] = plan
    left_out = [
        item for item in mine if _step_of(item) not in plan.steps or (_is_drill(item) and not plan.peer_loss_drill)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(
        (item for item in items if item not in left_out), key=lambda item: (_is_drill(item), _step_of(item))
    )


def _step_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("step")
    return int(marker.args[0]) if marker else -1


def _is_drill(item: pytest.Item) -> bool:
    return item.get_closest_marker("drill") is not None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "step(number): the step of the acceptance chain a test shows")
    config.addinivalue_line("markers", "drill: takes the service down and restores it; run last, where the plan asks")


@pytest.fixture(scope="session")
def chain(pytestconfig: pytest.Config) -> Iterator[Chain]:
    """The run: hosts connected as the plan says, steps run one layer at a time."""
    plan = pytestconfig.stash[_PLAN]
    hosts = {host.name: EngineHost(host, testinfra.get_host(host.uri, **host.options)) for host in plan.hosts}
    with (plan.run_dir / _PROGRESS).open("w", encoding="utf-8", buffering=1) as log:
        pytestconfig.stash[_CHAIN] = Chain(Context.of(plan, hosts, listener=_writer(log)))
        yield pytestconfig.stash[_CHAIN]


def _writer(log: TextIO) -> Listener:
    """Write each thing the chain begins once, with its time: what to follow while a playbook is silent."""
    said: list[str] = []

    def write(now: Progress) -> None:
        what = now.what.rsplit(",", 1)[0] if now.what.endswith(" s") else now.what  # without the seconds passed
        line = f"step {now.step} {now.name}: {what}"
        if said[-1:] != [line]:
            said.append(line)
            log.write(f"{datetime.now(UTC):%H:%M:%S} {line}\n")

    return write


@pytest.fixture
def show_step(chain: Chain) -> Show:
    """Run one step and fail with every check that did not pass.

    A step that was not run is skipped for pytest; record, report and exit status say that it is no pass.
    """

    def show(step: int, *, drill: bool = False) -> None:
        result = chain.run_drill() if drill else chain.run(step)
        if result is None:
            pytest.skip("NOT_RUN, which is no pass: a planned step does not hold, so nothing is taken down")
        if result.state is State.NOT_RUN:
            pytest.skip(f"NOT_RUN, which is no pass: {result.note}")
        told = "\n".join(f"{check.state} {check.sentence()}" for check in result.unmet())
        assert result.state.lets_next_layer_run, f"step {result.step} ({result.name}) is {result.state}\n{told}"

    return show


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write record and reports, and turn the verdict into the exit status; no code of pytest's reads as accepted."""
    chain = session.config.stash.get(_CHAIN, None)
    if chain is None or not chain.started_any:
        if exitstatus not in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR):
            session.exitstatus = _NOTHING_LOOKED_AT
        return
    plan = session.config.stash[_PLAN]
    record = chain.record()
    record.write(plan.run_dir)
    if plan.continues:
        try:
            earlier = AcceptancePlan.load(plan.continues / "acceptance.json")
            record = with_campaign(completed(load_record(plan.continues), record), earlier)
        except RunbookError as error:
            raise pytest.UsageError(str(error)) from error
        record.write(plan.continues)
    session.config.stash[_RECORD] = record
    write_reports(record, plan.continues or plan.run_dir)
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        session.exitstatus = _INTERRUPTED
    elif exitstatus == pytest.ExitCode.INTERNAL_ERROR:
        session.exitstatus = _NOTHING_LOOKED_AT
    else:
        session.exitstatus = verdict_of(record).name.exit_code


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """End with the verdict, whatever pytest's own counts look like."""
    record = config.stash.get(_RECORD, None)
    if record is None:
        return
    verdict = verdict_of(record)
    terminalreporter.section("acceptance")
    for step in record.steps:
        terminalreporter.line(f"step {step.step} {step.name:<14} {step.state}  {step.note}".rstrip())
    terminalreporter.line(headline(record))
    for reason in verdict.reasons:
        terminalreporter.line(f"  because {reason.text}")
    plan = config.stash[_PLAN]
    terminalreporter.line(f"report: {(plan.continues or plan.run_dir) / 'report.md'}")
    terminalreporter.line(f"next: {verdict.next_command}")
