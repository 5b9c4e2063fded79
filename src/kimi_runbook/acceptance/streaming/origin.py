"""One server and what it takes to reach it: route, trust, key, resolved addresses, and the connections kept to it."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kimi_runbook.acceptance.plan import Access
from kimi_runbook.acceptance.streaming.connection import Address, Connection, OpenError, Route
from kimi_runbook.acceptance.streaming.errors import EngineError
from kimi_runbook.acceptance.streaming.flight import Flight
from kimi_runbook.acceptance.streaming.wire import Head, request_bytes
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import data_file

_NS = 1_000_000_000


class Origin:
    """One server. Safe to share between threads: a connection belongs to whoever took it.

    The API key goes with every request and is kept here and nowhere else; ``redact_error`` and ``redact_bytes`` take it
    out of what a server sends back.

    Attributes:
        url: Scheme, host and port; no path.
        flight: When completions were in flight.
    """

    def __init__(self, url: str, access: Access | None = None) -> None:
        """Read what the URL and the access options name.

        Raises:
            RunbookError: When the URL or the proxy is none, the key's variable is empty, or the CA file cannot be read.
        """
        access = access or Access()
        parts = split_url(url)
        self.route = _route(parts, url, access.proxy)
        self.url = f"{parts.scheme}://{self.route.authority}"
        self._key = _key(access.api_key_env)
        self._context = _trust(access.ca_file) if self.route.tls else None
        self.flight = Flight()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._resolved_for_s = data_file("client.yml").fields("connections").number("resolved_for_s")
        self._resolved: tuple[float, list[Address]] = (float("-inf"), [])
        self._forget = weakref.finalize(self, _close_all, self._idle)

    def request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None) -> bytes:
        """Return one request as bytes; raises RunbookError for a path or header that cannot be sent."""
        through_proxy = self.route.via is not None and not self.route.tls
        all_headers = {
            "Host": self.route.authority,
            "User-Agent": "kimi-runbook",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            **(headers or {}),
        }
        if self._key:
            all_headers["Authorization"] = f"Bearer {self._key}"
        try:
            return request_bytes(method, (self.url if through_proxy else "") + path, all_headers, body)
        except ValueError as error:
            raise RunbookError(
                where=f"{method} {self.url}{path}",
                observed=str(error),
                expected="a path and headers that fit into a request",
                next_step="Percent-encode the URL.",
            ) from None

    def take(self) -> Connection | None:
        """Return a kept connection that can carry another request, or None. It is the caller's until given back."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.alive():
                return connection
            connection.close()

    def give(self, connection: Connection) -> None:
        """Keep a connection whose answer has ended whole."""
        with self._lock:
            self._idle.append(connection)

    def open(self, addresses: Sequence[Address]) -> Connection:
        """Begin a new connection; raises OpenError."""
        return Connection(self.route, addresses, self._context, idle_limit_s(None))

    def close(self) -> None:
        """Close the kept connections; the origin can be used further."""
        with self._lock:
            _close_all(self._idle)

    def addresses(self, timeout_s: float) -> list[Address]:
        """Return the addresses of the first hop, kept for a while (data/client.yml).

        Raises:
            OpenError: When the name has none, or the resolver does not answer in time.
        """
        with self._lock:
            at_s, found = self._resolved
        if time.monotonic() - at_s > self._resolved_for_s:
            found = _resolve(*self.route.first_hop, timeout_s)
            with self._lock:
                self._resolved = (time.monotonic(), found)
        return list(found)

    def prefer(self, address: Address) -> None:
        """Try this address first from now on."""
        with self._lock:
            at_s, found = self._resolved
            if found and found[0] != address:
                self._resolved = (at_s, sorted(found, key=lambda one: one != address))

    def redact_error(self, error: EngineError) -> None:
        """Take the API key out of an error, should the server have repeated it."""
        if self._key and self._key in error.detail:
            error.detail = error.detail.replace(self._key, "[API key]")
            error.args = (f"{error.where}: {error.detail}",)

    def redact_bytes(self, data: bytes) -> bytes:
        """Return the bytes without the API key."""
        return data.replace(self._key.encode(), b"[API key]") if self._key else data


