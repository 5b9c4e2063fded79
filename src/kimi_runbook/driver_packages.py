"""Which packages make the locked driver on one host, and the files that pin, fence and configure it. Pure.

The names are data of the role (``roles/gpu_driver/vars/main/names.yml``); here they are chosen and filled in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kimi_runbook.errors import RunbookError
from kimi_runbook.wishes import apt_source, read_key

Json = Mapping[str, Any]

CUDA_REPOSITORY = "https://developer.download.nvidia.com/compute/cuda/repos"
SERVER_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}
"""Machine name to the folder name of NVIDIA's CUDA repository, which calls server arm64 "sbsa" (gpu-driver-container
install.sh); neither aarch64 nor arm64 exists there."""

_NONE: dict[str, Any] = {
    "manager": None, "folder": None, "stream": None, "pin": [], "packages": [], "locks": [], "preferences": []
}  # fmt: skip


def driver_set(
    platforms: Json, families: Mapping[str, str], os: Json, driver: Mapping[str, str], source: str
) -> dict[str, Any]:
    """Return what makes the driver on one host; empty lists on a distribution that no set is for.

    Args:
        platforms: ``__gpu_driver_platforms``.
        families: os-release id to the family whose packages it takes.
        os: ``id``, ``version_id`` and ``kernel`` (running release) of the snapshot.
        driver: ``branch``, ``version`` and ``package_version``.
        source: ``cuda``, ``canonical`` or ``mirror`` (of the CUDA repository, so with its names).

    Returns:
        ``manager`` (apt or dnf), ``folder``, ``stream``, ``pin`` and ``packages`` (wishes: name, version, held),
        ``locks`` and ``preferences`` (names).
    """
    platform = platforms.get(_key(families, os, source))
    if platform is None:
        return dict(_NONE)
    chosen = next((one for one in platform["sets"] if _covers(one, int(driver["branch"]))), None)
    if chosen is None:
        return {**_NONE, "manager": platform["manager"]}
    words = {
        "branch": driver["branch"],
        "version": driver["version"],
        "kernel": str(os.get("kernel") or ""),
        "major": _release(os).partition(".")[0],
        "compact": _release(os).replace(".", ""),
    }

    def filled(key: str) -> list[str]:
        return [name.format(**words) for name in chosen.get(key, ())]

    return {
        "manager": platform["manager"],
        "folder": platform["folder"].format(**words) if "folder" in platform else None,
        "stream": chosen["stream"].format(**words) if "stream" in chosen else None,
        "pin": [_wish(name, None) for name in filled("pin")],
        "packages": [_wish(name, driver["package_version"]) for name in filled("packages")]
        + [_wish(name, None) for name in filled("as_offered")],
        "locks": filled("locks"),
        "preferences": filled("preferences"),
    }


def asked_names(platforms: Json, driver: Mapping[str, str]) -> list[str]:
    """Return every name a set of any platform has for this driver, for the snapshot to ask for.

    Names that carry the kernel are left out: a snapshot reports every driver package it finds anyway.
    """
    words = {"branch": driver["branch"], "version": driver["version"]}
    names = (
        name
        for platform in platforms.values()
        for one in platform["sets"]
        if _covers(one, int(driver["branch"]))
        for key in ("pin", "packages", "as_offered")
        for name in one.get(key, ())
    )
    return list(dict.fromkeys(name.format(**words) for name in names if "{kernel}" not in name))


def installed_companions(companions: Mapping[str, str], packages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lock's companions that are installed: they change in one transaction with the driver or break it.

    A fabric manager of another version ends at its start (NVIDIA/gpu-operator#544), and one that depends on its
    driver's exact version makes the driver's change impossible without it.
    """
    return [_wish(name, version) for name, version in companions.items() if packages.get(name)]


def stops(site_units: Iterable[str], limit_s: int, daemons: Sequence[Json]) -> list[dict[str, Any]]:
    """Return the units to stop in order with their limits: a site's own first, since they use the daemons."""
    own = [{"unit": unit, "limit_s": limit_s} for unit in site_units]
    return own + [dict(one) for one in daemons if one["unit"] not in {row["unit"] for row in own}]


def lock_lines(wishes: Iterable[Json], names: Iterable[str], version: str) -> list[str]:
    """Return the version lock's lines of a driver: its packages, and the names they pull in, at its version."""
    versions = dict.fromkeys(names, version) | {wish["name"]: wish["version"] for wish in wishes if wish["version"]}
    return [f"{name}-{exact}.*" for name, exact in versions.items()]


def repository(given: Json, source: str, folder: str | None, arch: str) -> dict[str, Any] | None:
    """Return the repository with its addresses, or None where the host's own sources have the driver.

    Raises:
        RunbookError: A mirror without an address, or an architecture NVIDIA's repository does not have.
    """
    if given["uris"]:
        return dict(given)
    if source == "canonical" or folder is None:
        return None
    if source == "mirror":
        raise RunbookError(
            where="gpu_driver_repository",
            observed="gpu_driver_source is mirror, and uris is empty",
            expected="the mirror's address",
            next_step="Name it in the inventory.",
        )
    if arch not in SERVER_ARCHITECTURES:
        raise RunbookError(
            where="gpu_driver_repository",
            observed=f"architecture {arch}",
            expected=" or ".join(SERVER_ARCHITECTURES),
            next_step="NVIDIA's CUDA repository has no such folder: name a mirror in gpu_driver_repository.uris.",
        )
    return {**given, "uris": [f"{CUDA_REPOSITORY}/{folder}/{SERVER_ARCHITECTURES[arch]}"]}


