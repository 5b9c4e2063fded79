"""Docker's API over its socket: answers, streams of progress, and what they say. Runs on the node.

The API and not the command line, because only it tells bytes while a pull runs, and a pull that hangs is told from one
that is slow. Paths carry no version: the daemon then answers with its own, and none is too old or too new for it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import urllib.parse
from http.client import HTTPConnection, HTTPException
from pathlib import Path

SOCKET = "/var/run/docker.sock"
OWN_REPOSITORY = "kimi-runbook/engine"
"""Tags of this name keep images from being pruned; nothing is run by it."""
_ANSWER_LIMIT = 64 << 20
_LINE_LIMIT = 1 << 20


class DockerError(Exception):
    """Docker's own words, with the HTTP status where there was one."""

    def __init__(self, text, status=None):
        super().__init__(text)
        self.status = status


class _Connection(HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Docker:
    """One daemon. Every call has a limit on the silence it bears."""

    def __init__(self, path=SOCKET, timeout_s=60):
        self.path = path
        self.timeout_s = timeout_s

    def call(self, method, path, query=None, timeout_s=None):
        """Return the parsed answer (None where it is empty); DockerError where Docker says no or nothing."""
        connection, answer = self._open(method, path, query, {}, timeout_s or self.timeout_s)
        with contextlib.closing(connection):
            try:
                content = answer.read(_ANSWER_LIMIT)
            except (OSError, HTTPException) as error:
                raise DockerError(f"{method} {path}: {error!r}") from error
        return json.loads(content) if content.strip() else None

    def stream(self, method, path, query, headers, silence_s):
        """Yield the objects of a streamed answer as they come; DockerError also for an error inside it."""
        connection, answer = self._open(method, path, query, headers, silence_s)
        with contextlib.closing(connection):
            while True:
                try:
                    line = answer.readline(_LINE_LIMIT)
                except socket.timeout as error:
                    raise DockerError(f"no sign of life for {silence_s} s") from error
                except (OSError, HTTPException) as error:
                    raise DockerError(f"the answer broke off: {error!r}") from error
                if not line:
                    return
                if not line.strip():
                    continue
                event = json.loads(line)
                if event.get("error"):
                    raise DockerError(str(event["error"]))
                yield event

    def _open(self, method, path, query, headers, timeout_s):
        address = urllib.parse.quote(path, safe="/:@")
        if query:
            address += "?" + urllib.parse.urlencode(query)
        connection = _Connection(self.path, timeout_s)
        try:
            connection.request(method, address, headers=headers)
            answer = connection.getresponse()
            if answer.status < 400:
                return connection, answer
            text = answer.read(_LINE_LIMIT).decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            connection.close()
            raise DockerError(f"{self.path} does not answer {method} {path}: {error}") from error
        connection.close()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        raise DockerError(text.strip() or f"HTTP {answer.status}", answer.status)


def store_path(info, root_dir):
    """Return where unpacked images lie: below containerd's root where its image store is in use (``docker info``)."""
    status = info.get("DriverStatus")
    rows = [row for row in status if isinstance(row, list)] if isinstance(status, list) else []
    containerd = any(row[:1] == ["driver-type"] and "containerd" in str(row[1:]) for row in rows)
    return "/var/lib/containerd" if containerd else root_dir


def names_of(images, digest):
    """Return the repositories under which a daemon's images hold a digest; RepoDigests alone count, no image id does.

    Args:
        images: As ``GET /images/json`` answers.
        digest: ``sha256:...``.
    """
    entries = [entry for image in images for entry in image.get("RepoDigests") or []]
    rows = [entry.partition("@") for entry in entries]
    return sorted({name for name, _, told in rows if told == digest and name not in ("<none>", OWN_REPOSITORY)})


def familiar(repository):
    """Return a repository's name as Docker itself writes it: without Docker Hub's host and its ``library``."""
    for prefix in ("docker.io/", "index.docker.io/"):
        if repository.startswith(prefix):
            repository = repository[len(prefix) :]
    return repository[len("library/") :] if repository.startswith("library/") else repository


def login_header(repository, config=None):
    """Return the header with the login that root's Docker configuration has for a registry; nothing is ever stored.

    Logins in credential helpers are not read.
    """
    folder = os.environ.get("DOCKER_CONFIG") or "/root/.docker"
    path = Path(config or Path(folder) / "config.json")
    first, slash, _ = repository.partition("/")
    hub = not (slash and ("." in first or ":" in first or first == "localhost"))
    try:
        auths = json.loads(path.read_text(encoding="utf-8"))["auths"]
        user, colon, word = (
            base64.b64decode(auths["https://index.docker.io/v1/" if hub else first]["auth"]).decode().partition(":")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not colon:
        return {}
    login = json.dumps({"username": user, "password": word, "serveraddress": first})
    return {"X-Registry-Auth": base64.urlsafe_b64encode(login.encode()).decode()}


class Progress:
    """Adds up a pull's events: bytes fetched, layers that came and that were there."""

    def __init__(self):
        self._layers = {}
        self.layers_held = 0

    def take(self, event):
        """Count one event of ``POST /images/create``."""
        layer, status = event.get("id"), event.get("status")
        if status == "Already exists":
            self.layers_held += 1
        detail = event.get("progressDetail") or {}
        if status == "Downloading" and layer and isinstance(detail.get("current"), int):
            self._layers[layer] = max(self._layers.get(layer, 0), detail["current"])

    @property
    def bytes(self):
        """Bytes fetched as far as Docker said."""
        return sum(self._layers.values())
