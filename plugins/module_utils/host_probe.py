"""Questions the host_snapshot module asks a host, each answered as plain JSON values.

Runs on the node with whatever Python the distribution ships (3.9 or newer) and nothing else. Every function takes a
:class:`Probe`, the only thing that touches the host, so a tree of files and canned command answers can stand in for it:
files are read below ``root``, and where root is not ``/`` commands are answered from ``<root>/.commands/`` by the rule
of command_run.py and never by the machine the tree lies on. The room on a file system is answered there too, as the
command ``df <path>`` in the layout of ``df --block-size=1 --output=avail,iavail``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

from ansible.module_utils.command_run import TooMuchOutputError, run, tree_answers
from ansible.module_utils.redaction import environment

SCHEMA_VERSION = 1


class Probe:
    """Reads files below ``root`` and runs commands with a time limit; keeps what could not be answered.

    Attributes:
        errors: One ``{"probe", "message"}`` per question that got no usable answer.
        tree: Whether a tree of files stands in for the host.
    """

    def __init__(self, root="/", timeout_s=10, run=None, budget_s=120):
        self.root = Path(root)
        self.tree = self.root != Path("/")
        self.timeout_s = timeout_s
        self.budget_s = budget_s
        self.errors = []
        self._run = run or (tree_answers(self.root) if self.tree else _run)
        self._deadline = time.monotonic() + budget_s
        self._kept = {}

    def error(self, probe, message):
        """Keep one question that got no usable answer; the same one only once."""
        entry = {"probe": str(probe), "message": str(message)[:300]}
        if entry not in self.errors:
            self.errors.append(entry)

    def once(self, key, question):
        """Return what ``question()`` answers, asked at most once per snapshot."""
        if key not in self._kept:
            self._kept[key] = question()
        return self._kept[key]

    def path(self, absolute):
        """Return where an absolute path of the host lies below the root."""
        return self.root / str(absolute).lstrip("/")

    def shown(self, path):
        """Return a path below the root as the host itself names it."""
        return f"/{path.relative_to(self.root)}"

    def text(self, absolute, limit=1 << 20):
        """Return a file's text, its first ``limit`` bytes; None when it does not exist or cannot be read."""
        try:
            with self.path(absolute).open("rb") as stream:
                return stream.read(limit).decode("utf-8", "replace")
        except OSError as error:
            # A process that has ended meanwhile, and a sysfs attribute its device does not have, are no errors.
            if error.errno not in _ABSENT:
                self.error(absolute, error.strerror)
            return None

    def line(self, absolute):
        """Return a one-line file's text without the space around it, or None when it is missing or empty."""
        return (self.text(absolute) or "").strip() or None

    def number(self, absolute):
        """Return the whole number a one-line file holds, or None."""
        return whole(self.line(absolute))

    def glob(self, pattern):
        """Return the paths below the root that match, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def names(self, folder):
        """Return the names in a folder, sorted; empty when there is no such folder."""
        try:
            return sorted(os.listdir(self.path(folder)))  # noqa: PTH208 - only the names are wanted
        except OSError as error:
            if error.errno not in _ABSENT:
                self.error(folder, error.strerror)
            return []

    def command(self, *argv, timeout_s=None, needed=False):
        """Return ``(rc, stdout, stderr)``, or None when the program is missing or did not answer in time.

        A missing program is an answer as a rule (no dkms, no dkms modules) and an error only where it is needed.
        """
        left = self._deadline - time.monotonic()
        limit = min(timeout_s or self.timeout_s, left)
        if limit <= 0:
            self.error(argv[0], f"not asked: the {self.budget_s} s for the whole snapshot are used up")
            return None
        try:
            done = self._run(argv, timeout=limit)
        except (FileNotFoundError, NotADirectoryError):
            if needed:
                self.error(argv[0], "not installed")
            return None
        except subprocess.TimeoutExpired:
            self.error(argv[0], f"no answer within {round(limit, 1):g} s")
            return None
        except TooMuchOutputError:
            self.error(argv[0], "stopped: it printed far more than an answer")
            return None
        except (OSError, ValueError) as error:
            self.error(argv[0], error)
            return None
        return done.returncode, done.stdout, done.stderr

    def refused(self, answer, *argv):
        """Keep what a command that failed said."""
        self.error(" ".join(argv[:2]), f"exit {answer[0]}: {(answer[2] or answer[1]).strip()[:200]}")

    def json_command(self, *argv, absent=None, needed=False, timeout_s=None):
        """Return the JSON a command prints, or None when it failed or printed something else.

        Args:
            argv: The command.
            absent: What a failure has to say to mean that the thing asked about is not there, which is no error.
            needed: Whether a missing program is an error.
            timeout_s: Seconds it may take, where that is not the limit of any command.
        """
        answer = self.command(*argv, needed=needed, timeout_s=timeout_s)
        if answer is None:
            return None
        if answer[0] != 0:
            if absent is None or absent not in (answer[1] + answer[2]).lower():
                self.refused(answer, *argv)
            return None
        try:
            return json.loads(answer[1])
        except ValueError:
            self.error(" ".join(argv[:2]), "did not print JSON")
            return None

    def room(self, absolute):
        """Return ``(free bytes, free inodes)`` where a path lies; either is None where it could not be told.

        Inodes are None too where the file system has no fixed table (btrfs, some network ones report 0 of 0).
        """
        if self.tree:
            answer = self.command("df", str(absolute))
            numbers = re.findall(r"^\s*(\d+)\s+(\d+|-)\s*$", answer[1], re.MULTILINE) if answer else []
            return (int(numbers[-1][0]), whole(numbers[-1][1])) if numbers else (None, None)
        kept = self.apart(f"room below {absolute}", lambda: _room(absolute))
        return tuple(kept) if kept else (None, None)

    def apart(self, name, question):
        """Return what ``question()`` answers as JSON, asked in a process of its own with this probe's time limit.

        For places that can hang a reader for good, as a network file system does whose server is gone.
        """
        limit = min(self.timeout_s, self._deadline - time.monotonic())
        if limit <= 0:
            self.error(name, f"not asked: the {self.budget_s} s for the whole snapshot are used up")
            return None
        try:
            return in_a_child(question, limit)
        except TimeoutError:
            self.error(name, f"no answer within {round(limit, 1):g} s")
        except (OSError, ValueError) as error:
            self.error(name, error)
        return None


_ABSENT = (2, 3, 6, 19, 20, 22, 95)  # ENOENT ESRCH ENXIO ENODEV ENOTDIR EINVAL EOPNOTSUPP


def _run(argv, timeout):
    return run(argv, timeout)


def _room(absolute):
    place = Path(absolute)
    while not place.exists() and place != place.parent:
        place = place.parent  # what is not there yet will lie there
    room = os.statvfs(place)
    return [room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None]


def in_a_child(question, timeout):
    """Return the JSON value ``question()`` gives in a forked child.

    Raises:
        TimeoutError: It did not answer in time; the child has been killed.
        ValueError: It broke, or answered something else than JSON; the message says what.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()  # what it starts is killed with it
            os.close(reader)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(timeout) + 2)  # ends it should the parent be gone
            try:
                answer = {"value": question()}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writer, "w") as stream:
                json.dump(answer, stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    deadline = time.monotonic() + timeout
    parts = []
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not _readable(reader, left):
                raise TimeoutError
            piece = os.read(reader, 1 << 16)
            if not piece:
                break
            parts.append(piece)
    finally:
        os.close(reader)
        _kill(child)
    answer = json.loads(b"".join(parts) or b'{"error": "ended without an answer"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def _readable(descriptor, timeout):
    return bool(select.select([descriptor], [], [], timeout)[0])


def _kill(child):
    """End a child and what it started, and collect it; one the kernel cannot end is left to it after a second."""
    for kill in (os.killpg, os.kill):  # it may not have a group of its own yet
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + 1
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.005)


def whole(text):
    """Return a text's whole number, or None for anything else: ``[N/A]``, garbage, nothing."""
    text = (text or "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def release(probe):
    """Return the running kernel's release; None in a tree that does not say it."""
    return probe.line("/proc/sys/kernel/osrelease") or (None if probe.tree else os.uname().release)


def hostname(probe):
    """Return the host's name; a tree that does not say it is named after its folder."""
    if not probe.tree:
        return socket.gethostname()
    return probe.line("/proc/sys/kernel/hostname") or probe.line("/etc/hostname") or probe.root.resolve().name


def system(probe):
    """Return the distribution, the kernel and the architecture."""
    told = assignments(probe.text("/etc/os-release") or probe.text("/usr/lib/os-release"))
    return {
        "id": told.get("ID", "unknown"),
        "version_id": told.get("VERSION_ID", "unknown"),
        "pretty": told.get("PRETTY_NAME", "unknown"),
        "kernel": release(probe),
        "arch": (probe.line("/proc/sys/kernel/arch") if probe.tree else os.uname().machine),
    }


def assignments(text):
    """Return the ``NAME=value`` lines of a file as a mapping, quotes taken off."""
    pairs = (line.strip().partition("=") for line in (text or "").splitlines() if not line.lstrip().startswith("#"))
    return {name: value.strip("\"'") for name, separator, value in pairs if separator}


def boot(probe):
    """Return what changes with a boot: the kernel's boot id and the start of process 1, in clock ticks."""
    stat = probe.text("/proc/1/stat") or ""
    fields = stat.rpartition(")")[2].split()
    return {
        "boot_id": probe.line("/proc/sys/kernel/random/boot_id"),
        "pid1_started_ticks": whole(fields[19]) if len(fields) > 19 else None,
    }


def files(probe, wanted):
    """Return ``{path: {"sha256", "mode"} | None}``; None for a file that is not there.

    Of nccl.conf and ucx.conf ``settings`` holds what they set, as far as it may be shown.
    """
    found = {}
    for name in wanted:
        path = probe.path(name)
        try:
            content = path.read_bytes()
            found[name] = {"sha256": hashlib.sha256(content).hexdigest(), "mode": f"{path.stat().st_mode & 0o7777:04o}"}
            if str(name).rpartition("/")[2] in _SETTINGS:
                found[name]["settings"] = settings(content.decode("utf-8", "replace"))
        except OSError as error:
            if error.errno not in _ABSENT:
                probe.error(name, error.strerror)
            found[name] = None
    return found


_SETTINGS = ("nccl.conf", "ucx.conf")
_SETTING = re.compile(r"\s*((?:NCCL|UCX)_[A-Z0-9_]+)\s*=(.*)")


def settings(text):
    """Return the NCCL and UCX settings of a file, the last of each name as both libraries take it; no secrets."""
    pairs = [match.groups() for match in map(_SETTING.match, text[: 64 << 10].splitlines()) if match]
    return environment(f"{name}={value.strip()[:1024]}" for name, value in pairs)


def kernel_modules(probe, wanted):
    """Return ``{module: {"loaded", "version", "refcnt"}}`` as /sys/module has them."""
    found = {}
    for name in wanted:
        base = f"/sys/module/{name.replace('-', '_')}"
        found[name] = {
            "loaded": probe.path(base).is_dir(),
            "version": probe.line(f"{base}/version"),
            "refcnt": probe.number(f"{base}/refcnt"),
        }
    return found
