"""Root file systems from Debian packages: the hosts' image, the layer below the engine, packages for the depot."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kimi_runbook.errors import RunbookError
from lab.commands import Purpose, stream
from lab.docker import Docker, label_arguments
from lab.files import digest_of, remove_others
from lab.progress import Step
from lab.settings import LABEL, SUITE

PACKAGES_FILE = Path(__file__).with_name("packages.yml")
_RECIPE = "1"  # raise it when the hooks below change, so that cached trees are built again

# Nothing that must differ between hosts may come out of the image; they get theirs when they are created.
_HOST_HOOKS = (
    'rm -f "$1"/etc/ssh/ssh_host_*',
    'rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',
    ': > "$1/etc/machine-id"',
    'chroot "$1" systemctl mask systemd-udevd.service systemd-udev-trigger.service systemd-firstboot.service'
    " getty.target docker-registry.service apt-daily.timer apt-daily-upgrade.timer",
    'chroot "$1" systemctl enable ssh.service',
)
_ENGINE_HOOKS = ('rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',)


@dataclass(frozen=True, slots=True)
class PackageLists:
    """Debian package names: of the hosts, below the engine, offered by the depot."""

    host: tuple[str, ...]
    engine: tuple[str, ...]
    repository: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TreeRecipe:
    """What a tree is made from: name, packages in it, commands run in it, packages fetched and not installed."""

    name: str
    packages: tuple[str, ...]
    hooks: tuple[str, ...]
    offered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RootFileSystem:
    """One tree made by mmdebstrap, kept as a tar file.

    Attributes:
        key: Digest of everything it was made from.
        tar: The uncompressed tar file.
        debs: Directory of packages fetched along with it; absent where none were asked for.
    """

    key: str
    tar: Path
    debs: Path


def package_lists(text: str) -> PackageLists:
    """Return the package lists of packages.yml."""
    data = yaml.safe_load(text)
    return PackageLists(tuple(data["host"]), tuple(data["engine"]), tuple(data["repository"]))


def mmdebstrap_argv(recipe: TreeRecipe, directory: Path, mirror: str | None) -> list[str]:
    """Return the mmdebstrap command that makes ``rootfs.tar`` in a directory, and ``archives`` of what is offered.

    The mirror is mmdebstrap's own choice unless one is given.
    """
    hooks = list(recipe.hooks)
    if recipe.offered:
        fetch = 'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get install --yes --download-only --no-install-recommends'
        # First, while the tree still has its apt sources. What is in the archive directory already is in the tree too.
        hooks = [f"{fetch} {' '.join(recipe.offered)}", f"copy-out /var/cache/apt/archives {directory}", *hooks]
    return [
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        *(f"--customize-hook={hook}" for hook in hooks),
        SUITE,
        str(directory / "rootfs.tar"),
        *([mirror] if mirror else []),
    ]


def tree_key(recipe: TreeRecipe) -> str:
    """Return the digest of what a tree is made from."""
    return digest_of(_RECIPE, *mmdebstrap_argv(recipe, Path("place"), None))


def host_tree(cache: Path, lists: PackageLists, log: Path, step: Step) -> RootFileSystem:
    """Return the hosts' tree with the packages for the depot, from the cache where it was built before."""
    return _build(cache, TreeRecipe("host", lists.host, _HOST_HOOKS, lists.repository), log, step)


def engine_tree(cache: Path, lists: PackageLists, log: Path, step: Step) -> RootFileSystem:
    """Return the tree below the engine, from the cache where it was built before."""
    return _build(cache, TreeRecipe("engine-base", lists.engine, _ENGINE_HOOKS, ()), log, step)


def import_image(docker: Docker, name: str, tree: RootFileSystem, changes: Sequence[str], step: Step) -> str:
    """Make a docker image of a tree, unless the engine has it; return its reference ``name:<key>``."""
    reference = f"{name}:{digest_of(tree.key, *changes)[:16]}"
    if docker.inspect("image", reference) is not None:
        step.outcome = "unchanged"
        return reference
    options = [argument for change in (*changes, f"LABEL {label_arguments()[1]}") for argument in ("--change", change)]
    docker.must("import", *options, str(tree.tar), reference, where=f"image {reference}")
    step.outcome = f"imported {reference}"
    return reference


def _build(cache: Path, recipe: TreeRecipe, log: Path, step: Step) -> RootFileSystem:
    key = tree_key(recipe)
    place = cache / f"{recipe.name}-{key[:16]}"
    tree = RootFileSystem(key, place / "rootfs.tar", place / "archives")
    if tree.tar.exists():
        step.outcome = "unchanged"
        return tree
    partial = place.with_name(place.name + ".partial")
    if partial.exists():  # of an interrupted run
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    stream(
        mmdebstrap_argv(recipe, partial, mirror_from(os.environ)),
        Purpose(
            "root file system",
            "Check that this machine reaches a Debian mirror (KIMI_LAB_APT_MIRROR names another one).",
        ),
        log=log,
        on_line=lambda line: step.say(line.removeprefix("I: ")[:60]) if line.startswith("I: ") else None,
    )
    if recipe.offered and not any((partial / "archives").glob("*.deb")):
        raise RunbookError(
            where="root file system",
            observed="no package was fetched for the depot",
            expected=f"{' '.join(recipe.offered)} and what they depend on",
            next_step=f"Read {log}.",
        )
    partial.replace(place)
    remove_others(place, f"{recipe.name}-")
    step.outcome = f"built from {len(recipe.packages)} packages and what they need"
    return tree


def remove_older(docker: Docker, reference: str) -> None:
    """Remove the lab's images of the same name with another tag: what a reference has replaced."""
    name = reference.rpartition(":")[0]
    listed = docker.must("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"label={LABEL}=1", name)
    older = [image for image in listed.split() if image != reference]
    if older:
        docker.must("image", "rm", *older)


def mirror_from(environment: Mapping[str, str]) -> str | None:
    """Return the Debian mirror that KIMI_LAB_APT_MIRROR names, or None for mmdebstrap's own choice."""
    return environment.get("KIMI_LAB_APT_MIRROR") or None
