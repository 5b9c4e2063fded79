"""The matrix of fake hosts as it is described: base values, each host's differences, and its twin one value away."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parents[1] / "data" / "hosts"

_BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One fake host.

    Attributes:
        name: File name without its ending; a twin's ends in ``-twin``.
        about: What the host is, and the case it is a test of.
        values: Everything about it, base and differences merged.
        wanted: What lock and inventory ask of it beyond the usual; see wanted.py.
        judged: What a careful operator would say of it: ``verdict``, ``codes`` (those that stop or change) and
            ``message``, one finding in full.
    """

    name: str
    about: str
    values: Mapping[str, Any]
    wanted: Mapping[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)


def host_names() -> tuple[str, ...]:
    """Return the names of the hosts in the matrix, without their twins."""
    return tuple(sorted(path.stem for path in DATA.glob("*.yml") if path.stem != _BASE))


def load_host(name: str) -> Host:
    """Return one host."""
    described = _described(name)
    values = merged(_described(_BASE), {"hostname": name, **described.get("differs", {})})
    return Host(
        name=name,
        about=described["about"],
        values=values,
        wanted=described.get("wanted", {}),
        judged=described["judged"],
    )


def load_twin(name: str) -> Host:
    """Return a host's twin: the same with one value changed.

    Raises:
        KeyError: The changed value is none the host has.
    """
    host, twin = load_host(name), _described(name)["twin"]
    return Host(
        name=f"{name}-twin",
        about=twin["about"],
        values=changed(host.values, twin["change"], twin["to"]),
        wanted=host.wanted,
        judged=twin["judged"],
    )


def matrix() -> Iterator[Host]:
    """Yield every host followed by its twin."""
    for name in host_names():
        yield load_host(name)
        yield load_twin(name)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return base with the differences laid over it.

    Mappings merge and anything else replaces; ``key: {only: {...}}`` replaces a mapping as a whole.
    """
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        if isinstance(value, Mapping) and set(value) == {"only"}:
            result[key] = copy.deepcopy(value["only"])
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def changed(values: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return the values with one of them changed; ``path`` joins its keys with ``|``, since names hold dots.

    Raises:
        KeyError: There is no such value.
    """
    result = copy.deepcopy(dict(values))
    *parents, last = path.split("|")
    place = result
    for key in parents:
        place = place[key]
    if last not in place:
        raise KeyError(path)
    place[last] = value
    return result


@cache
def _described(name: str) -> Mapping[str, Any]:
    described: Mapping[str, Any] = yaml.safe_load((DATA / f"{name}.yml").read_text(encoding="utf-8"))
    return described
