"""nvidia-ctk: CDI specifications from the stand-in's state, and the Docker daemon's configuration."""

from __future__ import annotations

import json
import re

from . import NOTICE
from .modtools import error
from .nvml import NvmlError, open_session
from .state import Gpu, Host, root_from_environment

SPEC_FOLDERS = ("/etc/cdi", "/var/run/cdi")
DEFAULT_CONFIG = "/etc/docker/daemon.json"
HELP = f"""nvidia-ctk ({NOTICE})

    nvidia-ctk --version
    nvidia-ctk cdi generate [--output=FILE]
    nvidia-ctk cdi list
    nvidia-ctk runtime configure --runtime=docker [--config=FILE] [--set-as-default] [--cdi.enabled] [--dry-run]"""


class CtkError(Exception):
    """A request that cannot be met."""


def main(arguments: list[str]) -> int:
    """Answer one call. The first argument is the version that the package was built as."""
    version, words = arguments[0], arguments[1:]
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if words[0] in ("-v", "--version"):
        print(f"NVIDIA Container Toolkit CLI version {version}\ncommit: none ({NOTICE})")
        return 0
    try:
        return dispatch(Host(root_from_environment()), words)
    except (CtkError, NvmlError) as problem:
        error(f'level=error msg="{str(problem).strip()}"')
        return 1


def dispatch(host: Host, words: list[str]) -> int:
    """Run one of the commands of HELP.

    Raises:
        CtkError, NvmlError: The command cannot be done.
    """
    options = dict(_option(word) for word in words if word.startswith("-"))
    command = [word for word in words if not word.startswith("-")]
    if command == ["cdi", "generate"]:
        return generate(host, options.get("output", ""))
    if command == ["cdi", "list"]:
        return list_devices(host)
    if command == ["runtime", "configure"]:
        return configure(host, options)
    raise CtkError(f"no help topic for '{' '.join(command)}' ({NOTICE})")


def _option(word: str) -> tuple[str, str]:
    name, _, value = word.lstrip("-").partition("=")
    return name, value


def specification(host: Host, gpus: list[Gpu]) -> str:
    """Return a CDI specification: every GPU by index and by UUID, "all", and the versioned library files."""
    lines = ["---", f"# {NOTICE}", "cdiVersion: 0.5.0", "kind: nvidia.com/gpu", "devices:"]
    named = [(name, [gpu]) for gpu in gpus for name in (str(gpu.index), gpu.uuid)]
    for name, members in [*named, ("all", gpus)]:
        lines += [f'  - name: "{name}"', "    containerEdits:", "      deviceNodes:"]
        lines += [f"        - path: /dev/nvidia{gpu.index}" for gpu in members]
    lines += ["containerEdits:", "  deviceNodes:"]
    lines += [f"    - path: /dev/{node}" for node in ("nvidiactl", "nvidia-uvm") if host.path(f"/dev/{node}").exists()]
    lines += ["  mounts:"]
    paths = [host.library_path(soname) for soname in ("libcuda.so.1", "libnvidia-ml.so.1")]
    for path in [*filter(None, paths), "/usr/bin/nvidia-smi"]:
        lines += [f"    - hostPath: {path}", f"      containerPath: {path}", "      options: [ro, nosuid, nodev, bind]"]
    return "\n".join(lines) + "\n"


def generate(host: Host, output: str) -> int:
    """Write or print the specification.

    Raises:
        NvmlError: The driver is not loaded or does not fit the library.
    """
    text = specification(host, open_session(host).gpus)
    if not output:
        print(text, end="")
        return 0
    path = host.path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    error(f'level=info msg="Generated CDI spec with version 0.5.0" path={output}')
    return 0


def list_devices(host: Host) -> int:
    """Print the device names of all specifications; /var/run/cdi wins over /etc/cdi for one name."""
    found: dict[str, None] = {}
    for folder in SPEC_FOLDERS:
        for path in sorted([*host.path(folder).glob("*.yaml"), *host.path(folder).glob("*.json")]):
            text = path.read_text()
            kind = re.search(r"kind\"?: *\"?([\w./-]+)", text)
            names = re.findall(r"^ *- name: *\"?([\w-]+)", text, re.MULTILINE)
            names += re.findall(r"\{\s*\"name\": *\"([\w-]+)\"", text)
            found |= dict.fromkeys(f"{kind.group(1)}={name}" for name in names) if kind else {}
    error(f'level=info msg="Found {len(found)} CDI devices"')
    for name in found:
        print(name)
    return 0


def configure(host: Host, options: dict[str, str]) -> int:
    """Merge the NVIDIA runtime into the Docker daemon's configuration, or with --dry-run print what would be written.

    Raises:
        CtkError: Another runtime was asked for, or the file is not a JSON object.
    """
    if options.get("runtime", "docker") != "docker":
        raise CtkError(f"unrecognized runtime {options['runtime']!r}: this stand-in configures docker only")
    name = options.get("config") or DEFAULT_CONFIG
    path = host.path(name)
    try:
        settings = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as problem:
        raise CtkError(f"unable to load config {name}: {problem}") from problem
    if not isinstance(settings, dict):
        raise CtkError(f"unable to load config {name}: not a JSON object")
    settings.setdefault("runtimes", {})["nvidia"] = {"args": [], "path": "nvidia-container-runtime"}
    if "set-as-default" in options or "nvidia-set-as-default" in options:
        settings["default-runtime"] = "nvidia"
    if "cdi.enabled" in options or "enable-cdi" in options:
        settings.setdefault("features", {})["cdi"] = True
    text = json.dumps(settings, indent=4) + "\n"
    if "dry-run" in options:
        print(text, end="")
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    error(f'level=info msg="Wrote updated config to {name}"')
    error('level=info msg="It is recommended that docker daemon be restarted."')
    return 0


def container_cli(arguments: list[str]) -> int:
    """Answer ``nvidia-container-cli --version``. The first argument is the version that the package was built as."""
    version, words = arguments[0], arguments[1:]
    if words in (["--version"], ["-V"]):
        print(f"cli-version: {version}\nlib-version: {version}\nbuild: {NOTICE}")
        return 0
    error(f"nvidia-container-cli ({NOTICE}) answers only: nvidia-container-cli --version")
    return 1
