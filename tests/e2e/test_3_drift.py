"""What somebody spoiled on a host is found by the next run, reported as exactly that, and put right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from labkit import Shell, newest_record, play

pytestmark = [pytest.mark.lab, pytest.mark.destructive]

# Packages that restart what the engine stands on change only while its whole replica is drained.
DRAINED = [
    "replica | Stop this rank, and what else uses the GPUs here",
    "replica | Stop the ranks on hosts that nothing is done to",
]
STAGED = "note | Remember that this host is staged for this lock"
# Per role: commands that spoil one file, one package, one unit and one key where the role has them; the codes the
# audit must report for the host, and the tasks the next run may change. Nothing else may change anywhere.
QUIET_DRIFT = {
    "gpu_driver": (
        [
            "rm /etc/apt/sources.list.d/kimi-cuda.sources",
            "echo broken > /usr/share/keyrings/kimi-cuda.asc",
            "apt-mark unhold nvidia-driver-cuda",
            "systemctl disable --now nvidia-persistenced",
        ],
        {"file.missing", "file.content", "package.unheld", "unit.enablement", "unit.inactive"},
        [
            "configure | Write package source, key, pins, fence and module parameters",
            "install | Hold driver, pin and companions where they are",
            "run | Keep the driver loaded while no process uses a GPU",
        ],
    ),
    "container_runtime": (
        [
            "sed -i s/stable/unstable/ /etc/apt/sources.list.d/kimi-container-toolkit.sources",
            "rm /usr/share/keyrings/kimi-container-toolkit.asc",
            "dpkg --purge --force-depends --force-remove-reinstreq libnvidia-container-tools",
            "systemctl disable docker",
        ],
        {"file.content", "file.missing", "package.missing", "unit.enablement"},
        [
            *DRAINED,
            "install | Write the toolkit's apt source and its key",
            "install | Install Docker and the toolkit at the locked versions",
            "install | Hold Docker and the toolkit where they are",
            "configure | Run Docker now and at boot",
        ],
    ),
    "rdma": (
        [
            "rm /etc/modules-load.d/kimi-rdma.conf",
            "dpkg --purge --force-depends rdma-core",
            "modprobe -r ib_umad",
        ],
        {"file.missing", "package.missing", "module.unloaded"},
        [
            "install | Install the verbs userspace",
            "configure | Write module and limit files",
            "configure | Load the modules that are not loaded",
        ],
    ),
}


# The hosts' clock is the machine's, which nothing synchronizes here, and a host without a time service is told of it.
OF_THE_LAB = {"clock.unsynchronized"}


def findings(tmp_path: Path, host: str, but: tuple[str, ...] = ()) -> set[str]:
    """Return the codes above info of the first findings.json of this test's runs.

    Left out are what the lab always has, and the engine that a drain took down: serve starts it, not provision.
    """
    path = sorted((tmp_path / "runs").glob("*/findings.json"))[0]
    return {
        finding["code"]
        for finding in json.loads(path.read_text(encoding="utf-8"))
        if finding["host"] == host and finding["severity"] != "info" and finding["role"] not in but
    } - OF_THE_LAB


@pytest.mark.parametrize("role", QUIET_DRIFT)
def test_drift_is_reported_exactly_and_restored(role: str, tmp_path: Path, shell: Shell) -> None:
    spoil, codes, tasks = QUIET_DRIFT[role]
    for command in spoil:
        shell("k3-b", command)
    audit = tmp_path / "audit"
    audit.mkdir()
    assert play("playbooks/audit.yml", audit).rc == 0
    assert findings(audit, "k3-b", but=("engine",)) == codes
    assert findings(audit, "k3-a", but=("engine",)) == set()

    outcome = play("playbooks/provision.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert outcome.changed == {"k3-b": tasks}

    again = tmp_path / "again"
    again.mkdir()
    assert play("playbooks/audit.yml", again).rc == 0
    assert findings(again, "k3-b", but=("engine",)) == set()


def test_serve_after_a_drain_tells_the_gap(tmp_path: Path) -> None:
    outcome = play("playbooks/serve.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    (gap,) = (tmp_path / "runs").glob("*/service_gap.json")
    told = json.loads(gap.read_text(encoding="utf-8"))["replicas"]["k3-a"]
    assert 0 < told["engine_start_s"] < told["gap_s"]
    assert (told["requests_cut"], told["rebooted"]) == (0, False)
    assert "k3-a: service gap" in outcome.stdout


def test_settings_and_unit_drift_restart_the_replica_as_one(tmp_path: Path, shell: Shell) -> None:
    shell("k3-b", "echo NCCL_DEBUG=INFO >> /etc/nccl.conf")
    shell("k3-b", "sed -i s/Restart=on-failure/Restart=no/ /etc/systemd/system/kimi-engine.service")
    shell("k3-b", "systemctl stop kimi-engine && systemctl disable kimi-engine")
    outcome = play("site.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert {"file.content", "unit.enablement", "unit.inactive"} <= findings(tmp_path, "k3-b")
    assert outcome.changed["k3-b"] == [
        STAGED,
        "configure | Write what NCCL and UCX read",
        "configure | Write launch file and unit",
        "configure | Run the unit at boot",
        "start | Start every rank",
    ]
    assert outcome.changed["k3-a"] == ["start | Stop every rank that runs", "start | Start every rank"]
    assert newest_record(tmp_path)["verdict"]["name"] == "accept"


def test_a_removed_image_and_a_changed_daemon_key_are_put_back(tmp_path: Path, shell: Shell, lock_text: str) -> None:
    shell("k3-b", "systemctl stop kimi-engine")
    shell("k3-b", "docker image rm --force $(docker image ls --quiet | sort -u)")
    shell(
        "k3-b",
        "python3 -c \"import json; p='/etc/docker/daemon.json'; v=json.load(open(p)); "
        "v.update({'insecure-registries': [], 'mtu': 1400}); json.dump(v, open(p, 'w'))\"",
    )
    outcome = play("site.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert {"image.absent", "daemon.setting"} <= findings(tmp_path, "k3-b")
    assert outcome.changed["k3-b"] == [
        "pull | Pull by digest",  # ahead of the window: the daemon still trusts the registry until it restarts
        STAGED,
        *DRAINED,
        "configure | Merge our keys into daemon.json",
        "Restart Docker",
        "configure | Run the unit at boot",
        "start | Start every rank",
    ]
    assert json.loads(shell("k3-b", "cat /etc/docker/daemon.json"))["mtu"] == 1400, "a foreign key was lost"


def test_diagnose_freezes_evidence_with_a_manifest(tmp_path: Path) -> None:
    outcome = play("playbooks/diagnose.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert outcome.changed == {}
    manifests = sorted((tmp_path / "runs").glob("*/evidence/*/manifest.json"))
    assert [path.parent.name for path in manifests] == ["k3-a", "k3-b"]
    for path in manifests:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        assert {"engine.log", "nvidia-smi.txt", "launch.json"} <= set(manifest["sha256"])


def test_a_rank_that_restarted_alone_makes_the_next_run_start_all_of_them(tmp_path: Path, shell: Shell) -> None:
    shell("k3-b", "systemctl restart kimi-engine")
    outcome = play("site.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert all("start | Start every rank" in outcome.changed[host] for host in ("k3-a", "k3-b"))
    assert newest_record(tmp_path)["verdict"]["name"] == "accept"


def test_an_engine_that_cannot_start_says_why_and_ends(tmp_path: Path, shell: Shell) -> None:
    outcome = play("playbooks/serve.yml", tmp_path, engine_extra_args=["--load-format", "no-such-format"])
    assert outcome.rc != 0
    assert "no-such-format" in outcome.messages
    assert "diagnose.yml" in outcome.messages
    for host in ("k3-a", "k3-b"):
        state = shell(host, "systemctl show --value --property ActiveState kimi-engine").strip()
        assert state in ("inactive", "failed")


def test_an_engine_that_is_never_ready_ends_with_the_limit_named(tmp_path: Path) -> None:
    outcome = play("playbooks/serve.yml", tmp_path, engine_ready_timeout_s=5)
    assert outcome.rc != 0
    assert "expected 200 within 5 s (engine_ready_timeout_s)" in outcome.messages


def test_part_of_a_replica_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    outcome = play("playbooks/serve.yml", tmp_path, limit="k3-a")
    assert outcome.rc != 0
    assert "expected all ranks of the replica: k3-a, k3-b" in outcome.messages
    assert outcome.changed == {}


def test_a_plain_run_repairs_what_the_failures_left(tmp_path: Path) -> None:
    outcome = play("site.yml", tmp_path)
    assert outcome.rc == 0, outcome.messages
    assert newest_record(tmp_path)["verdict"]["name"] == "accept"


@pytest.mark.full
def test_another_build_of_the_branch_is_taken_by_reload_where_the_lock_allows_it(
    tmp_path: Path, shell: Shell, lock_text: str
) -> None:
    older = tmp_path / "lock.yml"
    older.write_text(
        lock_text.replace("580.178.04", "580.167.08").replace("activation: reboot", "activation: reload"),
        encoding="utf-8",
    )
    outcome = play("playbooks/provision.yml", tmp_path, lock_file=str(older))
    assert outcome.rc == 0, outcome.messages
    for host in ("k3-a", "k3-b"):
        assert "reload | Prove that nothing holds the modules and take them out" in outcome.changed[host]
        assert "reboot | Boot" not in outcome.changed[host]
        assert "580.167.08" in shell(host, "cat /proc/driver/nvidia/version")
    back = tmp_path / "back"
    back.mkdir()
    assert play("site.yml", back).rc == 0
