"""The package repository over HTTP on the loopback address, where the machines' user network finds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lab.commands import ask, await_condition
from lab.files import write_atomically
from lab.kernel.settings import REPOSITORY_PORT

START_TIMEOUT_S = 15.0


def argv(folder: Path) -> list[str]:
    """Return the command that serves a folder."""
    options = ["--bind", "127.0.0.1", "--directory", str(folder)]
    return [sys.executable, "-m", "http.server", *options, str(REPOSITORY_PORT)]


def pid(pid_file: Path, folder: Path) -> int | None:
    """Return the process number where our server runs, else None."""
    if not pid_file.exists():
        return None
    number = int(pid_file.read_text())
    try:
        command = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return number if str(folder).encode() in command else None


def start(pid_file: Path, folder: Path) -> None:
    """Serve a folder in the background, unless it is served.

    Raises:
        RunbookError: It does not come up, because the port is taken for instance.
    """
    if pid(pid_file, folder) is not None:
        return
    log = pid_file.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv(folder), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    write_atomically(pid_file, f"{process.pid}\n")

    def question() -> str | None:
        if process.poll() is not None:
            return f"it has ended: {' '.join(log.read_text(errors='replace').split()[-8:])}"
        probe = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{REPOSITORY_PORT}/', timeout=5)"
        return None if ask([sys.executable, "-c", probe], timeout_s=10).status == 0 else "no answer"

    await_condition(
        question,
        where="package repository",
        expected=f"an answer on 127.0.0.1:{REPOSITORY_PORT}",
        timeout_s=START_TIMEOUT_S,
        next_step=f"Free the port, or read {log}.",
    )


def stop(pid_file: Path, folder: Path) -> bool:
    """Stop our server; return whether it ran."""
    number = pid(pid_file, folder)
    if number is not None:
        os.kill(number, signal.SIGTERM)
        await_condition(
            lambda: None if pid(pid_file, folder) is None else f"process {number} runs",
            where="package repository",
            expected="the server to end at SIGTERM",
            timeout_s=START_TIMEOUT_S,
            next_step=f"Look at process {number}.",
        )
    pid_file.unlink(missing_ok=True)
    return number is not None
