"""The lab's commands: ``up``, ``down``, ``status``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kimi_runbook.errors import RunbookError
from lab import depot, hosts, keys, machines, network, site
from lab.docker import Docker, remove_arguments
from lab.dockerd import OwnEngine, find, start, stop
from lab.engine import Workshop, engine_trees
from lab.engine_image import PushedImage, layers_of, push
from lab.files import write_atomically
from lab.images import PACKAGES_FILE, engine_tree, host_tree, import_image, package_lists, remove_older
from lab.model import model_files, revision
from lab.prerequisites import provide, provide_test_tools
from lab.progress import Progress
from lab.registry import Registry
from lab.settings import (
    DEPOT,
    ENGINE_PORT,
    ENGINE_REPOSITORY,
    ENGINE_VERSIONS,
    HOSTS,
    MODEL_DIRECTORY,
    NETWORK,
    REGISTRY,
    REPOSITORIES_URL,
    SERVED_MODEL_NAME,
    SUBNET,
    Places,
    current_places,
    near,
)

HOST_STEPS, SITE_STEPS = 10, 1
KINDS = ("container", "network", "volume", "image")


@dataclass(frozen=True, slots=True)
class Wish:
    """What ``up`` is asked for: engine versions to offer, default first, and whether hosts start anew."""

    versions: tuple[str, ...]
    fresh: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a lab command; return 0, 1 when something failed, 2 for wrong usage, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m lab", description="GPU hosts on one machine, without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    up_parser = commands.add_parser("up", help="build and start everything, then run site.yml")
    up_parser.add_argument("--hosts-only", action="store_true", help="stop before site.yml")
    up_parser.add_argument("--fresh", action="store_true", help="make the hosts anew, whatever state they are in")
    up_parser.add_argument(
        "--engine-version",
        action="append",
        dest="versions",
        metavar="VERSION",
        help=f"engine version to offer in the registry, repeatable; default {', '.join(ENGINE_VERSIONS)}",
    )
    down_parser = commands.add_parser("down", help="remove exactly what `up` made")
    down_parser.add_argument("--purge", action="store_true", help="remove caches and keys as well")
    commands.add_parser("status", help="say what is there")
    commands.add_parser("prerequisites", help="install what is missing and start a Docker engine where none answers")
    options = parser.parse_args(arguments)
    places = current_places()
    try:
        if options.command == "up":
            wish = Wish(tuple(options.versions or ENGINE_VERSIONS), fresh=options.fresh)
            return up(places, wish, hosts_only=options.hosts_only)
        if options.command == "prerequisites":
            return prerequisites(places)
        if options.command == "down":
            return down(places, purge=options.purge)
        return status(places)
    except RunbookError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again: what is done is kept.", file=sys.stderr)
        return 130


def up(places: Places, wish: Wish, *, hosts_only: bool) -> int:
    """Bring the lab up; without ``hosts_only`` also run site.yml. Safe to repeat."""
    started = time.time()
    progress = Progress(total=HOST_STEPS + (0 if hosts_only else SITE_STEPS))
    log = places.state / "log" / f"up-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.log"
    docker = bring_up(places, wish, progress, log)
    with progress.step("lock") as step:
        site.resolve_lock(places, log)
        step.outcome = f"written to {site.LOCK}"
    if hosts_only:
        print(f"hosts:   {machines.names(HOSTS)} are up, with simulated GPUs and driver 570")
        print(f"next:    ssh -F {near(places.state / 'ssh_config')} {HOSTS[0].name}")
        return 0
    outcome = site.run_site(places, progress, docker.environment)
    for line in site.finish(places, outcome, started):
        print(line)
    return 0


def prerequisites(places: Places) -> int:
    """Make the machine able to run the lab, and no more."""
    log = places.state / "log" / "prerequisites.log"
    progress = Progress(total=2)
    with progress.step("prerequisites") as step:
        provide(OwnEngine(places.docker), log, step)
    with progress.step("tools of the unit tests") as step:
        provide_test_tools(log, step)
    return 0


def bring_up(places: Places, wish: Wish, progress: Progress, log: Path) -> Docker:
    """Build and start network, depot, engine image and hosts; return the Docker engine they live in."""
    lists = package_lists(PACKAGES_FILE.read_text())
    with progress.step("prerequisites") as step:
        network.refuse_conflict(None)  # before packages are installed or an engine is started
        docker = provide(OwnEngine(places.docker), log, step)
        network.refuse_conflict(docker)
    with progress.step("host root file system") as step:
        host_root = host_tree(places.cache, lists, log, step)
    with progress.step("engine base file system") as step:
        engine_root = engine_tree(places.cache, lists, log, step)
    with progress.step("package repositories") as step:
        lab_keys = keys.ensure_keys(places)
        keys.publish(places, lab_keys)
        repositories = depot.build(places.cache, lab_keys.gnupg_home, host_root.debs, step)
    with progress.step("images") as step:
        host_image = import_image(docker, "kimi-lab/host", host_root, ['CMD ["/lib/systemd/systemd"]'], step)
        base_image = import_image(docker, "kimi-lab/engine-base", engine_root, ['CMD ["/bin/sh"]'], step)
    with progress.step("depot") as step:
        network.ensure(docker)
        depot.ensure(docker, host_image, repositories, step)
    with progress.step("engine") as step:
        trees = engine_trees(places.cache, wish.versions, Workshop(docker, base_image, log, step))
    with progress.step("engine image") as step:
        registry = Registry(REGISTRY, ENGINE_REPOSITORY)
        known = places.cache / "engine" / "layers.json"
        images = {
            version: push(registry, version, layers_of(engine_root, trees, version), known, step)
            for version in wish.versions
        }
    with progress.step("hosts") as step:
        specs = hosts.host_specs(host_image, lab_keys, repositories)
        hosts.ensure(docker, specs, places.state, step, fresh=wish.fresh)
        for image in (host_image, base_image):  # now that no machine is made from an older one
            remove_older(docker, image)
    write_atomically(places.state / "lab.json", json.dumps(description(images, docker), indent=1) + "\n")
    return docker


def description(images: dict[str, PushedImage], docker: Docker) -> dict[str, object]:
    """Return lab.json: where everything in the lab is, for the lock, the tests and people."""
    return {
        "schema_version": 1,
        "network": {"name": NETWORK, "subnet": SUBNET},
        "addresses": {machine.name: machine.address for machine in (DEPOT, *HOSTS)},
        "docker_host": docker.host,
        "registry": REGISTRY,
        "repositories": {name: f"{REPOSITORIES_URL}/{name}" for name in ("cuda", "container-toolkit", "debian")},
        "engine": {
            "repository": f"{REGISTRY}/{ENGINE_REPOSITORY}",
            "port": ENGINE_PORT,
            "versions": {
                version: {
                    "tag": image.tag,
                    "index_digest": image.index_digest,
                    "manifest_digests": {"amd64": image.manifest_digest},
                    "size_bytes": image.size_bytes,
                }
                for version, image in images.items()
            },
        },
        "model": {
            "path": MODEL_DIRECTORY,
            "served_name": SERVED_MODEL_NAME,
            "revision": revision(model_files()),
        },
    }


def down(places: Places, *, purge: bool) -> int:
    """Remove what ``up`` made: containers, network, volumes, images, and the lab's own Docker engine."""
    own = OwnEngine(places.docker)
    if own.data.exists():
        # It holds nothing but the lab; it has to run once more so that mounts and network interfaces go as well.
        remove_all(own.docker if own.docker.answers() else start(own))
        stop(own)
        print("stopped the lab's own Docker engine")
    elif (docker := find(own)) is not None:
        remove_all(docker)
    (places.project / site.LOCK).unlink(missing_ok=True)
    for directory in (places.docker, places.state, *((places.home,) if purge else ())):
        if directory.exists():
            shutil.rmtree(directory)
            print(f"removed {directory}")
    if not purge and places.home.exists():
        print(f"kept {places.home} (caches, keys); `python -m lab down --purge` removes it")
    return 0


