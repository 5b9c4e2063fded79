"""systemd units: quoting that systemd reads back unchanged, and the unit of the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kimi_runbook.errors import RunbookError

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%", "$": "$$"}


def systemd_escape(argv: Sequence[str]) -> str:
    """Return a command for ``ExecStart=`` that systemd splits back into exactly these arguments.

    systemd takes off quotes and backslashes, then expands ``%`` specifiers, then ``$`` variables (systemd.service(5),
    "Command lines"), so all of them are escaped and everything beyond plain words is quoted.

    Raises:
        RunbookError: no program, a program that is no absolute path (its first characters could be read as a
            prefix), or a NUL character.
    """
    if not argv or not re.fullmatch(r"/[A-Za-z0-9_+./-]*", argv[0]):
        raise RunbookError(
            where="systemd command",
            observed=repr(argv[0]) if argv else "nothing",
            expected="a program by its absolute path",
            next_step="Name the program by its path.",
        )
    return " ".join(_quote(argument) for argument in argv)


def _quote(argument: str) -> str:
    if _PLAIN.fullmatch(argument):
        return argument
    if "\0" in argument or any("\ud800" <= char <= "\udfff" for char in argument):
        raise RunbookError(
            where="systemd command",
            observed="an argument with a NUL character or a lone surrogate",
            expected="text",
            next_step="Correct the engine's arguments in the inventory.",
        )
    escaped = "".join(
        _ESCAPES.get(char) or (char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in char.encode()))
        for char in argument
    )
    return f'"{escaped}"'


def render_engine_unit(  # noqa: PLR0913 - one keyword per choice in the unit
    docker_argv: Sequence[str],
    *,
    description: str,
    container: str,
    stop_timeout_s: int,
    start_timeout_s: int,
    restart: str = "no",
    restart_delay_s: int = 10,
) -> str:
    """Return the text of the engine's unit.

    Args:
        docker_argv: The ``docker run`` command, program first.
        description: One line for ``systemctl status``.
        container: The container's name.
        stop_timeout_s: Seconds docker gives the engine to end before it is killed.
        start_timeout_s: Seconds a start may take. The unit counts as started once docker runs; readiness is
            watched by the engine's log and /health, so this covers removing a stale container.
        restart: systemd's ``Restart=``. ``no`` leaves a failed engine as it ended, for triage.
        restart_delay_s: Seconds before a restart.

    Raises:
        RunbookError: a container name docker would not take, or an unknown restart policy.
    """
    _check(container, restart)
    docker = docker_argv[0]
    # --rm removes the container, except where docker itself was killed. An error of either command ends the start.
    remove = (
        f'set -e; id="$({docker} ps --all --quiet --no-trunc --filter name=^/{container}$)"; '
        f'if [ -n "$id" ]; then {docker} rm --force "$id"; fi'
    )
    return f"""\
# Written by the engine role; changes made here are lost.
[Unit]
Description={description.replace("%", "%%")}
Requires=docker.service
After=docker.service network-online.target
Wants=network-online.target

[Service]
Type=exec
ExecStartPre={systemd_escape(["/bin/sh", "-c", remove])}
ExecStart={systemd_escape(docker_argv)}
ExecStop={systemd_escape([docker, "stop", "--time", str(stop_timeout_s), container])}
# docker run ends with 143 when the engine was asked to stop.
SuccessExitStatus=143
TimeoutStartSec={start_timeout_s}
TimeoutStopSec={stop_timeout_s + 30}
Restart={restart}
RestartSec={restart_delay_s}

[Install]
WantedBy=multi-user.target
"""


def _check(container: str, restart: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]+", container):
        raise RunbookError(
            where="engine container",
            observed=repr(container),
            expected="letters, digits, underscore, dot and dash",
            next_step="Correct engine_container in the inventory.",
        )
    policies = ("no", "on-failure", "on-abnormal", "always")
    if restart not in policies:
        raise RunbookError(
            where="engine restart policy",
            observed=repr(restart),
            expected=", ".join(policies),
            next_step="Correct engine_restart in the inventory.",
        )
