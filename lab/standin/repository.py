"""Signed apt repositories of the stand-in packages, and of real Debian packages handed in.

Layout: ``<output>/<name>/dists/stable/main/binary-<arch>/Packages`` with the .deb files under ``pool/``, so that a host
reads ``deb [signed-by=KEY] URL/<name> stable main``.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.files import digest_of, write_atomically
from lab.standin.plan import PackagePlan, plan_packages

SUITE, COMPONENT = "stable", "main"
KEY_NAME = "kimi-runbook lab archive <archive@kimi-runbook.invalid>"
PUBLIC_KEY = "lab-archive.asc"
STAMP = ".inputs.sha256"
TOOLS = {"dpkg-deb": "dpkg", "apt-ftparchive": "apt-utils", "gpg": "gnupg"}
BUILD_DATE = "1767225600"  # 2026-01-01: one date for all files, so that a rebuilt package is the same package


def require_tools() -> None:
    """Check that the programs this module runs are there.

    Raises:
        RunbookError: One is missing; the message names its Debian package.
    """
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise RunbookError(
            where="lab package repository",
            observed=f"programs of the Debian packages {', '.join(missing)} are missing",
            expected=f"{', '.join(TOOLS)} on PATH",
            next_step=f"Run: apt-get install {' '.join(missing)}",
        )


def create_signing_key(gnupg_home: Path) -> Path:
    """Make the lab's signing key where there is none yet; return the armored public key's file in ``gnupg_home``.

    Raises:
        RunbookError: gpg is missing or refused.
    """
    require_tools()
    gnupg_home.mkdir(parents=True, exist_ok=True)
    gnupg_home.chmod(0o700)
    public = gnupg_home / PUBLIC_KEY
    try:
        if not _gpg(gnupg_home, "--list-secret-keys", "--with-colons").strip():
            _gpg(gnupg_home, "--passphrase", "", "--quick-generate-key", KEY_NAME, "ed25519", "sign", "never")
        write_atomically(public, _gpg(gnupg_home, "--armor", "--export"))
    finally:
        stop_agent(gnupg_home)
    return public


def stop_agent(gnupg_home: Path) -> None:
    """End the gpg-agent that gpg started for this home."""
    subprocess.run(["gpgconf", "--homedir", str(gnupg_home), "--kill", "gpg-agent"], check=True, capture_output=True)


def _gpg(gnupg_home: Path, *arguments: str) -> str:
    return _run(["gpg", "--homedir", str(gnupg_home), "--batch", "--yes", "--pinentry-mode", "loopback", *arguments])


def _run(command: list[str], where: Path | None = None) -> str:
    environment = os.environ | {"SOURCE_DATE_EPOCH": BUILD_DATE, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=where, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RunbookError(
            where=f"lab package repository, {command[0]}",
            observed=f"exit code {done.returncode}: {last}",
            expected="exit code 0",
            next_step=f"Run it by hand: {' '.join(command)}",
        )
    return done.stdout


def build_repositories(output: Path, gnupg_home: Path, extra_debs: Mapping[str, Path]) -> bool:
    """Build and sign every repository under ``output``; return whether anything had to be built.

    Args:
        output: Folder that gets one folder per repository; each is swapped in whole.
        gnupg_home: Where the signing key is; made when missing.
        extra_debs: Repository name to a folder of .deb files that go into it, e.g. ``{"debian": folder}``.

    Raises:
        RunbookError: A program is missing or failed, or a handed-in folder has no .deb file.
    """
    require_tools()
    public = create_signing_key(gnupg_home)
    plans = plan_packages()
    handed_in = {name: _debs_in(folder) for name, folder in extra_debs.items()}
    output.mkdir(parents=True, exist_ok=True)
    changed = False
    for name in sorted({plan.repository for plan in plans} | set(handed_in)):
        mine = [plan for plan in plans if plan.repository == name]
        extra = handed_in.get(name, [])
        wanted = digest_of(public.read_bytes(), repr(mine), *_describe(extra), Path(__file__).read_bytes())
        stamp = output / name / STAMP
        if stamp.is_file() and stamp.read_text() == wanted:
            continue
        with tempfile.TemporaryDirectory(dir=output, prefix=f".{name}-") as workplace:
            fresh = Path(workplace) / "new"
            fill(fresh / "pool", mine, extra)
            index(fresh, name, gnupg_home)
            (fresh / STAMP).write_text(wanted)
            swap(fresh, output / name, aside=Path(workplace) / "old")
        changed = True
    return changed


def _debs_in(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.deb"))
    if not found:
        raise RunbookError(
            where=str(folder),
            observed="no .deb file",
            expected="the packages of one repository",
            next_step="Fill the folder first, for instance with apt-get download.",
        )
    return found


def _describe(debs: Iterable[Path]) -> Iterable[str | bytes]:
    for deb in debs:
        yield deb.name
        yield deb.read_bytes()


def fill(pool: Path, plans: Iterable[PackagePlan], extra: Iterable[Path]) -> None:
    """Put built and handed-in packages into ``pool``."""
    pool.mkdir(parents=True)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        list(workers.map(lambda plan: build_package(plan, pool), plans))
    for deb in extra:
        shutil.copy2(deb, pool / deb.name)


def swap(fresh: Path, place: Path, aside: Path) -> None:
    """Put a finished repository in its place; what was there is moved aside, so that none is ever half-written."""
    fresh.chmod(0o755)
    if place.exists():
        place.rename(aside)
    fresh.rename(place)


def build_package(plan: PackagePlan, pool: Path) -> Path:
    """Write one .deb into ``pool`` and return it; not compressed, since it never leaves the machine."""
    with tempfile.TemporaryDirectory(prefix="kimi-standin-") as workplace:
        tree = Path(workplace) / "tree"
        for file in plan.files:
            target = tree / file.path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.link_to is not None:
                target.symlink_to(file.link_to)
            else:
                target.write_bytes(file.content)
                target.chmod(file.mode)
        control = tree / "DEBIAN"
        control.mkdir(parents=True)
        (control / "control").write_text("".join(f"{field}: {value}\n" for field, value in plan.control))
        for script, text in plan.scripts:
            (control / script).write_text(text)
            (control / script).chmod(0o755)
        if plan.triggers:
            (control / "triggers").write_text("".join(f"{line}\n" for line in plan.triggers))
        for folder in (tree, *(path for path in tree.rglob("*") if path.is_dir() and not path.is_symlink())):
            folder.chmod(0o755)
        target = pool / plan.filename
        _run(["dpkg-deb", "-Znone", "--root-owner-group", "--build", str(tree), str(target)])
    return target


def index(repository: Path, name: str, gnupg_home: Path) -> None:
    """Write Packages, Release and its signatures over what lies in ``pool``."""
    architecture = _run(["dpkg", "--print-architecture"]).strip()
    binary = repository / "dists" / SUITE / COMPONENT / f"binary-{architecture}"
    binary.mkdir(parents=True)
    packages = _run(["apt-ftparchive", "packages", "pool"], where=repository)
    (binary / "Packages").write_text(packages)
    (binary / "Packages.gz").write_bytes(gzip.compress(packages.encode(), mtime=0))
    fields = {
        "Origin": "kimi-runbook lab",
        "Label": f"kimi-runbook lab: {name}",
        "Suite": SUITE,
        "Codename": SUITE,
        "Components": COMPONENT,
        "Architectures": architecture,
        "Description": "Packages of the kimi-runbook lab; those with NVIDIA names are stand-ins",
    }
    options = [f"-oAPT::FTPArchive::Release::{field}={value}" for field, value in fields.items()]
    suite = repository / "dists" / SUITE
    release = _run(["apt-ftparchive", *options, "release", "."], where=suite)
    (suite / "Release").write_text(release)
    try:
        _gpg(gnupg_home, "--clearsign", "--output", str(suite / "InRelease"), str(suite / "Release"))
        signature = str(suite / "Release.gpg")
        _gpg(gnupg_home, "--armor", "--detach-sign", "--output", signature, str(suite / "Release"))
    finally:
        stop_agent(gnupg_home)