def remove_all(docker: Docker) -> None:
    """Remove everything that carries the lab's label, containers first."""
    for kind in KINDS:
        found = list(dict.fromkeys(docker.ours(kind)))
        if found:
            docker.must(*remove_arguments(kind, found), where="lab down")
            print(f"removed {len(found)} {kind}(s)")


def status(places: Places) -> int:
    """Print what is there; return 0 when every host of the lab runs, else 1."""
    own = OwnEngine(places.docker)
    docker = find(own)
    pid = own.pid()
    if docker is None:
        print("Docker engine: none answers")
        return 1
    whose = f"the lab's own, process {pid}" if docker == own.docker else "the machine's"
    print(f"Docker engine: {docker.answers()}, {whose}")
    running = 0
    for machine in (DEPOT, *HOSTS):
        seen = docker.inspect("container", machine.name)
        state = "absent" if seen is None else str(seen["State"]["Status"])
        running += state == "running"
        print(f"{machine.name}: {state}, {machine.address}")
    description_file = places.state / "lab.json"
    if description_file.exists():
        engine = json.loads(description_file.read_text())["engine"]
        for version, image in engine["versions"].items():
            print(f"engine {version}: {engine['repository']}@{image['index_digest']}")
    lock = places.project / site.LOCK
    print(f"lock: {near(lock) if lock.exists() and yaml.safe_load(lock.read_text()) else 'none yet'}")
    return 0 if running == 1 + len(HOSTS) else 1
