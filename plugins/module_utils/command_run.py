"""Runs one command on the node with a limit on time and output, or answers it from a tree of files.

Nothing outlives its limit: a command gets a session of its own, which is killed whole, and where coreutils' ``timeout``
exists it stands around the command too, so that the limit holds even when this process is killed first.

How a tree answers
------------------
A fake host is a directory tree. Files are read below it, and a command is answered by ``<tree>/.commands/<name>``,
``<name>`` being :func:`answer_name` of its words: the words joined by one space, every ``/`` written as ``%``, every
run of other characters than letters, digits and ``space . _ = , : + @ % -`` as one ``_``, cut at 160 characters. So
``modinfo -k 6.8.0-90-generic nvidia`` is answered by a file of that name, ``docker info --format {{json .}}`` by
``docker info --format _json .``, ``/usr/bin/x`` by ``%usr%bin%x``.

- The file holds standard output. ``<name>.rc`` holds the exit status (0 without it), ``<name>.stderr`` standard error.
  Each of the three is enough; the others then are empty, or 0.
- ``<name>.rc`` with the word ``timeout`` is a command that hangs, with ``denied`` one that may not be run.
- Trailing words may be left out: the file with the longest run of leading words answers, so ``systemctl show`` answers
  whatever units are asked for, and ``nvidia-smi`` every call of it.
- Without a file the program is not installed. Nothing is ever asked of the machine the tree lies on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from pathlib import Path

OUTPUT_LIMIT = 8 << 20
"""Bytes of one stream after which a command is stopped; the longest real answer, nvidia-smi -q -x, is under 1 MiB."""

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ODD = re.compile(r"[^A-Za-z0-9 ._=,:+@%-]+")
_GRACE_S = 1  # seconds a killed command gets to go, and the outer limit stands behind the inner one


class TooMuchOutputError(Exception):
    """A command printed more than OUTPUT_LIMIT bytes."""


def answer_name(words):
    """Return the name of the file that answers a command in a tree (see the module's rule)."""
    return _ODD.sub("_", " ".join(words).replace("/", "%"))[:160].rstrip()


def tree_answers(root):
    """Return a stand-in for :func:`run` that answers from ``<root>/.commands``."""
    folder = Path(root) / ".commands"

    def answer(argv, timeout, **_):
        for count in range(len(argv), 0, -1):
            name = answer_name(argv[:count])
            parts = {end: folder / f"{name}{end}" for end in ("", ".rc", ".stderr")}
            if any(path.is_file() for path in parts.values()):
                text = {end: _text(path) for end, path in parts.items()}
                code = text[".rc"].strip() or "0"
                if code == "timeout":
                    raise subprocess.TimeoutExpired(argv, timeout)
                if code == "denied":
                    raise PermissionError(13, "Permission denied", argv[0])
                return subprocess.CompletedProcess(argv, int(code), text[""], text[".stderr"])
        raise FileNotFoundError(2, "No such file or directory", argv[0])

    return answer


def _text(path):
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def environment():
    """Return the environment commands run in: the C locale, no pager, no colours, and sbin on the path."""
    path = os.environ.get("PATH", "")
    return dict(
        os.environ,
        PATH=f"{path}:{_SYSTEM_PATH}" if path else _SYSTEM_PATH,
        LC_ALL="C",
        LANGUAGE="C",
        SYSTEMD_COLORS="0",
        SYSTEMD_PAGER="cat",
        PAGER="cat",
        TERM="dumb",
    )


def run(argv, timeout, limit=OUTPUT_LIMIT):
    """Run a command and return its CompletedProcess, output as text.

    Raises:
        FileNotFoundError: There is no such program.
        subprocess.TimeoutExpired: It did not end in time; it has been killed with everything it started.
        TooMuchOutputError: It printed more than the limit and has been killed likewise.
        OSError: It could not be started.
    """
    env = environment()
    program = shutil.which(argv[0], path=env["PATH"])
    if program is None:
        raise FileNotFoundError(2, "No such file or directory", argv[0])
    words = [program, *argv[1:]]
    guard = shutil.which("timeout", path=env["PATH"])
    if guard:
        words = [guard, "-s", "KILL", str(math.ceil(timeout) + _GRACE_S), *words]  # as BusyBox spells it too
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        output = _read(process, argv, timeout, limit)
    finally:
        _end(process)
    return subprocess.CompletedProcess(argv, process.returncode, *(part.decode(errors="replace") for part in output))


def _read(process, argv, timeout, limit):
    """Return both streams in bytes once both have ended and so has the process."""
    deadline = time.monotonic() + timeout
    kept = {process.stdout: [], process.stderr: []}
    sizes = dict.fromkeys(kept, 0)
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                raise subprocess.TimeoutExpired(argv, timeout)
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                kept[key.fileobj].append(piece)
                sizes[key.fileobj] += len(piece)
                if sizes[key.fileobj] > limit:
                    raise TooMuchOutputError(argv[0])
                if not piece:
                    selector.unregister(key.fileobj)
    process.wait(max(deadline - time.monotonic(), 0.05))
    return [b"".join(parts) for parts in kept.values()]


def _end(process):
    """Kill whatever of the command's session is left. A process the kernel cannot end is left behind after a second."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, which is what was wanted
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        stream.close()
    # One that is stuck in the kernel, as nvidia-smi can be, is left: waiting longer would only hang this process too.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
