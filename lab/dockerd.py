"""A Docker engine of the lab's own, where none answers: started, found again, stopped, and no other one touched."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.commands import await_condition
from lab.docker import Docker
from lab.files import write_atomically
from lab.firewall import put_back, remember

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 90  # containers with systemd get their time to stop


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """Where the lab's own engine keeps its files.

    Attributes:
        directory: Holds data root, exec root, socket, pid file, configuration and log.
    """

    directory: Path

    @property
    def socket(self) -> Path:
        """Path of its socket."""
        return self.directory / "docker.sock"

    @property
    def pid_file(self) -> Path:
        """Path of its pid file."""
        return self.directory / "dockerd.pid"

    @property
    def data(self) -> Path:
        """Its data root; exists when this engine was ever started."""
        return self.directory / "data"

    @property
    def before(self) -> Path:
        """File with the machine's network settings from before its first start."""
        return self.directory / "network-before.json"

    @property
    def log(self) -> Path:
        """Path of its log."""
        return self.directory / "dockerd.log"

    @property
    def docker(self) -> Docker:
        """The command line for this engine."""
        return Docker(f"unix://{self.socket}")

    def argv(self) -> list[str]:
        """Return the command that starts it.

        Its own (empty) configuration file keeps /etc/docker/daemon.json out; no default bridge, so that no subnet is
        taken but the lab's.
        """
        return [
            "dockerd",
            "--config-file",
            str(self.directory / "daemon.json"),
            "--data-root",
            str(self.data),
            "--exec-root",
            str(self.directory / "exec"),
            "--host",
            f"unix://{self.socket}",
            "--pidfile",
            str(self.pid_file),
            "--bridge",
            "none",
        ]

    def pid(self) -> int | None:
        """Return the process that the pid file names, if it really is this engine."""
        try:
            pid = int(self.pid_file.read_text().strip())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if is_engine([part.decode(errors="replace") for part in command], self.pid_file) else None


def is_engine(command: Sequence[str], pid_file: Path) -> bool:
    """Return whether a command line is a dockerd that was started with this pid file."""
    return bool(command) and Path(command[0]).name == "dockerd" and str(pid_file) in command


def find(own: OwnEngine) -> Docker | None:
    """Return the engine to use: the lab's own when it runs (the lab lives in it), else the one that answers."""
    if own.pid() is not None and own.docker.answers():
        return own.docker
    standard = Docker()
    return standard if standard.answers() else None


def start(own: OwnEngine) -> Docker:
    """Start the lab's own engine and return it once it answers.

    Raises:
        RunbookError: When it ends or does not answer within 60 s; names its log.
    """
    own.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(own.directory / "daemon.json", "{}\n")
    process: subprocess.Popen[bytes] | None = None
    if own.pid() is None:  # else one was started a moment ago and only has to answer
        remember(own.before)
        own.pid_file.unlink(missing_ok=True)  # dockerd refuses a stale one when another process has the number now
        with own.log.open("ab") as log:
            process = subprocess.Popen(
                own.argv(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )

    def question() -> str | None:
        if own.docker.answers():
            return None
        status = None if process is None else process.poll()
        if status is not None:
            raise RunbookError(
                where="Docker engine",
                observed=f"dockerd ended with status {status}: {_last_line(own.log)}",
                expected="an engine that stays up",
                next_step=f"Read {own.log}.",
            )
        return "no answer"

    await_condition(
        question,
        where="Docker engine",
        expected="an answer to `docker info`",
        timeout_s=START_TIMEOUT_S,
        next_step=f"Read {own.log}.",
    )
    return own.docker


def stop(own: OwnEngine) -> bool:
    """Stop the lab's own engine, and only that one, and undo its network settings; return whether one was running."""
    pid = own.pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    await_condition(
        lambda: None if own.pid() is None else f"process {pid} still runs",
        where="Docker engine",
        expected="an end after SIGTERM",
        timeout_s=STOP_TIMEOUT_S,
        next_step=f"Read {own.log}.",
    )
    put_back(own.before)
    return True


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "no output"
