"""The state file of a host's change: whose it is, where it stands, and how long its steps take.

One JSON file per host. It is only ever replaced whole (written beside, synced, renamed), under a lock that is held for
one reading and writing, so a process killed at any instruction leaves the old state or the new one. A step is written
down *before* it begins: what a killed run was doing is known without anybody having caught the signal.

The lease in it says which run works on the host. Its age is counted by the clock that only runs forward
(CLOCK_BOOTTIME) as long as the host has not rebooted, so setting the wall clock neither ends nor prolongs it; after a
reboot the wall clock has to do, and where that lies before the lease's own stamp the lease counts as fresh.

The functions that change a state are pure: state, request and moment in, state out, or Refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

FILE = "transaction.json"
LOCK = "transaction.lock"
RESERVE = "transaction.reserve"
SCHEMA_VERSION = 1
UNREADABLE = "unreadable"

_RESERVE_BYTES = 128 << 10  # given up when the disk is full, so that even then it can be written why
_KEPT_DURATIONS = 10
_KEPT_RUNS = 20
_REASON_LIMIT = 2000
_LOCK_S = 20
_UNFINISHED = ("open", "failed", UNREADABLE)


class Refused(Exception):  # noqa: N818 - it is an answer, not an error
    """What was asked cannot be granted; the text says observed, expected and next step."""


def moment():
    """Return the present by the wall, by the clock that only runs forward, and in which boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"wall": round(time.time(), 3), "up": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3), "boot": boot}


def elapsed(then, now):
    """Return the seconds between two moments; None where the wall clock of a later boot lies before the first."""
    if then["boot"] == now["boot"]:
        return max(0.0, now["up"] - then["up"])
    gone = now["wall"] - then["wall"]
    return gone if gone >= 0 else None


def lease_view(lease, now):
    """Return a lease as others see it: ``run``, ``owner``, ``age_s`` and ``expires_in_s``, None for none."""
    if not lease:
        return None
    age = elapsed(lease["renewed"], now) or 0.0
    return {
        "run": lease["run"],
        "owner": lease["owner"],
        "age_s": int(age),
        "expires_in_s": int(lease["ttl_s"] - age),
    }


def view(state, now):
    """Return what a snapshot carries of a state; None for none."""
    if state is None:
        return None
    return {
        **{key: state[key] for key in ("state", "run", "step", "begun", "interrupted", "lock_digest", "reason")},
        "lease": lease_view(state["lease"], now),
        "durations": {name: taken[-5:] for name, taken in state["durations"].items()},
    }


def begin(state, request, now):
    """Take the lease and open the transaction, keeping what an unfinished one had begun.

    Args:
        state: What the file holds, None for none.
        request: ``run``, ``owner``, ``ttl_s``, ``take_over``, ``lock_digest`` and ``plan_digest``.
        now: The moment.

    Returns:
        The new state and a sentence about whose lease was taken, empty when there was none.

    Raises:
        Refused: Another run's lease is alive.
    """
    held = lease_view(state and state["lease"], now)
    note = ""
    if held and held["run"] != request["run"]:
        taken = held["run"] == request["take_over"]
        told = (
            f"run {held['run']} of {held['owner']}, which renewed its lease {held['age_s']} s ago, "
            + (f"expiring in {held['expires_in_s']} s" if held["expires_in_s"] > 0 else _expired(held))
            + f", and stands at step {state['step']}"
        )
        if not taken and held["expires_in_s"] > 0:
            raise Refused(
                f"this host is leased by {told}; expected a host that no other run works on. "
                f"Wait for that run to end, or, if it is dead, add -e take_over={held['run']}."
            )
        note = ("took over from " if taken else "took the expired lease of ") + told
    unfinished = state is not None and state["state"] in _UNFINISHED
    return (
        {
            "schema_version": SCHEMA_VERSION,
            "state": "open",
            "run": request["run"],
            "owner": request["owner"],
            "lock_digest": request["lock_digest"],
            "plan_digest": request["plan_digest"],
            "step": state["step"] if unfinished else "begin",
            "begun": list(state["begun"]) if unfinished else [],
            "interrupted": list(state["interrupted"]) if unfinished else [],
            "playing": False,  # whether ``step`` was begun by this run
            "began": now,
            "step_began": now,
            "reason": "",
            "lease": _lease(request, now),
            "durations": state["durations"] if state else {},
            "history": state["history"] if state else [],
        },
        note,
    )


def step(state, request, now):
    """Record that a step begins, that the one before it has ended, and renew the lease."""
    state = _ended(_own(state, request, now), now)
    name = request["step"]
    return {
        **state,
        "step": name,
        "playing": True,
        "step_began": now,
        "begun": [*(one for one in state["begun"] if one != name), name],
        "interrupted": [*(one for one in state["interrupted"] if one != name), name],
        "lease": _lease(request, now),
    }


def fail(state, request, now):
    """Record why the step failed, and give the lease back: the run ended in order, and the next one may begin."""
    state = _own(state, request, now)
    reason = request["reason"][:_REASON_LIMIT]
    return {
        **state,
        "state": "failed",
        "reason": reason,
        "lease": None,
        "history": _history(state, "failed", reason, now),
    }


