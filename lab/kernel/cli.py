"""The kernel lab's commands: ``up``, ``down``, ``link``, ``status``."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.kernel import machine as machines
from lab.kernel import repository_server
from lab.kernel.access import ensure_access, publish
from lab.kernel.image import ensure_image, machine_files
from lab.kernel.machine import Running
from lab.kernel.packages import build_repository
from lab.kernel.settings import CONTROLLER, REPOSITORY_PORT, VIRTUAL_MACHINES
from lab.prerequisites import KERNEL_TOOLS, provide_tools
from lab.progress import Progress
from lab.settings import Places, current_places, near

STEPS = 6
STATE = ".lab-kernel"  # of the checkout; apart from .lab, which `make lab-down` removes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 when something failed, 2 for wrong usage, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m lab.kernel", description="GPU hosts with a kernel of their own.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="build what is missing and start fresh machines")
    commands.add_parser("down", help="stop and remove exactly what `up` started; image and packages stay cached")
    commands.add_parser("status", help="say what runs")
    link = commands.add_parser("link", help="plug the rail's cable into a machine, or pull it")
    link.add_argument("machine", choices=[machine.name for machine in VIRTUAL_MACHINES])
    link.add_argument("state", choices=["up", "down"])
    options = parser.parse_args(arguments)
    places = current_places()
    state = places.project / STATE
    try:
        if options.command == "up":
            return up(places, state)
        if options.command == "down":
            return down(places, state)
        if options.command == "link":
            chosen = next(running for running in all_of(state) if running.machine.name == options.machine)
            machines.set_link(chosen, up=options.state == "up")
            return 0
        return status(state)
    except RunbookError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. `python -m lab.kernel down` stops what runs.", file=sys.stderr)
        return 130


def all_of(state: Path) -> list[Running]:
    """Return the machines with their files."""
    return [Running(machine=machine, folder=state) for machine in VIRTUAL_MACHINES]


def repository_folder(places: Places) -> Path:
    """Return the folder that is served to the machines."""
    return places.cache / "kernel-repository"


def up(places: Places, state: Path) -> int:
    """Start fresh machines; what they are made from is built where it is not cached."""
    progress = Progress(total=STEPS)
    log = state / "log" / f"up-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with progress.step("prerequisites") as step:
        provide_tools(KERNEL_TOOLS, log, step)
    with progress.step("image") as step:
        access = ensure_access(places.keys)
        image = ensure_image(places.cache, machine_files(access.public, access.host_key), log, step)
    with progress.step("package repository") as step:
        folder = repository_folder(places)
        built = build_repository(folder, access.gnupg_home, image.packages())
        repository_server.start(state / "repository.pid", folder)
        step.outcome = f"{'built' if built else 'unchanged'}, served on http://{CONTROLLER}:{REPOSITORY_PORT}"
    with progress.step("accelerator") as step:
        publish(state, access)
        config = state / "ssh_config"
        accelerator = machines.choose_accelerator(all_of(state)[0], image, config, places.cache / "kernel-accelerator")
        step.outcome = "KVM" if accelerator == machines.KVM else "software emulation: no machine boots with KVM here"
    with progress.step("machines") as step:
        for running in all_of(state):
            machines.stop(running)
            machines.start(running, image, accelerator)
        step.outcome = f"started {' and '.join(machine.name for machine in VIRTUAL_MACHINES)}"
    with progress.step("boot") as step:
        for running in all_of(state):
            machines.await_ssh(running, config)
        step.outcome = f"kernel {image.kernel}"
    print(f"next:    ssh -F {near(config)} {VIRTUAL_MACHINES[0].name}")
    return 0


def down(places: Places, state: Path) -> int:
    """Stop what ``up`` started and remove its files."""
    for running in all_of(state):
        if machines.stop(running):
            print(f"stopped {running.machine.name}")
    if repository_server.stop(state / "repository.pid", repository_folder(places)):
        print("stopped the package repository")
    if state.exists():
        shutil.rmtree(state)
        print(f"removed {state}")
    return 0


def status(state: Path) -> int:
    """Print what runs; return 0 when every machine does, else 1."""
    seen = [(running.machine, running.pid()) for running in all_of(state)]
    for machine, pid in seen:
        print(f"{machine.name}: {f'process {pid}' if pid else 'not running'}, ssh on 127.0.0.1:{machine.ssh_port}")
    return 0 if all(pid for _, pid in seen) else 1
