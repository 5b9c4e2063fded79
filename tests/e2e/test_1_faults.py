"""What is wrong from the start must stop the run with the right message, before anything on a host has changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from labkit import HOSTS, ROOT, Shell, lab, play

pytestmark = [pytest.mark.lab, pytest.mark.destructive]

# Everything a role would touch: package states, apt sources and keys, unit files, settings.
FINGERPRINT = (
    "{ dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n';"
    " find /etc -xdev -type f ! -name 'resolv.conf' ! -name 'machine-id' -exec sha256sum {} +;"
    " find /usr/share/keyrings /lib/modules-load.d -type f -exec sha256sum {} +; } 2>/dev/null | sort | sha256sum"
)


@pytest.fixture
def untouched(shell: Shell) -> Iterator[None]:
    """Assert that a host is the same after the test as before it."""
    before = {host: shell(host, FINGERPRINT) for host in HOSTS}
    yield
    assert {host: shell(host, FINGERPRINT) for host in HOSTS} == before


def test_audit_works_in_check_mode_on_hosts_nobody_touched(tmp_path: Path, untouched: None) -> None:
    outcome = play("playbooks/audit.yml", tmp_path, check=True)
    assert outcome.rc == 0, outcome.messages
    assert outcome.seen >= HOSTS
    assert outcome.changed == {}
    plan = json.loads(next((tmp_path / "runs").glob("*/plan.json")).read_text(encoding="utf-8"))
    assert set(plan["hosts"]) == HOSTS
    assert {"gpu_driver", "container_runtime", "engine_image"} <= {item["role"] for item in plan["hosts"]["k3-a"]}


def test_a_missing_lock_is_named(tmp_path: Path, untouched: None) -> None:
    outcome = play("site.yml", tmp_path, lock_file=str(tmp_path / "no-lock.yml"))
    assert outcome.rc != 0
    assert "no-lock.yml" in outcome.messages
    assert "lock resolve" in outcome.messages
    assert outcome.changed == {}


def test_a_malformed_lock_is_named_with_its_place(tmp_path: Path, untouched: None, lock_text: str) -> None:
    broken = tmp_path / "lock.yml"
    broken.write_text(lock_text.replace("driver:", "driver: [", 1), encoding="utf-8")
    outcome = play("site.yml", tmp_path, lock_file=str(broken))
    assert outcome.rc != 0
    assert str(broken) in outcome.messages
    assert "line" in outcome.messages
    assert outcome.changed == {}


def test_a_digest_the_registry_does_not_have_stops_every_host(tmp_path: Path, untouched: None, lock_text: str) -> None:
    lock = yaml.safe_load(lock_text)
    wrong = "sha256:" + "0" * 64
    other = tmp_path / "lock.yml"
    other.write_text(lock_text.replace(lock["image"]["digest"], wrong), encoding="utf-8")
    outcome = play("site.yml", tmp_path, lock_file=str(other))
    assert outcome.rc != 0
    assert wrong in outcome.messages
    assert "Nothing was changed" in outcome.messages
    assert outcome.changed.keys().isdisjoint(HOSTS) or _only_downloads(outcome.changed)


def _only_downloads(changed: dict[str, list[str]]) -> bool:
    """Stage may have fetched packages into apt's cache, which adds files and touches nothing a host runs."""
    return all(task.startswith("packages |") for tasks in changed.values() for task in tasks)


def test_a_full_disk_stops_before_the_pull(tmp_path: Path, untouched: None, shell: Shell) -> None:
    shell("k3-b", "mount -t tmpfs -o size=64m tmpfs /var/lib/docker")
    try:
        outcome = play("site.yml", tmp_path)
    finally:
        shell("k3-b", "umount /var/lib/docker")
    assert outcome.rc != 0
    assert "k3-b: disk.short" in outcome.messages
    assert outcome.changed == {}


def test_a_host_that_does_not_answer_stops_the_rest(tmp_path: Path, shell: Shell) -> None:
    before = shell("k3-a", FINGERPRINT)
    docker("stop", "k3-b")
    try:
        outcome = play("site.yml", tmp_path)
    finally:
        docker("start", "k3-b")
        lab("up", "--hosts-only")  # waits until the host answers again
    assert outcome.rc != 0
    assert "k3-b: host.unreachable" in outcome.messages
    assert outcome.changed == {}
    assert shell("k3-a", FINGERPRINT) == before


def docker(*arguments: str) -> None:
    """Run a command of the Docker engine the lab's hosts live in."""
    host = json.loads((ROOT / ".lab/lab.json").read_text(encoding="utf-8"))["docker_host"]
    subprocess.run(["docker", "--host", host, *arguments], check=True, capture_output=True)


def test_a_bad_signature_stops_before_any_change(tmp_path: Path, untouched: None) -> None:
    foreign = tmp_path / "foreign.asc"
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--passphrase", ""]
    subprocess.run([*gpg, "--quick-generate-key", "Somebody Else <else@example.org>"], check=True, capture_output=True)
    foreign.write_bytes(subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True).stdout)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    inventory = yaml.safe_load((ROOT / "inventories/lab/group_vars/all/main.yml").read_text(encoding="utf-8"))
    repository = {**inventory["gpu_driver_repository"], "key_file": str(foreign)}
    outcome = play("site.yml", tmp_path, gpu_driver_repository=repository)
    assert outcome.rc != 0
    assert "NO_PUBKEY" in outcome.messages or "not signed" in outcome.messages
    assert "key_file" in outcome.messages
    assert outcome.changed == {}


def test_an_unknown_interconnect_is_refused(tmp_path: Path, untouched: None) -> None:
    outcome = play("site.yml", tmp_path, interconnect_profile="tokenring")
    assert outcome.rc != 0
    assert "tokenring" in outcome.messages
    assert outcome.changed == {}


def test_a_port_somebody_else_listens_on_is_named(tmp_path: Path, untouched: None, shell: Shell) -> None:
    shell("k3-a", "systemd-run --unit squatter python3 -m http.server 8000")
    try:
        outcome = play("site.yml", tmp_path)
    finally:
        shell("k3-a", "systemctl stop squatter")
    assert outcome.rc != 0
    assert "k3-a: port.taken" in outcome.messages
    assert outcome.changed == {}


def test_a_host_that_fails_keeps_its_step_while_its_replica_comes_to_an_end(tmp_path: Path, shell: Shell) -> None:
    """Both hosts are one replica, so they are one batch."""
    shell("k3-a", "mount -t tmpfs -o ro tmpfs /etc/apt/preferences.d")  # the pinning package cannot be unpacked
    try:
        outcome = play("playbooks/provision.yml", tmp_path)
    finally:
        shell("k3-a", "umount /etc/apt/preferences.d")
    assert outcome.rc != 0
    assert "dpkg returned an error code" in outcome.messages
    state = json.loads(shell("k3-a", "cat /var/lib/kimi-runbook/transaction.json"))
    assert (state["state"], state["step"], state["lease"]) == ("failed", "gpu_driver", None)
    assert "dpkg returned an error code" in state["reason"]
    assert json.loads(shell("k3-b", "cat /var/lib/kimi-runbook/transaction.json"))["state"] == "done"
    assert "570.133.20" in shell("k3-a", "cat /proc/driver/nvidia/version")
    # The next file starts from here: a host left half changed must be taken up by a plain run.
