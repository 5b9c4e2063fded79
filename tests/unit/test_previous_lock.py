"""Which lock a rollback goes back to, and that the plays after it really get that one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lock_cases import full_lock

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import load_lock
from kimi_runbook.transaction.previous_lock import find_previous_lock, named_lock

DONE = {"k3-a": {"state": "done"}, "k3-b": {"state": "done"}}


def lock_of(facts_version):
    return {**full_lock(), "recipe_facts_version": facts_version}


def write_lock(path, facts_version):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(lock_of(facts_version)))
    return load_lock(path)


@pytest.fixture
def runs(tmp_path):
    """Return a function that leaves the folder of a run behind."""

    def leave(run_id, facts_version, hosts=DONE, **more):
        folder = tmp_path / "runs" / run_id
        lock = write_lock(folder / "lock.json", facts_version)
        outcome = {"schema_version": 1, "run_id": run_id, "lock_digest": lock.digest(), "hosts": hosts, **more}
        (folder / "outcome.json").write_text(json.dumps(outcome))
        return folder

    leave.dir = tmp_path / "runs"
    leave.present = write_lock(tmp_path / "lock.yml", "2")
    return leave


def test_the_newest_finished_run_with_another_lock_is_it(runs):
    runs("20261101T000000Z-0001", "0")
    wanted = runs("20261102T000000Z-0001", "1")
    runs("20261103T000000Z-0001", "2")
    found = find_previous_lock(runs.dir, runs.present)
    assert (found.run_id, found.file) == (wanted.name, str(wanted / "lock.json"))
    assert found.digest == load_lock(wanted / "lock.json").digest()
    assert found.to_json()["lock"] == json.loads((wanted / "lock.json").read_text())


def test_going_back_twice_leads_to_the_same_lock(runs):
    runs("20261101T000000Z-0001", "1")
    runs("20261102T000000Z-0001", "2")
    runs("20261103T000000Z-0001", "1")  # the rollback
    found = find_previous_lock(runs.dir, runs.present)
    assert found.run_id == "20261103T000000Z-0001"
    assert found.lock.recipe_facts_version == "1"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(
            lambda f: (f / "outcome.json").write_text("{half"), "outcome.json cannot be read", id="half-written"
        ),
        pytest.param(lambda f: (f / "outcome.json").write_text("[]"), "outcome.json cannot be read", id="no-outcome"),
        pytest.param(
            lambda f: (f / "outcome.json").write_text('{"hosts": []}'), "names no host", id="hosts-no-mapping"
        ),
        pytest.param(lambda f: (f / "outcome.json").write_text('{"hosts": {}}'), "names no host", id="no-host"),
        pytest.param(
            lambda f: (f / "outcome.json").write_text('{"hosts": {"k3-a": {"state": "done"}, "k3-b": "?"}}'),
            "k3-b is unknown",
            id="no-state",
        ),
        pytest.param(
            lambda f: (f / "outcome.json").write_text('{"hosts": {"k3-a": {"state": "failed"}}}'),
            "k3-a is failed",
            id="failed",
        ),
        pytest.param(lambda f: write_lock(f / "lock.json", "7"), "not the lock it was run with", id="another-lock"),
        pytest.param(lambda f: (f / "lock.json").unlink(), "no such file", id="no-lock"),
        pytest.param(lambda f: (f / "lock.json").write_text("{}"), "absent", id="lock-without-content"),
    ],
)
def test_a_run_that_does_not_fit_is_passed_over_and_named_when_none_is_left(runs, spoil, reason):
    spoilt = runs("20261102T000000Z-0001", "1")
    spoil(spoilt)
    with pytest.raises(RunbookError) as told:
        find_previous_lock(runs.dir, runs.present)
    assert spoilt.name in told.value.observed
    assert reason in told.value.observed
    assert "-e rollback_lock=FILE" in str(told.value)
    older = runs("20261101T000000Z-0001", "1")
    assert find_previous_lock(runs.dir, runs.present).run_id == older.name


def test_an_outcome_that_names_no_lock_is_taken_by_its_folders_lock(runs):
    runs("20261102T000000Z-0001", "1", lock_digest="")
    assert find_previous_lock(runs.dir, runs.present).run_id == "20261102T000000Z-0001"


def test_without_any_run_there_is_nothing_to_go_back_to(runs):
    with pytest.raises(RunbookError, match="no run that provisioned hosts"):
        find_previous_lock(runs.dir, runs.present)
    for day in range(1, 8):
        runs(f"2026110{day}T000000Z-0001", "2")
    with pytest.raises(RunbookError, match="the present lock; and 2 more"):
        find_previous_lock(runs.dir, runs.present)


def test_a_named_lock_must_be_another(runs, tmp_path):
    other = write_lock(tmp_path / "old.yml", "1")
    assert named_lock(tmp_path / "old.yml", runs.present).digest == other.digest()
    with pytest.raises(RunbookError, match="the present lock"):
        named_lock(tmp_path / "lock.yml", runs.present)
    with pytest.raises(RunbookError, match="no such file"):
        named_lock(tmp_path / "nowhere.yml", runs.present)


# What stands for provision: its first play asks the hosts, its second rolls over a group that is made on the way.
PROVISION = [
    {
        "name": "First",
        "hosts": "gpu_nodes",
        "gather_facts": False,
        "tasks": [
            {"name": "Say", "ansible.builtin.debug": {"msg": "first {{ inventory_hostname }} {{ lock_file }}"}},
            {
                "name": "Group",
                "ansible.builtin.add_host": {"name": "{{ item }}", "groups": ["kimi_provision"]},
                "loop": ["k3-a", "k3-b"],
            },
        ],
    },
    {
        "name": "Roll",
        "hosts": "kimi_provision",
        "gather_facts": False,
        "serial": "{{ provision_batches | default([1]) }}",
        "tasks": [{"name": "Say", "ansible.builtin.debug": {"msg": "roll {{ inventory_hostname }} {{ lock_file }}"}}],
    },
]


@pytest.fixture
def rollback(runs, tmp_path, project_root):
    """Return a function that runs rollback.yml with what stands for provision.yml beside it."""
    playbooks = tmp_path / "playbooks"
    playbooks.mkdir()
    shutil.copy(project_root / "playbooks/rollback.yml", playbooks)
    (playbooks / "provision.yml").write_text(yaml.safe_dump(PROVISION))
    variables = {
        "lock_file": "{{ inventory_dir }}/lock.yml",
        "runs_dir": str(runs.dir),
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
    }
    inventory = {"gpu_nodes": {"hosts": {"k3-a": {}, "k3-b": {}}, "vars": variables}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))

    def run(*extra):
        command = [
            Path(sys.executable).parent / "ansible-playbook",
            "-i",
            tmp_path / "hosts.yml",
            playbooks / "rollback.yml",
        ]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(project_root / "ansible.cfg")}
        return subprocess.run(
            [*command, *extra], cwd=project_root, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_every_play_of_the_transaction_gets_the_previous_lock(rollback, runs):
    wanted = runs("20261102T000000Z-0001", "1") / "lock.json"
    result = rollback()
    assert result.returncode == 0, result.stdout + result.stderr
    for host in ("k3-a", "k3-b"):
        assert f"first {host} {wanted}" in result.stdout
        assert f"roll {host} {wanted}" in result.stdout
    assert "recipe_facts_version: 2 -> 1" in result.stdout
    assert "changed=0" in result.stdout


def test_a_named_lock_wins(rollback, runs, tmp_path):
    runs("20261102T000000Z-0001", "1")
    write_lock(tmp_path / "old.yml", "0")
    result = rollback("-e", f"rollback_lock={tmp_path}/old.yml")
    assert f"roll k3-b {tmp_path}/old.yml" in result.stdout


@pytest.mark.parametrize("extra", ["lock_file", ""])
def test_what_cannot_go_back_stops_before_provision(rollback, runs, tmp_path, extra):
    if extra:
        runs("20261102T000000Z-0001", "1")
    result = rollback(*(["-e", f"lock_file={tmp_path}/lock.yml"] if extra else []))
    assert result.returncode != 0
    assert "Nothing was changed" in " ".join(result.stdout.split())
    assert "PLAY [First]" not in result.stdout
