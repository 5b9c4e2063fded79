"""Large files on one host: what is proved, what is missing, and the record that says so. Runs on the node.

A record remembers of each file its size, time of change, inode and SHA-256, and the revision. An entry counts only
while the first three still match, so 1.5 TB are read once and not at every run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path

RECORD_NAME = ".kimi-proved.json"
PARTS_NAME = ".kimi-parts"
FALLBACK = "/var/lib/kimi-runbook/proved"
SCHEMA_VERSION = 1
BUFFER_BYTES = 4 << 20
SPARE = 1.01
"""Room asked for beyond the files' own size: file systems account for blocks and metadata too."""
_RECORD_LIMIT = 16 << 20
_READ_TIMEOUT_S = 60
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class FilesError(Exception):
    """What cannot be done, in the words of the message."""


def record_paths(folder, fallback=FALLBACK):
    """Return where a folder's record may lie: beside the files, else where a read-only storage leaves room for it."""
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return Path(folder) / RECORD_NAME, Path(fallback) / f"{key}.json"


def read_record(paths):
    """Return the first readable record of the right schema, an empty one where there is none."""
    for path in paths:
        try:
            with path.open("rb") as file:
                record = json.loads(file.read(_RECORD_LIMIT))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("schema_version") == SCHEMA_VERSION:
            files = record.get("files")
            entries = files.items() if isinstance(files, dict) else ()
            return {
                "revision": record.get("revision"),
                "files": {name: entry for name, entry in entries if isinstance(entry, dict)},
            }
    return {"revision": None, "files": {}}


def write_record(paths, record):
    """Write a record whole, at the first place that takes it; return that place."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **record}, indent=1, sort_keys=True) + "\n"
    refusal = None
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        except OSError as error:
            refusal = error
            continue
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            refusal = error
            continue
        return path
    raise FilesError(f"the record of what is proved cannot be written to {paths[-1]}: {refusal}")


def stamp(path):
    """Return what an entry of the record says about a file beside its sum, None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def proved(folder, record):
    """Return ``{name: sha256}`` of the record's files that are still as they were when they were hashed."""
    found = {}
    for name, entry in record["files"].items():
        now = stamp(Path(folder) / name)
        if now is not None and all(entry.get(key) == value for key, value in now.items()):
            found[name] = str(entry.get("sha256"))
    return found


def proof_digest(sums):
    """Return one SHA-256 over names and sums, as the controller computes it of the list; None without any."""
    if not sums:
        return None
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest()


def sort_out(folder, wanted, record):
    """Return the names that are ``proved``, ``unproved`` (to be hashed) and ``missing`` (to be fetched)."""
    known = proved(folder, record)
    sorted_out = {"proved": [], "unproved": [], "missing": []}
    for name, file in sorted(wanted.items()):
        now = stamp(Path(folder) / name)
        if now is None or (file.get("size") is not None and now["size"] != file["size"]):
            sorted_out["missing"].append(name)
        elif known.get(name) == file["sha256"]:
            sorted_out["proved"].append(name)
        else:
            sorted_out["unproved"].append(name)
    return sorted_out


def sha256_of(path, digest=None, count=None):
    """Return the hash object over a file, or over its first ``count`` bytes, with one buffer whatever its size."""
    digest = digest or hashlib.sha256()
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count is None or count > 0:
            read = file.readinto(view if count is None else view[: min(count, BUFFER_BYTES)])
            if not read:
                break
            digest.update(view[:read])
            if count is not None:
                count -= read
    return digest


def in_threads(names, workers, work):
    """Yield ``(name, result)`` of ``work(name)`` as they are done, ``(name, error)`` where one raised."""
    pool = ThreadPoolExecutor(max_workers=max(workers, 1))
    try:
        running = {pool.submit(work, name): name for name in names}
        for future in as_completed(running):
            error = future.exception()
            if error is not None and not isinstance(error, (OSError, FilesError)):
                raise error
            yield running[future], error if error is not None else future.result()
    finally:
        for future in running:
            future.cancel()
        pool.shutdown()


class DirectorySource:
    """Files of another directory on this host, a mounted share for example."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def size(self, name):
        """Return a file's size; FilesError where it is not there."""
        try:
            return (self.folder / name).stat().st_size
        except OSError as error:
            raise FilesError(f"{self.folder / name}: {error.strerror}") from error

    @contextlib.contextmanager
    def open(self, name, offset):
        """Yield ``(read function, offset it begins at)``."""
        try:
            file = (self.folder / name).open("rb", buffering=0)
        except OSError as error:
            raise FilesError(f"{self.folder / name}: {error.strerror}") from error
        with file:
            file.seek(offset)
            yield file.read, offset


