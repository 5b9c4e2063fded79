"""The kernel's receive stamps: when bytes arrived, whatever the process that reads them was doing (socket(7))."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterable

_TIMESPEC = struct.Struct("@ll")
SPACE = socket.CMSG_SPACE(_TIMESPEC.size)
"""Bytes of ancillary data to make room for in ``recvmsg``."""

# asm-generic/socket.h; Python's socket module has no name for it. The message that comes back has the same number.
_SO_TIMESTAMPNS = 35
_NS = 1_000_000_000


def ask_for_stamps(sock: socket.socket) -> None:
    """Ask the kernel to say when it received what is read, where it can."""
    if sys.platform != "linux" or struct.calcsize("l") != 8:
        return
    with contextlib.suppress(OSError):  # a sandbox may refuse it: reads then carry no stamp, and the lag says so
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def stamp_ns(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Return the receive stamp that came with a read, in nanoseconds of the wall clock; 0 when there is none."""
    for level, kind, value in ancillary:
        if kind == _SO_TIMESTAMPNS and level == socket.SOL_SOCKET and len(value) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            return int(seconds) * _NS + int(nanoseconds)
    return 0
