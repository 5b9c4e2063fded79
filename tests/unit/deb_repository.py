"""A local apt repository of stand-in packages under NVIDIA's names, and a system of its own for the real apt.

Everything of apt (state, cache, sources, preferences) is below one folder, named by APT_CONFIG.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TOOLS = ("apt-get", "dpkg-deb", "apt-ftparchive", "gpg")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

VERSIONS = ("570.133.20", "580.178.04", "595.91.07")
UBUNTU = ("libnvidia-compute-580", "nvidia-utils-580", "nvidia-dkms-580-open", "nvidia-modprobe", "nvidia-persistenced")


def build(folder: Path, revision: str) -> Path:
    """Build a flat repository with what Ubuntu's names of branch 580 and Debian's need, and return its folder."""
    folder.mkdir(parents=True)
    for version in VERSIONS:
        full, branch = f"{version}-{revision}", version.partition(".")[0]
        pin = f"Package: *nvidia* libcuda1\nPin: version {version}-*\nPin-Priority: 1001\n"
        package(
            folder, f"nvidia-driver-pinning-{version}", full, "", {"etc/apt/preferences.d/nvidia-driver-pinning": pin}
        )
        for name in (
            f"libnvidia-compute-{branch}",
            f"nvidia-dkms-{branch}-open",
            "nvidia-modprobe",
            "nvidia-persistenced",
        ):
            package(folder, name, full, "")
        package(folder, f"nvidia-utils-{branch}", full, f"libnvidia-compute-{branch} (= {full})")
        # A lower bound only, as metapackages have it: without a pin the newest branch comes (C01).
        package(folder, "nvidia-driver-cuda", full, f"libcuda1 (>= {full}), nvidia-persistenced (>= {full})")
        package(folder, "libcuda1", full, "")
    index = subprocess.run(["apt-ftparchive", "packages", "."], cwd=folder, check=True, capture_output=True).stdout
    (folder / "Packages").write_bytes(index)
    release = subprocess.run(["apt-ftparchive", "release", "."], cwd=folder, check=True, capture_output=True).stdout
    (folder / "Release").write_bytes(release)
    return folder


def package(folder: Path, name: str, version: str, depends: str, files: dict[str, str] | None = None) -> None:
    """Build one package."""
    tree = folder / "build" / f"{name}_{version}"
    (tree / "DEBIAN").mkdir(parents=True)
    for path, content in (files or {}).items():
        (tree / path).parent.mkdir(parents=True)
        (tree / path).write_text(content, encoding="utf-8")
    control = [
        f"Package: {name}",
        f"Version: {version}",
        "Architecture: all",
        "Maintainer: kimi <kimi@example.invalid>",
    ]
    control += [f"Depends: {depends}"] if depends else []
    (tree / "DEBIAN/control").write_text("\n".join([*control, "Description: a stand-in", ""]), encoding="utf-8")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(folder)], check=True, capture_output=True
    )
    shutil.rmtree(tree)


def sign(folder: Path, home: Path) -> str:
    """Sign the repository with a new key and return that key, armored."""
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--yes", "--passphrase", ""]
    subprocess.run(
        [*gpg, "--quick-generate-key", "kimi@example.invalid", "ed25519", "sign"], check=True, capture_output=True
    )
    signed = ["--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release")]
    subprocess.run([*gpg, *signed], check=True, capture_output=True)
    key = subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True, text=True).stdout
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    return key


def system(folder: Path) -> Path:
    """Make an empty system for apt and return the file APT_CONFIG has to name."""
    for name in (
        *("etc/sources.list.d", "etc/preferences.d", "etc/apt.conf.d", "lib/lists/partial", "cache/archives/partial"),
        *("dpkg/info", "dpkg/updates"),
    ):
        (folder / name).mkdir(parents=True)
    (folder / "dpkg/status").touch()
    config = folder / "apt.conf"
    config.write_text(
        f'Dir::Etc "{folder}/etc/";\nDir::Etc::Parts "{folder}/etc/apt.conf.d";\n'
        f'Dir::State "{folder}/lib/";\nDir::State::status "{folder}/dpkg/status";\nDir::Cache "{folder}/cache/";\n'
        'Dir::Etc::SourceList "/dev/null";\nAPT::Architecture "amd64";\nAPT::Architectures {"amd64";};\n',
        encoding="utf-8",
    )
    return config


def install(folder: Path, name: str, version: str) -> None:
    """Let dpkg's status say that a package is installed."""
    with (folder / "dpkg/status").open("a", encoding="utf-8") as status:
        status.write(
            f"Package: {name}\nStatus: install ok installed\nVersion: {version}\nArchitecture: all\n"
            "Maintainer: kimi <kimi@example.invalid>\nDescription: a stand-in\n\n"
        )


def source(uri: str) -> dict[str, str]:
    """Return the source's file as the role writes it, trusted because these repositories are not signed."""
    text = f"Types: deb\nURIs: {uri}\nSuites: ./\nTrusted: yes\n"
    return {"path": "/etc/apt/sources.list.d/kimi-cuda.sources", "mode": "0644", "content": text}
