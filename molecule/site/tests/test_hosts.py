"""What must be true on every host after site.yml, read straight from the host."""

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
LOCK = yaml.safe_load((ROOT / "inventories/lab/lock.yml").read_text(encoding="utf-8"))
DRIVER = LOCK["driver"]["version"]


def test_the_locked_driver_is_loaded(host):
    assert DRIVER in host.file("/proc/driver/nvidia/version").content_string


def test_userspace_and_kernel_agree(host):
    answer = host.run("nvidia-smi --query-gpu=driver_version,name --format=csv,noheader")
    assert answer.rc == 0, answer.stderr
    assert all(DRIVER in line and "simulated" in line for line in answer.stdout.splitlines())


@pytest.mark.parametrize("package", ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-container-toolkit"])
def test_packages_are_held(host, package):
    assert package in host.check_output("apt-mark showhold").splitlines()


@pytest.mark.parametrize("unit", ["nvidia-persistenced", "docker", "kimi-engine"])
def test_units_run_now_and_at_boot(host, unit):
    assert host.service(unit).is_running
    assert host.service(unit).is_enabled


def test_the_engine_runs_from_the_locked_digest(host):
    container = json.loads(host.check_output("docker container inspect kimi-engine"))[0]
    image = json.loads(host.check_output(f"docker image inspect {container['Image']}"))[0]
    # The name may be that of the stage, where the image waited for Docker; the digest is what counts.
    assert LOCK["image"]["digest"] in [reference.partition("@")[2] for reference in image["RepoDigests"]]


def test_settings_are_the_same_inside_the_container(host):
    pid = host.check_output("docker container inspect --format '{{.State.Pid}}' kimi-engine")
    outside = host.file("/etc/nccl.conf").sha256sum
    assert host.file(f"/proc/{pid}/root/etc/nccl.conf").sha256sum == outside


def test_each_rank_has_its_own_address(host):
    env = json.loads(host.check_output("docker container inspect --format '{{json .Config.Env}}' kimi-engine"))
    own = next(entry.partition("=")[2] for entry in env if entry.startswith("VLLM_HOST_IP="))
    assert own in host.check_output("ip -4 -oneline address show")
