"""A minimal initramfs: one file in a cpio archive of the new ASCII format, compressed by gzip.

Format: cpio(5) of FreeBSD and the kernel's Documentation/driver-api/early-userspace/buffer-format.rst, read 2026-11-30.
"""

from __future__ import annotations

import gzip

_TRAILER = "TRAILER!!!"


def initramfs(path: str, content: bytes) -> bytes:
    """Return an initramfs that holds one file; an empty one when the path is empty."""
    members = [(path, content)] if path else []
    return gzip.compress(b"".join(_member(*member) for member in [*members, (_TRAILER, b"")]), mtime=0)


def _member(name: str, content: bytes) -> bytes:
    """Return one member: header of 13 hexadecimal fields, name and content, each padded to four bytes."""
    fields = (1, 0o100644, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    header = "070701" + "".join(f"{field:08X}" for field in fields) + name + "\0"
    return _padded(header.encode()) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)
