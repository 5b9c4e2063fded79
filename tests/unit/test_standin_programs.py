"""The stand-in programs, run for real against a tree: versions on disk and loaded part and meet again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fabric_probe
import imex_wait
import pytest

from lab.standin.host import HARDWARE_PATH, hardware
from lab.standin.plan import plan_packages

PLANS = plan_packages()
OLD, NEW = "570.133.20", "580.178.04"


@dataclass(frozen=True, slots=True)
class Tree:
    """A host's file tree with stand-in packages in it."""

    root: Path

    def install(self, version: str) -> None:
        """Unpack the packages of one version, as dpkg would over an older one."""
        for plan in PLANS:
            if plan.version != f"{version}-1":
                continue
            for file in plan.files:
                target = self.root / file.path.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                if file.link_to is not None:
                    target.symlink_to(file.link_to)
                else:
                    target.write_bytes(file.content)
                    target.chmod(file.mode)

    def set_hardware(self, **changes: object) -> None:
        path = self.root / HARDWARE_PATH.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(hardware("k3-a", 2) | changes))

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"KIMI_STANDIN_ROOT": str(self.root)}

    def program(self, name: str) -> Path:
        return next(path for folder in ("usr/local/sbin", "usr/bin") if (path := self.root / folder / name).is_file())

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-ISB", str(self.program(name)), *arguments]
        return subprocess.run(command, env=self.environment, check=False, capture_output=True, text=True, timeout=20)

    def read(self, path: str) -> str:
        return (self.root / path.lstrip("/")).read_text()

    def reboot(self) -> None:
        assert self.run("kimi-standin-boot", "reboot").returncode == 0

    @contextmanager
    def daemon(self, name: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-ISB", str(self.program(name))]
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert "stand-in" in process.stdout.readline()  # written when it is ready
                yield process
            finally:
                process.terminate()
        assert process.returncode == 0


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A booted host with two GPUs and driver 570."""
    made = Tree(tmp_path)
    for version in ("1.0", OLD):
        made.install(version)
    made.set_hardware()
    made.reboot()
    return made


def test_loaded_at_boot_from_disk(tree: Tree) -> None:
    line = tree.read("/proc/driver/nvidia/version").splitlines()[0]
    start = f"NVRM version: NVIDIA UNIX Open Kernel Module for {platform.machine()}  {OLD}  Release Build"
    assert line.startswith(start)
    assert "stand-in" in line
    assert tree.read("/sys/module/nvidia/version") == f"{OLD}\n"
    assert tree.read("/sys/module/nvidia/refcnt") == "2\n"


def test_a_second_boot_call_loads_nothing_new(tree: Tree) -> None:
    tree.install(NEW)
    assert tree.run("kimi-standin-boot").returncode == 0
    assert tree.read("/sys/module/nvidia/version") == f"{OLD}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--query-gpu=index,name", "--format=csv,noheader"], "0, NVIDIA B300 (simulated)", id="names"),
        pytest.param(["--query-gpu=driver_version", "--format=csv"], f"driver_version\n{OLD}", id="with-header"),
        pytest.param(["--query-gpu=memory.total", "--format=csv"], "memory.total [MiB]\n275040 MiB", id="units"),
        pytest.param(
            ["--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"], "275040, 0", id="no-units"
        ),
        pytest.param(
            ["--query-gpu", "pci.bus_id", "--format", "csv,noheader", "-i", "1"], "00000000:43:00.0", id="one"
        ),
        pytest.param(["-L"], "GPU 0: NVIDIA B300 (simulated) (UUID: GPU-", id="list"),
        pytest.param(["--query-compute-apps=pid", "--format=csv,noheader"], "", id="nobody-computes"),
    ],
)
def test_nvidia_smi_answers(tree: Tree, arguments: list[str], expected: str) -> None:
    done = tree.run("nvidia-smi", *arguments)
    assert (done.returncode, done.stdout[: len(expected)]) == (0, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--query-gpu=nonsense", "--format=csv"], 'Field "nonsense" is not a valid field', id="field"),
        pytest.param(["--query-gpu=name"], '"--format=" switch is missing', id="format"),
        pytest.param(["--reset-everything"], "Invalid combination of input arguments", id="option"),
    ],
)
def test_nvidia_smi_refuses_what_it_does_not_know(tree: Tree, arguments: list[str], message: str) -> None:
    done = tree.run("nvidia-smi", *arguments)
    assert done.returncode == 2
    assert message in done.stdout


@pytest.mark.parametrize("arguments", [[], ["-q"], ["--version"], ["--help"]])
def test_every_form_of_nvidia_smi_says_what_it_is(tree: Tree, arguments: list[str]) -> None:
    assert "stand-in" in tree.run("nvidia-smi", *arguments).stdout


@pytest.mark.parametrize(
    "name", ["modprobe", "rmmod", "lsmod", "modinfo", "dkms", "mokutil", "nvidia-modprobe", "nvidia-persistenced"]
)
def test_help_says_what_it_is(tree: Tree, name: str) -> None:
    done = tree.run(name, "--help")
    assert done.returncode == 0
    assert "stand-in" in done.stdout


def test_mismatch_until_a_reboot(tree: Tree) -> None:
    tree.install(NEW)
    done = tree.run("nvidia-smi")
    assert done.returncode == 18
    assert done.stdout == "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
    assert tree.run("modinfo", "-F", "version", "nvidia").stdout == f"{NEW}\n"
    assert tree.read("/sys/module/nvidia/version") == f"{OLD}\n"
    tree.reboot()
    assert tree.run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").stdout == f"{NEW}\n{NEW}\n"


def test_mismatch_until_a_reload(tree: Tree) -> None:
    tree.install(NEW)
    assert tree.run("rmmod", "nvidia_uvm", "nvidia_modeset", "nvidia").returncode == 0
    assert tree.run("nvidia-smi").returncode == 9
    assert not (tree.root / "proc/driver/nvidia").exists()
    assert tree.run("modprobe", "nvidia-uvm").returncode == 0
    assert tree.run("nvidia-smi").returncode == 0
    assert tree.read("/sys/module/nvidia_uvm/version") == f"{NEW}\n"


def test_a_module_of_another_version_is_refused(tree: Tree) -> None:
    tree.install(NEW)
    done = tree.run("modprobe", "nvidia_drm")
    assert done.returncode == 1
    assert done.stderr == "modprobe: ERROR: could not insert 'nvidia_drm': Invalid argument\n"


def test_a_module_with_others_on_it_stays(tree: Tree) -> None:
    done = tree.run("rmmod", "nvidia")
    assert done.returncode == 1
    assert done.stderr == "rmmod: ERROR: Module nvidia is in use by: nvidia_modeset nvidia_uvm\n"
    done = tree.run("modprobe", "-r", "nvidia")
    assert (done.returncode, done.stderr) == (1, "modprobe: FATAL: Module nvidia is in use.\n")


def test_removing_takes_along_what_nothing_else_needs(tree: Tree) -> None:
    assert tree.run("modprobe", "-r", "nvidia_uvm").returncode == 0
    assert (tree.root / "sys/module/nvidia").is_dir()
    assert tree.run("modprobe", "-r", "nvidia_modeset").returncode == 0
    assert not (tree.root / "sys/module/nvidia").exists()


def test_peermem_counts_on_both_modules_below(tree: Tree) -> None:
    assert tree.run("modprobe", "nvidia-peermem").returncode == 0
    assert tree.read("/sys/module/nvidia/refcnt") == "3\n"
    assert tree.read("/sys/module/ib_core/refcnt") == "1\n"
    lines = tree.run("lsmod").stdout.splitlines()
    assert [line.split() for line in lines if line.startswith("nvidia ")] == [
        ["nvidia", "16384", "3", "nvidia_modeset,nvidia_peermem,nvidia_uvm"]
    ]


def test_persistenced_keeps_the_module_from_going(tree: Tree) -> None:
    with tree.daemon("nvidia-persistenced"):
        assert tree.read("/sys/module/nvidia/refcnt") == "3\n"
        mode = tree.run("nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader").stdout
        assert mode == "Enabled\nEnabled\n"
        assert tree.run("rmmod", "nvidia_uvm", "nvidia_modeset").returncode == 0
        assert tree.run("rmmod", "nvidia").stderr == "rmmod: ERROR: Module nvidia is in use\n"
    assert tree.run("rmmod", "nvidia").returncode == 0


def test_any_process_with_the_device_open_is_a_holder(tree: Tree) -> None:
    with (tree.root / "dev/nvidia1").open("rb"):
        apps = tree.run("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader").stdout
        assert str(os.getpid()) in apps.split()


def test_persistenced_refuses_a_mismatch(tree: Tree) -> None:
    tree.install(NEW)
    done = tree.run("nvidia-persistenced")
    assert done.returncode == 1
    assert f"driver {OLD}, library {NEW}" in done.stderr


def test_fabric_manager_wants_exactly_its_driver(tree: Tree) -> None:
    tree.install(NEW)
    done = tree.run("nv-fabricmanager")
    assert done.returncode == 1
    assert f"version {NEW} don't match with driver version {OLD}" in done.stderr
    tree.reboot()
    assert "Nothing to do" in tree.run("nv-fabricmanager").stderr  # no NVSwitch
    tree.set_hardware(nvswitch=True)
    with tree.daemon("nv-fabricmanager") as process:
        assert process.poll() is None


def test_imex_tells_of_its_domain_while_it_runs(tree: Tree) -> None:
    nodes = tree.root / "etc/nvidia-imex/nodes_config.cfg"
    nodes.parent.mkdir(parents=True)
    nodes.write_text("192.0.2.11\n192.0.2.12\n")
    assert "unable to connect" in tree.run("nvidia-imex-ctl", "-N", "-j").stderr
    with tree.daemon("nvidia-imex"):
        domain = fabric_probe.imex_domain_of(json.loads(tree.run("nvidia-imex-ctl", "-N", "-j").stdout))
    assert imex_wait.not_ready(domain, "192.0.2.12", whole=True) == ""
    assert [node["version"] for node in domain["nodes"]] == [OLD, OLD]


def test_rdma_modules_load_at_boot_when_named(tree: Tree) -> None:
    folder = tree.root / "etc/modules-load.d"
    folder.mkdir(parents=True)
    (folder / "rdma.conf").write_text("# RDMA\nib_umad\nmlx5_ib\n")
    tree.reboot()
    loaded = {line.split()[0] for line in tree.run("lsmod").stdout.splitlines()[1:]}
    assert {"ib_umad", "mlx5_ib", "mlx5_core", "ib_uverbs", "ib_core"} <= loaded


def test_a_blacklisted_module_is_not_loaded_at_boot(tree: Tree) -> None:
    folder = tree.root / "etc/modprobe.d"
    folder.mkdir(parents=True)
    (folder / "no.conf").write_text("blacklist nvidia_uvm\n")
    tree.reboot()
    assert not (tree.root / "sys/module/nvidia_uvm").exists()
    assert (tree.root / "sys/module/nvidia").is_dir()


def test_without_gpus_the_module_finds_no_device(tree: Tree) -> None:
    tree.set_hardware(gpus=[], autoload=[])
    tree.reboot()
    done = tree.run("modprobe", "nvidia")
    assert (done.returncode, done.stderr) == (1, "modprobe: ERROR: could not insert 'nvidia': No such device\n")


def test_a_failed_dkms_build_shows_everywhere(tree: Tree) -> None:
    tree.set_hardware(dkms_failed_for=[platform.release()])
    tree.reboot()
    assert tree.run("dkms", "status").stdout == f"nvidia/{OLD}: added\n"
    assert tree.run("modinfo", "-F", "version", "nvidia").stderr == "modinfo: ERROR: Module nvidia not found.\n"
    assert tree.run("nvidia-smi").returncode == 9
    assert tree.run("modinfo", "-k", "6.1.0-0-amd64", "-F", "version", "nvidia").stdout == f"{OLD}\n"


def test_dkms_and_secure_boot(tree: Tree) -> None:
    expected = f"nvidia/{OLD}, {platform.release()}, {platform.machine()}: installed\n"
    assert tree.run("dkms", "status").stdout == expected
    assert tree.run("mokutil", "--sb-state").stdout == "SecureBoot disabled\n"
    tree.set_hardware(secure_boot=True)
    assert tree.run("mokutil", "--sb-state").stdout == "SecureBoot enabled\n"


def test_an_unknown_module(tree: Tree) -> None:
    done = tree.run("modprobe", "no_such_module")
    message = f"modprobe: FATAL: Module no_such_module not found in directory /lib/modules/{platform.release()}\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.fixture
def toolkit(tree: Tree) -> Callable[..., subprocess.CompletedProcess[str]]:
    tree.install("1.20.0")
    return lambda *arguments: tree.run("nvidia-ctk", *arguments)


def test_cdi_follows_the_driver(tree: Tree, toolkit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert toolkit("--version").stdout.startswith("NVIDIA Container Toolkit CLI version 1.20.0\n")
    assert toolkit("cdi", "generate", "--output=/var/run/cdi/nvidia.yaml").returncode == 0
    assert f"libcuda.so.{OLD}" in tree.read("/var/run/cdi/nvidia.yaml")
    names = toolkit("cdi", "list").stdout.split()
    assert names[0] == "nvidia.com/gpu=0"
    assert len(names) == 5  # two GPUs by index and UUID, and "all"
    tree.install(NEW)
    refused = toolkit("cdi", "generate")
    assert refused.returncode == 1
    assert "Driver/library version mismatch" in refused.stderr


def test_docker_settings_are_merged(tree: Tree, toolkit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    path = tree.root / "etc/docker/daemon.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"live-restore": true}')
    shown = json.loads(toolkit("runtime", "configure", "--runtime=docker", "--dry-run").stdout)
    assert shown["live-restore"] is True
    assert json.loads(path.read_text()) == {"live-restore": True}
    assert toolkit("runtime", "configure", "--runtime=docker").returncode == 0
    assert json.loads(path.read_text()) == shown
    path.write_text("{broken")
    assert "unable to load config" in toolkit("runtime", "configure", "--runtime=docker").stderr
