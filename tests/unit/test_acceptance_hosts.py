"""Steps 0, 1 and 5 on paper hosts: healthy passes, each thing spoiled turns its own check red."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_runbook.acceptance import step0_host, step1_start, step5_multi_node
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.hosts import HostError, parse_container
from kimi_runbook.acceptance.result import State, StepResult
from kimi_runbook.findings import Finding
from kimi_runbook.verdict import VerdictName, judge_steps
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import DIGEST, OTHER_DIGEST, REPOSITORY, FakeHost, argv, context, nodes, snapshot

Spoil = Callable[[FakeHost], None]


def spoil(**values: object) -> Spoil:
    def change(host: FakeHost) -> None:
        for name, value in values.items():
            setattr(host, name, value)

    return change


@pytest.fixture(autouse=True)
def _no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge has its own tests; here it finds nothing unless a test says otherwise."""
    monkeypatch.setattr(step0_host, "judge_host", lambda *_: ())


def checks_of(result: StepResult) -> dict[str, State]:
    return {check.name: check.state for check in result.unmet()}


def run_on(step: Callable[[Context], StepResult], run_dir: Path, change: Spoil | None = None) -> StepResult:
    """Run a step with the second node spoiled."""
    first, second = nodes()
    if change:
        change(second)
    with FakeEngine() as engine:
        return step(context(engine.url, run_dir, first, second))


def test_healthy_hosts_pass(tmp_path: Path) -> None:
    result = run_on(step0_host.run, tmp_path)
    assert result.state is State.PASS, result.unmet()
    assert result.figures["gpus"]["k3-b"] == {"NVIDIA H200 (stand-in)": 2}


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        pytest.param(spoil(driver="570.133.20"), "k3-b.driver-loaded", "570.133.20 is loaded", id="old-driver"),
        pytest.param(
            spoil(digests=[f"{REPOSITORY}@{OTHER_DIGEST}"]), "k3-b.image-digest", OTHER_DIGEST, id="other-image"
        ),
        pytest.param(spoil(digests=[]), "k3-b.image-digest", "without a registry digest", id="image-built-here"),
        pytest.param(spoil(container=False), "k3-b.image-digest", "No such container", id="no-container"),
        pytest.param(
            spoil(argv=[*argv(1), "--enforce-eager"]), "k3-b.arguments", "--enforce-eager", id="extra-argument"
        ),
        pytest.param(spoil(argv=argv(0)), "k3-b.arguments", "argument 8 is '0'; expected '1'", id="other-rank"),
        pytest.param(spoil(argv=argv(1)[:-1]), "k3-b.arguments", "argument 9 is missing", id="argument-lost"),
        pytest.param(
            spoil(env={"VLLM_HOST_IP": "172.31.240.11", "HF_HUB_OFFLINE": "1"}),
            "k3-b.own-address",
            "VLLM_HOST_IP=172.31.240.11",
            id="address-of-another-node",
        ),
        pytest.param(
            spoil(env={"VLLM_HOST_IP": "172.31.240.12"}), "k3-b.environment", "HF_HUB_OFFLINE=unset", id="variable-lost"
        ),
        pytest.param(spoil(nccl_sha="0" * 64), "k3-b.inside/etc/nccl.conf", "000000000000", id="file-not-effective"),
    ],
)
def test_a_spoiled_host_turns_its_check_red(change: Spoil, check: str, says: str, tmp_path: Path) -> None:
    result = run_on(step0_host.run, tmp_path, change)
    assert checks_of(result).get(check) is State.FAIL, result.unmet()
    assert any(says in one.sentence() for one in result.unmet() if one.name == check)
    assert not [name for name in checks_of(result) if name.startswith("k3-a")]


def test_a_host_that_does_not_answer_is_no_pass(tmp_path: Path) -> None:
    result = run_on(step0_host.run, tmp_path, spoil(reachable=False))
    assert checks_of(result)["k3-b.driver-loaded"] is State.INCONCLUSIVE
    assert result.state is State.FAIL


def test_findings_above_warn_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(severity: str) -> Finding:
        return Finding(
            code="driver.reboot",
            severity=severity,
            host="k3-a",
            role="gpu_driver",
            observed="x",
            expected="y",
            source="lock",
            next_step="Reboot it.",
        )

    for severity, state in (("stop", State.FAIL), ("change", State.FAIL), ("warn", State.PASS), ("info", State.PASS)):
        monkeypatch.setattr(step0_host, "judge_host", lambda *_, s=severity: (finding(s),))
        result = run_on(step0_host.run, tmp_path)
        assert {check.state for check in result.checks if check.name.endswith(".findings")} == {state}


def test_a_gpu_fewer_on_one_node_is_red(tmp_path: Path) -> None:
    lost = snapshot("k3-b")
    lost["gpus"].pop()
    with FakeEngine() as engine:
        asked = context(engine.url, tmp_path, *nodes(), snapshots={"k3-a": snapshot("k3-a"), "k3-b": lost})
        result = step0_host.run(asked)
    assert checks_of(result) == {"same-topology": State.FAIL}
    assert "k3-b: 1 x NVIDIA H200" in result.unmet()[0].observed


