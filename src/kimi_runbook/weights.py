"""A model's files: the list of what a revision holds, read from a file or made from a folder, and the comparison.

A list is JSON (``{"schema_version": 1, "revision": ..., "files": {name: {"size": bytes, "sha256": hex}}}``) or what
``sha256sum`` prints. Checksums are computed in threads, which hashlib lets run beside each other, with one buffer per
thread: memory does not grow with the files.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, parse_json, read_text

SCHEMA_VERSION = 1
BUFFER_BYTES = 4 << 20
LISTS = ("SHA256SUMS", "sha256sums.txt", "checksums.sha256", "REVISION")
"""Files beside the weights that are about them and not of them."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUM_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64}) [ *](?P<name>.+)")

Progress = Callable[[int, int], None]
"""Told of bytes read so far and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One file: SHA-256 in hex, and its size where the list says one."""

    sha256: str
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsManifest:
    """The files of one revision, by name relative to the folder."""

    files: Mapping[str, WeightsFile]
    revision: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "revision": self.revision,
            "files": {
                name: {"size": file.size, "sha256": file.sha256} if file.size is not None else {"sha256": file.sha256}
                for name, file in sorted(self.files.items())
            },
        }

    def digest(self) -> str:
        """Return one SHA-256 for all files: equal where names and contents are, whatever else the list says."""
        lines = "".join(f"{file.sha256}  {name}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A file that is not what the list says: ``missing``, ``size``, ``content``, ``unreadable`` or ``extra``."""

    name: str
    kind: str
    observed: str
    expected: str

    def __str__(self) -> str:
        return f"{self.name}: {self.observed}, expected {self.expected}"


def read_manifest(path: Path) -> WeightsManifest:
    """Read a list from a file; RunbookError as :func:`parse_manifest`."""
    return parse_manifest(read_text(path), str(path))


def parse_manifest(text: str, source: str) -> WeightsManifest:
    """Read either form of a list.

    Raises:
        RunbookError: neither form, no file, a name that leaves the folder, or one that occurs twice.
    """
    if text.lstrip().startswith("{"):
        return _from_json(text, source)
    files: dict[str, WeightsFile] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        told = _SUM_LINE.fullmatch(line.rstrip("\r"))
        if told is None:
            raise _bad(f"{source}:{number}", repr(line[:80]), "<64 hexadecimal digits>  <name>")
        name = _safe(told["name"].removeprefix("./"), f"{source}:{number}")
        if name in files and files[name].sha256 != told["sha256"]:
            raise _bad(f"{source}:{number}", f"{name} a second time with another sum", "each file once")
        files[name] = WeightsFile(sha256=told["sha256"])
    return _not_empty(WeightsManifest(files=files), source)


def _from_json(text: str, source: str) -> WeightsManifest:
    root = Fields(parse_json(text, source), source, _MAKE)
    root.require_schema(SCHEMA_VERSION)
    listed = root.fields("files")
    files: dict[str, WeightsFile] = {}
    for name in listed.names():
        entry = listed.fields(name)
        digest, size = entry.text("sha256"), entry.optional_integer("size")
        if not _SHA256.fullmatch(digest):
            raise _bad(f"{source}: files.{name}.sha256", repr(digest), "64 hexadecimal digits in lower case")
        if size is not None and size < 0:
            raise _bad(f"{source}: files.{name}.size", str(size), "bytes, 0 or more")
        files[_safe(name, f"{source}: files")] = WeightsFile(sha256=digest, size=size)
    return _not_empty(WeightsManifest(files=files, revision=root.optional_text("revision")), source)


_MAKE = "Make it from a folder that is known to be right: kimi-runbook weights manifest DIR > FILE"


def _bad(where: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(where=where, observed=observed, expected=expected, next_step=_MAKE)


def _safe(name: str, where: str) -> str:
    """Return a name that stays below its folder and is no hidden file: names come from files, and get written to."""
    parts = name.split("/")
    if not all(parts) or any(part.startswith(".") for part in parts) or not name.isprintable():
        raise _bad(where, f"the name {name!r}", "a path below the folder, without hidden parts")
    return name


def _not_empty(manifest: WeightsManifest, source: str) -> WeightsManifest:
    if not manifest.files:
        raise _bad(source, "no file listed", "the model's files")
    return manifest


def files_below(folder: Path) -> dict[str, Path]:
    """Return the model's files by name: hidden ones and :data:`LISTS` left out, links to files followed.

    Raises:
        RunbookError: there is no such folder, or it cannot be read.
    """
    try:
        return dict(sorted(_walk(folder, "")))
    except OSError as error:
        raise RunbookError(
            where=str(folder),
            observed=error.strerror or str(error),
            expected="a readable folder with a model's files",
            next_step="Check the path, and that the storage is mounted.",
        ) from error


def _walk(folder: Path, below: str) -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or (not below and entry.name in LISTS):
                continue
            if entry.is_file():
                yield f"{below}{entry.name}", Path(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{below}{entry.name}/")


def hash_files(paths: Mapping[str, Path], workers: int, progress: Progress) -> Iterator[tuple[str, str | OSError]]:
    """Yield ``(name, SHA-256)`` as files are done, or ``(name, error)`` where one could not be read to its end."""
    total, done = sum(_size(path) for path in paths.values()), 0
    ended = threading.Event()

    def advance(count: int) -> None:
        nonlocal done
        if ended.is_set():
            raise InterruptedError  # a file of 26 GB would otherwise be read to its end after a Ctrl-C
        done += count  # a lost update costs a digit of the progress line, nothing else
        progress(done, total)

    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        running = {pool.submit(_sha256, path, advance): name for name, path in paths.items()}
        for future in as_completed(running):
            error = future.exception()
            if isinstance(error, OSError):
                yield running[future], error
            else:
                yield running[future], future.result()
    finally:
        ended.set()
        pool.shutdown(cancel_futures=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest, buffer = hashlib.sha256(), bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            advance(count)
    return digest.hexdigest()


def make_manifest(folder: Path, revision: str | None, workers: int, progress: Progress) -> WeightsManifest:
    """Return the list of what lies in a folder.

    Raises:
        RunbookError: no file there, or one cannot be read.
    """
    paths = files_below(folder)
    if not paths:
        raise RunbookError(
            where=str(folder), observed="no file", expected="a model's files", next_step="Check the path."
        )
    files: dict[str, WeightsFile] = {}
    for name, result in hash_files(paths, workers, progress):
        if isinstance(result, OSError):
            raise RunbookError(
                where=str(paths[name]),
                observed=result.strerror or str(result),
                expected="a file that can be read to its end",
                next_step="Check permissions and the storage below it.",
            ) from result
        files[name] = WeightsFile(sha256=result, size=paths[name].stat().st_size)
    return WeightsManifest(files=files, revision=revision)


def compare(folder: Path, manifest: WeightsManifest, workers: int, progress: Progress) -> tuple[Difference, ...]:
    """Return how a folder differs from a list, sorted by name; sizes first, so that nothing too short is read.

    Args:
        folder: Where the files lie.
        manifest: What they should be.
        workers: Files read at the same time.
        progress: Told of the bytes read.

    Raises:
        RunbookError: there is no such folder, or it cannot be read.
    """
    there = files_below(folder)
    wanted = manifest.files
    found: list[Difference] = []
    to_read: dict[str, Path] = {}
    for name, file in wanted.items():
        size = _size(there[name]) if name in there else None
        if size is None:
            found.append(Difference(name=name, kind="missing", observed="not there", expected=f"sha256 {file.sha256}"))
        elif file.size is not None and size != file.size:
            found.append(Difference(name=name, kind="size", observed=f"{size} bytes", expected=f"{file.size} bytes"))
        else:
            to_read[name] = there[name]
    found += [
        Difference(name=name, kind="extra", observed="there", expected="no such file in the list")
        for name in there
        if name not in wanted
    ]
    for name, result in hash_files(to_read, workers, progress):
        expected = f"sha256 {wanted[name].sha256}"
        if isinstance(result, OSError):
            text = result.strerror or str(result)
            found.append(Difference(name=name, kind="unreadable", observed=text, expected=expected))
        elif result != wanted[name].sha256:
            found.append(Difference(name=name, kind="content", observed=f"sha256 {result}", expected=expected))
    return tuple(sorted(found, key=lambda difference: difference.name))
