"""What the change of the driver left behind, read straight from the kernel."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DRIVER = yaml.safe_load((ROOT / "molecule/kernel/inventory/lock.yml").read_text(encoding="utf-8"))["driver"]["version"]
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def test_the_locked_driver_is_loaded(host):
    assert host.file("/sys/module/nvidia/version").content_string.strip() == DRIVER
    assert f"Open Kernel Module for x86_64  {DRIVER} " in host.file("/proc/driver/nvidia/version").content_string


def test_another_driver_was_loaded_before(before):
    assert {seen["driver"] for seen in before.values()} == {"570.133.20"}


def test_disk_and_library_agree_with_the_kernel(host):
    assert host.check_output("modinfo --field version nvidia") == DRIVER
    assert host.check_output("nvidia-smi --query-gpu=driver_version --format=csv,noheader") == DRIVER


def test_the_modules_say_what_they_are(host):
    assert "stand-in" in host.check_output("modinfo --field description nvidia")


def test_packages_are_held(host):
    held = host.check_output("apt-mark showhold").splitlines()
    assert {"nvidia-kernel-open-dkms", "nvidia-driver-cuda", f"nvidia-driver-pinning-{DRIVER}"} <= set(held)


def test_the_persistence_daemon_holds_the_new_module(host):
    assert host.service("nvidia-persistenced").is_running
    users = host.check_output("ls /sys/module/nvidia/holders").split()
    assert int(host.file("/sys/module/nvidia/refcnt").content_string) > len(users)


def test_nothing_rebooted_where_a_reload_was_enough(machine_a, before):
    assert machine_a.check_output(BOOT_ID) == before["kernel-a"]["boot"]


def test_the_kernel_really_booted_where_a_stranger_held_the_gpu(machine_b, before):
    assert machine_b.check_output(BOOT_ID) != before["kernel-b"]["boot"]
    assert not machine_b.service("stranger").is_running


def test_the_initramfs_brought_the_new_module(machine_b):
    """It held 570 before, and what it holds is loaded ahead of the disk: an old one there undoes an upgrade."""
    lines = machine_b.check_output("dmesg --notime").splitlines()
    loaded = next(number for number, line in enumerate(lines) if line.startswith("NVRM: loading"))
    mounted = next(number for number, line in enumerate(lines) if "EXT4-fs (vdb): mounted" in line)
    assert DRIVER in lines[loaded]
    assert loaded < mounted


@pytest.mark.parametrize("user", ["nvidia_uvm", "nvidia_peermem"])
def test_nvidia_stays_while_a_module_needs_it(machine_a, user):
    machine_a.check_output(f"modprobe {user}")
    assert user in machine_a.check_output("ls /sys/module/nvidia/holders").split()
    refused = machine_a.run("modprobe --remove nvidia")
    assert refused.rc != 0
    assert "in use" in refused.stderr
