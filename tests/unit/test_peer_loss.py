"""The drill: a killed node is noticed, named and explained, and the service is started again whatever happens."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance.chain import STEPS, Chain
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.http import BadStatusError, TimedOutError
from kimi_runbook.acceptance.peer_loss import drill, explain
from kimi_runbook.acceptance.result import Check, State, StepResult
from tests.faults.engine.site import FakeHost, context, nodes

LOG = (Path(__file__).parents[1] / "data/engine_logs/peer_loss_head.log").read_text(encoding="utf-8")
NCCL = "misc/socket.cc:40 NCCL WARN socketProgress: Connection closed by remote peer"
REMOTE = "NCCL error: remote process exited or there was a network error; peer 172.31.240.12<45123>"


class Service:
    """The API as clients of the drill meet it: fine until a node is killed, fine again once units were started."""

    def __init__(self, *hosts: FakeHost, notices: bool = True, comes_back: bool = True) -> None:
        self.up = True
        self.notices, self.comes_back = notices, comes_back
        for host in hosts:
            host.on = self.hear

    def hear(self, command: str) -> None:
        if command.startswith("docker kill") and self.notices:
            self.up = False
        if command.startswith("systemctl start"):
            self.up = self.comes_back

    def health(self) -> int:
        return 200 if self.up else 503

    def chat(self, body: dict[str, Any]) -> None:
        if not self.up:
            raise BadStatusError("POST /v1/chat/completions", 500, b"EngineCore encountered an issue.")

    def in_flight_s(self, since_s: float, until_s: float) -> float:
        return 0.0


def made(tmp_path: Path, **service: bool) -> tuple[Context, FakeHost, FakeHost]:
    head, other = nodes()
    head.journal, other.unit_state = LOG, "failed"
    made = context("http://127.0.0.1:1", tmp_path, head, other, peer_loss_drill=True)
    made.client = Service(head, other, **service)  # type: ignore[assignment] # as much of the client as the drill asks
    return made, head, other


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_lost_node_is_noticed_named_and_explained_and_the_service_restored(tmp_path: Path) -> None:
    site, head, other = made(tmp_path)
    checks, figures = drill(site)
    assert [check.state for check in checks] == [State.PASS] * 4, checks
    loss = figures["peer_loss"]
    assert (loss["killed_host"], loss["named_host"]) == ("k3-b", "k3-b")
    assert loss["cause"] == "gloo lost the connection to a peer"
    assert "docker kill --signal KILL kimi-engine" in other.told
    assert not any("kill" in command for command in head.told)
    for host in (head, other):
        stopped, started = (host.told.index(f"systemctl {verb} kimi-engine.service") for verb in ("stop", "start"))
        assert stopped < started


def test_a_loss_nobody_notices_fails_and_is_restored_all_the_same(tmp_path: Path) -> None:
    site, head, _ = made(tmp_path, notices=False)
    checks, figures = drill(site)
    noticed = by_name(checks)["peer-loss.noticed"]
    assert noticed.state is State.FAIL
    assert "requests went on for 660 s with k3-b gone" in noticed.observed
    assert figures["peer_loss"]["noticed_s"] is None
    assert "systemctl start kimi-engine.service" in head.told


def test_a_service_that_does_not_come_back_fails_with_the_next_step(tmp_path: Path) -> None:
    site, *_ = made(tmp_path, comes_back=False)
    checks, figures = drill(site)
    restored = by_name(checks)["peer-loss.restored"]
    assert restored.state is State.FAIL
    assert "playbooks/serve.yml" in restored.next_step
    assert figures["peer_loss"]["restored_s"] is None


def test_an_interrupt_in_the_middle_restores_the_service(tmp_path: Path) -> None:
    site, head, _ = made(tmp_path)

    def interrupted(body: dict[str, Any]) -> None:
        if not site.client.up:  # type: ignore[attr-defined] # the Service above
            raise KeyboardInterrupt

    site.client.chat = interrupted  # type: ignore[method-assign,assignment] # as above
    with pytest.raises(KeyboardInterrupt):
        drill(site)
    assert "systemctl start kimi-engine.service" in head.told


def test_a_signal_while_ranks_are_restarted_lets_all_of_them_start_first(tmp_path: Path) -> None:
    site, head, other = made(tmp_path)
    hear = head.on

    def interrupt(command: str) -> None:
        hear(command)
        if command.startswith("systemctl stop"):
            os.kill(os.getpid(), signal.SIGINT)

    head.on = interrupt
    with pytest.raises(KeyboardInterrupt):
        drill(site)
    for host in (head, other):
        assert "systemctl start kimi-engine.service" in host.told


def test_a_connection_cut_in_the_restart_is_asked_again(tmp_path: Path) -> None:
    site, head, _ = made(tmp_path)
    hear, cuts = head.on, iter([True, False])

    def cut(command: str) -> None:
        hear(command)
        if command.startswith("systemctl start") and next(cuts, False):
            raise RuntimeError("ssh: connection closed")

    head.on = cut
    assert by_name(drill(site)[0])["peer-loss.restored"].state is State.PASS


def test_a_log_that_names_another_node_is_told(tmp_path: Path) -> None:
    site, head, _ = made(tmp_path)
    head.journal = LOG.replace("172.31.240.12", "172.31.240.11")
    named = by_name(drill(site)[0])["peer-loss.named"]
    assert named.state is State.FAIL
    assert "the survivors' logs name k3-a" in named.observed


def test_without_a_known_line_the_units_still_tell(tmp_path: Path) -> None:
    site, head, _ = made(tmp_path)
    head.journal = "INFO nothing to see\n"
    checks = by_name(drill(site)[0])
    assert checks["peer-loss.named"].state is State.WARN
    assert checks["peer-loss.cause"].state is State.WARN
    assert "k3-b failed" in checks["peer-loss.named"].observed


@pytest.mark.parametrize(
    ("lines", "cause", "address"),
    [
        pytest.param(LOG.splitlines(), "gloo lost the connection to a peer", "172.31.240.12", id="gloo"),
        pytest.param([NCCL, REMOTE], "NCCL lost the connection to a peer", "172.31.240.12", id="nccl"),
        pytest.param(
            ["Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", *LOG.splitlines()],
            "gloo lost the connection to a peer",
            "172.31.240.12",
            id="the-cause-before-the-symptom",
        ),
    ],
)
def test_explain(lines: list[str], cause: str, address: str) -> None:
    told = explain({"k3-a": lines})
    assert told is not None
    assert (told.cause, told.address, told.on) == (cause, address, "k3-a")


def test_the_drill_is_part_of_step_5_and_runs_only_when_all_else_holds(tmp_path: Path) -> None:
    site, *_ = made(tmp_path)
    ran: list[str] = []

    def fake_drill(_: Context) -> tuple[list[Check], dict[str, Any]]:
        ran.append("drill")
        return [Check(name="peer-loss.noticed", state=State.FAIL, observed="no", expected="yes")], {"peer_loss": {}}

    def ending(state: State, step: int) -> Any:
        check = Check(name="x", state=state, observed="seen", expected="wanted")
        return lambda _: StepResult.of(step, "x", [check], {"a_s": 1})

    chain = Chain(site, {n: ending(State.PASS, n) for n in STEPS}, drill=fake_drill)
    for step in site.plan.steps:
        chain.run(step)
    result = chain.run_drill()
    assert result is not None
    assert result.state is State.FAIL
    assert [check.name for check in result.checks] == ["x", "peer-loss.noticed"]
    assert {"a_s", "peer_loss", "wall_s", "in_flight_s"} <= set(result.figures)

    broken = Chain(site, {n: ending(State.PASS if n else State.FAIL, n) for n in STEPS}, drill=fake_drill)
    broken.run(0)
    assert broken.run_drill() is None
    assert ran == ["drill"]


def test_a_request_that_times_out_is_a_notice(tmp_path: Path) -> None:
    site, *_ = made(tmp_path)

    def hangs(body: dict[str, Any]) -> None:
        if not site.client.up:  # type: ignore[attr-defined] # the Service above
            raise TimedOutError("POST /v1/chat/completions", "no answer before the deadline")

    site.client.chat = hangs  # type: ignore[method-assign,assignment] # as above
    assert by_name(drill(site)[0])["peer-loss.noticed"].state is State.PASS
