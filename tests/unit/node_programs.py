"""Fake programs on PATH, and one call of a module as Ansible would make it on a node."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ansible.module_utils.testing import patch_module_args


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
    """Run a module of plugins/modules with these programs first on PATH; return its exit status and its answer."""
    said = io.StringIO()
    code: object = 0
    with (
        patch.dict(os.environ, {"PATH": f"{programs.folder}:{os.environ['PATH']}"}),
        patch_module_args({**params, "_ansible_check_mode": check}),
        contextlib.redirect_stdout(said),
    ):
        try:
            importlib.import_module(module).main()
        except SystemExit as end:
            code = end.code
    line = next((line for line in reversed(said.getvalue().splitlines()) if line.startswith("{")), "")
    assert line, said.getvalue()
    return int(str(code or 0)), json.loads(line)
