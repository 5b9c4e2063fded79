"""The wheel: what it holds, and that it works with nothing but its own dependencies, from an empty folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from kimi_runbook.record import load_record
from kimi_runbook.verdict import VerdictName
from tests.faults.engine.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that no build folder appears in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", sources / "src", ignore=leave)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, and beside it what the wheel says it depends on; nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    (own,) = target.glob("kimi_runbook-*.dist-info")
    wanted = metadata.PathDistribution(own).requires or []
    for distribution in dependencies(wanted):
        for top in {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith("..")}:
            path = target / top
            if not path.exists():
                path.symlink_to(Path(str(distribution.locate_file(top))))
    return target


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def dependencies(requirements: list[str]) -> Iterator[metadata.Distribution]:
    """Yield what is required without an extra, and what that requires."""
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        distribution = metadata.distribution(name)
        yield distribution
        yield from dependencies(distribution.requires or [])


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command without this environment's own packages (-S), in another folder."""
    return subprocess.run(
        [sys.executable, "-S", "-m", "kimi_runbook", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    package = ROOT / "src" / "kimi_runbook"
    files = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert files - inside == set()
    assert any(name.endswith(".yml") for name in files)
    strange = {name for name in inside - files if ".dist-info/" not in name}
    assert strange == set()


def test_the_installed_command_knows_its_version_and_its_commands(installed: Path, tmp_path: Path) -> None:
    version = run(installed, tmp_path, "--version")
    assert version.stdout.strip() == metadata.version("kimi-runbook")
    assert "accept" in run(installed, tmp_path, "--help").stdout


def test_it_runs_without_ansible_and_pytest(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import ansible"],
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "No module named 'ansible'" in done.stderr
    with FakeEngine() as engine:
        engine.token_delay_s = 0.002
        accepted = run(installed, tmp_path, "accept", "--endpoint", engine.url)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    verdict = load_record(run_dir).verdict
    assert verdict is not None and verdict.name is VerdictName.ACCEPT
