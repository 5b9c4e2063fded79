"""The GPU hosts: systemd and sshd in containers, simulated GPUs, driver 570 as they came from the last owner."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.commands import ask, await_condition
from lab.docker import Docker
from lab.keys import Keys
from lab.machines import File, Spec, await_boot, is_current, mark_prepared, names, recreate
from lab.model import model_files, revision
from lab.progress import Step
from lab.settings import HOSTS, MODEL_DIRECTORY, REPOSITORIES_URL, Machine
from lab.standin.host import BOOT_UNIT, HARDWARE_PATH, INITIAL_DRIVER, hardware_json, preinstalled

SSH_TIMEOUT_S = 60
ARCHIVE_KEY = "/usr/share/keyrings/kimi-lab-archive.asc"
# Read while a host is prepared and at no other time: the roles bring the permanent source.
_VENDOR_SOURCES = "/run/kimi-lab-sources"


def apt_source(name: str) -> str:
    """Return the deb822 source of one of the depot's repositories."""
    return f"Types: deb\nURIs: {REPOSITORIES_URL}/{name}\nSuites: stable\nComponents: main\nSigned-By: {ARCHIVE_KEY}\n"


def host_spec(machine: Machine, image: str, keys: Keys, vendor_index: bytes) -> Spec:
    """Return what a host is made from.

    ``vendor_index`` is the index of the stand-in packages: when they change, hosts that carry the old ones are
    made again.
    """
    private, public = keys.host[machine.name]
    model = model_files()
    files = {
        "/root/.ssh/authorized_keys": File(keys.public.encode(), 0o600),
        "/etc/ssh/ssh_host_ed25519_key": File(private.encode(), 0o600),
        "/etc/ssh/ssh_host_ed25519_key.pub": File(public.encode()),
        "/etc/ssh/sshd_config.d/kimi-lab.conf": File(
            b"HostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nUseDNS no\nMaxStartups 64\n"
        ),
        "/etc/machine-id": File(f"{hashlib.md5(machine.name.encode(), usedforsecurity=False).hexdigest()}\n".encode()),
        ARCHIVE_KEY: File(keys.archive.encode()),
        "/etc/apt/sources.list.d/lab-debian.sources": File(apt_source("debian").encode()),
        HARDWARE_PATH: File(hardware_json(machine.name).encode()),
        f"{MODEL_DIRECTORY}/revision": File(f"{revision(model)}\n".encode()),
    }
    files |= {f"{MODEL_DIRECTORY}/{name}": File(text.encode()) for name, text in model.items()}
    prepared_from = "\n".join([*preinstalled(), hashlib.sha256(vendor_index).hexdigest()])
    return Spec(machine=machine, image=image, files=files, prepared_from=prepared_from)


def host_specs(image: str, keys: Keys, repositories: Path) -> list[Spec]:
    """Return what each host is made from; ``repositories`` is the directory the depot's content was built in."""
    indexes = sorted((repositories / "cuda" / "dists" / "stable" / "main").rglob("Packages"))
    vendor_index = b"".join(path.read_bytes() for path in indexes)
    return [host_spec(machine, image, keys, vendor_index) for machine in HOSTS]


def ensure(docker: Docker, specs: Sequence[Spec], state: Path, step: Step, *, fresh: bool = False) -> None:
    """Bring all hosts up and reachable over ssh; those that are right already stay as they are, unless ``fresh``.

    Raises:
        RunbookError: The first failure of any host.
    """
    wanted = [spec for spec in specs if fresh or not is_current(docker, spec)]
    step.update(len(specs) - len(wanted), of=len(specs), unit="hosts")
    with ThreadPoolExecutor(max_workers=len(specs)) as pool:
        work = [pool.submit(make, docker, spec) for spec in wanted]
        for done, future in enumerate(as_completed(work), start=len(specs) - len(wanted) + 1):
            future.result()
            step.update(done, of=len(specs), unit="hosts")
    for spec in specs:
        await_boot(docker, spec.machine.name)
        await_ssh(spec.machine, state)
    step.outcome = f"made {names([spec.machine for spec in wanted])}" if wanted else "unchanged"


def make(docker: Docker, spec: Spec) -> None:
    """Make one host: boot it, install what it came with, load its driver."""
    name = spec.machine.name
    recreate(docker, spec, keep_volume=False)
    await_boot(docker, name)
    docker.shell(name, prepare_script(preinstalled()))
    loaded = docker.ask("exec", name, "cat", "/sys/module/nvidia/version").out.strip()
    if loaded != INITIAL_DRIVER:
        raise RunbookError(
            where=name,
            observed=f"loaded stand-in driver {loaded or 'none'}",
            expected=INITIAL_DRIVER,
            next_step=f"Read `docker exec {name} journalctl --unit {BOOT_UNIT}`.",
        )
    mark_prepared(docker, spec)


def prepare_script(packages: Sequence[str]) -> str:
    """Return the shell script that gives a host its first driver; it leaves only the `debian` repository behind."""
    vendor = f"-o Dir::Etc::sourceparts={_VENDOR_SOURCES}"
    return "\n".join(
        [
            "export DEBIAN_FRONTEND=noninteractive",
            f"mkdir -p {_VENDOR_SOURCES}",
            f"cat > {_VENDOR_SOURCES}/cuda.sources <<'END'\n{apt_source('cuda')}END",
            f"cp /etc/apt/sources.list.d/*.sources {_VENDOR_SOURCES}/",
            f"apt-get {vendor} --quiet update",
            f"apt-get {vendor} --quiet install --yes --no-install-recommends {' '.join(packages)}",
            f"rm -r {_VENDOR_SOURCES}",
            "apt-get --quiet update",
            f"systemctl start {BOOT_UNIT}",
            "systemctl daemon-reload",
        ]
    )


def await_ssh(machine: Machine, state: Path) -> None:
    """Wait until a host answers over ssh with the lab's key.

    Raises:
        RunbookError: After 60 s.
    """
    command = ["ssh", "-F", str(state / "ssh_config"), "-o", "BatchMode=yes", machine.name, "true"]

    def question() -> str | None:
        answer = ask(command, timeout_s=15)
        return None if answer.status == 0 else answer.err.strip() or f"exit {answer.status}"

    await_condition(
        question,
        where=machine.name,
        expected="an answer over ssh",
        timeout_s=SSH_TIMEOUT_S,
        next_step=f"Try: {' '.join(command)}",
    )