def test_secrets_of_the_environment_are_compared_and_not_shown(tmp_path: Path) -> None:
    first, second = nodes()
    first.env["HF_TOKEN"] = second.env["HF_TOKEN"] = "hf_" + "x" * 8
    with FakeEngine() as engine:
        asked = context(engine.url, tmp_path, first, second)
        launch = asked.plan.launch["k3-b"].env
        launch["HF_TOKEN"] = "hf_" + "y" * 8  # type: ignore[index] # a dict behind a read-only type
        result = step0_host.run(asked)
    (check,) = [check for check in result.unmet() if check.name == "k3-b.environment"]
    assert "HF_TOKEN=(not shown)" in check.observed
    assert "hf_" not in check.sentence()


def test_a_clean_start_passes_with_the_time_of_each_phase(tmp_path: Path) -> None:
    result = run_on(step1_start.run, tmp_path)
    assert result.state is State.PASS, result.unmet()
    assert result.figures["phases_s"]["k3-a"]["ready"] == 31.5
    assert "ready" not in result.figures["phases_s"]["k3-b"]


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        pytest.param(spoil(running=False), "k3-b.running", "not running", id="stopped"),
        pytest.param(spoil(restarts=2), "k3-b.running", "2 restarts", id="restarted-by-docker"),
        pytest.param(spoil(unit_restarts=1), "k3-b.unit-restarts", "restarted 1 times", id="restarted-by-systemd"),
        pytest.param(
            spoil(log="ERROR 11-30 14:53:31 [core.py:1] EngineCore encountered a fatal error.\n"),
            "k3-b.no-fatal-line",
            "engine died: ERROR",
            id="fatal-line",
        ),
    ],
)
def test_a_bad_start_turns_its_check_red(change: Spoil, check: str, says: str, tmp_path: Path) -> None:
    result = run_on(step1_start.run, tmp_path, change)
    assert checks_of(result) == {check: State.FAIL}
    assert says in result.unmet()[0].sentence()


@pytest.mark.parametrize(
    ("engine", "check", "says"),
    [
        pytest.param(FakeEngine(Fault.UNHEALTHY), "health", "HTTP 503", id="unhealthy"),
        pytest.param(FakeEngine(version="0.31.0"), "version", "0.31.0; expected 0.32.0 (lock)", id="other-version"),
    ],
)
def test_an_engine_that_is_not_up_is_red(engine: FakeEngine, check: str, says: str, tmp_path: Path) -> None:
    with engine:
        result = step1_start.run(context(engine.url, tmp_path, *nodes()))
    assert checks_of(result) == {check: State.FAIL}
    assert says in result.unmet()[0].sentence()


def test_a_head_without_a_ready_line_is_red(tmp_path: Path) -> None:
    first, second = nodes()
    first.log = "\n".join(first.log.splitlines()[:-1])
    with FakeEngine() as engine:
        result = step1_start.run(context(engine.url, tmp_path, first, second))
    assert checks_of(result) == {"k3-a.ready-line": State.FAIL}
    assert "last phase seen is kv_cache" in result.unmet()[0].observed


def test_a_log_on_file_is_read_instead_of_the_nodes(tmp_path: Path) -> None:
    file = tmp_path / "engine.log"
    file.write_text(nodes()[0].log + "torch.OutOfMemoryError: CUDA out of memory.\n", encoding="utf-8")
    with FakeEngine() as engine:
        asked = context(engine.url, tmp_path, *nodes())
        asked.plan.engine.logs["k3-a"] = str(file)  # type: ignore[index] # a dict behind a read-only type
        result = step1_start.run(asked)
    assert checks_of(result) == {"k3-a.no-fatal-line": State.FAIL}


def traffic_of(*readings: int) -> Callable[[], int]:
    """Bytes moved at each reading: before, after the request, after the idle interval."""
    values = iter(readings)
    return lambda: next(values)


def run_step5(
    run_dir: Path, change: Spoil | None = None, moved: tuple[int, int, int] = (0, 500_000, 500_100)
) -> StepResult:
    first, second = nodes()
    for host in (first, second):
        host.moved = traffic_of(*moved)
    if change:
        change(second)
    with FakeEngine() as engine:
        return step5_multi_node.run(context(engine.url, run_dir, first, second))


