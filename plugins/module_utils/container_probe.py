"""The container runtime, the engine image and the engine's container. Runs on the node, as host_probe does."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ansible.module_utils.host_probe import files

# Only names that steer the engine leave the container; anything else could be a secret. A node has no library, so
# both patterns and the options stand in kimi_runbook/environment.py as well; a unit test holds them together.
_ENGINE_ENV = re.compile(
    r"(NCCL|UCX|GLOO|VLLM|CUDA|NVIDIA|TORCH|TORCHDYNAMO|PYTORCH|OMP|TP|MASTER)_[A-Z0-9_]+|HF_HUB_OFFLINE"
)
_SECRET_NAME = re.compile(
    r"KEY|(?<!MAX_)(?<!NUM_)TOKEN(?!IZ|S_PER)|SECRET|PASSW|PASSPHRASE|PASS$|CREDENTIAL|AUTH", re.IGNORECASE
)
_SECRET_OPTIONS = ("--api-key", "--hf-token")
_NOT_SHOWN = "(not shown)"


def runtime(probe):
    """Return Docker's version, the place its images lie in with the room left there, and daemon.json as parsed."""
    info = probe.json_command("docker", "info", "--format", "{{json .}}") or {}
    root_dir = info.get("DockerRootDir") or None
    store = Path(root_dir or "/var/lib/docker")
    while not probe.path(store).exists() and store != store.parent:
        store = store.parent
    room = os.statvfs(probe.path(store))
    daemon, daemon_error = None, None
    text = probe.text("/etc/docker/daemon.json")
    if text is not None:
        try:
            daemon = json.loads(text or "{}")
        except ValueError as error:
            daemon_error = str(error)
    return {
        "docker_version": info.get("ServerVersion") or None,
        "root_dir": root_dir,
        "store_path": str(store),
        "free_bytes": room.f_bavail * room.f_frsize,
        # Filesystems without a fixed inode table (btrfs, some network ones) report 0 of 0.
        "free_inodes": room.f_favail if room.f_files else None,
        "daemon": daemon,
        "daemon_error": daemon_error,
    }


def image(probe, reference):
    """Return whether the runtime holds an image reference, with its digests; None when nobody asked."""
    if not reference:
        return None
    rows = probe.json_command("docker", "image", "inspect", reference) or []
    first = rows[0] if rows else {}
    return {
        "reference": reference,
        "present": bool(rows),
        "repo_digests": first.get("RepoDigests") or [],
        "architecture": first.get("Architecture"),
        "size_bytes": first.get("Size"),
    }


def _shown(args):
    """Return command-line arguments with the values of secret options blotted out."""
    shown = []
    for argument in args:
        name, equals, _ = argument.partition("=")
        if equals and name in _SECRET_OPTIONS:
            shown.append(f"{name}={_NOT_SHOWN}")
        else:
            shown.append(_NOT_SHOWN if shown and shown[-1] in _SECRET_OPTIONS else argument)
    return shown


def engine_container(probe, name, container_files):
    """Return what the engine's container really runs with: image, arguments, steering environment, settings files."""
    rows = probe.json_command("docker", "container", "inspect", name) or [] if name else []
    if not rows:
        return None
    row = rows[0]
    pid = row["State"].get("Pid") or None
    environment = dict(entry.split("=", 1) for entry in row["Config"].get("Env") or [] if "=" in entry)
    inside = files(probe, [f"/proc/{pid}/root{path}" for path in container_files]) if pid else {}
    images = probe.json_command("docker", "image", "inspect", row["Image"]) or [{}]
    return {
        "name": name,
        "id": row["Id"],
        "image_reference": row["Config"].get("Image"),
        "image_repo_digests": images[0].get("RepoDigests") or [],
        "started_at": row["State"].get("StartedAt"),
        "pid": pid,
        "args": _shown(row.get("Args") or []),
        "env": {
            key: value
            for key, value in sorted(environment.items())
            if _ENGINE_ENV.fullmatch(key) and not _SECRET_NAME.search(key)
        },
        "restart_count": row.get("RestartCount", 0),
        "files": {
            path: (inside.get(f"/proc/{pid}/root{path}") or {}).get("sha256") if pid else None
            for path in container_files
        },
    }