def commit(state, request, now):
    """Record that the host is as it was wished, and give the lease back."""
    state = _ended(_own(state, request, now), now)
    return {
        **state,
        "state": "done",
        "step": "commit",
        "begun": [],
        "interrupted": [],
        "lease": None,
        "history": _history(state, request["end"], "", now),
    }


def _lease(request, now):
    return {"run": request["run"], "owner": request["owner"], "renewed": now, "ttl_s": request["ttl_s"]}


def _expired(held):
    return f"expired {-held['expires_in_s']} s ago"


def _own(state, request, now):
    """Return the state if this run holds the lease; Refused where another took it, or nobody has one."""
    held = lease_view(state and state["lease"], now)
    if held is None or held["run"] != request["run"]:
        holder = f"run {held['run']} of {held['owner']} has taken the lease" if held else "no run holds a lease"
        raise Refused(
            f"{holder}; expected run {request['run']}, which began here. "
            "Nothing more is done on this host by this run; look at it with playbooks/audit.yml."
        )
    return state


def _ended(state, now):
    """Return the state with the step that this run was at ended and measured."""
    if not state["playing"]:
        return state
    name, taken = state["step"], elapsed(state["step_began"], now)
    durations = dict(state["durations"])
    if taken is not None:
        durations[name] = [*durations.get(name, []), max(1, round(taken))][-_KEPT_DURATIONS:]
    return {**state, "durations": durations, "interrupted": [one for one in state["interrupted"] if one != name]}


def _history(state, end, reason, now):
    row = {
        "run": state["run"],
        "owner": state["owner"],
        "end": end,
        "step": state["step"],
        "reason": reason,
        "began_at": _stamp(state["began"]),
        "ended_at": _stamp(now),
        "lock_digest": state["lock_digest"],
    }
    return [*state["history"], row][-_KEPT_RUNS:]


def _stamp(when):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when["wall"]))


def parse(text, written, ttl_s=7200):
    """Return the state a file's text holds; one that makes no sense stands for an unfinished run that nobody knows.

    Args:
        text: The file's text.
        written: The moment of its last change, as good as it is known.
        ttl_s: How long its unknown owner is believed to be alive.
    """
    try:
        state = json.loads(text)
        if state["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {state['schema_version']}, expected {SCHEMA_VERSION}")
        wanted = begin(None, dict.fromkeys(("run", "owner", "ttl_s", "take_over", "lock_digest", "plan_digest")), {})[0]
        missing = sorted(set(wanted) - set(state))
        if missing:
            raise ValueError(f"no {missing[0]}")
        view(state, state["began"])
        return state
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        nobody = {"run": UNREADABLE, "owner": "nobody knows", "ttl_s": ttl_s, "take_over": ""}
        state, _ = begin(None, {**nobody, "lock_digest": "", "plan_digest": ""}, written)
        return {
            **state,
            "state": UNREADABLE,
            "step": UNREADABLE,
            "begun": ["drain"],  # it may be drained, so it is restored
            "reason": f"the state file cannot be read ({error})",
        }


def read(folder, ttl_s=7200):
    """Return the state below a folder, None where there is none; OSError when the file cannot be read."""
    try:
        with Path(folder, FILE).open(encoding="utf-8", errors="replace") as file:
            text, written = file.read(), os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse(text, {"wall": written, "up": 0.0, "boot": ""}, ttl_s)


def write(folder, state):
    """Replace the file by a state, whole or not at all; OSError when that cannot be done even with the reserve."""
    text = json.dumps(state, sort_keys=True) + "\n"
    try:
        _replace(folder, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(FileNotFoundError):
            Path(folder, RESERVE).unlink()
        _replace(folder, text)


def _replace(folder, text):
    beside = Path(folder, f"{FILE}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(Path(folder, FILE))
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(folder):
    """Set the reserve aside; without room for it no change should begin, so OSError is the caller's."""
    path = Path(folder, RESERVE)
    if not path.exists() or path.stat().st_size < _RESERVE_BYTES:
        with path.open("wb") as file:
            file.write(b"\0" * _RESERVE_BYTES)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def locked(folder, wait_s=_LOCK_S):
    """Hold the folder's lock; Refused when another process does not let go of it in time."""
    path = Path(folder, LOCK)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refused(
                        f"{path} is held by another process for {wait_s} s, expected a moment. "
                        f"See who holds it: fuser -v {path}."
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


CHANGES = {"step": step, "fail": fail, "commit": commit}


def apply(folder, action, request, *, check=False):
    """Read, change and write under the lock.

    Returns:
        ``(before, after, note)``: the state found, the state it is now (or, checking, would be), and a sentence.

    Raises:
        Refused: Another run has the host.
        OSError: The file cannot be read or written; the state on disk is then the one before.
    """
    if action == "look" or (check and action != "begin"):
        state = read(folder, request["ttl_s"])
        return state, state, ""
    if check:
        state = read(folder, request["ttl_s"])
        after, note = begin(state, request, moment())
        return state, after, note
    with locked(folder):
        state, now, note = read(folder, request["ttl_s"]), moment(), ""
        if action == "begin":
            reserve(folder)
            after, note = begin(state, request, now)
            if state is not None and state["state"] == UNREADABLE:
                shutil.copyfile(Path(folder, FILE), Path(folder, f"{FILE}.unreadable"))
        else:
            after = CHANGES[action](state, request, now)
        write(folder, after)
    return state, after, note
