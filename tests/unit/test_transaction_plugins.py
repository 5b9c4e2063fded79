"""What the controller does around a change: gate, state and outcome, and the table a run ends with."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail
from judging import a_lock

from kimi_runbook.findings import make_finding
from kimi_runbook.plan import build_plan
from kimi_runbook.transaction.outcome import Outcome
from kimi_runbook.transaction.outcome_file import change_outcome, load_outcome

FLEET = {"replicas": [["a"], ["b"], ["c"]], "serving": [["a"], ["b"], ["c"]], "domains": {}}


def a_plan(*batches: tuple[str, ...]) -> Any:
    hosts = [host for batch in batches for host in batch]
    findings = [
        make_finding("package.version", host=host, observed="1", expected="2", role="gpu_driver") for host in hosts
    ]
    return build_plan("r1", findings, a_lock(), batches)


class Acting:
    """An action plugin outside Ansible: what it is given, what hosts answer, and what it shows."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
        spec = importlib.util.spec_from_file_location(f"action_{name}", root / f"plugins/action/{name}.py")
        assert spec and spec.loader
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        monkeypatch.setattr(self.module.ActionBase, "run", lambda *_: {})
        monkeypatch.setattr(self.module, "Display", lambda: SimpleNamespace(display=self.display))
        self.run_dir = tmp_path / "r1"
        self.run_dir.mkdir()
        self.shown: list[str] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[dict[str, Any]] = []

    def display(self, text: str) -> None:
        self.shown += text.splitlines()

    def execute(self, module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        self.asked.append((module_name, module_args))
        return self.answers.pop(0) if self.answers else {"status": 200}

    def act(self, *, host: str = "a", snapshots: dict[str, Any] | None = None, check: bool = False, **args: Any) -> Any:
        action = self.module.ActionModule.__new__(self.module.ActionModule)
        action._task = SimpleNamespace(args={"run": {"id": "r1", "dir": str(self.run_dir)}, **args}, check_mode=check)
        action._execute_module = self.execute
        hostvars = {
            name: {
                "engine_address": f"192.0.2.{ord(name)}",
                "__host_snapshot_taken": {
                    "snapshot": {"schema_version": 1, "hostname": name, "transaction": (snapshots or {}).get(name)}
                },
            }
            for name in "abc"
        }
        return action.run(task_vars={"inventory_hostname": host, "hostvars": hostvars})


@pytest.fixture
def gate(project_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Acting:
    return Acting(project_root, monkeypatch, tmp_path, "kimi_gate")


def conditions(phase: str, **more: Any) -> dict[str, Any]:
    plan = more.pop("plan", a_plan(("a",), ("b", "c")))
    given = {"phase": phase, "plan": plan.to_json(), "fleet": FLEET, "roles": ["gpu_driver"], "min_up": 0}
    return given | {"sizes": [1], "wait_s": 0, "port": 8000} | more


def lease(run: str, expires_in_s: int) -> dict[str, Any]:
    held = {"run": run, "owner": "ops@desk", "age_s": 60, "expires_in_s": expires_in_s}
    return {"state": "open", "run": run, "step": "rdma", "lease": held}


def test_the_gate_opens_the_outcome_and_says_what_it_will_take(gate: Acting) -> None:
    told = gate.act(**conditions("run"), snapshots={"a": {"state": "done", "durations": {"gpu_driver": [60]}}})["told"]
    assert told == [
        "batch 1: a: 2 min (slowest a; guessed: audit)",
        "batch 2: b, c: 2 min (slowest b; guessed: audit)",
    ]
    outcome = load_outcome(gate.run_dir)
    assert outcome and {one.state for one in outcome.hosts.values()} == {"not_begun"}


def test_the_gate_writes_nothing_in_check_mode_and_minds_no_window(gate: Acting) -> None:
    gate.act(**conditions("run", window_start="2999-01-01T00:00"), check=True)
    assert gate.act(**conditions("batch", batch=["a"], min_up=3), check=True)["told"] == []
    assert load_outcome(gate.run_dir) is None


@pytest.mark.parametrize(
    ("more", "snapshots", "message"),
    [
        pytest.param({}, {"b": lease("r0", 60)}, "b: leased by ops@desk for run r0.*take_over=r0", id="foreign-lease"),
        pytest.param({"take_over": "r7"}, {"b": lease("r0", 60)}, "run r0", id="another-is-taken-over"),
        pytest.param({"window_start": "2999-01-01T00:00"}, {}, "window_start 2999-01-01", id="too-early"),
        pytest.param({"window_end": "2000-01-01T00:00"}, {}, "the window is over", id="too-late"),
        pytest.param({"min_up": 3}, {}, "provision_min_up", id="capacity"),
        pytest.param({"approved_plan": "/nonexistent"}, {}, "no such file", id="no-approval"),
    ],
)
def test_the_gate_stops_before_any_change(
    gate: Acting, more: dict[str, Any], snapshots: dict[str, Any], message: str
) -> None:
    with pytest.raises(AnsibleActionFail, match=message):
        gate.act(**conditions("run", **more), snapshots=snapshots)
    assert load_outcome(gate.run_dir) is None


@pytest.mark.parametrize(
    ("more", "standing"),
    [({"take_over": "r0"}, lease("r0", 60)), ({}, lease("r1", 60)), ({}, lease("r0", -60))],
)
def test_the_gate_lets_its_own_the_taken_over_and_the_expired_pass(
    gate: Acting, more: dict[str, Any], standing: dict[str, Any]
) -> None:
    told = gate.act(**conditions("run", **more), snapshots={"b": standing})["told"]
    assert any("taken for dead" in line for line in told) is (standing["lease"]["expires_in_s"] < 0)


def test_the_gate_compares_with_the_approved_plan(gate: Acting, tmp_path: Path) -> None:
    path = tmp_path / "approved.json"
    path.write_text(json.dumps(a_plan(("a",), ("b", "c")).to_json()), encoding="utf-8")
    gate.act(**conditions("run", approved_plan=str(path)))
    with pytest.raises(AnsibleActionFail, match=r"- batches a \| b, c\n\+ batches a \| b \| c"):
        gate.act(**conditions("run", approved_plan=str(path), plan=a_plan(("a",), ("b",), ("c",))))


def test_no_batch_after_one_that_did_not_end_well(gate: Acting) -> None:
    change_outcome(gate.run_dir, lambda _: Outcome.of("r1", "p", "l", [["a"], ["b", "c"]]).with_host("a", state="open"))
    with pytest.raises(AnsibleActionFail, match=r"batch 2 \(b, c\): a of an earlier batch did not end well"):
        gate.act(**conditions("batch", batch=["b", "c"]))
    change_outcome(gate.run_dir, lambda one: one.with_host("a", state="done"))  # type: ignore[union-attr]
    gate.act(**conditions("batch", batch=["b", "c"]))


def test_a_batch_is_not_begun_that_cannot_finish(gate: Acting) -> None:
    end = (datetime.now().astimezone() + timedelta(minutes=9)).isoformat()
    slow = {"state": "done", "durations": {"gpu_driver": [600], "audit": [1]}}
    quick = {"state": "done", "durations": {"gpu_driver": [60], "audit": [1]}}
    gate.act(**conditions("batch", batch=["a"], window_end=end), snapshots={"a": quick, "b": slow})
    with pytest.raises(AnsibleActionFail, match=r"window_end.*slowest b; all measured"):
        gate.act(**conditions("batch", batch=["b"], window_end=end), snapshots={"a": quick, "b": slow})


@pytest.mark.parametrize(("statuses", "enough"), [([200, 200], True), ([200, -1], False), ([503, 503], False)])
def test_capacity_is_asked_of_the_replicas_before_each_batch(gate: Acting, statuses: list[int], enough: bool) -> None:
    gate.answers = [{"status": status} for status in statuses]
    if enough:
        gate.act(**conditions("batch", batch=["a"], min_up=2))
    else:
        with pytest.raises(
            AnsibleActionFail, match=r"other replicas answer /health; not those of .*playbooks/serve.yml"
        ):
            gate.act(**conditions("batch", batch=["a"], min_up=2))
    assert [args["url"] for _, args in gate.asked] == ["http://192.0.2.98:8000/health", "http://192.0.2.99:8000/health"]


@pytest.fixture
def change(project_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Acting:
    return Acting(project_root, monkeypatch, tmp_path, "host_transaction")


def standing(step: str, begun: tuple[str, ...] = (), ended: bool = True, **more: Any) -> dict[str, Any]:
    now = {"step": step, "begun": list(begun), "interrupted": [] if ended else list(begun)}
    return {"transaction": now, "interrupted": [], "begun": [], "note": "", **more}


def test_a_change_from_begin_to_commit(change: Acting) -> None:
    plan = a_plan(("a",), ("b",)).to_json()
    change.answers = [standing("begin", note="took over from run r0"), standing("drain", ("drain",), ended=False)]
    change.answers += [standing("gpu_driver", ("drain",)), standing("commit")]
    begun = change.act(action="begin", plan=plan, roles=["gpu_driver", "node_drain"], ttl_s=60, take_over="r0")
    assert begun["due"] == ["drain", "gpu_driver", "audit", "restore"]
    assert begun["entries"]["restore"] == {"role": "node_drain", "entry": "restore"}
    assert change.shown == ["a: took over from run r0"]
    name, asked = change.asked[0]
    assert (name, asked["run"], asked["take_over"], asked["ttl_s"]) == ("host_transaction", "r1", "r0", 60)
    assert asked["plan_digest"].startswith("sha256:") and "@" in asked["owner"] and "plan" not in asked
    change.act(action="step", step="drain")
    outcome = load_outcome(change.run_dir)
    assert outcome and (outcome.hosts["a"].step, outcome.hosts["a"].drained) == ("drain", False)
    change.act(action="step", step="gpu_driver")
    outcome = load_outcome(change.run_dir)
    assert outcome and (outcome.hosts["a"].step, outcome.hosts["a"].drained) == ("gpu_driver", True)
    change.act(action="commit")
    outcome = load_outcome(change.run_dir)
    assert outcome and (outcome.hosts["a"].state, outcome.hosts["a"].drained) == ("done", False)


def test_an_interrupted_step_calls_its_roles_handlers(change: Acting) -> None:
    plan = a_plan(("b",)).to_json()
    change.answers = [standing("rdma") | {"interrupted": ["rdma"], "begun": ["rdma"]}]
    begun = change.act(action="begin", plan=plan, roles=["rdma"])
    assert begun["due"] == ["rdma", "audit"]
    assert begun["handlers"] == {
        "rdma": ["Let systemd read its own limits again", "Let logind read its settings again"]
    }


def test_a_failure_is_on_the_outcome_with_its_reason(change: Acting) -> None:
    change.answers = [standing("rdma")]
    change.act(action="fail", reason="no module")
    outcome = load_outcome(change.run_dir)
    assert outcome and (outcome.hosts["a"].state, outcome.hosts["a"].reason) == ("failed", "no module")


def test_a_refused_host_was_not_begun(change: Acting) -> None:
    change_outcome(change.run_dir, lambda _: Outcome.of("r1", "p", "l", [["a"]]))
    change.answers = [{"failed": True, "msg": "leased by run r9", "refused": True}]
    result = change.act(action="begin", plan=a_plan(("a",)).to_json(), roles=["gpu_driver"])
    assert result["failed"]
    outcome = load_outcome(change.run_dir)
    assert outcome and (outcome.hosts["a"].state, outcome.hosts["a"].reason) == ("not_begun", "leased by run r9")


def test_check_mode_leaves_no_outcome(change: Acting) -> None:
    change.answers = [standing("begin")]
    change.act(action="begin", plan=a_plan(("a",)).to_json(), roles=["gpu_driver"], check=True)
    assert load_outcome(change.run_dir) is None


def test_the_table_is_printed_last_and_knows_who_stopped_answering(project_root: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("kimi_outcome", project_root / "plugins/callback/kimi_outcome.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    callback, shown = module.CallbackModule(), []
    callback._display = SimpleNamespace(display=shown.append, warning=shown.append)
    change_outcome(
        tmp_path, lambda _: Outcome.of("r1", "p", "l", [["a", "b"]]).with_host("a", state="open", step="rdma")
    )

    def result(action: str, host: str, **told: Any) -> Any:
        return SimpleNamespace(
            _task=SimpleNamespace(action=action), _host=SimpleNamespace(get_name=lambda: host), _result=told
        )

    callback.v2_playbook_on_task_start(None, False)
    callback.v2_runner_on_start(None, None)
    callback.v2_runner_on_ok(result("kimi_run", "a", run={"id": "r1", "dir": str(tmp_path)}))
    callback.v2_runner_on_unreachable(result("copy", "a", msg="Connection refused"))
    callback.v2_playbook_on_stats(None)
    text = "\n".join(shown)
    assert "at step rdma: not reached any more" in text and "Connection refused" in text
    assert "next: ansible-playbook playbooks/provision.yml -e take_over=r1" in text
    assert shown[-1] == "cost: 1 tasks, run 1 times"
