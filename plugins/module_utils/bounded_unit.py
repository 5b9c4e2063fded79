"""Starts and stops systemd units with a time limit that holds even when a unit does not stop.

A stop that hangs, as one of the GPU daemons' can (NVIDIA/dcgm-exporter#606), is escalated: the unit's processes get
SIGKILL, and what is left after that is named.
"""

from __future__ import annotations

import subprocess

from ansible.module_utils.command_run import run

_ASK_S = 10
_KILL_S = 10


class UnitError(Exception):
    """A unit that did not do what it was told; the text says which, and what was seen."""


def show(unit, ask=run):
    """Return ``{property: value}`` of one unit: LoadState, ActiveState, UnitFileState, MainPID, InvocationID.

    Raises:
        UnitError: systemd did not answer.
    """
    names = "LoadState,ActiveState,UnitFileState,MainPID"
    try:
        done = ask(["systemctl", "show", "--property", names, unit], _ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnitError(f"systemctl show {unit}: {error}") from error
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    told = {name: value for name, separator, value in pairs if separator}
    if "LoadState" not in told:
        raise UnitError(f"systemctl show {unit}: {(done.stderr or done.stdout).strip()[:200] or 'no answer'}")
    return told


def stop(unit, timeout_s, ask=run):
    """Stop a unit; after ``timeout_s`` kill it. Returns whether it had to be killed.

    Raises:
        UnitError: Its processes did not even end when killed; a person has to look.
    """
    try:
        ask(["systemctl", "stop", unit], timeout_s)
        killed = False
    except subprocess.TimeoutExpired:
        killed = True
        _told(["systemctl", "kill", "--signal=SIGKILL", unit], _KILL_S, ask)
        _told(["systemctl", "stop", unit], _KILL_S, ask)
    state = show(unit, ask)
    if state.get("ActiveState") not in ("inactive", "failed"):
        raise UnitError(
            f"{unit} is {state.get('ActiveState')} {'after SIGKILL' if killed else 'after systemctl stop'}, "
            "main process "
            f"{state.get('MainPID')}; expected it to end within {timeout_s} s"
        )
    return killed


def start(unit, timeout_s, ask=run):
    """Start a unit, an earlier failure forgotten, and require it to be active.

    Raises:
        UnitError: It is not active after ``timeout_s``; the text ends with the last lines of its journal.
    """
    _told(["systemctl", "reset-failed", unit], _ASK_S, ask)  # else a start limit that was hit refuses it
    code, said = _told(["systemctl", "start", unit], timeout_s, ask)
    state = show(unit, ask)
    if code != 0 or state.get("ActiveState") != "active":
        raise UnitError(
            f"{unit} is {state.get('ActiveState', 'unknown')} within {timeout_s} s of its start, expected active"
            f"{': ' + said if said else ''}; its journal ends: {journal(unit, ask)}"
        )


def enable(unit, ask=run):
    """Enable a unit at boot.

    Raises:
        UnitError: systemd refused.
    """
    code, said = _told(["systemctl", "enable", unit], 3 * _ASK_S, ask)
    if code != 0:
        raise UnitError(f"systemctl enable {unit}: {said or f'exit {code}'}")


def journal(unit, ask=run):
    """Return the last lines a unit printed, in one line."""
    _, said = _told(["journalctl", "--unit", unit, "--lines", "5", "--output", "cat", "--no-pager"], _ASK_S, ask)
    return " | ".join(said.splitlines()) or "nothing"


def _told(argv, timeout_s, ask):
    """Return ``(exit status, what was said)``; a command that does not end has the status None."""
    try:
        done = ask(argv, timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s} s"
    except OSError as error:
        return None, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()[:500]
