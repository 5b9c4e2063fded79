"""The model's files on a host: how many, how large, of which revision, with which checksums recorded at the download.

Files are not hashed here: 1.5 TB would take half an hour. Four records are read: the one that the module model_weights
wrote when it had read every byte, the metadata huggingface_hub keeps below ``.cache/huggingface/download``, the names
of blobs in its cache, and a SHA256SUMS file beside the weights.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ansible.module_utils.proved_files import FALLBACK, proof_digest, proved, read_record, record_paths

_SHA256 = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9a-f]{40}")
_MOST_FILES = 5000
_DEEPEST = 4


def weights(probe, path):
    """Return what lies at a path and the room left there; None when nobody asked, or it could not be told in time.

    Weights often lie on a network file system, so all of it is read with a time limit.
    """
    if not path:
        return None
    place = probe.path(path)
    records = (record_paths(place)[0], probe.path(str(record_paths(path, FALLBACK)[1])))
    found = probe.apart(f"weights in {path}", lambda: read_weights(place, records))
    if found is None:
        return None
    return {"path": path, **found, "free_bytes": probe.room(path)[0]}


def read_weights(place, records):
    """Return ``{"revision", "files", "bytes", "checksums", "proved"}`` of a folder; no files where there is none.

    Args:
        place: The folder.
        records: Where a record of what was hashed may lie; the first that can be read counts.
    """
    if not place.is_dir():
        return {"revision": None, "files": 0, "bytes": 0, "checksums": None, "proved": None}
    sums, sizes = {}, {}
    for name, entry in _files(place, "", 0):
        sizes[name] = entry.stat().st_size
        blob = Path(entry.path).readlink().name if entry.is_symlink() else ""
        if _SHA256.fullmatch(blob):
            sums[name] = blob
    recorded, revision = _metadata(place / ".cache/huggingface/download")
    sums.update(recorded)
    sums.update(_sums_file(place))
    record = read_record(records)
    hashed = proved(place, record)
    sums.update(hashed)
    return {
        "revision": (record["revision"] if hashed else None) or revision or _told_revision(place),
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "checksums": dict(sorted(sums.items())) or None,
        "proved": proof_digest(hashed),
    }


def _files(folder, below, depth):
    """Yield ``(relative name, entry)`` of the files below a folder, hidden ones left out, links to files followed."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name)[:_MOST_FILES]:
            if entry.name.startswith("."):
                continue
            if entry.is_file():
                yield f"{below}{entry.name}", entry
            elif depth < _DEEPEST and entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{below}{entry.name}/", depth + 1)


def _metadata(folder):
    """Return checksums and the revision that huggingface_hub recorded: commit, etag and time, one line each.

    The etag of a file in large-file storage is its SHA-256. Revisions that differ between files are no revision.
    """
    sums, revisions = {}, set()
    for path in sorted(folder.rglob("*.metadata"))[:_MOST_FILES]:
        lines = [line.strip() for line in _beginning(path, 4096).splitlines()]
        if len(lines) > 1 and _SHA256.fullmatch(lines[1]):
            sums[str(path.relative_to(folder))[: -len(".metadata")]] = lines[1]
        if lines and _REVISION.fullmatch(lines[0]):
            revisions.add(lines[0])
    return sums, (revisions.pop() if len(revisions) == 1 else "mixed" if revisions else None)


def _sums_file(place):
    sums = {}
    for name in ("SHA256SUMS", "sha256sums.txt", "checksums.sha256"):
        for line in _beginning(place / name, 1 << 20).splitlines():
            told = re.fullmatch(r"([0-9a-f]{64}) [ *](?:\./)?(.+)", line.strip())
            if told:
                sums[told[2]] = told[1]
    return sums


def _told_revision(place):
    """Return the revision in a folder's own name, as in the cache's ``snapshots/<revision>``, or in a REVISION file."""
    last = place.resolve().name
    if _REVISION.fullmatch(last):
        return last
    told = (_beginning(place / name, 200).strip() for name in ("REVISION", ".revision"))
    return next((line for line in told if line), None)


def _beginning(path, size):
    """Return the first bytes of a file as text, nothing where there is no file."""
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.read(size)
