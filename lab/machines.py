"""Containers that stand for machines: how they are made, told apart from outdated ones, and waited for."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from lab.commands import await_condition
from lab.docker import Docker, label_arguments
from lab.files import digest_of
from lab.settings import DEPOT, HOSTS, NETWORK, SPEC_LABEL, Machine

BOOT_TIMEOUT_S = 90
PREPARED_MARKER = "/var/lib/kimi-lab/prepared"

# What systemd as PID 1, a nested Docker engine and the engine's containers need. --privileged asks for SYS_RESOURCE as
# well, which not every machine can give (a container cannot); SYS_MODULE, SYS_RAWIO and SYS_TIME stay out so that a
# lab host cannot load a module into the machine's kernel or set its clock.
CAPABILITIES = (
    "SYS_ADMIN",
    "NET_ADMIN",
    "NET_RAW",
    "SYS_PTRACE",
    "MKNOD",
    "SYS_BOOT",
    "SYS_NICE",
    "IPC_LOCK",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "DAC_READ_SEARCH",
    "LINUX_IMMUTABLE",
    "SETFCAP",
    "SYSLOG",
)


@dataclass(frozen=True, slots=True)
class File:
    """A file put into a machine before its first boot: content and mode."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Everything a machine is made from; its digest on the container tells whether that one is still right.

    Attributes:
        machine: Name, address, volume.
        image: Image reference.
        files: {absolute path: file} put in before the first boot.
        prepared_from: Digest of what is done to it after the first boot.
    """

    machine: Machine
    image: str
    files: Mapping[str, File]
    prepared_from: str = ""

    def digest(self) -> str:
        """Return the digest over all of it, the command line included."""
        files = [part for path, file in sorted(self.files.items()) for part in (path, file.content, oct(file.mode))]
        return digest_of(*create_arguments(self.machine, self.image, ""), self.prepared_from, *files)


def create_arguments(machine: Machine, image: str, spec: str) -> list[str]:
    """Return the docker arguments that make a machine without starting it."""
    neighbours = [f"{other.name}:{other.address}" for other in (DEPOT, *HOSTS) if other != machine]
    options = [
        *("--name", machine.name, "--hostname", machine.name),
        *("--network", NETWORK, "--ip", machine.address),
        *(argument for entry in neighbours for argument in ("--add-host", entry)),
        *(argument for name in CAPABILITIES for argument in ("--cap-add", name)),
        *("--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"),
        *("--device-cgroup-rule", "a *:* rwm"),
        *("--cgroupns", "host", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw"),
        # A reboot inside ends the container; coming back is the restart policy's work. What a reboot empties is tmpfs.
        *("--restart", "always", "--stop-signal", "SIGRTMIN+3"),
        *("--tmpfs", "/run:exec,mode=755", "--tmpfs", "/run/lock", "--tmpfs", "/tmp:exec,mode=1777"),  # noqa: S108 - inside the container
        *("--shm-size", "2g"),  # engine ranks of one host share memory there
        *("--volume", f"{machine.volume}:{machine.mount}"),
        *("--env", "container=docker"),
    ]
    return ["create", *options, *label_arguments(spec), image, "/lib/systemd/systemd"]


def archive(files: Mapping[str, File]) -> bytes:
    """Return a tar archive of files and the directories above them, all root's; below /root for root alone."""
    stream = io.BytesIO()
    directories = sorted({str(parent) for path in files for parent in PurePosixPath(path).parents} - {"/"})
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for directory in directories:  # an engine of version 20.10 would make them with mode 0600
            info = tarfile.TarInfo(directory.lstrip("/"))
            info.type, info.mode = tarfile.DIRTYPE, 0o700 if directory.startswith("/root") else 0o755
            tar.addfile(info)
        for path, file in sorted(files.items()):
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(file.content), file.mode
            tar.addfile(info, io.BytesIO(file.content))
    return stream.getvalue()


def is_current(docker: Docker, spec: Spec) -> bool:
    """Return whether the machine exists, is made from this spec, and was prepared to the end."""
    seen = docker.inspect("container", spec.machine.name)
    if seen is None or (seen["Config"]["Labels"] or {}).get(SPEC_LABEL) != spec.digest():
        return False
    if not seen["State"]["Running"]:
        docker.must("start", spec.machine.name, where=spec.machine.name)
    return docker.ask("exec", spec.machine.name, "test", "-e", PREPARED_MARKER).status == 0


def recreate(docker: Docker, spec: Spec, *, keep_volume: bool) -> None:
    """Make a machine anew and start it; its volume goes as well unless it is to be kept."""
    machine = spec.machine
    if docker.inspect("container", machine.name) is not None:
        docker.must("rm", "--force", machine.name, where=machine.name)
    if not keep_volume and docker.inspect("volume", machine.volume) is not None:
        docker.must("volume", "rm", machine.volume, where=machine.name)
    if docker.inspect("volume", machine.volume) is None:
        docker.must("volume", "create", *label_arguments(), machine.volume, where=machine.name)
    docker.must(*create_arguments(machine, spec.image, spec.digest()), where=machine.name)
    docker.must("cp", "-", f"{machine.name}:/", data=archive(spec.files), where=machine.name)
    docker.must("start", machine.name, where=machine.name)


def mark_prepared(docker: Docker, spec: Spec) -> None:
    """Leave the mark that the machine was prepared to the end."""
    docker.shell(spec.machine.name, f"mkdir -p /var/lib/kimi-lab && date -u +%FT%TZ > {PREPARED_MARKER}")


def await_boot(docker: Docker, name: str) -> None:
    """Wait until systemd says that the machine is up with every unit it wanted.

    Raises:
        RunbookError: After 90 s; names the failed units.
    """

    def question() -> str | None:
        state = docker.ask("exec", name, "systemctl", "is-system-running").out.strip()
        if state == "running":
            return None
        if state == "degraded":
            failed = docker.ask("exec", name, "systemctl", "list-units", "--failed", "--plain", "--no-legend").out
            return f"degraded ({', '.join(line.split()[0] for line in failed.splitlines() if line)})"
        return state or "no answer from systemd"

    await_condition(
        question,
        where=name,
        expected="system state running",
        timeout_s=BOOT_TIMEOUT_S,
        next_step=f"Read `docker exec {name} journalctl --boot --priority warning`.",
    )


def names(machines: Sequence[Machine]) -> str:
    """Return the machines' names for a sentence."""
    return ", ".join(machine.name for machine in machines)
