"""The kernel lab's pure parts: QEMU's command line and protocol, the image's key, packages for a real kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_runbook.errors import RunbookError
from lab.kernel import qmp
from lab.kernel.access import ssh_config
from lab.kernel.image import Image, image_key, machine_files, sources
from lab.kernel.machine import EMULATION, KVM, Running, console_tail, peer_of, qemu_argv
from lab.kernel.packages import driver_set, kernel_packages, module_files
from lab.kernel.settings import DRIVER_VERSIONS, FIRST_DRIVER, VIRTUAL_MACHINES
from lab.prerequisites import KERNEL_TOOLS, Situation, packages_for
from lab.standin.plan import FilePlan, PackagePlan, plan_packages

KERNEL = "6.1.0-57-amd64"
IMAGE = Image(key="k", place=Path("/cache/image"), kernel=KERNEL)
A, B = VIRTUAL_MACHINES
FILES = machine_files("ssh-ed25519 AAAA lab", ("private", "ssh-ed25519 BBBB host"))


def packages() -> dict[tuple[str, str], PackagePlan]:
    """Return the packages for a kernel by name and version, with a module of four bytes per driver."""
    modules = {
        version: (FilePlan(f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko", b"\x7fELF"),) for version in DRIVER_VERSIONS
    }
    plans = kernel_packages(plan_packages(), KERNEL, modules, b"daemon")
    return {(plan.name, plan.version): plan for plan in plans}


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        pytest.param(KVM, ["-accel", "kvm", "-cpu", "host"], id="kvm"),
        pytest.param(EMULATION, ["-accel", "tcg,thread=multi", "-cpu", "max"], id="emulation"),
    ],
)
def test_qemu_argv_names_the_accelerator(tmp_path: Path, accelerator: str, options: list[str]) -> None:
    argv = qemu_argv(Running(machine=A, folder=tmp_path), IMAGE, accelerator, B)
    start = argv.index("-accel")
    assert argv[start : start + 4] == options


def test_the_rail_joins_the_two_machines(tmp_path: Path) -> None:
    """What one sends to is where the other one listens; with the ports mixed up both would boot and never meet."""
    ends = []
    for machine in (A, B):
        argv = qemu_argv(Running(machine=machine, folder=tmp_path), IMAGE, EMULATION, peer_of(machine))
        rail = next(value for value in argv if value.startswith("dgram,"))
        options = dict(part.split("=", 1) for part in rail.split(",")[1:])
        ends.append((options["local.port"], options["remote.port"]))
    assert ends[0] == tuple(reversed(ends[1]))
    assert ends[0][0] != ends[0][1]


def test_the_image_is_never_written(tmp_path: Path) -> None:
    argv = qemu_argv(Running(machine=A, folder=tmp_path), IMAGE, EMULATION, B)
    drives = [argv[place + 1] for place, word in enumerate(argv) if word == "-drive"]
    assert all("readonly=on" in drive for drive in drives if str(IMAGE.place) in drive)
    assert any(str(tmp_path) in drive for drive in drives)


def test_machines_are_reached_on_the_loopback_address_only(tmp_path: Path) -> None:
    argv = qemu_argv(Running(machine=A, folder=tmp_path), IMAGE, EMULATION, B)
    assert f"hostfwd=tcp:127.0.0.1:{A.ssh_port}-:22" in next(word for word in argv if word.startswith("user,"))
    ports = [port for machine in VIRTUAL_MACHINES for port in (machine.ssh_port, machine.rail_port)]
    assert len(set(ports)) == len(ports)


def test_a_process_number_left_behind_is_nobody_s(tmp_path: Path) -> None:
    """The number of a machine that died may be another process's by now, which must never be stopped."""
    running = Running(machine=A, folder=tmp_path)
    assert running.pid() is None
    running.pid_file.write_text("1\n")
    assert running.pid() is None


def test_console_tail_keeps_the_end(tmp_path: Path) -> None:
    console = tmp_path / "console"
    console.write_text("".join(f"line {number}\n" for number in range(100)))
    assert console_tail(console).splitlines()[-1] == "line 99"
    assert "line 10\n" not in console_tail(console)


def test_image_key_covers_files_and_sources(tmp_path: Path) -> None:
    known = image_key(FILES, sources())
    assert image_key(dict(reversed(list(FILES.items()))), sources()) == known
    assert image_key(FILES | {"etc/fstab": "another"}, sources()) != known
    other = tmp_path / "nvidia.c"
    other.write_text("int changed;\n")
    assert image_key(FILES, [*sources()[1:], other]) != known


