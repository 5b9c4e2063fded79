"""The lab as the tests find it: fresh hosts first, one chain through site.yml, then drift and repair.

Files run in the order of their numbers; each starts from the state the one before it leaves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import ROOT, Shell, lab


@pytest.fixture(scope="session", autouse=True)
def fresh_hosts() -> Iterator[None]:
    """Hosts nobody touched, from cached images, removed again at the end.

    For work on one test: KIMI_KEEP_LAB leaves them, KIMI_KEEP_LAB=reuse also starts from those that are there.
    """
    os.chdir(ROOT)  # the lab's inventory names .lab/ relative to the checkout, as the command line does
    if os.environ.get("KIMI_KEEP_LAB") != "reuse":
        lab("up", "--hosts-only", "--fresh")
    yield
    if not os.environ.get("KIMI_KEEP_LAB"):
        lab("down")


@pytest.fixture(scope="session")
def shell() -> Shell:
    """Run a command on a host as an operator would, over ssh; fails with the command's output."""

    def run(host: str, command: str) -> str:
        done = subprocess.run(
            ["ssh", "-F", ".lab/ssh_config", host, command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{host}: {command} exited {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def lock_text() -> str:
    """The lab's lock as resolved."""
    return Path(ROOT / "inventories/lab/lock.yml").read_text(encoding="utf-8")