def _key(families: Mapping[str, str], os: Json, source: str) -> str:
    family = families.get(os["id"], os["id"])
    major = _release(os).partition(".")[0] if family == "rhel" else ""
    return f"{'cuda' if source == 'mirror' else source}-{family}{major}"


def _release(os: Json) -> str:
    return str(os.get("version_id") or "")


def _covers(chosen: Json, branch: int) -> bool:
    return int(chosen.get("since", 0)) <= branch <= int(chosen.get("until", 10**6))


def _wish(name: str, version: str | None) -> dict[str, Any]:
    return {"name": name, "version": version, "held": True}


_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def parameter_file(path: str, parameters: Json, *, blacklist_nouveau: bool) -> list[dict[str, str]]:
    """Return the one modprobe.d file of the driver, none where it would say nothing.

    Raises:
        RunbookError: A name or value modprobe could not read, or one that must never be set.
    """
    for name, value in parameters.items():
        _check_parameter(name, str(value))
    lines = ["blacklist nouveau", "options nouveau modeset=0"] if blacklist_nouveau else []
    if parameters:
        lines.append(
            " ".join(["options nvidia", *(f"{name}={_quoted(str(value))}" for name, value in parameters.items())])
        )
    if not lines:
        return []
    head = "# Parameters of the NVIDIA driver; written by kimi-runbook, role gpu_driver."
    return [{"path": path, "mode": "0644", "content": "\n".join([head, *lines]) + "\n"}]


def parameter_names(parameters: Json) -> dict[str, str]:
    """Return parameters as the loaded module reports them: without ``NVreg_``, values as text."""
    return {name.removeprefix("NVreg_"): str(value) for name, value in parameters.items()}


def _check_parameter(name: str, value: str) -> None:
    problem = None
    if not _PARAMETER.fullmatch(name) or any(sign in value for sign in '"\n\\'):
        problem = "a name of letters, digits and _, and a value without quotes, backslashes and line ends"
    elif name == "NVreg_EnableGpuFirmware" and value.strip() == "0":
        problem = "GSP firmware left on: open modules and Blackwell do not run without it"
    if problem:
        raise RunbookError(
            where="gpu_driver_parameters",
            observed=f"{name}={value}",
            expected=problem,
            next_step="Correct it in the inventory.",
        )


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"[\s;=]", value) else value


def preferences(path: str, names: Sequence[str], version: str) -> list[dict[str, str]]:
    """Return apt's preferences that hold names to a version where no pinning package does; none without names."""
    if not names:
        return []
    content = (
        "Explanation: the locked driver; written by kimi-runbook, role gpu_driver.\n"
        "Explanation: Above 1000, so that apt may downgrade.\n"
        f"Package: {' '.join(names)}\nPin: version {version}-*\nPin-Priority: 1001\n"
    )
    return [{"path": path, "mode": "0644", "content": content}]


def dnf_source(repository: Json, key_path: str, key: str, *, modular: bool) -> list[dict[str, str]]:
    """Return the two files of a dnf repository: the entry, which checks signatures by itself, and its key.

    Args:
        repository: ``name`` and ``uris``.
        key_path: Where the key will lie on the host.
        key: The armored key.
        modular: Whether module streams choose versions; else modular filtering is off, which otherwise hides packages
            on EL10 (rocky-linux/rockylinux.org#201).
    """
    name = repository["name"]
    lines = [
        "# Written by kimi-runbook.",
        f"[{name}]",
        f"name={name}",
        f"baseurl={' '.join(repository['uris'])}",
        "enabled=1",
        "gpgcheck=1",  # a host whose default is off would install anything
        "skip_if_unavailable=0",
        f"gpgkey=file://{key_path}",
        *([] if modular else ["module_hotfixes=1"]),
    ]
    return [
        {"path": key_path, "mode": "0644", "content": key},
        {"path": f"/etc/yum.repos.d/{name}.repo", "mode": "0644", "content": "\n".join(lines) + "\n"},
    ]


def source_files(source: Json | None, manager: str | None, *, modular: bool) -> list[dict[str, str]]:
    """Return the files of the driver's repository for one host's package manager; none where it needs none."""
    if source is None or manager is None:
        return []
    if manager == "apt":
        return apt_source(source, f"/usr/share/keyrings/{source['name']}.asc")
    key_path = f"/etc/pki/rpm-gpg/RPM-GPG-KEY-{source['name']}"
    return dnf_source(source, key_path, read_key(source), modular=modular)


def known_paths(name: str) -> list[str]:
    """Return every path the files of a repository may have, whatever the host's package manager."""
    return [
        f"/usr/share/keyrings/{name}.asc",
        f"/etc/apt/sources.list.d/{name}.sources",
        f"/etc/pki/rpm-gpg/RPM-GPG-KEY-{name}",
        f"/etc/yum.repos.d/{name}.repo",
    ]