def test_two_nodes_of_one_engine_pass(tmp_path: Path) -> None:
    result = run_step5(tmp_path)
    assert result.state is State.PASS, result.unmet()
    assert result.figures["backends"] == ["gloo"]
    assert result.figures["busy_bytes"] == {"k3-a": 500_000, "k3-b": 500_000}


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        pytest.param(spoil(argv=argv(0)), "k3-b.rank", "rank 0 running", id="rank-0-twice"),
        pytest.param(spoil(running=False), "k3-b.rank", "stopped", id="stopped"),
        pytest.param(spoil(env={"VLLM_HOST_IP": "127.0.0.1"}), "k3-b.rank", "under 127.0.0.1", id="other-address"),
        pytest.param(spoil(digests=[f"{REPOSITORY}@{OTHER_DIGEST}"]), "k3-b.rank", OTHER_DIGEST, id="other-image"),
        pytest.param(spoil(log="nothing of use\n"), "world-size-formed", "k3-b: ranks none", id="no-rendezvous"),
    ],
)
def test_a_node_that_is_not_part_of_the_engine_is_red(change: Spoil, check: str, says: str, tmp_path: Path) -> None:
    result = run_step5(tmp_path, change)
    assert checks_of(result) == {check: State.FAIL}
    assert says in result.unmet()[0].sentence()
    assert DIGEST[:19] in " ".join(one.expected for one in result.checks if one.name == "k3-b.rank")


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        pytest.param((0, 800, 900), "800 bytes on eth0", id="no-traffic-during-the-request"),
        pytest.param((0, 500_000, 9_000_000_000), "equal idle interval", id="as-much-without-a-request"),
    ],
)
def test_traffic_that_the_request_did_not_cause_is_red(moved: tuple[int, int, int], says: str, tmp_path: Path) -> None:
    result = run_step5(tmp_path, moved=moved)
    assert checks_of(result) == {"k3-a.traffic": State.FAIL, "k3-b.traffic": State.FAIL}
    assert says in result.unmet()[0].sentence()


def test_an_interconnect_that_nobody_knows_is_inconclusive(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        result = step5_multi_node.run(context(engine.url, tmp_path, *nodes(), interconnect="carrier-pigeon"))
    assert checks_of(result) == {"backend": State.INCONCLUSIVE, "traffic": State.INCONCLUSIVE}


def comm_line(nodes_of_comm: int, mnnvl: int) -> str:
    """NCCL's line about a communicator, as NCCL_DEBUG=INFO prints it."""
    return (
        f"tray:{nodes_of_comm}:9 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 8 nNodes {nodes_of_comm} "
        f"localRanks 4 localRank 0 MNNVL {mnnvl}\n"
    )


NVLS_LINE = "n:1:9 [0] NCCL INFO NVLS comm 0x7f31 headRank 0 nHeads 8 nvlsRanks 8 buffSize 4194304\n"


def run_step5_over_nvlink(run_dir: Path, interconnect: str, first_says: str, second_says: str) -> StepResult:
    pair = nodes()
    for host, says in zip(pair, (first_says, second_says), strict=True):
        host.log = host.log.replace("backend=gloo", "backend=nccl") + says
    with FakeEngine() as engine:
        return step5_multi_node.run(context(engine.url, run_dir, *pair, interconnect=interconnect))


@pytest.mark.parametrize(
    ("interconnect", "says"),
    [
        pytest.param("mnnvl", comm_line(2, 1), id="mnnvl"),
        pytest.param("mnnvl", comm_line(1, 0) + comm_line(18, 1), id="mnnvl-and-a-group-of-one-node"),
        pytest.param("nvlink", NVLS_LINE, id="nvls"),
    ],
)
def test_the_way_over_nvlink_is_proved_by_nccls_own_lines(interconnect: str, says: str, tmp_path: Path) -> None:
    result = run_step5_over_nvlink(tmp_path, interconnect, says, says)
    assert result.state is State.PASS, result.unmet()
    assert {one.name for one in result.checks} >= {"k3-a.traffic", "k3-b.traffic"}


def test_a_node_that_fell_back_from_mnnvl_is_red(tmp_path: Path) -> None:
    result = run_step5_over_nvlink(tmp_path, "mnnvl", comm_line(2, 1), comm_line(2, 1) + comm_line(2, 0))
    assert checks_of(result) == {"k3-b.traffic": State.FAIL}
    assert "MNNVL 0" in result.unmet()[0].observed
    assert judge_steps([result]).name is VerdictName.FIX_ENVIRONMENT


@pytest.mark.parametrize("interconnect", ["mnnvl", "nvlink"])
@pytest.mark.parametrize("says", ["", comm_line(1, 0)], ids=["silent", "one-node-only"])
def test_a_silent_nccl_is_accepted_with_the_reason_in_sight(interconnect: str, says: str, tmp_path: Path) -> None:
    result = run_step5_over_nvlink(tmp_path, interconnect, says, says)
    assert checks_of(result) == {"k3-a.traffic": State.WARN, "k3-b.traffic": State.WARN}
    verdict = judge_steps([result])
    assert verdict.name is VerdictName.ACCEPT
    (reason,) = verdict.reasons
    assert reason.text.startswith("k3-a.traffic (also k3-b.traffic): the transport was not observed")
    assert "NCCL_DEBUG=INFO" in reason.text


def test_option_values_are_found_in_both_spellings() -> None:
    assert step5_multi_node.argument(["--node-rank", "1"], "--node-rank") == "1"
    assert step5_multi_node.argument(["--node-rank=1"], "--node-rank") == "1"
    assert step5_multi_node.argument(["--node-rank-other", "1"], "--node-rank") is None
    assert step5_multi_node.argument(["--node-rank"], "--node-rank") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"Id": "x"}]', "Error"])
def test_what_is_no_container_is_an_error(text: str) -> None:
    with pytest.raises(HostError):
        parse_container(text)
