"""Starting, awaiting and stopping virtual machines with QEMU; what is stopped is what was started, by its pid file."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.commands import Purpose, ask, await_condition, must
from lab.files import digest_of, write_atomically
from lab.kernel import qmp
from lab.kernel.image import Image
from lab.kernel.settings import CPUS, MEMORY_MIB, VIRTUAL_MACHINES, VirtualMachine

PROGRAM = "qemu-system-x86_64"
KVM, EMULATION = "kvm", "tcg"
# With KVM a machine is up in seconds; one that is not is emulated, however slow, rather than trusted.
KVM_TRIAL_S = 45.0
BOOT_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_CONSOLE_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Files of one machine while it runs and after.

    Attributes:
        machine: The machine.
        folder: Where they lie.
    """

    machine: VirtualMachine
    folder: Path

    @property
    def disk(self) -> Path:
        """What the machine has written on top of the image."""
        return self.folder / f"{self.machine.name}.qcow2"

    @property
    def console(self) -> Path:
        """What the machine printed on its console."""
        return self.folder / f"{self.machine.name}.console.log"

    @property
    def control(self) -> Path:
        """QEMU's control socket."""
        return self.folder / f"{self.machine.name}.qmp"

    @property
    def pid_file(self) -> Path:
        """QEMU's process number, written by QEMU and removed by it."""
        return self.folder / f"{self.machine.name}.pid"

    def pid(self) -> int | None:
        """Return the process number while this very machine runs; a number alone may be another process's by now."""
        if not self.pid_file.exists():
            return None
        pid = int(self.pid_file.read_text())
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        return pid if str(self.pid_file).encode() in command else None


def accelerator_options(accelerator: str) -> list[str]:
    """Return QEMU's options for an accelerator."""
    if accelerator == KVM:
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", "max"]


def qemu_argv(running: Running, image: Image, accelerator: str, peer: VirtualMachine) -> list[str]:
    """Return the command that starts a machine in the background.

    The first network card is QEMU's user network, which shows this machine's loopback address as 10.0.2.2; the second
    is a cable to the peer. Neither needs rights on this machine.
    """
    machine = running.machine
    return [
        PROGRAM,
        "-name",
        machine.name,
        *accelerator_options(accelerator),
        "-m",
        str(MEMORY_MIB),
        "-smp",
        str(CPUS),
        "-display",
        "none",
        "-daemonize",
        "-pidfile",
        str(running.pid_file),
        "-chardev",
        f"file,id=console,path={running.console},append=on",
        "-serial",
        "chardev:console",
        "-qmp",
        f"unix:{running.control},server=on,wait=off",
        "-drive",
        f"file={image.boot_disk},format=raw,if=none,id=boot,readonly=on",
        "-device",
        "virtio-blk-pci,drive=boot,bootindex=0",
        "-drive",
        f"file={running.disk},format=qcow2,if=none,id=root,cache=unsafe",
        "-device",
        "virtio-blk-pci,drive=root,bootindex=1",
        "-netdev",
        f"user,id=management,hostfwd=tcp:127.0.0.1:{machine.ssh_port}-:22",
        "-device",
        "virtio-net-pci,netdev=management,romfile=",
        "-netdev",
        "dgram,id=rail,"
        f"local.type=inet,local.host=127.0.0.1,local.port={machine.rail_port},"
        f"remote.type=inet,remote.host=127.0.0.1,remote.port={peer.rail_port}",
        "-device",
        f"virtio-net-pci,netdev=rail,id=rail-card,mac={machine.rail_mac},romfile=",
    ]


def peer_of(machine: VirtualMachine, machines: Sequence[VirtualMachine] = VIRTUAL_MACHINES) -> VirtualMachine:
    """Return the machine at the other end of the rail."""
    return next(other for other in machines if other != machine)


