"""Makes the node-side modules importable the way Ansible ships them."""

import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Under nohup, or in the background of a script, signals come in ignored, and what is ignored stays so on purpose: the
# tests are about what signals do. The programs they start inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

sys.path[:0] = [str(ROOT / "plugins" / "module_utils"), str(ROOT / "plugins" / "modules"), str(ROOT)]

# Modules import their helpers as ansible.module_utils.*, where Ansible puts them on the node.
import ansible.module_utils  # noqa: E402 (after the path is set)

ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))


@pytest.fixture
def project_root() -> Path:
    """The checkout."""
    return ROOT
