"""QEMU's machine protocol: one command and its answer over the machine's control socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from kimi_runbook.errors import RunbookError

TIMEOUT_S = 10.0


def message(command: str, **arguments: object) -> str:
    """Return one command as QEMU reads it: a line of JSON."""
    body: dict[str, object] = {"execute": command}
    if arguments:
        body["arguments"] = arguments
    return json.dumps(body) + "\r\n"


def answer(line: str) -> dict[str, Any] | None:
    """Return what QEMU answered, None for an event, which may come in between.

    Raises:
        RunbookError: QEMU refused the command.
    """
    body = json.loads(line)
    if "error" in body:
        raise RunbookError(
            where="QEMU",
            observed=f"{body['error'].get('class')}: {body['error'].get('desc')}",
            expected="the command to be done",
            next_step="Compare it with `query-commands` of this QEMU.",
        )
    if "return" not in body:
        return None
    value = body["return"]
    return value if isinstance(value, dict) else {"value": value}


def ask(control: Path, command: str, **arguments: object) -> dict[str, Any]:
    """Send one command to the machine behind a control socket and return its answer.

    Raises:
        RunbookError: Nothing answers there, or QEMU refused.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(control))
            with connection.makefile("rw", encoding="utf-8", newline="") as lines:
                lines.readline()  # the greeting
                for text in (message("qmp_capabilities"), message(command, **arguments)):
                    lines.write(text)
                    lines.flush()
                    given = _next_answer(lines)
                return given
    except OSError as error:
        raise RunbookError(
            where=str(control),
            observed=str(error),
            expected="QEMU's control socket to answer",
            next_step="See `python -m lab.kernel status` and the machine's console log.",
        ) from error


def _next_answer(lines: Any) -> dict[str, Any]:
    while line := lines.readline():
        given = answer(line)
        if given is not None:
            return given
    raise OSError("QEMU ended without an answer")
