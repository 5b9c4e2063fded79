"""A local dnf repository of stand-in packages under NVIDIA's names, for transactions that are resolved for real.

Packages are built by rpmbuild and indexed by createrepo_c; module streams are written as NVIDIA's repository has them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from lab.prerequisites import missing_test_tools

TOOLS = ("dnf", "rpm", "rpmbuild", "createrepo_c")
MISSING = [*(tool for tool in TOOLS if shutil.which(tool) is None), *missing_test_tools()]

NAMES = (
    "nvidia-driver-cuda",
    "nvidia-driver-cuda-libs",
    "kmod-nvidia-open-dkms",
    "nvidia-modprobe",
    "nvidia-persistenced",
)
VERSIONS = ("570.133.20", "580.167.08", "580.178.04", "595.91.07")


def build(folder: Path, el: int, *, modular: bool) -> Path:
    """Build the repository of one major version and return its folder."""
    folder.mkdir(parents=True)
    for version in VERSIONS:
        release = f"1.el{el}"
        for name in (*NAMES, "libnvidia-ml"):
            needs = []
            if (
                name == "nvidia-driver-cuda"
            ):  # exactly its libraries, and a lower bound on another, as NVIDIA's have them
                needs = [f"nvidia-driver-cuda-libs = 3:{version}", f"libnvidia-ml >= 3:{version}"]
            package(
                folder, name, version, release, requires=needs, label=f"nvidia-driver:{version}" if modular else None
            )
    subprocess.run(["createrepo_c", "--quiet", str(folder)], check=True, capture_output=True)
    if modular:
        streams = folder / "modules.yaml"
        streams.write_text("".join(_stream(branch, el) for branch in ("570", "580", "595")), encoding="utf-8")
        subprocess.run(
            ["modifyrepo_c", "--mdtype=modules", str(streams), str(folder / "repodata")],
            check=True,
            capture_output=True,
        )
    return folder


def package(folder: Path, name: str, version: str, release: str, *, requires: list[str], label: str | None) -> None:
    """Build one empty package of epoch 3."""
    lines = [
        f"Name: {name}", "Epoch: 3", f"Version: {version}", f"Release: {release}", "Summary: stand-in", "License: MIT",
        "BuildArch: noarch", *(f"Requires: {need}" for need in requires),
        *([f"ModularityLabel: {label}"] if label else []),
        "%description", "A stand-in.", "%files",
    ]  # fmt: skip
    spec = folder / f"{name}-{version}.spec"
    spec.write_text("\n".join(lines) + "\n", encoding="utf-8")
    definitions = {"_rpmdir": folder, "_topdir": folder / "top", "_rpmfilename": "%{NAME}-%{VERSION}-%{RELEASE}.rpm"}
    options = [word for name, value in definitions.items() for word in ("--define", f"{name} {value}")]
    subprocess.run(["rpmbuild", "-bb", "--quiet", *options, str(spec)], check=True, capture_output=True)


def root(folder: Path, el: int) -> Path:
    """Return an empty system of one major version that dnf --installroot can work on."""
    for name in ("etc/yum.repos.d", "etc/dnf/modules.d", "etc/dnf/plugins", "var/cache/dnf"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/os-release").write_text(f'ID="rocky"\nVERSION_ID="{el}.4"\nPLATFORM_ID="platform:el{el}"\n')
    plugins = folder / "etc/dnf/plugins"
    (plugins / "versionlock.list").write_text("")
    (plugins / "versionlock.conf").write_text(f"[main]\nenabled = 1\nlocklist = {plugins}/versionlock.list\n")
    subprocess.run(["rpm", f"--root={folder}", "--initdb"], check=True, capture_output=True)
    return folder


def source(repository: Path, *, modular: bool) -> dict[str, str]:
    """Return the repository's file as the role writes it, without signatures, which these packages do not have."""
    lines = ["[kimi-cuda]", "name=kimi-cuda", f"baseurl=file://{repository}", "enabled=1", "gpgcheck=0"]
    return {
        "path": "/etc/yum.repos.d/kimi-cuda.repo",
        "mode": "0644",
        "content": "\n".join([*lines, *([] if modular else ["module_hotfixes=1"])]) + "\n",
    }


def _stream(branch: str, el: int) -> str:
    artifacts = "".join(
        f"      - {name}-3:{version}-1.el{el}.noarch\n"
        for version in VERSIONS
        if version.startswith(branch)
        for name in (*NAMES, "libnvidia-ml")
    )
    return f"""---
document: modulemd
version: 2
data:
  name: nvidia-driver
  stream: "{branch}-open"
  version: 20260804000000
  context: kimi
  arch: noarch
  summary: NVIDIA driver {branch}
  description: Stand-in
  license:
    module: [MIT]
  dependencies: []
  artifacts:
    rpms:
{artifacts}...
"""
