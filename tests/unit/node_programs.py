"""Fake programs on PATH, and one call of a module as Ansible would make it on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

UNIT_DIR = Path(__file__).resolve().parent


class Programs:
    """A folder of programs that stands first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, script: str) -> None:
        """Write a shell script; ``$DIR`` is the folder, where it may keep what it was told."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\nDIR={self.folder}\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def said(self, name: str) -> list[str]:
        """Return the lines a program kept in ``$DIR/<name>``; empty when it was never called."""
        path = self.folder / name
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def call(module: str, programs: Programs, *, check: bool = False, **params: Any) -> tuple[int, dict[str, Any]]:
    """Run a module of plugins/modules in a process of its own; return its exit status and what it answered."""
    source = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(UNIT_DIR)!r})\n"
        "import conftest\n"
        "from ansible.module_utils.testing import patch_module_args\n"
        f"import {module}\n"
        "with patch_module_args(json.loads(sys.argv[1])):\n"
        f"    {module}.main()\n"
    )
    arguments = json.dumps({**params, "_ansible_check_mode": check})
    environment = {**os.environ, "PATH": f"{programs.folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", source, arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), "")
    assert line, done.stdout + done.stderr
    return done.returncode, json.loads(line)
