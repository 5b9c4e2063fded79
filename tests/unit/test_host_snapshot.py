"""The whole snapshot: complete, small, without secrets, and whole whatever a host's commands do."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import host_probe
import host_snapshot
import pytest
from host_tree import Tree

ROOT = Path(__file__).resolve().parents[2]
with_the_library = pytest.mark.skipif(sys.version_info < (3, 11), reason="the library needs Python 3.11")

WANTED = {
    "packages": ["docker.io"],
    "files": ["/etc/nccl.conf"],
    "units": ["docker.service"],
    "modules": ["mlx5_core"],
    "ports": [8000],
    "image": "repo@sha256:1",
    "engine_container": "kimi-engine",
    "container_files": ["/etc/nccl.conf"],
    "engine_unit": "kimi-engine.service",
    "weights_path": "/models/k3",
}
COMMANDS = (
    *("nvidia-smi", "modinfo", "dkms", "mokutil", "systemctl", "timedatectl", "docker info", "docker image"),
    *("docker container", "dpkg-query", "rpm", "ip", "ibv_devinfo", "ofed_info", "journalctl", "dmesg", "df"),
)
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.put("/proc/driver/nvidia/version", NVRM)
    tree.put("/etc/hostname", "gpu-07\n")
    tree.put("/models/k3/config.json", "{}")
    return tree


def read(snapshot: dict[str, object]):
    from kimi_runbook.snapshot import Snapshot  # noqa: PLC0415 - most tests here run without the library

    return Snapshot.from_json(json.loads(json.dumps(snapshot)))


@with_the_library
def test_the_library_reads_all_of_it_and_knows_every_part(tree):
    from kimi_runbook import hardware_facts, host_facts  # noqa: PLC0415 - most tests here run without the library

    taken = host_snapshot.take(tree.probe(), WANTED)
    seen = read(taken)
    assert seen.hostname == "gpu-07"
    assert set(taken) - {"schema_version"} == {name.name for name in fields(seen)} - {"container"} | {"engine"}
    for part, kind in [
        ("kernel", hardware_facts.KernelFacts),
        ("driver", hardware_facts.DriverFacts),
        ("fabric", hardware_facts.FabricFacts),
        ("rdma", hardware_facts.RdmaFacts),
        ("iommu", hardware_facts.IommuFacts),
        ("network", host_facts.NetworkFacts),
        ("runtime", host_facts.RuntimeFacts),
        ("memlock", host_facts.MemlockFacts),
        ("clock", host_facts.ClockFacts),
        ("weights", host_facts.WeightsFacts),
        ("image", host_facts.ImageFacts),
    ]:
        assert set(taken[part]) == {field.name for field in fields(kind)}, part


@with_the_library
@pytest.mark.parametrize("kind", ["garbage", "timeout", "denied", "fails", "half-json", "wrong-json", "another-locale"])
def test_whatever_commands_do_the_snapshot_is_whole_and_says_what_failed(tree, kind):
    noise = random.Random(7)  # noqa: S311 - the same garbage every time
    for name in COMMANDS:
        out, rc = {
            "garbage": ("".join(chr(noise.randrange(1, 0x2FF)) for _ in range(4000)) + "\n\t\n=\n:\n", 0),
            "timeout": ("", "timeout"),
            "denied": ("", "denied"),
            "fails": ("segmentation fault\n", 139),
            "half-json": ('[{"Id": "x", "State": {"Pid": 4', 0),
            "wrong-json": ('[{"State": 7, "Config": [], "GraphDriver": 3, "Args": {"a": 1}}]', 0),
            "another-locale": ("Nicht gefunden: Übersicht\n見つかりません\n", 0),
        }[kind]
        tree.say(name, out, rc=rc)
    before = listing(tree.root)
    taken = host_snapshot.take(tree.probe(), WANTED)
    assert read(taken).driver.loaded == "580.95.05"
    assert taken["errors"], "nothing was said of it"
    assert all(error["probe"] and error["message"] for error in taken["errors"])
    assert taken["gpus"] == []
    assert listing(tree.root) == before  # nothing was written


def listing(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


@with_the_library
def test_files_of_garbage_are_no_traceback_either(tree):
    noise = random.Random(8)  # noqa: S311 - the same garbage every time
    for path in (
        *("/etc/os-release", "/proc/1/stat", "/proc/stat", "/proc/cmdline", "/proc/net/tcp", "/etc/docker/daemon.json"),
        *("/etc/modprobe.d/a.conf", "/boot/grub/grubenv", "/boot/grub/grub.cfg", "/boot/loader/entries/x.conf"),
        *(
            "/proc/driver/nvidia/params",
            "/etc/cdi/a.yaml",
            "/usr/local/cuda-13/version.json",
            "/etc/security/limits.conf",
        ),
        *("/sys/class/infiniband/mlx5_0/ports/1/state", "/sys/class/infiniband/mlx5_0/ports/x/state"),
        *("/sys/class/net/eth0/mtu", "/sys/module/mlx5_core/refcnt", "/etc/nvidia-imex/nodes_config.cfg"),
        *("/sys/bus/pci/devices/x/vendor", "/sys/bus/pci/devices/x/class", "/etc/dnf/versionlock.toml"),
    ):
        tree.put(path, bytes(noise.randrange(256) for _ in range(3000)))
    read(host_snapshot.take(tree.probe(), WANTED))


def test_a_section_that_breaks_leaves_the_others_whole(tree, monkeypatch):
    monkeypatch.setattr(host_snapshot, "rdma", lambda probe: 1 / 0)
    taken = host_snapshot.take(tree.probe(), WANTED)
    assert taken["rdma"] == {}
    assert {"probe": "rdma", "message": "ZeroDivisionError: division by zero"} in taken["errors"]
    assert taken["driver"]["loaded"] == "580.95.05"


def test_a_question_that_hangs_in_the_kernel_is_broken_off(tree, monkeypatch):
    monkeypatch.setattr(host_snapshot, "rdma", lambda probe: time.sleep(60))
    monkeypatch.setattr(host_snapshot, "_LATE_S", 0.5)
    probe = tree.probe(budget_s=1)
    sections = host_snapshot.Sections(probe)
    started = time.monotonic()
    sections.guard(1)
    taken = host_snapshot.take(probe, WANTED, sections)
    sections.release()
    assert time.monotonic() - started < 10
    assert [error["message"] for error in taken["errors"] if error["probe"] == "rdma"] == [
        "broken off: the time for the whole snapshot is used up"
    ]
    assert taken["runtime"] is not None


RANDOM = "q7WkL2pZx9Rt4VbN8mYc"


def test_planted_secrets_are_not_shown(tree):
    """Ten places a secret lies in on real hosts, constructed."""
    tree.say("docker info", json.dumps({"ServerVersion": "29", "HttpProxy": f"http://me:{RANDOM}@p"}))
    inspected = {
        "Id": "c",
        "State": {"Pid": 77},
        "Args": ["serve", "--api-key", RANDOM, f"--hf-token=hf_{RANDOM}"],
        "Config": {"Env": [f"VLLM_API_KEY={RANDOM}", f"HF_TOKEN={RANDOM}", f"VLLM_NOTE={RANDOM}"]},
    }
    tree.say("docker container", json.dumps([inspected]))
    tree.put("/proc/77/cmdline", f"docker\0run\0--env\0HF_TOKEN={RANDOM}\0https://u:{RANDOM}@host/x\0")
    tree.put("/proc/77/comm", f"{RANDOM[:15]}\n")
    tree.put("/proc/cmdline", f"ro site.key={RANDOM} {RANDOM}\n")
    tree.put("/etc/docker/daemon.json", json.dumps({"auths": {"r": {"auth": RANDOM}}, "proxies": {"a": f"u:{RANDOM}"}}))
    tree.put("/root/.netrc", f"machine x password {RANDOM}")
    tree.put("/etc/kimi/env", f"NCCL_AUTH_TOKEN={RANDOM}\n")
    tree.say(
        "systemctl show", "Id=kimi-engine.service\nLoadState=loaded\nMainPID=77\nEnvironmentFiles=/etc/kimi/env (i)\n"
    )
    tree.say("nvidia-smi", f"failed: Authorization: Bearer {RANDOM}\n", rc=9)
    tree.say("journalctl", f"2025-11-30T11:00:00+0000 h kernel: NVRM: token={RANDOM} lost\n")
    text = json.dumps(host_snapshot.take(tree.probe(), WANTED))
    assert RANDOM not in text
    assert text.count("(not shown)") >= 10


def test_the_answer_stays_small(tree):
    tree.put("/models/k3/SHA256SUMS", "".join(f"{n:064x}  model-{n:05}-{'x' * 150}.safetensors\n" for n in range(3000)))
    for number in range(300):
        tree.put(f"/proc/{1000 + number}/comm", "a\n")
        tree.link(f"/proc/{1000 + number}/fd/3", "/dev/nvidia0")
    taken = host_snapshot.take(tree.probe(), WANTED)
    assert taken["cut"] == {"holders": 100, "weights.checksums": 3000}
    assert len(json.dumps(taken)) < 256 << 10


def test_what_does_not_fit_is_cut_and_counted():
    lines = [{"at": None, "kind": "xid", "text": str(n) * 50} for n in range(200)]
    big = {"weights": {"checksums": {"a": "x" * 5000}}, "kernel_log": {"lines": lines}, "cut": {}, "image": None}
    fitted = host_snapshot.fitted(big, limit=9000)
    assert fitted["weights"]["checksums"] is None
    assert fitted["cut"]["weights.checksums"] == 1
    assert fitted["cut"]["kernel_log.lines"] + len(fitted["kernel_log"]["lines"]) == 200
    assert fitted["kernel_log"]["lines"][-1]["text"].startswith("199")
    assert len(json.dumps(fitted)) <= 9000


TAKE = """
import json, sys
sys.path[:0] = {paths!r}
import ansible.module_utils
ansible.module_utils.__path__.append({utils!r})
import host_probe, host_snapshot
print(json.dumps(host_snapshot.take(host_probe.Probe(root={root!r}), json.loads({wanted!r}))))
"""


def code(root: Path) -> str:
    utils = str(ROOT / "plugins/module_utils")
    return TAKE.format(
        paths=[utils, str(ROOT / "plugins/modules")], utils=utils, root=str(root), wanted=json.dumps(WANTED)
    )


@pytest.mark.skipif(shutil.which("python3.9") is None, reason="python3.9 is not installed")
def test_python_3_9_takes_the_same_snapshot(tree):
    """ansible-core supports 3.9 on hosts, which is what RHEL 9 has."""
    import ansible  # noqa: PLC0415 - its place is all that is wanted

    tree.say("modinfo nvidia", "version: 580.95.05\nlicense: Dual MIT/GPL\n")
    path = str(Path(ansible.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": path, "PYENV_VERSION": "3.9"}  # for those who keep several Pythons by pyenv
    done = subprocess.run(["python3.9", "-c", code(tree.root)], capture_output=True, text=True, env=env, check=False)
    if "not found" in done.stderr:
        pytest.skip("python3.9 does not run here")
    taken = json.loads(done.stdout)
    here = json.loads(json.dumps(host_snapshot.take(tree.probe(), WANTED)))
    assert {**taken, "taken_at": None} == {**here, "taken_at": None}


def test_the_module_costs_less_than_a_breath(tree):
    """Without the commands it asks, a snapshot takes less CPU than Ansible's own setup module, which takes 0.3 s."""
    probe = tree.probe()
    before = time.process_time()
    host_snapshot.take(probe, WANTED)
    assert time.process_time() - before < 0.3


def test_the_machine_itself_can_be_asked():
    taken = host_snapshot.take(host_probe.Probe(timeout_s=5), {**WANTED, "image": "", "engine_container": ""})
    assert taken["kernel"]["running"] == os.uname().release
    assert taken["runtime"]["free_bytes"] > 0
