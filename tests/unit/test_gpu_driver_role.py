"""The role's own tasks, run by Ansible in check mode as on a host that was never touched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import deb_repository
import pytest
import yaml
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

SOURCE = {"name": "kimi-cuda", "uris": [], "suites": ["./"], "components": [], "key_file": "/x"}

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
    snapshot["os"] |= {"id": "ubuntu", "version_id": "24.04"}
    snapshot["packages"] = {}
    lock = lock_data()
    lock["driver"] |= {"package_version": "580.178.04-1ubuntu1", "companions": {}}
    given = {
        "ansible_python_interpreter": sys.executable,
        "kimi_lock": lock,
        "kimi_snapshot": snapshot,
        "kimi_planned": [{"action": action, "role": "gpu_driver", "what": "x"} for action in planned],
        "gpu_driver_repository": {**SOURCE, "uris": [f"file:{repository}"], "key_file": str(key)},
        **variables,
    }
    (tmp_path / "vars.json").write_text(json.dumps(given))
    settings = {
        "APT_CONFIG": str(config),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_STDOUT_CALLBACK": "default",
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
    }
    words = ["--check", "--diff", "-i", "localhost,", "-e", f"@{tmp_path}/vars.json", str(playbook)]
    done = subprocess.run(
        [sys.executable, "-m", "ansible.cli.playbook", *words],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
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
        ({"gpu_driver_source": "mirror", "gpu_driver_repository": {**SOURCE, "uris": []}}, "the mirror's address"),
        ({"gpu_driver_parameters": {"NVreg_EnableGpuFirmware": "0"}}, "GSP firmware left on"),
    ],
    ids=["mirror-without-address", "firmware-off"],
)
def test_a_request_that_cannot_be_met_is_refused_before_any_change(tmp_path, repository, variables, words):
    rc, said = play(tmp_path, repository, ["install"], **variables)
    assert rc != 0
    assert words in " ".join(said.split())
    assert "changed=0" in said


def test_a_distribution_without_a_set_is_refused_with_what_there_is(tmp_path, repository):
    snapshot = b300()
    snapshot["os"] |= {"id": "fedora", "version_id": "44"}
    snapshot["packages"] = {}
    rc, said = play(tmp_path, repository, ["install"], kimi_snapshot=snapshot)
    assert rc != 0
    assert "no driver packages are known for fedora 44" in " ".join(said.split())
    assert "changed=0" in said


def tasks(name):
    return yaml.safe_load((ROOT / f"roles/gpu_driver/tasks/{name}.yml").read_text(encoding="utf-8"))


def test_holds_come_back_whatever_happens_to_the_packages():
    (change,) = [task for task in tasks("install") if "block" in task]
    assert [one["ansible.builtin.include_tasks"] for one in change["block"]] == [
        "install_{{ __gpu_driver_manager }}.yml"
    ]
    (holds,) = change["always"]
    assert holds["package_holds"]["packages"] == "{{ __gpu_driver_held }}"
    assert "when" not in holds


def test_the_order_is_files_packages_initramfs_activation():
    order = [task["ansible.builtin.import_tasks"] for task in tasks("change")]
    assert order == ["validate.yml", "configure.yml", "install.yml", "initramfs.yml", "activate.yml", "run.yml"]


def test_what_holds_the_gpus_is_stopped_before_packages_change_and_before_a_reboot():
    install = [next(iter(set(task) & {"gpu_release", "block", "package_repair"}), "") for task in tasks("install")]
    assert install.index("package_repair") < install.index("gpu_release") < install.index("block")
    assert tasks("reboot")[0]["gpu_release"]["state"] == "stopped"


DECIDE = """
- name: Decide
  hosts: localhost
  gather_facts: false
  connection: local
  vars:
    kimi_snapshot:
      os: {id: debian, version_id: "12", kernel: 6.1.0, arch: x86_64}
      packages: {}
      driver: {on_disk_next: null}
    kimi_lock: {driver: {version: "1.2", branch: "580", package_version: "1.2-1", activation: reload, companions: {}}}
    kimi_planned: [{action: reload, role: gpu_driver}]
  tasks:
    - import_role: {name: gpu_driver, tasks_from: expect}
    - set_fact: {__gpu_driver_verdict: {name: reload}, __gpu_driver_release: {released: true}}
    - assert: {that: [not __gpu_driver_reboots, __gpu_driver_disturbs, not __gpu_driver_installs]}
    - set_fact: {__gpu_driver_release: {released: false}} # something would not let go
    - assert: {that: [__gpu_driver_reboots]}
    - command: "true"
      register: __gpu_driver_release
      when: false # as the reload is, where the verdict is another one
    - assert: {that: [not __gpu_driver_reboots]}
    - set_fact: {__gpu_driver_verdict: {name: reboot}}
    - assert: {that: [__gpu_driver_reboots]}
"""


def test_modules_that_cannot_be_taken_out_lead_to_a_reboot(tmp_path):
    (tmp_path / "decide.yml").write_text(DECIDE)
    done = subprocess.run(
        [sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,", str(tmp_path / "decide.yml")],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_ROLES_PATH": str(ROOT / "roles"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