def idle_limit_s(head: Head | None) -> float:
    """Return how long a connection may be idle: below the server's keep-alive, by its answer or by vLLM's default."""
    facts = data_file("client.yml").fields("connections")
    margin_s, keep_alive_s = facts.number("keep_alive_margin_s"), facts.number("server_keep_alive_s")
    told = head.headers.get("keep-alive", "") if head else ""
    for part in told.split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "timeout" and value.isascii() and value.isdigit():
            keep_alive_s = min(keep_alive_s, float(value))
    return keep_alive_s - margin_s


def split_url(url: str) -> SplitResult:
    """Return the parts of an http or https URL; raises RunbookError when it is none or carries a password."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and (parts.hostname or "").isascii() and url.isprintable() and " " not in url
        usable = usable and not (parts.hostname or "").startswith(".")
    except ValueError:
        usable = False
    if not usable:
        raise RunbookError(
            where=url,
            observed="is no URL of a server",
            expected="http://host:port or https://host:port",
            next_step="Correct the URL (a host name with other than ASCII letters in its xn-- form).",
        )
    if parts.username is not None or parts.password is not None:
        raise RunbookError(
            where=f"{parts.scheme}://{parts.hostname}",
            observed="a user or password in the URL, which would be written into every file of the run",
            expected="a URL without one",
            next_step="Name an environment variable that holds the API key (--api-key-env, api_key_env in the plan).",
        )
    return parts


def _route(parts: SplitResult, url: str, proxy: str) -> Route:
    via = None
    if proxy:
        hop = split_url(proxy)
        if hop.scheme != "http" or hop.path not in ("", "/"):
            raise RunbookError(
                where=f"proxy for {url}",
                observed=proxy,
                expected="http://host:port",
                next_step="Correct access.proxy; the connection to the proxy itself is without TLS.",
            )
        via = (hop.hostname or "", hop.port or 80)
    tls = parts.scheme == "https"
    return Route(host=parts.hostname or "", port=parts.port or (443 if tls else 80), tls=tls, via=via)


def _key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if key and key.isascii() and key.isprintable():
        return key
    raise RunbookError(
        where=f"environment variable {variable}",
        observed="holds characters that a header cannot carry" if key else "is not set, or empty",
        expected="the API key",
        next_step=f"export {variable}=... in the shell that runs this, or leave out --api-key-env.",
    )


def _trust(ca_file: str) -> ssl.SSLContext:
    if not ca_file:
        return _context("", 0)
    try:
        return _context(ca_file, Path(ca_file).stat().st_mtime_ns)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise RunbookError(
            where=ca_file,
            observed=f"cannot be used as CA file ({_reason(error)})",
            expected="certificates in PEM form (-----BEGIN CERTIFICATE-----)",
            next_step="Name the file with the certificate of the CA that signed the server's (--ca-file).",
        ) from error


@lru_cache(maxsize=8)
def _context(ca_file: str, _changed_ns: int) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _resolve(host: str, port: int, timeout_s: float) -> list[Address]:
    """Ask the resolver in a thread of its own: it knows no deadline, and an interrupt has to get through meanwhile."""
    try:
        family = socket.AF_INET if ipaddress.ip_address(host.partition("%")[0]).version == 4 else socket.AF_INET6
        return [(family, info[4]) for info in socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)]
    except ValueError:
        pass
    found: list[Address] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            found.extend((info[0], info[4]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # the second for a label that is too long for a name
            failed.append(error)

    asking = threading.Thread(target=ask, name=f"resolve {host}", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if found:
        return found
    why = _reason(failed[0]) if failed else f"no answer from the resolver in {timeout_s:g} s"
    raise OpenError(f"the name {host} has no address ({why})")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _close_all(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()
