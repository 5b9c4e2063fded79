"""``kimi-runbook lock``: make a lock from a template, show one, compare two.

Exit codes: of ``resolve`` and ``show`` 0 when the lock is good (warnings included), 2 when it is refused or unreadable;
of ``diff`` 0 when the locks say the same, 1 when they differ, 2 when one is refused or unreadable.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kimi_runbook.commands import FINE, NO, Commands
from kimi_runbook.errors import RunbookError
from kimi_runbook.image_index import files_as_registry
from kimi_runbook.lock import Fetch, Lock, Resolved, lock_warnings, open_fields, parse_lock, resolve_lock
from kimi_runbook.lock.difference import changes, consequences, leaves, shown
from kimi_runbook.lock.refusal import RESOLVE
from kimi_runbook.lock.schema import check_shape
from kimi_runbook.lock.vendor import read_redistrib, read_releases
from kimi_runbook.reading import Fields, parse_json, parse_yaml, read_text
from kimi_runbook.registry import fetch_manifest

_Read = TypeVar("_Read")
_MAX_FILE_BYTES = 16 * 1024 * 1024  # NVIDIA's files have some tens of KB, a manifest at most 4 MiB


def register(commands: Commands) -> None:
    """Add the command and its three actions."""
    parser = commands.add_parser("lock", help="resolve, show or compare locks", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    resolve = actions.add_parser("resolve", help="fill in digests, sizes and companion versions, write the lock")
    resolve.add_argument("--template", required=True, type=Path, help="a lock without what is filled in")
    resolve.add_argument("--out", required=True, type=Path, help="where to write the lock")
    resolve.add_argument(
        "--driver-json", type=Path, metavar="FILE", help="NVIDIA's redistrib_<driver version>.json: companion versions"
    )
    resolve.add_argument(
        "--releases-json", type=Path, metavar="FILE", help="NVIDIA's releases.json: does that driver exist, which class"
    )
    resolve.add_argument(
        "--image-manifest",
        type=Path,
        metavar="FILE",
        action="append",
        help="read the image from saved manifests instead of the registry (docker buildx imagetools inspect --raw):"
        " the index, and for the size each architecture's manifest; may be repeated",
    )
    resolve.add_argument("--insecure", action="store_true", help="the registry speaks plain HTTP")
    resolve.add_argument("--json", action="store_true", help="print the lock as JSON")
    resolve.set_defaults(run=_resolve)

    show = actions.add_parser("show", help="say what a lock holds, leaves open, and warns about")
    show.add_argument("lock", type=Path, metavar="LOCK")
    show.add_argument("--json", action="store_true", help="print the lock as JSON")
    show.set_defaults(run=_show)

    diff = actions.add_parser("diff", help="say what changed between two locks, and what that leads to")
    diff.add_argument("before", type=Path, metavar="BEFORE")
    diff.add_argument("after", type=Path, metavar="AFTER")
    diff.add_argument("--json", action="store_true", help="print the changes as JSON")
    diff.set_defaults(run=_diff)


def _resolve(arguments: argparse.Namespace) -> int:
    source = str(arguments.template)
    data = parse_yaml(read_text(arguments.template), source)
    check_shape(data, source, template=True)
    template = Fields(data, source, "Correct the template.")
    wanted: dict[str, Any] = dict(template.mapping())
    if arguments.insecure:
        wanted["image"] = {**template.fields("image").mapping(), "insecure": True}
    files = [
        path for path in (arguments.driver_json, arguments.releases_json, *(arguments.image_manifest or ())) if path
    ]
    resolved = resolve_lock(
        wanted,
        _fetch(arguments.image_manifest, template),
        source,
        release=_json(arguments.driver_json, read_redistrib),
        releases=_json(arguments.releases_json, read_releases),
    )
    lock = resolved.lock
    _write(arguments.out, _header(arguments.template, files, resolved) + _dump(lock.to_json()))
    _say_on_stderr(
        [*(f"note: {note}" for note in resolved.notes), *(f"warning: {text}" for text in lock_warnings(lock))]
    )
    print(json.dumps(lock.to_json(), indent=2) if arguments.json else f"{arguments.out}: {lock.image.reference}")
    return FINE


def _show(arguments: argparse.Namespace) -> int:
    lock = _load(arguments.lock)
    warnings, left_open = lock_warnings(lock), open_fields(lock)
    if arguments.json:
        extra = {"digest": lock.digest(), "left_open": list(left_open), "warnings": list(warnings)}
        print(json.dumps({**lock.to_json(), **extra}, indent=2))
        return FINE
    for name, value in leaves(lock.to_json()):
        print(f"{name}: {shown(value)}")
    print(f"digest: {lock.digest()}")
    if left_open:
        print(f"left open, so that anything on a host is accepted: {', '.join(left_open)}")
    for text in warnings:
        print(f"warning: {text}")
    return FINE


def _diff(arguments: argparse.Namespace) -> int:
    before, after = _load(arguments.before), _load(arguments.after)
    found = changes(before, after)
    if arguments.json:
        answer = {
            "same": not found,
            "before": {"file": str(arguments.before), "digest": before.digest()},
            "after": {"file": str(arguments.after), "digest": after.digest()},
            "changes": [change.to_json() for change in found],
            "means": list(consequences(found)),
        }
        print(json.dumps(answer, indent=2))
    else:
        for line in found or ("the locks are the same",):
            print(line)
        for sentence in consequences(found):
            print(f"means for {sentence}")
    return NO if found else FINE


def _load(path: Path) -> Lock:
    """Read a lock, naming every wrong key at once."""
    source = str(path)
    try:
        text = read_text(path)
    except RunbookError as error:
        raise RunbookError(
            where=error.where, observed=error.observed, expected="a lock file", next_step=RESOLVE
        ) from error
    data = parse_yaml(text, source)
    check_shape(data, source)
    return parse_lock(data, source)


def _fetch(files: list[Path] | None, template: Fields) -> Fetch:
    if not files:
        return fetch_manifest
    contents = [(str(path), _bytes(path)) for path in files]
    return files_as_registry(contents, template.fields("image").optional_text("digest"))


def _json(path: Path | None, read: Callable[[object, str], _Read]) -> _Read | None:
    return None if path is None else read(parse_json(_bytes(path).decode("utf-8", "replace"), str(path)), str(path))


def _bytes(path: Path) -> bytes:
    """Return a file's exact bytes: digests depend on every one of them."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RunbookError(
            where=str(path),
            observed=f"cannot be read ({error.strerror or error})",
            expected="a readable file",
            next_step="Check the path and its permissions.",
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise RunbookError(
            where=str(path),
            observed=f"more than {_MAX_FILE_BYTES} bytes",
            expected="one of NVIDIA's JSON files or an image's manifest",
            next_step="Check what was saved there.",
        )
    return content


def _header(template: Path, files: Iterable[Path], resolved: Resolved) -> str:
    """Return the comment on top of the lock: where it came from, and what was derived rather than read."""
    lines = [f"Made by kimi-runbook lock resolve from {template.name}: change that, not this file."]
    lines += [f"From {path.name} (sha256:{hashlib.sha256(_bytes(path)).hexdigest()})" for path in files]
    lines += resolved.notes
    return "".join(f"# {line}\n" for line in lines)


def _say_on_stderr(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"kimi-runbook: {line}", file=sys.stderr)


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
