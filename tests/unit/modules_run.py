"""Runs a node-side module in this process and returns what it would answer Ansible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import basic


class Answered(Exception):  # noqa: N818 - the way out of a module, not an error
    """A module's result."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result)
        self.result = result


def run_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, main: Callable[[], None], *, check: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Run ``main`` with these arguments; the result has ``failed`` where the module stopped."""

    def answer(self, **result):
        raise Answered(result)

    def fail(self, msg, **result):
        raise Answered({"failed": True, "msg": msg, **result})

    temporary = tmp_path / "module-tmp"
    temporary.mkdir(exist_ok=True)
    number = len(list(temporary.iterdir()))
    (temporary / str(number)).mkdir()
    words = {**arguments, "_ansible_check_mode": check, "_ansible_remote_tmp": str(temporary)}
    monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": words}).encode())
    monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
    monkeypatch.setattr(basic.AnsibleModule, "exit_json", answer)
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", fail)
    monkeypatch.setattr(basic.AnsibleModule, "tmpdir", str(temporary / str(number)))
    monkeypatch.setattr(basic.AnsibleModule, "warn", lambda self, text: None)
    try:
        main()
    except Answered as answered:
        return answered.result
    raise AssertionError("the module ended without an answer")
