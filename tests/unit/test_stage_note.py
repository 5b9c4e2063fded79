"""For which lock a host was staged: noted, asked, and said before anything is drained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stage_note
import yaml
from ansible.module_utils.testing import patch_module_args


@pytest.fixture
def note(tmp_path, capsys):
    def run(digest, check=False, **args):
        told = {"lock_digest": digest, "path": str(tmp_path / "k/staged.json"), **args}
        with patch_module_args({**told, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            stage_note.main()
        return json.loads(capsys.readouterr().out)

    run.path = tmp_path / "k/staged.json"
    return run


def test_a_lock_is_staged_once_it_was_noted(note):
    assert (note("a")["staged"], note("a")["last"]) == (False, {})
    assert note("a", run_id="r1", needs=["x"])["changed"] is True
    assert note("a")["staged"] is True
    assert note("b")["staged"] is False
    assert note("b")["last"] == {"lock_digest": "a", "run_id": "r1", "needs": ["x"]}


def test_staging_the_same_again_changes_nothing(note):
    note("a", run_id="r1", needs=["x"])
    note("b", run_id="r2", needs=["y"])
    before = note.path.read_text()
    assert note("a", run_id="r3", needs=["x"])["changed"] is False
    assert note.path.read_text() == before
    assert note("a", run_id="r4", needs=["x", "z"])["last"]["run_id"] == "r4"


def test_the_newest_locks_are_remembered(note):
    for digest in "abcd":
        note(digest, run_id="r", keep=2)
    assert [note(digest)["staged"] for digest in "abcd"] == [False, False, True, True]


def test_check_mode_writes_nothing(note):
    assert note("a", check=True, run_id="r1")["changed"] is True
    assert not note.path.exists()


def test_a_note_that_is_none_stops_with_what_to_do(note):
    note("a", run_id="r1")
    note.path.write_text("{half")
    assert "Move it away" in note("a")["msg"]


@pytest.mark.parametrize("required", [False, True])
def test_a_host_that_was_not_staged_is_named_before_anything_else(note, tmp_path, project_root, required):
    note("sha256:old", run_id="r1")
    play = {
        "name": "Play",
        "hosts": "localhost",
        "vars": {
            "kimi_plan": {"lock_digest": "sha256:new"},
            "stage_note_state_dir": str(note.path.parent),
            "stage_note_required": required,
            "ansible_python_interpreter": sys.executable,
        },
        "roles": ["stage_note"],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    result = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", "-c", "local", tmp_path / "play.yml"],
        cwd=project_root,
        env={**os.environ, "ANSIBLE_CONFIG": str(project_root / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    told = " ".join(result.stdout.split())
    assert "not staged for lock sha256:new (last for sha256:old by run r1)" in told, result.stdout + result.stderr
    assert ("Nothing was changed" in told) is required
    assert (result.returncode != 0) is required
