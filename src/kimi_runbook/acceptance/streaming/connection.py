"""One connection to one server: non-blocking TCP, through a proxy where one is named, TLS on top where the URL says so.

TLS works on memory (``ssl.MemoryBIO``) and not on the socket, so that reading is the same with and without it and the
kernel's receive stamps are there in both cases.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kimi_runbook.acceptance.streaming.stamps import SPACE, ask_for_stamps, stamp_ns
from kimi_runbook.acceptance.streaming.wire import WireError, parse_head, request_bytes

READ_SIZE = 16 * 1024
_NS = 1_000_000_000

Address = tuple[int, Any]
"""Address family and what ``connect`` takes for it."""


class OpenError(Exception):
    """A connection that could not be opened; the text says why and what to do about it."""


class Stage(Enum):
    """How far a connection is."""

    TCP = auto()
    PROXY = auto()
    TLS = auto()
    READY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How to get to a server.

    Attributes:
        host: The server's name or address, without brackets.
        port: Its port.
        tls: Whether it speaks TLS.
        via: Host and port of the proxy, or None.
    """

    host: str
    port: int
    tls: bool
    via: tuple[str, int] | None = None

    @property
    def authority(self) -> str:
        """Host and port as a URL has them; the port left out where it is the scheme's own."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}"

    @property
    def first_hop(self) -> tuple[str, int]:
        """Host and port the socket connects to."""
        return self.via or (self.host, self.port)


class Connection:
    """One connection, from connecting to closing. Never blocks: where it would, it says so.

    Attributes:
        stage: How far it is.
        address: The address it was opened to, or is tried with.
        used: Requests it has carried.
        ended: Whether the server has said, within TLS, that nothing more comes after what was given.
        idle_since_ns: When its last answer ended, on the monotonic clock; when it was opened, before the first.
        idle_limit_s: Seconds it may be idle before it is no longer trusted with a request.
    """

    __slots__ = (
        "_addresses",
        "_encrypted",
        "_from_proxy",
        "_out",
        "_plain",
        "_received",
        "_route",
        "_sock",
        "_tls",
        "address",
        "ended",
        "idle_limit_s",
        "idle_since_ns",
        "stage",
        "used",
    )

    def __init__(
        self, route: Route, addresses: Sequence[Address], context: ssl.SSLContext | None, idle_limit_s: float
    ) -> None:
        """Begin to connect to the first address; raises OpenError when not even that can be done."""
        self._route = route
        self._addresses = list(addresses)
        self._received, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        if context is not None:
            self._tls = context.wrap_bio(self._received, self._encrypted, server_hostname=route.host)
        self._plain = self._tls is None
        self._out = memoryview(b"")
        self._from_proxy = b""
        self.ended = False
        self.used = 0
        self.idle_since_ns = time.monotonic_ns()
        self.idle_limit_s = idle_limit_s
        self.stage = Stage.TCP
        self.address: Address = (0, ())
        self._sock = self._connect()

    def fileno(self) -> int:
        """Return the socket's descriptor; it changes with ``next_address``."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether it waits for room in the socket, and not only for bytes from it."""
        return self.stage is Stage.TCP or len(self._out) > 0

    def next_address(self) -> None:
        """Give up the address that was tried and begin with the next one; raises OpenError when none can be begun."""
        self._sock.close()
        self._sock = self._connect()

    @property
    def has_next_address(self) -> bool:
        """Whether there is another address to try while this one does not answer."""
        return self.stage is Stage.TCP and bool(self._addresses)

    def advance(self) -> bool:
        """Go on opening, as far as it goes without waiting; returns whether it is open. Raises OpenError."""
        try:
            if self.stage is Stage.TCP:
                self._connected()
            if self.stage is Stage.PROXY and self.flush():
                self._ask_proxy()
            if self.stage is Stage.TLS:
                self._handshake()
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError as error:
            raise OpenError(self._said(error)) from error
        return self.stage is Stage.READY

    def send(self, data: bytes) -> bool:
        """Take a request and send what fits; returns whether all of it went. Raises OSError."""
        if self._tls is not None:
            self._tls.write(data)
            data = self._encrypted.read()
        self._out = memoryview(data)
        return self.flush()

    def flush(self) -> bool:
        """Send what did not fit before; returns whether all of it went. Raises OSError."""
        while self._out:
            try:
                self._out = self._out[self._sock.send(self._out) :]
            except BlockingIOError:
                return False
        return True

    def forget_output(self) -> None:
        """Send no more of the request: the server does not take it."""
        self._out = memoryview(b"")

    def receive(self) -> tuple[bytes | None, int]:
        """Return what one read brings and the kernel's receive stamp in wall-clock nanoseconds, 0 where there is none.

        The bytes are empty at the end of the connection and None when there is nothing to give yet. Raises OSError.
        """
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_SIZE, SPACE)
        except BlockingIOError:
            return None, 0
        stamp = stamp_ns(ancillary)
        if self._plain:
            return data, stamp
        return self._decrypt(data), stamp

    def alive(self) -> bool:
        """Return whether it can carry another request: not idle for too long, not closed, nothing said unasked."""
        if self.used and time.monotonic_ns() - self.idle_since_ns > self.idle_limit_s * _NS:
            return False
        while True:
            try:
                data = self._sock.recv(READ_SIZE)
                if not data or self._plain or self._decrypt(data) is not None:  # None: a TLS session ticket
                    return False
            except BlockingIOError:
                return True
            except OSError:
                return False

    def close(self) -> None:
        """Close it at once."""
        self._sock.close()

    def _connect(self) -> socket.socket:
        """Begin to connect to the next address that lets itself be tried."""
        said = "no address"
        while self._addresses:
            self.address = self._addresses.pop(0)
            try:
                sock = socket.socket(self.address[0], socket.SOCK_STREAM)
            except OSError as error:  # no IPv6 on this machine, or no descriptor left
                said = self._said(error)
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_stamps(sock)
            code = sock.connect_ex(self.address[1])
            if code in (0, errno.EINPROGRESS, errno.EAGAIN):
                self.stage = Stage.TCP
                return sock
            sock.close()
            said = self._said(OSError(code, os.strerror(code)))
        raise OpenError(said)

    def _connected(self) -> None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        try:
            self._sock.getpeername()
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                raise BlockingIOError from error
            raise
        if self._route.via is not None and self._route.tls:
            self.stage = Stage.PROXY
            target = f"{self._route.host}:{self._route.port}"
            if ":" in self._route.host:
                target = f"[{self._route.host}]:{self._route.port}"
            self._out = memoryview(request_bytes("CONNECT", target, {"Host": target}, None))
        else:
            self._opened_tcp()

    def _opened_tcp(self) -> None:
        self.stage = Stage.READY if self._tls is None else Stage.TLS

    def _ask_proxy(self) -> None:
        data = self._sock.recv(READ_SIZE)
        if not data:
            raise OpenError(f"the proxy closed the connection when asked for {self._route.authority}")
        self._from_proxy += data
        try:
            parsed = parse_head(self._from_proxy)
        except WireError as error:
            raise OpenError(f"the proxy sent {error}") from error
        if parsed is None:
            raise BlockingIOError
        head, rest = parsed
        if not 200 <= head.status < 300:
            raise OpenError(f"the proxy answered CONNECT {self._route.authority} with HTTP {head.status}")
        self._received.write(rest)
        self._opened_tcp()

    def _handshake(self) -> None:
        if self._tls is None:
            raise OpenError("no TLS context for a connection that needs one")
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if not self._send_encrypted():
                    raise
                data = self._sock.recv(READ_SIZE)  # BlockingIOError ends the loop
                if not data:
                    raise OpenError("the server closed the connection during the TLS handshake") from None
                self._received.write(data)
            except ssl.SSLError:
                self._send_encrypted()  # the alert, so that the server's log has the reason too
                raise
            else:
                self._send_encrypted()
                self.stage = Stage.READY
                return

    def _send_encrypted(self) -> bool:
        self._out = memoryview(bytes(self._out) + self._encrypted.read())
        return self.flush()

    def _decrypt(self, data: bytes) -> bytes | None:
        if self._tls is None:
            return data
        if data:
            self._received.write(data)
        else:
            self._received.write_eof()
        plain: list[bytes] = []
        while True:
            try:
                piece = self._tls.read(READ_SIZE)
            except ssl.SSLWantReadError:
                break
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                piece = b""
            if not piece:
                self.ended = True
                return b"".join(plain)
            plain.append(piece)
        if self._encrypted.pending:
            self._send_encrypted()
        return b"".join(plain) or None

    def _said(self, error: OSError) -> str:
        host = self._route.host
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
                return (
                    f"the certificate is not for {host} ({error.verify_message}): use a name it is made for in the URL"
                )
            return (
                f"the certificate is not trusted ({error.verify_message}): "
                "name a file with its CA certificate (--ca-file, ca_file in the plan)"
            )
        if isinstance(error, ssl.SSLError):
            if error.reason == "WRONG_VERSION_NUMBER":
                return "the server answers TLS with something else: use http:// in the URL if it has no TLS"
            return f"the TLS handshake failed ({error.reason or error})"
        reason = error.strerror or str(error) or type(error).__name__
        return reason if self._route.via is None else f"proxy {self._route.via[0]}:{self._route.via[1]}: {reason}"
