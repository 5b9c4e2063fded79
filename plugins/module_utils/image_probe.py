"""What the engine image brings: Python distributions and libraries, read from its layers on disk; nothing is started.

Only the folders that matter are listed, layer by layer from the top, with the marks of overlayfs obeyed: a character
device 0:0 hides a name of the layers below, and an opaque folder hides them all.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ansible.module_utils.container_probe import held_name, inspected

_PYTHON = re.compile(
    r"torch|triton|vllm|nvidia|flash|cuda|cupy|nccl|nixl|deep[_-]|ray$|transformers|xformers|numpy$|mooncake|tilelang"
    r"|cutlass|xgrammar|compressed[_-]tensors|amd|rocm|aiter|lmcache",
    re.IGNORECASE,
)
_LIBRARY = re.compile(
    r"^(libnccl(-net)?|libmlx5|libibverbs|librdmacm|libcuda|libnvidia-ml|libcudart|libnvshmem_host|libucp|librccl)\.so[\d.]*"
    r"|^lib(nccl|cuda|cudart)[\w-]*\.so\.[\d.]+$"
)
_PLACES = (
    "usr/lib/python3*",
    "usr/local/lib/python3*",
    "opt/*/lib/python3*",
    "opt/*/*/lib/python3*",
    "root/.venv/lib/python3*",
)
_LIBRARY_PLACES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/compat",
    "usr/local/cuda*/compat/lib",
    "usr/local/nvidia/lib64",
    "opt/*/lib",
    "opt/rocm*/lib",
)
_MOST = 300
_MOST_LAYERS = 256


def stack(probe, reference, pid=None):
    """Return the stack of an image, or None when its files cannot be found; ``errors`` then says why.

    Args:
        probe: The host.
        reference: The image asked about.
        pid: First process of a container of that image, whose own root is read where Docker names no layers, as it
            does not with containerd's image store.
    """
    row = inspected(probe, "image", held_name(probe, reference))
    if not row:
        return None
    layers = _layers(row.get("GraphDriver"))
    present = [probe.path(layer) for layer in layers if probe.path(layer).is_dir()]
    if not present and pid and probe.path(f"/proc/{pid}/root").is_dir():
        present = [probe.path(f"/proc/{pid}/root")]
    if not present:
        probe.error("image stack", "Docker names no layers on disk for this image, and no container of it runs")
        return None
    if len(present) < len(layers) and len(present) > 1:
        probe.error("image stack", f"{len(layers) - len(present)} of the image's {len(layers)} layers are not there")
    return probe.apart("image stack", lambda: read_layers(present))


def _layers(driver):
    """Return the folders of an image's layers, the top one first."""
    data = driver.get("Data") if isinstance(driver, dict) else None
    if not isinstance(data, dict):
        return []
    named = [str(data.get("UpperDir") or ""), *str(data.get("LowerDir") or "").split(":")]
    return [layer for layer in named if layer.startswith("/")][:_MOST_LAYERS]


def read_layers(layers):
    """Return ``{"python", "libraries", "torch", "torch_cuda", "vllm", "nccl"}`` of layers, the top one first."""
    sites = _folders(layers, [f"{place}/{kind}-packages" for place in _PLACES for kind in ("site", "dist")])
    python, copied = {}, []
    for site in sites:
        names = merged(layers, site)
        for name in names:
            match = re.fullmatch(r"(.+?)-([^-]+)\.(?:dist|egg)-info", name)
            if match and _PYTHON.search(match[1]):
                python.setdefault(match[1].replace("_", "-").lower(), match[2])
        if "nvidia" in names:
            copied += [f"{site}/nvidia/{part}/lib" for part in merged(layers, f"{site}/nvidia")]
        copied += [f"{site}/{part}" for part in ("torch/lib", "nvidia_nccl/lib") if part.split("/")[0] in names]
    libraries = [
        {"path": f"/{folder}/{name}", "name": name, "version": _library_version(layers, f"{folder}/{name}")}
        for folder in [*_folders(layers, _LIBRARY_PLACES), *copied]
        for name in merged(layers, folder)
        if _LIBRARY.match(name)
    ]
    return {
        "python": [{"name": name, "version": version} for name, version in sorted(python.items())][:_MOST],
        "libraries": sorted(libraries, key=lambda row: row["path"])[:_MOST],
        "torch": python.get("torch"),
        "torch_cuda": _torch_cuda(layers, sites),
        "vllm": python.get("vllm"),
        "nccl": _nccl(python, libraries),
    }


def _nccl(python, libraries):
    told = [version for name, version in sorted(python.items()) if name.startswith("nvidia-nccl")]
    told += [row["version"] for row in libraries if row["name"].startswith("libnccl.so") and row["version"]]
    return told[0] if told else None


def _torch_cuda(layers, sites):
    """Return ``torch.version.cuda``, from torch/version.py of the topmost layer that has it."""
    for site in sites:
        path = _topmost(layers, f"{site}/torch/version.py")
        if path is not None:
            text = path.read_text(encoding="utf-8", errors="replace")[: 64 << 10]
            told = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return told[1] if told else None
    return None


def _library_version(layers, name):
    """Return the version in a library's file name, that of its target where it is a link with a version."""
    told = re.search(r"\.so\.(\d+\.\d[\d.]*)$", name)
    if told is None:
        path = _topmost(layers, name)
        target = os.readlink(path) if path is not None and path.is_symlink() else ""  # noqa: PTH115 - text of the link
        told = re.search(r"\.so\.(\d+\.\d[\d.]*)$", target)
    return told[1] if told else None


def _folders(layers, patterns):
    """Return the folders that match in any layer, in the order of the patterns, each once."""
    found = {}
    for pattern in patterns:
        matches = {str(path.relative_to(layer)) for layer in layers for path in Path(layer).glob(pattern)}
        # A link (lib64 to lib, cuda to cuda-13.0) would show the same files twice.
        found.update(dict.fromkeys(name for name in sorted(matches) if not _is_link(layers, name)))
    return list(found)


def _is_link(layers, name):
    path = _topmost(layers, name)
    return path is None or path.is_symlink()


def _topmost(layers, name):
    """Return a name's path in the topmost layer that has it; None where that layer deletes it, or none has it."""
    for layer in layers:
        path = Path(layer) / name
        try:
            status = path.lstat()
        except OSError:
            if _hidden(layer, name):
                return None
            continue
        return None if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else path
    return None


def _hidden(layer, name):
    """Return whether a layer deletes a folder above a name."""
    path = Path(layer)
    for part in name.split("/")[:-1]:
        path = path / part
        try:
            status = path.lstat()
        except OSError:
            return False
        if (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0) or _opaque(path):
            return True
    return False


def _opaque(path):
    for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
        try:
            if os.getxattr(path, name) == b"y":
                return True
        except OSError:
            continue  # not set, or the file system has no such attributes
    return False


def merged(layers, folder):
    """Return the names in a folder as the image shows them, sorted."""
    shown, hidden = set(), set()
    for layer in layers:
        path = Path(layer) / folder
        try:
            entries = list(os.scandir(path))
        except OSError:
            if _hidden(layer, f"{folder}/."):
                break
            continue
        for entry in entries:
            if entry.name.startswith(".wh."):
                hidden.add(entry.name[4:])
            elif entry.name not in hidden:
                status = entry.stat(follow_symlinks=False)
                gone = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
                (hidden if gone and entry.name not in shown else shown).add(entry.name)
        if _opaque(path) or _hidden(layer, f"{folder}/."):
            break
    return sorted(shown)
