"""``kimi-runbook lock``: resolve a template against its registry, show a lock, compare two.

Exit code of ``diff``: 0 when they are the same, 1 when they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kimi_runbook.commands import FINE, NO, Commands
from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import load_lock, parse_lock, resolve_lock
from kimi_runbook.reading import Fields, parse_yaml, read_text
from kimi_runbook.registry import fetch_manifest


def register(commands: Commands) -> None:
    """Add the command and its three actions."""
    parser = commands.add_parser("lock", help="resolve, show or compare locks", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    resolve = actions.add_parser("resolve", help="read digests and sizes from the registry, write the lock")
    resolve.add_argument("--template", required=True, type=Path, help="a lock without digests and sizes")
    resolve.add_argument("--out", required=True, type=Path, help="where to write the lock")
    resolve.add_argument("--insecure", action="store_true", help="the registry speaks plain HTTP")
    resolve.add_argument("--json", action="store_true", help="print the lock as JSON")
    resolve.set_defaults(run=_resolve)

    show = actions.add_parser("show", help="say what a lock holds")
    show.add_argument("lock", type=Path, metavar="LOCK")
    show.add_argument("--json", action="store_true", help="print the lock as JSON")
    show.set_defaults(run=_show)

    diff = actions.add_parser("diff", help="say what changed between two locks")
    diff.add_argument("before", type=Path, metavar="BEFORE")
    diff.add_argument("after", type=Path, metavar="AFTER")
    diff.add_argument("--json", action="store_true", help="print the changes as JSON")
    diff.set_defaults(run=_diff)


def _resolve(arguments: argparse.Namespace) -> int:
    source = str(arguments.template)
    template = Fields(parse_yaml(read_text(arguments.template), source), source, "Correct the template.")
    wanted: dict[str, Any] = dict(template.mapping())
    if arguments.insecure:
        wanted["image"] = {**template.fields("image").mapping(), "insecure": True}
    resolved = resolve_lock(wanted, fetch_manifest, source)
    header = f"# Made by kimi-runbook lock resolve from {arguments.template.name}: change that, not this file.\n"
    _write(arguments.out, header + _dump(resolved))
    lock = parse_lock(resolved, source)
    print(json.dumps(resolved, indent=2) if arguments.json else f"{arguments.out}: {lock.image.reference}")
    return FINE


def _show(arguments: argparse.Namespace) -> int:
    lock = load_lock(arguments.lock)
    if arguments.json:
        print(json.dumps({**lock.to_json(), "digest": lock.digest()}, indent=2))
        return FINE
    for name, value in _leaves(lock.to_json()):
        print(f"{name}: {'-' if value is None else value}")
    print(f"digest: {lock.digest()}")
    return FINE


def _diff(arguments: argparse.Namespace) -> int:
    before = dict(_leaves(load_lock(arguments.before).to_json()))
    after = dict(_leaves(load_lock(arguments.after).to_json()))
    changes = [
        {"field": name, "before": before.get(name), "after": after.get(name)}
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    if arguments.json:
        print(json.dumps({"changes": changes}, indent=2))
    else:
        for change in changes:
            print(f"{change['field']}: {change['before']} -> {change['after']}")
        if not changes:
            print("the locks are the same")
    return NO if changes else FINE


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(item) if isinstance(item, list) else item


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, as yamllint's default rules ask."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _dump(lock: Mapping[str, Any]) -> str:
    return yaml.dump(lock, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all: a lock cut short would be worse than none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RunbookError(
            where=str(path),
            observed=f"cannot be written ({error.strerror or error})",
            expected="a place for the lock",
            next_step="Check the folder and its permissions.",
        ) from error
