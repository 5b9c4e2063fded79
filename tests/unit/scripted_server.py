"""A server that says what a test tells it to, byte by byte, with or without TLS; and a CA of its own."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Script = Callable[[socket.socket], None]

DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def word(text: str = "word") -> bytes:
    """Return a chat event with text, as one chunk."""
    return chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode())


def json_answer(body: bytes = b"{}", *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """Return a whole answer with its length."""
    lines = [b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def read_request(sock: socket.socket) -> tuple[bytes, bytes]:
    """Return head and body of the next request; raises EOFError when the client has closed the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    length = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < length:
        body += _some(sock)
    return head, body


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise EOFError
    return data


def answering(*answers: bytes) -> Script:
    """Return a script that gives each request of a connection the next answer, and then closes it."""

    def script(sock: socket.socket) -> None:
        for answer in answers:
            read_request(sock)
            sock.sendall(answer)

    return script


class ScriptedServer:
    """Runs a script for each connection, in a thread of its own; the last script serves all further connections.

    Attributes:
        connections: How many were accepted.
        ended: Is set when a connection's script has come to its end, or to the client's.
    """

    def __init__(self, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self._scripts = scripts
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._open: set[socket.socket] = set()
        self.connections = 0
        self.ended = threading.Event()
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._accept, name="scripted-server", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts[min(self.connections, len(self._scripts) - 1)]
            self.connections += 1
            self._open.add(sock)
            threading.Thread(target=self._run, args=(sock, script), daemon=True).start()

    def _run(self, sock: socket.socket, script: Script) -> None:
        try:
            served = self._tls.wrap_socket(sock, server_side=True) if self._tls else sock
            self._open.add(served)
            with served, contextlib.suppress(OSError, EOFError):
                script(served)
        except OSError:  # the client refused the certificate
            sock.close()
        finally:
            self._open.discard(sock)
            self.ended.set()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Give a port that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ca:
    """A certificate authority for one test.

    Attributes:
        file: Its certificate.
        server: What a server needs that has a certificate of it.
    """

    file: Path
    server: ssl.SSLContext


def make_ca(folder: Path, name: str = "test CA", server_name: str = "127.0.0.1") -> Ca:
    """Make a CA and a server certificate for one name or address."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def certificate(subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    ca = certificate(ca_name, ca_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    try:
        told: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(server_name))
    except ValueError:
        told = x509.DNSName(server_name)
    server = certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")]), key.public_key())
    server = server.add_extension(x509.SubjectAlternativeName([told]), critical=False)
    folder.mkdir(parents=True, exist_ok=True)
    ca_file, server_file = folder / "ca.pem", folder / "server.pem"
    ca_file.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    server_file.write_bytes(
        server.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_file)
    return Ca(file=ca_file, server=context)
