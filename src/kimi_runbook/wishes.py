"""What the roles want of one host, in the shape the judge compares with a snapshot.

Roles state their wishes as plain lists (files, packages, units, modules); the functions here add the role's name,
hash contents and check what cannot be checked later. Nothing here reads a host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_runbook.environment import reportable
from kimi_runbook.errors import RunbookError

Json = Mapping[str, Any]


_SINGLE = ("driver", "image", "engine", "ofed", "dmabuf")


def content_sha256(content: str) -> str:
    """Return the SHA-256 a file with this content has on the host."""
    return hashlib.sha256(content.encode()).hexdigest()


def packages(names: Iterable[str], version: str | None = None, *, held: bool = False) -> list[dict[str, Any]]:
    """Return package wishes: ``name``, ``version`` (None takes any) and whether it is held."""
    return [{"name": name, "version": version or None, "held": held} for name in names]


def units(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return wishes for units that run now and at boot."""
    return [{"name": name, "enabled": True, "active": True} for name in names]


def apt_names(wishes: Iterable[Json]) -> list[str]:
    """Return what apt is asked for: ``name=version`` where a version is wished for, else ``name``."""
    return [f"{wish['name']}={wish['version']}" if wish["version"] else wish["name"] for wish in wishes]


def read_key(repository: Json) -> str:
    """Return a repository's armored signing key, read from ``key_file`` on the controller.

    Raises:
        RunbookError: The key file is not named or cannot be read.
    """
    key_file = Path(repository["key_file"] or "/nonexistent")
    try:
        return key_file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunbookError(
            where=f"package source {repository['name']}",
            observed=f"no signing key at {repository['key_file'] or 'an empty path'} ({error.strerror})",
            expected="an armored public key on the controller (key_file)",
            next_step="Export it from the vendor's package: gpg --no-default-keyring --keyring F --export --armor.",
        ) from error


def dnf_names(wishes: Iterable[Json]) -> list[str]:
    """Return what dnf is asked for: ``name-epoch:version-release`` where a version is wished for, else ``name``."""
    return [f"{wish['name']}-{wish['version']}" if wish["version"] else wish["name"] for wish in wishes]


def apt_source(repository: Json, key_path: str) -> list[dict[str, str]]:
    """Return the two files of an apt source: the deb822 entry and its key, read from the controller.

    Args:
        repository: ``name``, ``uris``, ``suites``, ``components`` and ``key_file`` (armored key on the controller).
        key_path: Where the key will lie on the host.

    Raises:
        RunbookError: The key file is not named or cannot be read.
    """
    key = read_key(repository)
    entry = ["Types: deb", f"URIs: {' '.join(repository['uris'])}", f"Suites: {' '.join(repository['suites'])}"]
    if repository["components"]:
        entry.append(f"Components: {' '.join(repository['components'])}")
    entry.append(f"Signed-By: {key_path}")
    return [
        {"path": key_path, "mode": "0644", "content": key},
        {
            "path": f"/etc/apt/sources.list.d/{repository['name']}.sources",
            "mode": "0644",
            "content": "# Written by kimi-runbook.\n" + "\n".join(entry) + "\n",
        },
    ]


def _settings(file: Json) -> dict[str, Any]:
    """Return what an nccl.conf or ucx.conf sets, so that the audit can name the setting that differs."""
    if file["path"].rpartition("/")[2] not in ("nccl.conf", "ucx.conf"):
        return {}
    rows = (line.partition("=") for line in file["content"].splitlines() if not line.startswith("#"))
    return {"settings": reportable({name.strip(): value.strip() for name, equals, value in rows if equals})}


def assemble(parts: Mapping[str, Json], host: str, address: str, supported_os: Sequence[Json]) -> dict[str, Any]:
    """Return the Expected value of one host from what each role wants.

    Args:
        parts: Role name to its wishes; the lists ``files``, ``packages``, ``units``, ``modules`` and the values
            ``daemon``, ``driver``, ``image``, ``weights``, ``engine``, ``ofed``, ``dmabuf``, each optional. Of the
            engine's environment only what a snapshot reports goes in: the value is written to a file.
        host: The host's name in the inventory.
        address: The address the engine's ranks use.
        supported_os: Distributions the roles know, each with ``id`` and ``versions``.
    """
    expected: dict[str, Any] = {
        "host": host,
        "address": address,
        "supported_os": list(supported_os),
        "packages": [],
        "files": [],
        "units": [],
        "modules": [],
    }
    for role, part in parts.items():
        # What two roles wish is the first one's: companions that are there change with the driver.
        wished = {package["name"] for package in expected["packages"]}
        expected["packages"] += [
            {"role": role, **wish} for wish in part.get("packages", []) if wish["name"] not in wished
        ]
        expected["units"] += [{"role": role, **wish} for wish in part.get("units", [])]
        expected["modules"] += [{"role": role, "name": name} for name in part.get("modules", [])]
        expected["files"] += [
            {
                "role": role,
                "path": file["path"],
                "mode": file["mode"],
                "sha256": content_sha256(file["content"]),
                **_settings(file),
            }
            for file in part.get("files", [])
        ]
        if part.get("daemon"):
            expected["daemon"] = {"role": role, "settings": part["daemon"]}
        expected.update({key: part[key] for key in _SINGLE if part.get(key)})
        if part.get("weights"):
            expected["weights"] = {"role": role, **part["weights"]}
    if expected.get("engine") and expected["engine"].get("env") is not None:
        expected["engine"] = {**expected["engine"], "env": reportable(expected["engine"]["env"])}
    return expected
