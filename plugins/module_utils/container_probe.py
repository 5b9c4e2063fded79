"""The container runtime, the engine image and the engine's container. Runs on the node, as host_probe does."""

from __future__ import annotations

import json

from ansible.module_utils import redaction
from ansible.module_utils.docker_socket import names_of, store_path
from ansible.module_utils.host_probe import files
from ansible.module_utils.package_probe import installed
from ansible.module_utils.unit_probe import main_pid, process_started_at, unit_environment

_TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
    "nvidia-container-runtime",
    "nvidia-docker2",
)


def runtime(probe):
    """Return Docker's version, the place its images lie in with the room left there, and daemon.json as parsed."""
    info = probe.json_command("docker", "info", "--format", "{{json .}}")
    info = info if isinstance(info, dict) else {}
    root_dir = info.get("DockerRootDir") or None
    store = store_path(info, root_dir or "/var/lib/docker")
    place = probe.path(store)
    while not place.exists() and place not in (place.parent, probe.root):
        place = place.parent
    store = probe.shown(place)
    free_bytes, free_inodes = probe.room(store)
    daemon, daemon_error = daemon_settings(probe)
    return {
        "docker_version": info.get("ServerVersion") or None,
        "root_dir": root_dir,
        "store_path": store,
        "free_bytes": free_bytes,
        "free_inodes": free_inodes,
        "read_only": read_only(probe, store),
        "root_read_only": read_only(probe, "/"),
        "daemon": redaction.value(daemon),
        "daemon_error": daemon_error,
        "toolkit": _toolkit(probe),
        "default_runtime": info.get("DefaultRuntime") or None,
        "storage_driver": info.get("Driver") or None,
        "cdi_enabled": _cdi_enabled(info, daemon),
    }


def read_only(probe, path):
    """Return whether the file system a path lies on is mounted read-only; None when the mounts cannot be read."""
    rows = [line.split() for line in (probe.text("/proc/self/mounts") or "").splitlines()]
    # The longest mount point above the path counts, of several mounts there the last. Spaces are written as \040.
    above = [
        row for row in rows if len(row) >= 4 and f"{path}/".startswith(f"{row[1].rstrip('/')}/".replace("\\040", " "))
    ]
    longest = max((len(row[1]) for row in above), default=0)
    options = [row[3].split(",") for row in above if len(row[1]) == longest]
    return "ro" in options[-1] if options else None


def daemon_settings(probe):
    """Return ``(daemon.json as parsed or None, why it could not be parsed or None)``."""

    def read():
        text = probe.text("/etc/docker/daemon.json")
        if text is None:
            return None, None
        try:
            return json.loads(text or "{}"), None
        except ValueError as error:
            return None, str(error)

    daemon, error = probe.once("daemon.json", read)
    return (daemon, error) if daemon is None or isinstance(daemon, dict) else (None, "it holds no JSON object")


def _toolkit(probe):
    rows = installed(probe)
    return None if rows is None else {name: version for name, version, _ in rows if name in _TOOLKIT}


def _cdi_enabled(info, daemon):
    """Return whether Docker injects devices by CDI; None when neither Docker nor daemon.json says."""
    if "CDISpecDirs" in info:
        return bool(info["CDISpecDirs"])
    features = daemon.get("features") if isinstance(daemon, dict) else None
    told = features.get("cdi") if isinstance(features, dict) else None
    return told if isinstance(told, bool) else None


def inspected(probe, kind, name):
    """Return what ``docker <kind> inspect`` says of one object, an empty mapping when it is not there."""
    rows = (
        probe.once(f"{kind} {name}", lambda: probe.json_command("docker", kind, "inspect", name, absent="no such"))
        if name
        else None
    )
    first = rows[0] if isinstance(rows, list) and rows else {}
    return first if isinstance(first, dict) else {}


def held_name(probe, reference):
    """Return the name under which the host holds a digest: the reference itself, else the one of a mirror or the stage.

    An image that came through a mirror has the mirror's name and the same digest.
    """
    if inspected(probe, "image", reference):
        return reference
    digest = reference.partition("@")[2]
    asked = ("docker", "image", "ls", "--digests", "--no-trunc", "--format", "{{.Repository}}@{{.Digest}}")
    answer = probe.once("image digests", lambda: probe.command(*asked)) if digest else None
    rows = answer[1].split() if answer and answer[0] == 0 else []
    names = names_of([{"RepoDigests": rows}], digest)
    return f"{names[0]}@{digest}" if names else reference


def image(probe, reference):
    """Return whether the runtime holds an image's digest, with its names; None when nobody asked."""
    if not reference:
        return None
    first = inspected(probe, "image", held_name(probe, reference))
    return {
        "reference": reference,
        "present": bool(first),
        "repo_digests": first.get("RepoDigests") or [],
        "architecture": first.get("Architecture"),
        "size_bytes": first.get("Size"),
    }


def engine_container(probe, name, container_files):
    """Return what the engine's container really runs with: image, arguments, steering environment, settings files."""
    row = inspected(probe, "container", name)
    if not row:
        return None
    state, config = row.get("State") or {}, row.get("Config") or {}
    pid = state.get("Pid") or None
    inside = files(probe, [f"/proc/{pid}/root{path}" for path in container_files]) if pid else {}
    return {
        "name": name,
        "id": row.get("Id"),
        "image_reference": config.get("Image"),
        "image_repo_digests": inspected(probe, "image", row.get("Image")).get("RepoDigests") or [],
        "created_at": row.get("Created"),
        "started_at": state.get("StartedAt"),
        "pid": pid,
        "args": redaction.arguments(row.get("Args") or []),
        "env": redaction.environment(config.get("Env") or []),
        "restart_count": row.get("RestartCount", 0),
        "files": {
            path: (inside.get(f"/proc/{pid}/root{path}") or {}).get("sha256") if pid else None
            for path in container_files
        },
        "settings": {
            path: told["settings"]
            for path in container_files
            for told in [inside.get(f"/proc/{pid}/root{path}") or {}]
            if "settings" in told
        },
    }


def engine(probe, name, container_files, unit):
    """Return the engine: its container, what its unit gives it, and its first process as the kernel has it."""
    container = engine_container(probe, name, container_files)
    return {
        "container": container,
        "unit_env": unit_environment(probe, unit) if unit else {},
        "process": _process(probe, (container or {}).get("pid") or (main_pid(probe, unit) if unit else None)),
    }


def _process(probe, pid):
    text = probe.text(f"/proc/{pid}/cmdline") if pid else None
    if not text:
        return None
    argv = redaction.arguments(text.rstrip("\0").split("\0"))
    return {
        "argv": [redaction.text(word)[:500] for word in argv[:400]],
        "started_at": process_started_at(probe, pid),
    }