def start(running: Running, image: Image, accelerator: str, *, fresh: bool = True) -> None:
    """Start a machine, on a new disk unless told otherwise; it is not awaited.

    Raises:
        RunbookError: It runs already, or QEMU refuses.
    """
    if running.pid() is not None:
        raise RunbookError(
            where=running.machine.name,
            observed=f"runs already (process {running.pid()})",
            expected="no machine of that name",
            next_step="Run: python -m lab.kernel down",
        )
    running.folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        for path in (running.disk, running.console):
            path.unlink(missing_ok=True)
        make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(image.root_disk), str(running.disk)]
        must(make, Purpose(running.machine.name, "Check the space where the checkout lies."))
    running.control.unlink(missing_ok=True)
    must(
        qemu_argv(running, image, accelerator, peer_of(running.machine)),
        Purpose(
            running.machine.name,
            f"Ports {running.machine.ssh_port} (TCP) and {running.machine.rail_port} (UDP) of 127.0.0.1 must be free.",
        ),
        timeout_s=60,
    )


def stop(running: Running) -> bool:
    """Stop a machine at once; return whether it ran. Its disk and console log stay.

    Raises:
        RunbookError: It is still there after the deadline.
    """
    pid = running.pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)  # QEMU ends at once; the machine's disk is made anew anyway
    await_condition(
        lambda: None if running.pid() is None else f"process {pid} runs",
        where=running.machine.name,
        expected="QEMU to end at SIGTERM",
        timeout_s=STOP_TIMEOUT_S,
        next_step=f"Look at process {pid}, then: kill -9 {pid}",
    )
    return True


def set_link(running: Running, *, up: bool) -> None:
    """Plug the rail's cable in, or pull it: the card in the machine sees its carrier come or go."""
    qmp.ask(running.control, "set_link", name="rail-card", up=up)


def await_ssh(running: Running, ssh_config: Path, timeout_s: float = BOOT_TIMEOUT_S) -> None:
    """Wait until a machine answers over ssh.

    Raises:
        RunbookError: It does not, or QEMU has ended or stands still; carries the end of its console.
    """
    command = ["ssh", "-F", str(ssh_config), "-o", "ConnectTimeout=5", running.machine.name, "true"]

    def question() -> str | None:
        if (trouble := trouble_of(running)) is not None:
            raise _not_up(running, trouble)
        answer = ask(command, timeout_s=20)
        return None if answer.status == 0 else (answer.err.strip().splitlines() or ["no answer"])[-1]

    try:
        await_condition(
            question, where=running.machine.name, expected="an answer over ssh", timeout_s=timeout_s, next_step=""
        )
    except RunbookError as error:
        if error.next_step:
            raise
        raise _not_up(running, error.observed) from error


def trouble_of(running: Running) -> str | None:
    """Return why a machine will never answer: QEMU ended, or has stopped it after an error of its own."""
    if running.pid() is None:
        return "QEMU has ended"
    state = str(qmp.ask(running.control, "query-status").get("status"))
    return None if state in ("running", "prelaunch") else f"QEMU has stopped the machine: {state}"


def _not_up(running: Running, observed: str) -> RunbookError:
    return RunbookError(
        where=running.machine.name,
        observed=f"{observed}; the console ends with:\n{console_tail(running.console)}",
        expected="an answer over ssh",
        next_step=f"Read {running.console}.",
    )


def console_tail(console: Path) -> str:
    """Return the last lines of a console log."""
    if not console.exists():
        return "(nothing)"
    return "\n".join(console.read_text(errors="replace").splitlines()[-_CONSOLE_LINES:])


def choose_accelerator(running: Running, image: Image, ssh_config: Path, memory: Path) -> str:
    """Return KVM where a machine really boots with it, else software emulation; asked once per image and machine.

    /dev/kvm alone proves little: nested and restricted hypervisors offer it and fail at the first unusual instruction.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return EMULATION
    situation = digest_of(image.key, os.uname().release, Path("/proc/sys/kernel/random/boot_id").read_text())
    if memory.exists():
        known, _, answer = memory.read_text().strip().partition(" ")
        if known == situation and answer in (KVM, EMULATION):
            return answer
    chosen = KVM
    try:
        start(running, image, KVM)
        await_ssh(running, ssh_config, KVM_TRIAL_S)
    except RunbookError:
        chosen = EMULATION
    finally:
        stop(running)
    write_atomically(memory, f"{situation} {chosen}\n")
    return chosen
