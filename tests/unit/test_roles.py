"""What every role owes its users: a typed front door, a default for every variable, and a README that is current."""

import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import role_readmes  # noqa: E402 (a script beside the documents it writes)

from kimi_runbook.transaction.steps import NAMES  # noqa: E402

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())


def load(path: Path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_specified_and_every_option_has_a_default(role):
    folder = ROOT / "roles" / role
    options = load(folder / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load(folder / "defaults/main.yml")
    own = {name for name, option in options.items() if not option.get("required")}
    assert own == set(defaults)


@pytest.mark.parametrize("role", ROLES)
def test_specified_defaults_are_the_defaults(role):
    folder = ROOT / "roles" / role
    options = load(folder / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load(folder / "defaults/main.yml")
    stated = {name: option["default"] for name, option in options.items() if "default" in option}
    assert stated == {name: defaults[name] for name in stated}


@pytest.mark.parametrize(("path", "text"), role_readmes.all_readmes().items(), ids=lambda value: str(value)[-40:])
def test_readmes_are_current(path, text):
    assert path.read_text(encoding="utf-8") == text, "run `make docs`"


@pytest.mark.parametrize("path", sorted(ROOT.glob("roles/*/tasks/*.yml")), ids=lambda path: "/".join(path.parts[-3:]))
def test_no_task_ignores_its_failure(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        assert "ignore_errors" not in line
        assert "ignore_unreachable" not in line


def plays(playbook):
    return {play["name"]: play for play in load(ROOT / f"playbooks/{playbook}.yml")}


@pytest.mark.parametrize(
    ("playbook", "play"),
    [
        ("stage", "Prove and fetch what the planned hosts will need"),
        ("provision", "Prove that the change may begin and that every version resolves"),
        ("serve", "Serve"),
        ("accept", "Accept"),
    ],
)
def test_one_failed_host_stops_every_host(playbook, play):
    assert plays(playbook)[play]["any_errors_fatal"] is True


def test_provision_rolls_with_a_canary_and_stops_at_the_first_failure():
    play = plays("provision")["Bring hosts to the lock"]
    assert play["max_fail_percentage"] == 0
    assert "kimi_plan.batches | map('length')" in play["serial"]


def test_the_proof_covers_every_role_the_frame_plays():
    defaults = load(ROOT / "roles/host_transaction/defaults/main.yml")
    proof = plays("provision")["Prove that nothing is left to provision"]["roles"][0]["vars"]
    played = set(defaults["host_transaction_roles"]) - {"node_drain"}  # which has no wishes of its own
    assert set(proof["host_snapshot_settled_roles"]) == {"host_transaction"} | played


def test_the_frame_has_a_task_for_every_step_in_its_order():
    tasks = load(ROOT / "roles/host_transaction/tasks/change.yml")
    assert tuple(task["vars"]["host_transaction_step"] for task in tasks if "vars" in task) == NAMES
    assert tasks[0]["ansible.builtin.import_tasks"] == "main.yml"
    assert tasks[-1]["ansible.builtin.import_tasks"] == "commit.yml"


def test_the_frame_loops_over_no_includes():
    """Included items come in the order in which the first host names them, which need not be every host's."""
    for path in (ROOT / "roles/host_transaction/tasks").glob("*.yml"):
        assert not any("loop" in task or "with_items" in task for task in load(path) or []), path


def test_provision_ends_with_the_proof_that_nothing_is_left():
    settled = plays("provision")["Prove that nothing is left to provision"]["roles"][0]["vars"][
        "host_snapshot_settled_roles"
    ]
    assert set(settled) == {
        "host_transaction",
        "gpu_driver",
        "container_runtime",
        "rdma",
        "fabric_services",
        "engine_image",
        "model_weights",
        "interconnect",
    }


def test_no_placeholder_is_left_in_the_documents():
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        assert "@@" not in path.read_text(encoding="utf-8"), path


def test_clients_get_a_replica_back_only_after_its_first_good_answer():
    play = plays("serve")["Serve"]
    assert [role["role"] for role in play["roles"]] == ["engine", "service_gap"]
    assert [task["ansible.builtin.import_role"]["tasks_from"] for task in play["post_tasks"]] == ["return"]


def test_a_host_counts_as_staged_only_after_all_was_fetched():
    play = plays("stage")["Prove and fetch what the planned hosts will need"]
    assert [role["role"] for role in play["roles"]] == ["node_stage"]
    assert [task["ansible.builtin.import_role"]["tasks_from"] for task in play["post_tasks"]] == ["note"]
