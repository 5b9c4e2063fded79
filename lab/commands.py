"""Running programs: output kept in a log, failures told with their last lines, conditions awaited with a deadline."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError

POLL_INTERVAL_S = 0.3
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a program is run for, as its failure is told: where the problem is, and what leads on."""

    where: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program answered: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


def ask(argv: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_s: float = 60) -> Answer:
    """Run a program for its answer, whatever its exit status; a missing program or a timeout is status 127 or 124."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            env=_environment(environment),
        )
    except FileNotFoundError:
        return Answer(127, "", f"{argv[0]}: not found")
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{argv[0]}: no answer within {timeout_s:.0f} s")
    return Answer(done.returncode, done.stdout, done.stderr)


def must(
    argv: Sequence[str],
    purpose: Purpose,
    *,
    environment: Mapping[str, str] | None = None,
    data: bytes | None = None,
    timeout_s: float = 600,
) -> str:
    """Run a program that has to succeed and return its standard output.

    Raises:
        RunbookError: When it is missing, takes longer than ``timeout_s`` or exits non-zero.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=data if data is not None else b"",
            capture_output=True,
            check=False,
            timeout=timeout_s,
            env=_environment(environment),
        )
    except FileNotFoundError as error:
        raise _failed(argv, purpose, f"{argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise _failed(argv, purpose, f"no end within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        text = (done.stderr or done.stdout).decode(errors="replace")
        raise _failed(argv, purpose, f"exit {done.returncode}: {_last(text.splitlines())}")
    return done.stdout.decode(errors="replace")


def stream(
    argv: Sequence[str],
    purpose: Purpose,
    *,
    log: Path,
    on_line: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a long program that has to succeed: output appended to ``log``, each line handed to ``on_line``.

    Raises:
        RunbookError: When it is missing or exits non-zero; names the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with log.open("a", encoding="utf-8") as kept:
        kept.write(f"$ {' '.join(argv)}\n")
        kept.flush()
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(environment),
            )
        except FileNotFoundError as error:
            raise _failed(argv, purpose, f"{argv[0]} is not installed") from error
        with process:
            try:
                for line in process.stdout or ():
                    kept.write(line)
                    text = line.rstrip()
                    if text:
                        tail.append(text)
                        if on_line is not None:
                            on_line(text)
            except BaseException:
                process.terminate()  # an interrupt that reached only this process must not wait for the other's end
                raise
    if process.returncode != 0:
        told = Purpose(purpose.where, f"{purpose.next_step} Full output: {log}")
        raise _failed(argv, told, f"exit {process.returncode}: {_last(list(tail))}")


def await_condition(
    question: Callable[[], str | None], *, where: str, expected: str, timeout_s: float, next_step: str
) -> None:
    """Ask until the answer is None (met) or the deadline has passed; any other answer says what is seen instead.

    Raises:
        RunbookError: When the deadline passed; carries the last answer.
    """
    deadline = time.monotonic() + timeout_s
    while (observed := question()) is not None:
        if time.monotonic() > deadline:
            raise RunbookError(
                where=where, observed=f"{observed} after {timeout_s:.0f} s", expected=expected, next_step=next_step
            )
        time.sleep(POLL_INTERVAL_S)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if extra is None else {**os.environ, **extra}


def _last(lines: Sequence[str]) -> str:
    return " | ".join(line.strip() for line in lines[-4:] if line.strip()) or "no output"


def _failed(argv: Sequence[str], purpose: Purpose, observed: str) -> RunbookError:
    return RunbookError(
        where=purpose.where,
        observed=f"`{' '.join(argv[:6])}`: {observed}",
        expected="exit 0",
        next_step=purpose.next_step,
    )
