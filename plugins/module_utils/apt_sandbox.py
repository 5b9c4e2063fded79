"""A place where apt has the host's sources and ours, with lists of its own: nothing the host reads changes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

SOURCE_PARTS = "/etc/apt/sources.list.d"
_COMPLAINT = re.compile(r"^[EW]: (?P<text>.+)$", re.MULTILINE)


def write_sources(folder, sources):
    """Write the host's further sources and ours into a folder of apt sources, keys beside it; return that folder.

    Args:
        folder: Where it goes; what an earlier call left there is replaced.
        sources: Files as a role will write them, each with ``path`` and ``content``; what is no ``.sources`` is a key.
    """
    place = Path(folder) / "sources.list.d"
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    ours = {Path(source["path"]).name for source in sources}
    if Path(SOURCE_PARTS).is_dir():
        for path in sorted(Path(SOURCE_PARTS).iterdir()):
            if path.is_file() and path.name not in ours:
                shutil.copy(path, place)
    keys = {}
    for source in sources:
        if not source["path"].endswith(".sources"):
            key = Path(folder) / Path(source["path"]).name
            key.write_text(source["content"], encoding="utf-8")
            keys[source["path"]] = str(key)
    for source in sources:
        if source["path"].endswith(".sources"):
            content = source["content"]
            for on_host, here in keys.items():
                content = content.replace(on_host, here)
            (place / Path(source["path"]).name).write_text(content, encoding="utf-8")
    return place


def options(parts, lists):
    """Return the options that keep apt to these sources and lists."""
    os.makedirs(Path(lists) / "partial", exist_ok=True)  # noqa: PTH103 - one call for the folder and the one in it
    return [
        *("-o", f"Dir::Etc::SourceParts={parts}"),
        *("-o", f"Dir::State::Lists={lists}"),
        *("-o", "Dir::Cache::pkgcache="),
        *("-o", "Dir::Cache::srcpkgcache="),
        *("-o", "APT::Update::Error-Mode=any"),
        *("-o", "Acquire::Retries=2"),
        # Folders are root's; the user apt drops to could not read them.
        *("-o", "APT::Sandbox::User=root"),
    ]


def complaints(output):
    """Return apt's own error and warning lines, joined, or the output's last line when it has none."""
    found = [match["text"] for match in _COMPLAINT.finditer(output)]
    return "; ".join(found) if found else (output.strip().splitlines() or ["no output"])[-1]
