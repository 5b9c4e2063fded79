"""``kimi-runbook weights``: list a model's files with their checksums, or hold a folder to such a list.

Exit codes: of ``manifest`` 0 when every file was read; of ``verify`` 0 when the folder is what the list says, 1 when a
file is missing, differs, cannot be read, or is there and not listed (``--allow-extra`` lets that pass). Both: 2 when
folder or list cannot be used, 130 when cancelled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from kimi_runbook.commands import FINE, NO, Commands
from kimi_runbook.errors import RunbookError
from kimi_runbook.weights import LISTS, compare, make_manifest, read_manifest

_SAY_EVERY_S = 5.0
_GB = 1e9


def register(commands: Commands) -> None:
    """Add the command and its two actions."""
    parser = commands.add_parser("weights", help="list and verify a model's files", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    manifest = actions.add_parser("manifest", help="print the list of a folder's files with size and SHA-256")
    manifest.add_argument("--revision", help="what the files are, as the lock's model.revision has it")
    manifest.add_argument("--sha256sum", action="store_true", help="print it as sha256sum does, not as JSON")
    manifest.set_defaults(run=_manifest)

    verify = actions.add_parser("verify", help="compare a folder with a list")
    verify.add_argument(
        "--manifest", type=Path, metavar="FILE", help="the list; by default SHA256SUMS or its like in the folder"
    )
    verify.add_argument("--allow-extra", action="store_true", help="files that are not listed are no difference")
    verify.add_argument("--json", action="store_true", help="print the differences as JSON")
    verify.set_defaults(run=_verify)

    for action in (manifest, verify):
        action.add_argument("folder", type=Path, metavar="DIR", help="where the files lie")
        action.add_argument(
            "--workers", type=_positive, default=min(8, os.cpu_count() or 1), help="files read at the same time"
        )
        action.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return number


def _manifest(arguments: argparse.Namespace) -> int:
    made = make_manifest(arguments.folder, arguments.revision, arguments.workers, _Progress(arguments.quiet))
    if arguments.sha256sum:
        print("".join(f"{file.sha256}  {name}\n" for name, file in sorted(made.files.items())), end="")
    else:
        print(json.dumps(made.to_json(), indent=2))
    return FINE


def _verify(arguments: argparse.Namespace) -> int:
    path = arguments.manifest or _list_beside(arguments.folder)
    manifest = read_manifest(path)
    found = compare(arguments.folder, manifest, arguments.workers, _Progress(arguments.quiet))
    if arguments.allow_extra:
        found = tuple(difference for difference in found if difference.kind != "extra")
    if arguments.json:
        answer = {
            "same": not found,
            "manifest": str(path),
            "revision": manifest.revision,
            "files": len(manifest.files),
            "differences": [asdict(difference) for difference in found],
        }
        print(json.dumps(answer, indent=2))
    else:
        for difference in found:
            print(difference)
        print(f"{arguments.folder}: {len(manifest.files)} files listed, {len(found)} differences")
    return NO if found else FINE


def _list_beside(folder: Path) -> Path:
    for name in LISTS:
        if name != "REVISION" and (folder / name).is_file():
            return folder / name
    raise RunbookError(
        where=str(folder),
        observed="no list of checksums beside the files",
        expected="--manifest FILE, or SHA256SUMS in the folder",
        next_step="Make one where the files are known to be right: kimi-runbook weights manifest DIR > FILE",
    )


class _Progress:
    """Says how far it is, every few seconds and at the end."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._began = time.monotonic()
        self._said = self._began

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._quiet or (now - self._said < _SAY_EVERY_S and done < total):
            return
        self._said = now
        rate = done / max(now - self._began, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if 0 < done < total else ""
        print(
            f"kimi-runbook: {done / _GB:.1f} of {total / _GB:.1f} GB, {rate / _GB:.2f} GB/s{left}",
            file=sys.stderr,
        )
