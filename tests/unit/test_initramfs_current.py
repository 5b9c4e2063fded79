"""An initramfs that would boot another driver or old parameters is rebuilt, and looked into again."""

import gzip
import os
import subprocess
from pathlib import Path

import initramfs_current
import pytest
from host_tree import Tree
from modules_run import run_module

from tests.hosts.archive import initramfs

OLD, TARGET = "570.133.20", "580.178.04"
RUNNING, NEXT = "6.8.0-60-generic", "6.8.0-90-generic"
CONF = "/etc/modprobe.d/kimi-nvidia.conf"


def image(version):
    return initramfs("usr/lib/modules/x/nvidia.ko", b"\0version=" + version.encode() + b"\0" if version else b"")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with images; its tools rebuild them to hold ``builds``."""

    class Host:
        root = tmp_path / "host"
        tree = Tree(tmp_path / "host")
        builds = TARGET
        fails = False

        def __init__(self):
            self.ran = []

        def image(self, kernel, version, age_s=100, name="/boot/initrd.img-{}"):
            path = self.tree.put(name.format(kernel), image(version))
            stamp = path.stat().st_mtime - age_s
            os.utime(path, (stamp, stamp))

        def run(self, argv, timeout):
            if argv[0] not in ("update-initramfs", "dracut"):
                raise FileNotFoundError(2, "No such file or directory", argv[0])
            self.ran.append(list(argv))
            if self.fails:
                return subprocess.CompletedProcess(argv, 1, "", "No space left on device")
            target = Path(argv[2]) if argv[0] == "dracut" else Path(f"/boot/initrd.img-{argv[3]}")
            self.tree.put(str(target), image(self.builds))
            return subprocess.CompletedProcess(argv, 0, "", "")

        def ask(self, **arguments):
            made = initramfs_current.Probe

            def probe(root, **limits):
                return made(root, run=self.run, **limits)

            monkeypatch.setattr(initramfs_current, "Probe", probe)
            answer = run_module(
                monkeypatch, tmp_path, initramfs_current.main, root=str(self.root), version=TARGET, newer_than=[CONF],
                **arguments,
            )  # fmt: skip
            monkeypatch.setattr(initramfs_current, "Probe", made)
            return answer

    made = Host()
    made.tree.put("/proc/sys/kernel/osrelease", f"{RUNNING}\n")
    for kernel in (RUNNING, NEXT):
        made.tree.put(f"/boot/vmlinuz-{kernel}")
        (made.root / f"lib/modules/{kernel}/kernel").mkdir(parents=True)
    return made


def test_a_stale_image_of_either_kernel_is_rebuilt(host):
    """C11: the module of the initramfs is loaded first."""
    host.image(RUNNING, OLD)
    host.image(NEXT, OLD)
    answer = host.ask()
    assert answer["rebuilt"] == {RUNNING: f"holds driver {OLD}", NEXT: f"holds driver {OLD}"}
    assert host.ran == [["update-initramfs", "-u", "-k", kernel] for kernel in (RUNNING, NEXT)]
    assert host.ask()["changed"] is False


def test_an_image_without_the_driver_or_with_the_right_one_stays(host):
    host.image(RUNNING, None)
    host.image(NEXT, TARGET)
    assert host.ask()["changed"] is False
    assert host.ran == []


def test_new_parameters_need_a_new_image(host):
    host.image(RUNNING, None)
    host.tree.put(CONF, "options nvidia NVreg_A=1\n")
    assert host.ask()["rebuilt"] == {RUNNING: f"older than {CONF}"}
    assert host.ask()["changed"] is False


def test_dracut_rebuilds_its_own_images(host):
    host.image(RUNNING, OLD, name="/boot/initramfs-{}.img")
    host.ask()
    assert host.ran == [["dracut", "--force", f"/boot/initramfs-{RUNNING}.img", RUNNING]]


def test_a_rebuild_that_keeps_the_old_module_stops(host):
    host.image(RUNNING, OLD)
    host.builds = OLD
    answer = host.ask()
    assert answer["failed"]
    assert f"holds driver {OLD} after a rebuild" in answer["msg"]


def test_a_rebuild_that_fails_forbids_the_reboot(host):
    host.image(RUNNING, OLD)
    host.fails = True
    answer = host.ask()
    assert "No space left on device" in answer["msg"]
    assert "do not reboot" in answer["msg"]


def test_an_image_that_cannot_be_read_is_no_right_one(host):
    host.tree.put(f"/boot/initrd.img-{RUNNING}", gzip.compress(b"no archive" * 20))
    answer = host.ask()
    assert answer["failed"]
    assert f"/boot/initrd.img-{RUNNING}" in answer["msg"]


def test_check_mode_rebuilds_nothing(host):
    host.image(RUNNING, OLD)
    assert host.ask(check=True)["changed"] is True
    assert host.ran == []


def test_a_host_without_an_initramfs_has_nothing_to_rebuild(host):
    assert host.ask()["changed"] is False
