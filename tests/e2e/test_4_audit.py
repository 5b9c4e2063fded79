"""The audit of a host nobody dares to touch: killed at any moment it leaves nothing behind; it asks once per host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from labkit import HOSTS, ROOT, Shell, play

pytestmark = [pytest.mark.lab, pytest.mark.destructive]

# Seconds after the controller's start: while it loads, connects, sends the module, while the host answers, at the end.
MOMENTS_S = (1.0, 2.5, 3.5, 4.5, 5.5, 7.0)
HANGING = "/usr/local/bin/ibv_devinfo"
LIMIT_S = 100  # the snapshot's budget of 90 s (host_snapshot_budget_s) and its commands' grace
ASIDE = ("/root/.ansible/tmp/*", "/var/log/*", "/var/lib/systemd/*", "/tmp/*", "/run/*", "/var/lib/kubelet/*")
"""Ansible's own temporary folder, and where the system itself writes by the minute: logins, journal, timers."""


@pytest.fixture
def hanging(shell: Shell) -> Iterator[None]:
    """Put a program in the audit's way that never answers, so that a kill can meet it running."""
    shell("k3-b", f"printf '#!/bin/sh\\nexec sleep 1000\\n' > {HANGING} && chmod 755 {HANGING}")
    yield
    shell("k3-b", f"rm {HANGING}")


def left_running(shell: Shell) -> list[str]:
    """Return what still runs on the host of an audit: its Python process, and the program that hangs."""
    # The pattern's first letter is a class of its own, so that the question does not find itself.
    return shell("k3-b", "pgrep -af '[A]nsiballZ|[/]usr/bin/python3 -c|[s]leep 1000' || test $? -eq 1").splitlines()


def awaited(question: Callable[[], list[str]], limit_s: float) -> list[str]:
    """Ask until the answer is empty or the time is up; returns the last answer."""
    end = time.monotonic() + limit_s
    while (answer := question()) and time.monotonic() < end:
        pass
    return answer


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_killed_audit_leaves_nothing(moment_s: float, tmp_path: Path, shell: Shell, hanging: None) -> None:
    shell("k3-b", "touch -d '1 second ago' /root/before")
    others = set(left_running(shell))  # the engine has Python processes too
    audit = subprocess.Popen(
        ["ansible-playbook", "playbooks/audit.yml", "--extra-vars", f"runs_dir={tmp_path / 'runs'}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status: int | None = audit.wait(moment_s)
    except subprocess.TimeoutExpired:
        status = None
    if status is None:
        os.killpg(audit.pid, signal.SIGKILL)
        audit.wait()
    assert awaited(lambda: sorted(set(left_running(shell)) - others), LIMIT_S) == []
    aside = " ".join(f"-not -path '{path}'" for path in ASIDE)
    written = shell("k3-b", f"find / -xdev -newer /root/before -type f {aside}").split()
    assert set(written) <= {HANGING}
    shell("k3-b", "rm /root/before")


def test_one_task_per_host_asks_everything(tmp_path: Path) -> None:
    audit = play("playbooks/audit.yml", tmp_path)
    assert audit.rc == 0, audit.stdout
    assert audit.changed == {}
    on_hosts = [task for host, task in audit.asked if host == "k3-b"]
    assert on_hosts == ["take | Answer every question about the host in one round trip"]
    assert {host for host, _ in audit.asked} >= HOSTS
