"""Both machines at once, for tests of what is between them, and what they were before."""

import json
from pathlib import Path

import pytest
import testinfra

ROOT = Path(__file__).resolve().parents[3]
STATE = ROOT / ".lab-kernel"


def connect(name):
    return testinfra.get_host(f"ssh://{name}", ssh_config=str(STATE / "ssh_config"))


@pytest.fixture(scope="session")
def machine_a():
    """The machine on which nothing kept the modules from being reloaded."""
    return connect("kernel-a")


@pytest.fixture(scope="session")
def machine_b():
    """The machine with a process on the GPU that no role may stop."""
    return connect("kernel-b")


@pytest.fixture(scope="session")
def before():
    """{machine: its driver and boot before the change}."""
    return {name: json.loads((STATE / f"before-{name}.json").read_text()) for name in ("kernel-a", "kernel-b")}
