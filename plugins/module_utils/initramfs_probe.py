"""The NVIDIA module inside an initramfs, found without unpacking it: the archive streams past until the module comes.

An initramfs is one or more cpio archives (newc), the first ones plain (microcode), the last as a rule compressed. What
Python's library cannot decompress (zstd, lz4, lzop) goes through the host's own tool.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import re
import shutil
import subprocess
import zlib

from ansible.module_utils.command_run import environment

_MODULE = re.compile(r"(^|/)nvidia(-current)?\.ko(\.(zst|xz|gz))?$")
_VERSION = re.compile(rb"(?<![a-z])version=(\d+(?:\.\d+)+)\0")  # srcversion is another field
_MOST_BYTES = 2 << 30  # of what comes out of one image; a large one with all firmware is below 1 GiB
_PIECE = 1 << 18
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x89LZO", "lzop"),
    (b"BZh", "bzip2"),
)


def initramfs(probe, kernels):
    """Return ``[{"kernel", "versions"}]`` of the kernels that have an initramfs; None when those could not be read."""
    rows, looked = [], 0
    for kernel in dict.fromkeys(name for name in kernels if name):
        paths = [probe.path(name) for name in (f"/boot/initrd.img-{kernel}", f"/boot/initramfs-{kernel}.img")]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            continue
        looked += 1
        versions = probe.apart(probe.shown(path), lambda path=path: module_versions(path))
        if versions is not None:
            rows.append({"kernel": kernel, "versions": versions})
    return rows if rows or not looked else None


def module_versions(path):
    """Return the versions of the nvidia modules in one image; empty when it holds none.

    Raises:
        OSError, ValueError: It cannot be read, or is of a form nobody here knows.
    """
    with path.open("rb") as image:
        while True:
            head = _skip_padding(image)
            if not head:
                return []
            if head[:6] == b"070701":
                found = _search(_Stream(image))
            else:
                kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
                if kind is None:
                    raise ValueError(f"compressed in an unknown way: it begins with {head[:6].hex()}")
                return _search_compressed(image, kind)
            if found:
                return found


def _skip_padding(image):
    """Move on to the next archive, which starts at the next byte that is not zero; return its first bytes."""
    while True:
        piece = image.read(512)
        kept = piece.lstrip(b"\0")
        if kept or not piece:
            image.seek(image.tell() - len(kept))
            head = image.read(8)
            image.seek(image.tell() - len(head))
            return head


def _search_compressed(image, kind):
    own = {"gzip": lambda: zlib.decompressobj(31), "xz": lzma.LZMADecompressor, "bzip2": bz2.BZ2Decompressor}
    if kind in own:
        return _search(_Stream(image, own[kind]()))
    tool = shutil.which(kind, path=environment()["PATH"])
    if tool is None:
        raise ValueError(f"compressed by {kind}, which is not installed")
    os.lseek(image.fileno(), image.tell(), os.SEEK_SET)  # the tool reads from where the archive starts
    # Runs in the process group of the child that asks (Probe.apart), which is killed whole when its time is up.
    process = subprocess.Popen(
        [tool, "-dc"], stdin=image.fileno(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        return _search(_Stream(process.stdout))
    finally:
        process.kill()
        process.wait()


class _Stream:
    """Bytes in order, decompressed when a decompressor is given; skipping costs no memory."""

    def __init__(self, source, decompressor=None):
        self._source = source
        self._decompressor = decompressor
        self._kept = b""
        self.position = 0

    def read(self, size):
        """Return the next bytes, fewer only at the end."""
        while len(self._kept) < size:
            piece = self._next()
            if not piece:
                break
            self._kept += piece
        taken, self._kept = self._kept[:size], self._kept[size:]
        self.position += len(taken)
        return taken

    def skip(self, size):
        """Pass over bytes."""
        if self._decompressor is None and isinstance(self._source, io.BufferedReader) and self._source.seekable():
            inside = min(size, len(self._kept))
            self._kept = self._kept[inside:]
            self._source.seek(size - inside, 1)
            self.position += size
            return
        while size > 0:
            passed = len(self.read(min(size, _PIECE)))
            if not passed:
                return
            size -= passed

    def _next(self):
        if self._decompressor is None:
            # A plain archive is followed by another one in the same file, so nothing is read ahead of what is needed.
            return self._source.read(512 if self._source.seekable() else _PIECE)
        while True:
            piece = self._source.read(_PIECE)
            if not piece:
                return b""
            out = self._decompressor.decompress(piece)
            if out:
                return out

    def give_back(self):
        """Put what was read ahead back into a plain source."""
        if self._kept and self._decompressor is None and self._source.seekable():
            self._source.seek(-len(self._kept), 1)
            self._kept = b""


def _search(stream):
    """Return the versions of the nvidia modules in one cpio archive, and leave the stream behind its end."""
    found = []
    while True:
        head = stream.read(110)
        if len(head) < 110:
            raise ValueError("cut off before its end")
        if head[:6] not in (b"070701", b"070702"):
            raise ValueError("not a cpio archive throughout")
        if stream.position > _MOST_BYTES:
            raise ValueError("larger than an initramfs can be")
        size, name_size = int(head[54:62], 16), int(head[94:102], 16)
        name = stream.read(_padded(110 + name_size) - 110)[: name_size - 1].decode(errors="replace")
        if name == "TRAILER!!!":
            break
        if _MODULE.search(name) and size:
            version = _VERSION.search(_unpacked(name, stream.read(size)))
            found.append(version[1].decode() if version else "unknown")
            stream.skip(_padded(size) - size)
        else:
            stream.skip(_padded(size))
    stream.give_back()
    return sorted(set(found))


def _padded(size):
    return (size + 3) & ~3


def _unpacked(name, content):
    if name.endswith(".xz"):
        return lzma.decompress(content)
    if name.endswith(".gz"):
        return zlib.decompress(content, 31)
    if name.endswith(".zst"):
        tool = shutil.which("zstd", path=environment()["PATH"])
        if tool is None:
            raise ValueError("holds a module compressed by zstd, which is not installed")
        done = subprocess.run([tool, "-dc"], input=content, capture_output=True, check=False, env=environment())
        return done.stdout
    return content