def test_each_machine_finds_its_address_by_its_card() -> None:
    for machine in VIRTUAL_MACHINES:
        text = FILES[f"etc/systemd/network/20-rail-{machine.name}.network"]
        assert f"MACAddress={machine.rail_mac}" in text
        assert f"Address={machine.rail_address}/24" in text


def test_qmp_message_is_one_line() -> None:
    text = qmp.message("set_link", name="rail-card", up=False)
    assert text.endswith("\r\n")
    assert json.loads(text) == {"execute": "set_link", "arguments": {"name": "rail-card", "up": False}}
    assert json.loads(qmp.message("query-status")) == {"execute": "query-status"}


@pytest.mark.parametrize(
    ("line", "given"),
    [
        pytest.param('{"return": {"status": "running"}}', {"status": "running"}, id="answer"),
        pytest.param('{"return": "text"}', {"value": "text"}, id="plain-value"),
        pytest.param('{"event": "SHUTDOWN", "timestamp": {"seconds": 1}}', None, id="event-in-between"),
    ],
)
def test_qmp_answer(line: str, given: dict[str, object] | None) -> None:
    assert qmp.answer(line) == given


def test_qmp_refusal_carries_its_words() -> None:
    with pytest.raises(RunbookError, match="Device 'x' not found"):
        qmp.answer('{"error": {"class": "DeviceNotFound", "desc": "Device \'x\' not found"}}')


def test_qmp_without_a_machine_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunbookError, match="control socket"):
        qmp.ask(tmp_path / "none.qmp", "query-status")


def test_nothing_stands_before_the_real_module_tools() -> None:
    paths = [file.path for plan in packages().values() for file in plan.files]
    assert not [path for path in paths if path.startswith("/usr/local/sbin") or "/kimi-standin/modules/" in path]


@pytest.mark.parametrize("version", DRIVER_VERSIONS)
def test_the_module_package_brings_real_modules(version: str) -> None:
    plan = packages()["nvidia-kernel-open-dkms", f"{version}-1"]
    assert f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko" in {file.path for file in plan.files}
    assert f"depmod -a {KERNEL}" in dict(plan.scripts)["postinst"]
    assert "initramfs" not in repr((plan.scripts, plan.triggers))  # renewing it is the role's part


def test_only_versions_with_modules_are_offered() -> None:
    offered = {version for name, version in packages() if name == "nvidia-driver-cuda"}
    assert offered == {f"{version}-1" for version in DRIVER_VERSIONS}


def test_the_first_driver_is_complete() -> None:
    """Every dependency of the set is in the set or comes with Debian: the image installs it without a repository."""
    chosen = driver_set(packages().values(), FIRST_DRIVER)
    names = {plan.name for plan in chosen}
    assert f"nvidia-driver-pinning-{FIRST_DRIVER}" in names
    assert len(names) == len(chosen)
    needed = {
        entry.split()[0]
        for plan in chosen
        for entry in dict(plan.control).get("Depends", "").split(",")
        if entry.strip()
    }
    assert needed - names <= {"python3"}


def test_modules_lie_where_dkms_puts_them(tmp_path: Path) -> None:
    module = tmp_path / "nvidia-uvm.ko"
    module.write_bytes(b"\x7fELF")
    assert module_files(KERNEL, [module]) == (
        FilePlan(f"/lib/modules/{KERNEL}/updates/dkms/nvidia-uvm.ko", b"\x7fELF"),
    )


def test_ssh_config_reaches_each_machine_with_the_lab_s_key_only(tmp_path: Path) -> None:
    text = ssh_config(tmp_path)
    assert text.count("IdentitiesOnly yes") == text.count("StrictHostKeyChecking yes") == len(VIRTUAL_MACHINES)
    assert all(
        f"Host {machine.name}\n" in text and f"Port {machine.ssh_port}\n" in text for machine in VIRTUAL_MACHINES
    )


def test_kernel_tools_are_named_where_nobody_may_install_them() -> None:
    seen = Situation(programs=frozenset(), is_root=False, has_apt=True, engine_answers=False)
    with pytest.raises(RunbookError, match="qemu-system-x86_64"):
        packages_for(KERNEL_TOOLS, seen)
    there = replace(seen, programs=frozenset(tool.program for tool in KERNEL_TOOLS))
    assert packages_for(KERNEL_TOOLS, there) == ()
