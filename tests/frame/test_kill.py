"""SIGKILL of the controller after each task of a provision run in turn: the next run finishes, N of N.

Every case is a run killed after its Nth task and one that takes over. ``FRAME_KILL=3:60:10`` plays a part of them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.frame.site import NEW, PLAYED, Site

ROLES = ["node_drain", "gpu_driver", "interconnect"]
HOSTS = {"a": {"engine_nodes": ["a", "b"]}, "b": {"engine_nodes": ["a", "b"]}}


def fresh(folder: Path) -> Site:
    """Return a site whose two hosts need a driver and settings, as one batch."""
    if folder.exists():
        shutil.rmtree(folder)
    site = Site(folder, HOSTS, host_transaction_roles=ROLES)
    for host in HOSTS:
        for role in set(PLAYED) - set(ROLES):
            site.put(host, role, NEW)
    return site


def flaws(site: Site, after: int) -> str:
    """Kill a run after so many tasks, let the next one take over, and return what is not as it must be; else empty."""
    killed = site.provision(kill_after=after)
    name = site.tasks()[0]
    if killed.code != -9:
        return f"after task {after} ({name}) the run was not killed: {killed.code}"
    standing = {host: state for host in HOSTS if (state := site.state(host))}
    unfinished = [host for host, state in standing.items() if state["state"] != "done"]
    held = [host for host in unfinished if standing[host]["lease"]]
    for host in HOSTS:
        if site.drained(host) and host not in unfinished:
            return f"after task {after} ({name}) {host} is drained and its state file does not say so"
    take_over = {"take_over": site.last_run()} if held else {}
    finished = site.provision(**take_over)
    wrong = [] if finished.code == 0 else [f"the next run ended with {finished.code}: {finished.output[-1500:]}"]
    for host in HOSTS:
        state = site.state(host)
        wrong += [f"{host} is still drained"] if site.drained(host) else []
        wrong += [f"{host} holds {site.versions(host)}"] if site.versions(host) != {NEW} else []
        wrong += [f"{host} ended as {state}"] if not state or state["state"] != "done" or state["lease"] else []
        journal = site.journal(host)
        for role in ROLES[1:]:
            if f"{role}-handler" not in journal:
                wrong.append(f"{host} never ran the handler of {role}")
    return f"after task {after} ({name}): {'; '.join(wrong)}" if wrong else ""


def test_killed_after_each_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Handlers are part of it: one whose notification died with the run must have run all the same."""
    whole = fresh(tmp_path / "site").provision()
    assert whole.code == 0, whole.output
    tasks = (tmp_path / "site/tasks").read_text(encoding="utf-8").splitlines()
    part = slice(*(int(text) if text else None for text in os.environ.get("FRAME_KILL", "::").split(":")))
    numbers = range(1, len(tasks) + 1)[part]
    failed = []
    for number in numbers:
        flaw = flaws(fresh(tmp_path / "site"), number)
        failed += [flaw] if flaw else []
        with capsys.disabled():
            print(f"{number}/{len(tasks)} {tasks[number - 1]}: {flaw or 'resumed'}", flush=True)
    with capsys.disabled():
        print(f"{len(numbers) - len(failed)} of {len(numbers)} resumed ({len(tasks)} tasks in a whole run)")
    assert not failed, "\n".join(failed)
