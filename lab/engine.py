"""The engine tree: vLLM for CPU as pip installs it, split into what versions share and what is one version's own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kimi_runbook.errors import RunbookError
from lab.commands import Purpose, stream
from lab.docker import Docker
from lab.files import digest_of, remove_others, write_atomically
from lab.progress import Step

RECIPE_FILE = Path(__file__).with_name("engine.yml")
DIST_PACKAGES = "usr/local/lib/python3.11/dist-packages"  # where Debian's python3.11 looks, below /
OWN_PACKAGES = "opt/vllm"  # on PYTHONPATH, so that what one version brings comes before what versions share
LAUNCHER = """\
#!/usr/bin/python3
if __name__ == "__main__":  # the workers that vLLM spawns read this file again
    import sys

    from vllm.entrypoints.cli.main import main

    sys.exit(main())
"""
IMPORT_CHECK = """\
import torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
assert current_platform.is_cpu(), "not taken for a CPU build"
assert hasattr(torch.ops._C, "init_cpu_memory_env"), "no C extension for this processor"
"""
_NEXT_STEP = (
    "Check that pip reaches its index; KIMI_LAB_TORCH_INDEX names an index with CPU builds of torch where it has none."
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What engine.yml says: distribution, name it is asked for by, Python version, omitted, trimmed."""

    distribution: str
    import_name: str
    python: str
    omit: tuple[str, ...]
    trim: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrees:
    """Directories that become layers of the engine's image.

    Attributes:
        shared: Everything but vLLM.
        own: vLLM itself, by version.
        keys: Digest of what each directory was made from: ``shared`` and every version.
    """

    shared: Path
    own: Mapping[str, Path]
    keys: Mapping[str, str]


def load_recipe(text: str) -> Recipe:
    """Return the recipe in the text of engine.yml."""
    data = yaml.safe_load(text)
    return Recipe(
        data["distribution"], data["import_name"], str(data["python"]), tuple(data["omit"]), tuple(data["trim"])
    )


def canonical(name: str) -> str:
    """Return a distribution's name as PyPA compares it (packaging specification, "names and normalization")."""
    return name.lower().replace("_", "-").replace(".", "-")


def platform_options(python: str, running: tuple[int, int]) -> list[str]:
    """Return the pip options for wheels of the image's Python, none when the running one is the same.

    Another Python may sit on a newer glibc than the image's Debian 12 (2.36), so the platforms are spelled out.
    """
    if running == tuple(int(part) for part in python.split(".")):
        return []
    platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)), "manylinux2014_x86_64"]
    options = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
    for platform in platforms:
        options += ["--platform", platform]
    return options


def index_options(environment: Mapping[str, str]) -> list[str]:
    """Return the pip options for KIMI_LAB_TORCH_INDEX; pip's own configuration holds in any case."""
    index = environment.get("KIMI_LAB_TORCH_INDEX")
    return ["--extra-index-url", index] if index else []


def pins_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Return {canonical name: version} of what a pip installation report would install."""
    found = {}
    for item in report["install"]:
        metadata = item["metadata"]
        found[canonical(metadata["name"])] = str(metadata["version"])
    return dict(sorted(found.items()))


def shared_pins(pins: Mapping[str, str], recipe: Recipe) -> list[str]:
    """Return the ``name==version`` lines of the shared layer: all but the engine and what the recipe omits."""
    left_out = {canonical(name) for name in (*recipe.omit, recipe.distribution)}
    return [f"{name}=={version}" for name, version in pins.items() if name not in left_out]


def different(pins: Sequence[str], shared: Path) -> list[str]:
    """Return the pins that are not among the lines of the shared ``pins.txt``."""
    there = set(shared.read_text().split())
    return [pin for pin in pins if pin not in there]


def metadata_text(import_name: str, version: str) -> str:
    """Return the METADATA under which vLLM finds itself; ``+cpu`` is how it tells that it is a CPU build."""
    return f"Metadata-Version: 2.1\nName: {import_name}\nVersion: {version}+cpu\n"


def compile_script() -> str:
    """Return a Python program that compiles a tree so that no start has to.

    Hash-based and unchecked: the layers give all files one date, which date-based ones would not survive. A file that
    is no valid Python 3.11 (a template) is counted and left as it is; the engine never imports it.
    """
    return (
        "import compileall, py_compile, sys\n"
        "mode = py_compile.PycInvalidationMode.UNCHECKED_HASH\n"
        "compileall.compile_dir(sys.argv[1], maxlevels=40, quiet=2, workers=0, invalidation_mode=mode,\n"
        "    stripdir=sys.argv[1], prependdir=sys.argv[2])\n"
    )


@dataclass(frozen=True, slots=True)
class Workshop:
    """What engine trees are built with: Docker, the image that has the engine's Python, a log, the step shown."""

    docker: Docker
    base_image: str
    log: Path
    step: Step


def engine_trees(cache: Path, versions: Sequence[str], workshop: Workshop) -> EngineTrees:
    """Return the engine's trees for the versions, from the cache where they were built before.

    The first version decides what is shared; another one brings along what it needs in other versions.

    Raises:
        RunbookError: When pip cannot install a version, or it does not load on this processor.
    """
    recipe = load_recipe(RECIPE_FILE.read_text())
    shared_key = digest_of(RECIPE_FILE.read_bytes(), versions[0], *index_options(os.environ))
    keys = {"shared": shared_key}
    root = cache / "engine" / shared_key[:16]
    builder = _Builder(root, recipe, workshop)
    shared = builder.shared(versions[0])
    own = {}
    for version in versions:
        keys[version] = digest_of(shared_key, version, LAUNCHER, OWN_PACKAGES)
        own[version] = builder.own(version, keys[version], compare=version != versions[0])
    remove_others(root)
    workshop.step.outcome = ", ".join(builder.built) or "unchanged"
    return EngineTrees(shared=shared, own=own, keys=keys)


