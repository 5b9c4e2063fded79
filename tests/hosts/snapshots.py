"""Takes the snapshot of a fake host with the probes a real host is asked by, and nothing but the tree they read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
_UTILS = str(ROOT / "plugins" / "module_utils")

# The probes import each other as ansible.module_utils.*, where Ansible puts them on the node.
if _UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_UTILS)
if str(ROOT / "plugins" / "modules") not in sys.path:
    sys.path.append(str(ROOT / "plugins" / "modules"))

import host_snapshot  # noqa: E402 - found on the path set above
from ansible.module_utils.host_probe import Probe  # noqa: E402 - likewise


def snapshot(tree: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the snapshot of a tree; ``wanted`` is what the module is asked for, its parameters by name."""
    taken: dict[str, Any] = host_snapshot.take(Probe(root=tree), wanted)
    return taken
