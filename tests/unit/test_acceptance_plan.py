"""The plan: what is read, and one clear message for everything that is wrong."""

import json
from pathlib import Path

import pytest

from kimi_runbook.acceptance.plan import Ability, AcceptancePlan, Access
from kimi_runbook.errors import RunbookError
from tests.faults.engine.site import plan_json

URL = "http://172.31.240.11:8000"


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(json.dumps(plan_json(f"{URL}/", tmp_path)), encoding="utf-8")
    plan = AcceptancePlan.load(file)
    assert (plan.endpoint, plan.steps, plan.not_planned) == (URL, (0, 1, 2, 3, 4, 5), (6,))
    assert plan.head is not None
    assert (plan.head.name, plan.engine.world_size, plan.max_tokens) == ("k3-a", 2, 16)


def test_a_bare_endpoint_needs_no_hosts_and_no_lock(tmp_path: Path) -> None:
    plan = AcceptancePlan.from_json(plan_json(URL, tmp_path, steps=(2, 3, 4)))
    assert (plan.hosts, plan.lock, plan.not_planned) == ((), None, (0, 1, 5, 6))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"schema_version": 2}, "schema_version: 2; expected 1", id="other-schema"),
        pytest.param({"steps": []}, "steps are []", id="no-steps"),
        pytest.param({"steps": [7]}, "steps are [7]", id="unknown-step"),
        pytest.param({"steps": ["0"]}, "'0'; expected step numbers", id="step-as-text"),
        pytest.param({"endpoint": "172.31.240.11:8000"}, "is no URL", id="no-url"),
        pytest.param({"metrics": []}, "metrics is empty", id="no-metrics"),
        pytest.param({"concurrency": 0}, "concurrency 0", id="no-streams"),
        pytest.param({"peak_concurrency": 3}, "peak_concurrency 3; expected at least concurrency 4", id="low-peak"),
        pytest.param({"steps": [6]}, "step 6 is planned and observe_s is 0", id="observation-of-no-time"),
        pytest.param({"continues": "runs/x"}, "continued by steps [0, 1, 2, 3, 4, 5]", id="continued-by-a-chain"),
        pytest.param({"steps": [2], "peer_loss_drill": True}, "step 5 is not planned", id="drill-without-step-5"),
        pytest.param(
            {"model_limits": {"abilities": {"tools": "maybe"}}},
            "'maybe' is not a valid Wanted",
            id="ability-as-you-like",
        ),
        pytest.param({"hosts": []}, "hosts is empty", id="no-hosts"),
        pytest.param({"lock": None}, "lock is empty", id="no-lock"),
        pytest.param({"launch": {}}, "launch has nothing about k3-a", id="host-without-launch"),
        pytest.param({"model": None}, "model", id="no-model"),
    ],
)
def test_a_plan_that_does_not_hold_together_is_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(RunbookError) as caught:
        AcceptancePlan.from_json(plan_json(URL, tmp_path) | change)
    assert says in str(caught.value)
    assert "playbooks/accept.yml" in caught.value.next_step


def test_what_is_wanted_beyond_text_is_probed_unless_told(tmp_path: Path) -> None:
    change = {"model_limits": {"abilities": {"tools": "required"}}, "access": {"api_key_env": "K3_KEY"}}
    plan = AcceptancePlan.from_json(plan_json(URL, tmp_path) | change)
    assert plan.abilities == {Ability.TOOLS: "required", Ability.REASONING: "probe", Ability.IMAGES: "probe"}
    assert plan.access == Access(api_key_env="K3_KEY")
    assert (plan.peak_concurrency, plan.observe_s, plan.peer_loss_drill, plan.continues) == (4, 0, False, None)


def test_ranks_are_each_there_once(tmp_path: Path) -> None:
    value = plan_json(URL, tmp_path)
    value["hosts"][1]["rank"] = 0
    with pytest.raises(RunbookError, match=r"ranks are \[0, 0\]"):
        AcceptancePlan.from_json(value)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RunbookError):
        AcceptancePlan.load(file)