class _Builder:
    """Runs pip; every tree is built beside its place and put there whole."""

    def __init__(self, root: Path, recipe: Recipe, workshop: Workshop) -> None:
        self._root = root
        self._recipe = recipe
        self._docker = workshop.docker
        self._base_image = workshop.base_image
        self._log = workshop.log
        self._step = workshop.step
        self._options = platform_options(recipe.python, sys.version_info[:2])
        self.built: list[str] = []

    def shared(self, version: str) -> Path:
        """Return the directory of what all versions share: ``tree`` and the ``pins.txt`` it came from."""
        place = self._root / "shared"
        if place.exists():
            return place
        partial = _fresh(place)
        self._step.say("asking pip what the engine needs")
        pins = self._resolve(version, partial)
        lines = shared_pins(pins, self._recipe)
        write_atomically(partial / "pins.txt", "\n".join(lines) + "\n")
        self._install(partial, len(lines))
        self._finish(partial, place, f"{len(lines)} packages", DIST_PACKAGES)
        return place

    def own(self, version: str, key: str, *, compare: bool) -> Path:
        """Return the directory of one version of vLLM, with those dependencies whose shared version does not fit it.

        ``compare`` asks pip what the version needs; the first one needs what is shared.
        """
        place, shared = self._root / f"vllm-{version}-{key[:16]}", self._root / "shared"
        if place.exists():
            return place
        partial = _fresh(place)
        lines = [f"{self._recipe.distribution}=={version}"]
        if compare:
            self._step.say(f"asking pip what {version} needs")
            lines += different(shared_pins(self._resolve(version, partial), self._recipe), (shared / "pins.txt"))
        write_atomically(partial / "pins.txt", "\n".join(lines) + "\n")
        self._install(partial, len(lines))
        name = self._recipe.import_name
        write_atomically(partial / "tree" / f"{name}-{version}.dist-info" / "METADATA", metadata_text(name, version))
        write_atomically(partial / "launcher", LAUNCHER, mode=0o755)
        self._try_import(partial / "tree", shared / "tree", version)
        self._finish(partial, place, f"vLLM {version}", OWN_PACKAGES)
        remove_others(place, f"vllm-{version}-")
        return place

    def _try_import(self, own: Path, shared: Path, version: str) -> None:
        """Load torch and the engine's C extension in the base image, so that a tree that cannot start is never kept."""
        self._step.update(note="trying it")
        answer = self._docker.ask(
            *["run", "--rm", "--network", "none", "--volume", f"{own}:/own:ro", "--volume", f"{shared}:/shared:ro"],
            *["--env", "PYTHONPATH=/own:/shared", "--env", "PYTHONDONTWRITEBYTECODE=1", self._base_image],
            *["python3", "-c", IMPORT_CHECK],
            timeout_s=300,
        )
        if answer.status != 0:
            raise RunbookError(
                where=f"engine {version}",
                observed="it does not load: " + (answer.err.strip().splitlines() or ["no output"])[-1],
                expected="torch and vLLM's extension for this processor (AVX2 or AVX512) to load",
                next_step=f"Read {self._log}; on another processor another --engine-version may have a build.",
            )

    def _resolve(self, version: str, partial: Path) -> dict[str, str]:
        report = partial / "report.json"
        wanted = f"{self._recipe.distribution}=={version}"
        self._pip(["install", "--dry-run", "--ignore-installed", "--report", str(report), wanted], partial)
        return pins_of(json.loads(report.read_text()))

    def _install(self, partial: Path, count: int) -> None:
        """Install exactly the lines of ``pins.txt``."""
        pins = str(partial / "pins.txt")
        self._pip(["install", "--no-deps", "--no-compile", "--requirement", pins], partial, expected=count)

    def _pip(self, arguments: Sequence[str], partial: Path, expected: int | None = None) -> None:
        seen = 0

        def on_line(line: str) -> None:
            nonlocal seen
            if line.startswith("Collecting "):
                seen += 1
                self._step.update(seen, of=expected, unit="packages", note=line.removeprefix("Collecting ")[:40])
            elif line.startswith("Installing collected"):
                self._step.update(note="unpacking")

        scratch = partial / "tmp"  # pip unpacks here and then moves, which is free on one file system
        scratch.mkdir(exist_ok=True)
        stream(
            [
                *[sys.executable, "-m", "pip", *arguments, "--target", str(partial / "tree")],
                *["--progress-bar", "off", "--no-input", *self._options, *index_options(os.environ)],
            ],
            Purpose("engine", _NEXT_STEP),
            log=self._log,
            on_line=on_line,
            environment={"TMPDIR": str(scratch)},
        )

    def _finish(self, partial: Path, place: Path, what: str, prefix: str) -> None:
        self._step.update(note="compiling")
        tree = partial / "tree"
        shutil.rmtree(partial / "tmp")
        trim(tree, self._recipe.trim)
        user = f"{os.geteuid()}:{os.getegid()}"
        # The base image's own Python, so that the compiled files are the ones it will look for.
        self._docker.must(
            *["run", "--rm", "--network", "none", "--user", user, "--volume", f"{tree}:/tree", self._base_image],
            *["python3", "-c", compile_script(), "/tree", f"/{prefix}"],
            timeout_s=1200,
            where="engine",
        )
        partial.replace(place)
        self.built.append(what)


def trim(tree: Path, patterns: Sequence[str]) -> None:
    """Remove what matches the patterns under a tree."""
    for pattern in patterns:
        for path in sorted(tree.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _fresh(place: Path) -> Path:
    """Return an empty directory beside a place; what an interrupted run left there goes."""
    partial = place.with_name(place.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial
