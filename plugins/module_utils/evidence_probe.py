"""Asks a node for evidence: commands, files, processes, pages; each with a limit on time and on size.

Runs on the node with whatever Python the distribution ships (3.9 or newer) and nothing else. What is too long is cut in
the middle: its head, its end and the lines around the first failure stay. What takes too long is ended with everything
it started, and what it had printed until then is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

GRACE_S = 2  # seconds between asking a command to end and killing it
_PIECE = 1 << 16
_BEFORE = 1 << 14  # bytes kept before the first failure, less where little may be kept
_STDERR = 1 << 13
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

running = set()  # process groups that have to end with this process


class Keeper:
    """Takes a stream of bytes and keeps at most ``limit``: the head, the end, and the lines around the first failure.

    Attributes:
        limit: Bytes that may be kept.
        total: Bytes that came.
    """

    def __init__(self, limit, mark=None):
        self.limit = max(limit, 1024)
        self.total = 0
        self._mark = re.compile(mark.encode()) if mark else None
        self._line = b""  # the last line, while its end has not come
        self._head = bytearray()
        self._tail = bytearray()
        self._window = None  # (offset of its first byte, bytes): from some lines before the first failure on

    def feed(self, piece):
        """Take the next bytes."""
        room = self.limit // 4 - len(self._head)
        self._head += piece[: max(room, 0)]
        self._tail += piece[max(room, 0) :]
        failure = self._failure(piece)
        self.total += len(piece)
        begins = self.total - len(self._tail)
        if failure is not None and failure >= len(self._head):
            first = max(failure - min(_BEFORE, self.limit // 16), begins)
            self._window = (first, bytearray(self._tail[first - begins :]))
        elif self._window is not None:
            self._window[1].extend(piece)
        if self._window is not None:
            del self._window[1][self.limit // 4 :]
        del self._tail[: max(len(self._tail) - self.limit, 0)]

    def _failure(self, piece):
        """Return the offset of the first line that tells of a failure, once, when its end has come."""
        if self._mark is None:
            return None
        block, start = self._line + piece, self.total - len(self._line)
        end = block.rfind(b"\n") + 1
        match = self._mark.search(block, 0, end)
        self._line = block[end:][-_PIECE:]
        if match is None:
            return None
        self._mark = None
        return start + match.start()

    def pieces(self):
        """Return ``(offset, bytes)`` of what is kept, in order, without overlap."""
        if self.total <= self.limit:
            return [(0, bytes(self._head + self._tail))]
        window = [(self._window[0], bytes(self._window[1]))] if self._window else []
        room = self.limit - len(self._head) - sum(len(data) for _, data in window)
        tail = bytes(self._tail[-room:])
        whole = [(0, bytes(self._head))]
        for offset, data in [*window, (self.total - len(tail), tail)]:
            last, kept = whole[-1]
            new = data[max(last + len(kept) - offset, 0) :]
            if offset <= last + len(kept):
                whole[-1] = (last, kept + new)
            else:
                whole.append((offset, new))
        return whole

    def text(self):
        """Return what is kept as text, with a line for every stretch that is not."""
        parts, end = [], 0
        for offset, data in self.pieces():
            if offset > end:
                parts.append(f"\n[{offset - end} bytes left out here]\n".encode())
            parts.append(data)
            end = offset + len(data)
        return b"".join(parts).decode("utf-8", errors="replace")

    def notes(self):
        """Return the note that says that something was left out, if anything was."""
        if self.total <= self.limit:
            return []
        kept = sum(len(data) for _, data in self.pieces())
        return [f"cut: {kept} of {self.total} bytes kept: head, end, and the lines around the first failure"]


def environment():
    """Return the environment commands run in: the C locale, no pager, no colours, sbin on the path."""
    path = os.environ.get("PATH", "")
    quiet = {"LC_ALL": "C.UTF-8", "LANGUAGE": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "cat", "PAGER": "cat"}
    return dict(os.environ, PATH=f"{path}:{_PATH}" if path else _PATH, TERM="dumb", **quiet)


def available(need):
    """Return whether a program is on the path, or a file exists."""
    if need.startswith("/"):
        return Path(need).exists()
    return shutil.which(need, path=environment()["PATH"]) is not None


def run_command(argv, timeout_s, keeper, with_stderr=False):
    """Run a command in a session of its own and feed what it prints; end all of it at its limit.

    coreutils' ``timeout`` stands around it, so that the limit holds even when this process is killed first.

    Returns:
        ``(rc, stderr)``; rc is None when the limit ended it.

    Raises:
        OSError: it could not be started.
    """
    env = environment()
    program = shutil.which(argv[0], path=env["PATH"])
    if program is None:
        raise FileNotFoundError(2, "no such program", argv[0])
    guard = shutil.which("timeout", path=env["PATH"])
    outer = [guard, "-s", "KILL", str(math.ceil(timeout_s) + 2 * GRACE_S)] if guard else []
    process = subprocess.Popen(
        [*outer, program, *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if with_stderr else subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    running.add(process.pid)
    try:
        stderr, in_time = _drain(process, time.monotonic() + timeout_s, keeper)
    finally:
        end_group(process)
        running.discard(process.pid)
    return (process.returncode if in_time else None), stderr.decode("utf-8", errors="replace")


def _drain(process, deadline, keeper):
    """Read both streams until they end or the time is up; return standard error and whether all ended in time."""
    stderr = bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                return stderr, False
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    keeper.feed(piece)
                elif len(stderr) < _STDERR:
                    stderr += piece
    try:
        process.wait(max(deadline - time.monotonic(), 0.05))
    except subprocess.TimeoutExpired:
        return stderr, False
    return stderr, True


def end_group(process):
    """End whatever of a command's session is left, gently first; one that the kernel cannot end is left behind."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    # One that is stuck in the kernel, as nvidia-smi can be, is left: waiting longer would only hang this process too.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def end_all(*_):
    """Kill every command that runs, then this process: what a signal to this process means for them."""
    for group in list(running):
        _signal(group, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def _signal(group, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, which is what was wanted
        os.killpg(group, number)


def read_file(pattern, keeper):
    """Feed the files a path or glob names, each below a line with its name where there are several.

    Raises:
        OSError: there is none, or one cannot be read.
    """
    paths = sorted(Path("/").glob(pattern.lstrip("/")))
    if not paths:
        raise FileNotFoundError(2, f"no such file: {pattern}", pattern)
    for path in paths:
        if len(paths) > 1:
            keeper.feed(f"==> {path} <==\n".encode())
        with path.open("rb") as file:
            _copy(file, keeper)


def _copy(stream, keeper):
    piece = stream.read(_PIECE)
    while piece:
        keeper.feed(piece)
        piece = stream.read(_PIECE)


def read_page(url, timeout_s, keeper):
    """Feed what a page on this host says; no proxy is asked.

    Raises:
        OSError: there was no answer.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout_s) as answer:
        _copy(answer, keeper)


def read_processes(pattern, shown, hidden, keeper, proc="/proc"):
    """Feed JSON: every process whose command line matches, with its arguments and those variables that may be shown.

    Raises:
        OSError: no process matches.
    """
    wanted, allowed, secret = re.compile(pattern), re.compile(shown), re.compile(hidden, re.IGNORECASE)
    folders = sorted((path for path in Path(proc).iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    found = [row for row in (_process(folder, wanted, allowed, secret) for folder in folders) if row is not None]
    if not found:
        raise FileNotFoundError(2, f"no process whose command line matches {pattern}", proc)
    keeper.feed(json.dumps(found, indent=1).encode())


def _process(folder, wanted, allowed, secret):
    """Return one process, or None when it is another one, a thread of the kernel, or gone."""
    try:
        argv = _entries(folder / "cmdline")
        if not wanted.search(" ".join(argv)) or int(folder.name) == os.getpid():
            return None
        stat = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        cgroup = _entries(folder / "cgroup", "\n")
    except (OSError, ValueError, IndexError):
        return None
    try:
        variables = dict(entry.split("=", 1) for entry in _entries(folder / "environ") if "=" in entry)
        unreadable = None
    except OSError as error:
        variables, unreadable = {}, error.strerror
    reportable = {name for name in variables if allowed.fullmatch(name) and not secret.search(name)}
    return {
        "pid": int(folder.name),
        "ppid": int(stat[1]),
        "started_at": _started(folder.parent, int(stat[19])),
        "argv": argv,
        "cgroup": cgroup,
        "environment": {name: variables[name] for name in sorted(reportable)},
        "environment_not_shown": sorted(set(variables) - reportable),
        "environment_error": unreadable,
    }


def _started(proc, ticks):
    """Return when a process began, from its ticks since boot (proc(5): stat, field 22), or None."""
    try:
        boot = re.search(r"^btime (\d+)", (proc / "stat").read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    if boot is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(boot.group(1)) + ticks // os.sysconf("SC_CLK_TCK")))


def _entries(path, separator="\x00"):
    with path.open("rb") as file:
        text = file.read(1 << 20).decode("utf-8", errors="replace")
    return [entry for entry in text.split(separator) if entry]
