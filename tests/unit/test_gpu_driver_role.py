"""The role's own tasks, run by Ansible in check mode as on a host that was never touched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import deb_repository
import pytest
from judging import lock_data
from whole_host import b300

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = """
- name: Run the role
  hosts: localhost
  gather_facts: false
  connection: local
  roles: [gpu_driver]
"""

pytestmark = pytest.mark.skipif(
    bool(deb_repository.MISSING), reason=f"not installed: {' '.join(deb_repository.MISSING)}"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A signed repository, with its key beside it."""
    folder = tmp_path_factory.mktemp("deb")
    made = deb_repository.build(folder / "repository", "1ubuntu1")
    (folder / "key.asc").write_text(deb_repository.sign(made, folder / "gnupg"))
    return made


def play(tmp_path, repository, planned, **variables):
    """Run the role in check mode on this machine, with everything of apt below one folder; return what it printed."""
    config = deb_repository.system(tmp_path / "system")
    playbook, key = tmp_path / "play.yml", repository.parent / "key.asc"
    playbook.write_text(PLAYBOOK)
    snapshot = b300()
    snapshot["os"] |= {"id": "ubuntu", "version": "24.04"}
    snapshot["packages"] = {}
    lock = lock_data()
    lock["driver"] |= {"package_version": "580.178.04-1ubuntu1", "companions": {}}
    given = {
        "ansible_python_interpreter": sys.executable,
        "kimi_lock": lock,
        "kimi_snapshot": snapshot,
        "kimi_planned": [{"action": action, "role": "gpu_driver", "what": "x"} for action in planned],
        "gpu_driver_repository": {
            "name": "kimi-cuda", "uris": [f"file:{repository}"], "suites": ["./"], "components": [], "key_file": str(key),
        },
        **variables,
    }  # fmt: skip
    (tmp_path / "vars.json").write_text(json.dumps(given))
    done = subprocess.run(
        [sys.executable, "-m", "ansible.cli.playbook", "--check", "--diff", "-i", "localhost,", "-e", f"@{tmp_path}/vars.json",
         str(playbook)],
        cwd=ROOT,
        env={**os.environ, "APT_CONFIG": str(config), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_STDOUT_CALLBACK": "default",
             "ANSIBLE_ROLES_PATH": str(ROOT / "roles"), "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_check_mode_on_a_fresh_host_names_the_files_and_versions(tmp_path, repository):
    rc, said = play(tmp_path, repository, ["install", "reboot"], gpu_driver_parameters={"NVreg_CreateImexChannel0": 1})
    assert rc == 0, said
    for name in deb_repository.UBUNTU:
        assert f"+{name} 580.178.04-1ubuntu1" in said
    assert "+options nvidia NVreg_CreateImexChannel0=1" in said
    assert "+URIs: file:" in said
    assert "failed=0" in said


def test_a_host_whose_plan_asks_nothing_skips_the_role_as_one_task(tmp_path, repository):
    rc, said = play(tmp_path, repository, [])
    assert rc == 0, said
    assert "changed=0" in said
    assert "skipped=1" in said
    assert "validate |" not in said


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"gpu_driver_source": "mirror", "gpu_driver_repository": {
            "name": "kimi-cuda", "uris": [], "suites": ["./"], "components": [], "key_file": "/x"}}, "the mirror's address"),
        ({"gpu_driver_parameters": {"NVreg_EnableGpuFirmware": "0"}}, "GSP firmware left on"),
    ],
    ids=["mirror-without-address", "firmware-off"],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_refused_before_any_change(tmp_path, repository, variables, words):
    rc, said = play(tmp_path, repository, ["install"], **variables)
    assert rc != 0
    assert words in " ".join(said.split())
    assert "changed=0" in said


def test_a_distribution_without_a_set_is_refused_with_what_there_is(tmp_path, repository):
    snapshot = b300()
    snapshot["os"] |= {"id": "fedora", "version": "44"}
    snapshot["packages"] = {}
    rc, said = play(tmp_path, repository, ["install"], kimi_snapshot=snapshot)
    assert rc != 0
    assert "no driver packages are known for fedora 44" in " ".join(said.split())
    assert "changed=0" in said