class HttpSource:
    """Files below a URL, read with range requests; a server that ignores them sends a file from its beginning."""

    def __init__(self, url, timeout_s=_READ_TIMEOUT_S):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    def _ask(self, name, method, headers):
        url = f"{self.url}/{urllib.parse.quote(name)}"
        request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310 - http(s), checked before
        try:
            return urllib.request.urlopen(request, timeout=self.timeout_s)  # noqa: S310 - see above
        except urllib.error.HTTPError as error:
            if error.code == 416:
                raise
            if error.code >= 500 or error.code in (408, 429):
                raise OSError(f"{url}: HTTP {error.code} {error.reason}") from error
            raise FilesError(f"{url}: HTTP {error.code} {error.reason}") from error
        except HTTPException as error:
            raise OSError(f"{url}: {error!r}") from error

    def size(self, name):
        """Return a file's size; FilesError where the server does not tell it."""
        try:
            with self._ask(name, "HEAD", {"Accept-Encoding": "identity"}) as answer:
                told = answer.headers.get("Content-Length")
        except OSError as error:
            raise FilesError(f"{self.url}/{name}: {error}") from error
        if told is None:
            raise FilesError(f"{self.url}/{name}: the server tells no size; write sizes into the list")
        return int(told)

    @contextlib.contextmanager
    def open(self, name, offset):
        """Yield ``(read function, offset it begins at)``."""
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
        with self._ask(name, "GET", headers) as answer:
            told = _RANGE.match(answer.headers.get("Content-Range") or "") if answer.status == 206 else None
            begins = int(told[1]) if told else 0

            def read(count):
                try:
                    return answer.read(count)
                except HTTPException as error:
                    raise OSError(f"{self.url}/{name}: {error!r}") from error

            yield read, begins


def source_of(text):
    """Return the source a text names: an absolute path or an HTTP address."""
    if text.startswith(("http://", "https://")):
        return HttpSource(text)
    if text.startswith("/"):
        return DirectorySource(text)
    raise FilesError(f"source {text!r}: expected an absolute path on the host, or http:// or https://")


class Store:
    """A folder of files with its record; several threads may fetch and prove files of it."""

    def __init__(self, folder, revision=None, fallback=FALLBACK):
        self.folder = Path(folder)
        self.paths = record_paths(folder, fallback)
        self.record = read_record(self.paths)
        self.before = json.dumps(self.record, sort_keys=True)
        self.revision = revision
        self.fetched_bytes = 0
        self.hashed_bytes = 0
        self._lock = threading.Lock()

    def remember(self, name, digest):
        """Add a proved file to the record, and write it: a run killed later begins where this one was."""
        with self._lock:
            self.record["files"][name] = {**stamp(self.folder / name), "sha256": digest}
            write_record(self.paths, self.record)

    def settle(self, wanted):
        """Keep in the record what is wanted, with the revision; return whether it differs from what was found."""
        files = {name: entry for name, entry in self.record["files"].items() if name in wanted}
        self.record = {"revision": self.revision, "files": files}
        if json.dumps(self.record, sort_keys=True) == self.before:
            return False
        write_record(self.paths, self.record)
        return True

    def hash(self, name):
        """Return the SHA-256 of a file that is there."""
        path = self.folder / name
        digest = sha256_of(path).hexdigest()
        with self._lock:
            self.hashed_bytes += path.stat().st_size
        return digest

    def part(self, name):
        """Return where a file lies until it is whole and proved."""
        return self.folder / PARTS_NAME / name

    def still_needed(self, names, sizes):
        """Return the bytes that are still to be written for some files."""
        return sum(max(sizes[name] - (stamp(self.part(name)) or {"size": 0})["size"], 0) for name in names)

    def room(self):
        """Return the bytes an unprivileged process may still write where the folder lies or will lie."""
        place = self.folder
        while not place.exists():
            place = place.parent
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize

    def fetch(self, source, name, sha256, attempts, wait):
        """Bring one file; it appears under its name only when its sum is right.

        A transfer that ends early is taken up where it stopped; attempts without a byte more are counted. What arrives
        whole with another sum is thrown away and fetched once more, since a part may have been spoiled by itself.
        """
        part = self.part(name)
        part.parent.mkdir(parents=True, exist_ok=True)
        size, failures, refetched = source.size(name), 0, False
        while True:
            had = (stamp(part) or {"size": 0})["size"]
            if had > size:
                part.unlink()
                had = 0
            digest = sha256_of(part) if had else hashlib.sha256()
            try:
                if had < size:
                    digest = self._receive(source, name, had, digest)
            except OSError as error:
                if getattr(error, "errno", None) in (28, 122):  # ENOSPC, EDQUOT: trying again brings no room
                    raise
                failures = failures + 1 if (stamp(part) or {"size": 0})["size"] <= had else 1
                if failures >= attempts:
                    raise
                wait(failures)
                continue
            now = (stamp(part) or {"size": 0})["size"]
            if now < size:
                failures = failures + 1 if now <= had else 1
                if failures >= attempts:
                    raise FilesError(f"{name}: the source ends after {now} of {size} bytes")
                wait(failures)
                continue
            if digest.hexdigest() == sha256:
                break
            part.unlink()
            if refetched:
                raise FilesError(f"{name}: the source has sha256 {digest.hexdigest()}, expected {sha256}")
            refetched = True
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
        return sha256

    def _receive(self, source, name, had, digest):
        part = self.part(name)
        with source.open(name, had) as (read, begins):
            if begins != had:
                digest, had = hashlib.sha256(), 0
            with part.open("r+b" if part.exists() else "wb") as file:
                file.truncate(had)
                file.seek(had)
                while True:
                    piece = read(BUFFER_BYTES)
                    if not piece:
                        break
                    file.write(piece)
                    digest.update(piece)
                    with self._lock:
                        self.fetched_bytes += len(piece)
                file.flush()
                os.fsync(file.fileno())
        return digest

    def tidy(self):
        """Remove the folder of parts when nothing is left in it."""
        folder = self.folder / PARTS_NAME
        for path, _, _ in sorted(os.walk(folder), reverse=True):
            with contextlib.suppress(OSError):
                Path(path).rmdir()
