"""The table of findings and the rules hold together: each code has a rule, a page and a case, each rule its codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_audit_command
import test_judge
import test_judge_fleet
import test_judge_rules

from kimi_runbook.findings import ACTIONS, CATALOGUE, SEVERITIES, anchor, catalogue, make_finding
from kimi_runbook.judge import CHECKS
from kimi_runbook.reading import data_file
from kimi_runbook.verdict import VerdictName

KEYS = (*("page", "severity", "action", "by_hand", "bound_to_the_driver", "role", "title", "next_step", "source"),)
ELSEWHERE = {
    **dict.fromkeys(
        ("host.unreachable", "snapshot.failed", "host.kernel", "driver.reload", "unit.active"), "test_judge"
    ),
    **dict.fromkeys(
        ("rdma.peermem", "rdma.peermem_symbols", "snapshot.unknown", "weights.unproved"), "test_judge_rules"
    ),
    **dict.fromkeys(("rdma.ofed", "interconnect.dmabuf", "interconnect.dmabuf_blocked"), "test_judge_rules"),
    **dict.fromkeys(("fleet.images", "fleet.memory_short", "fleet.memory_unknown"), "test_judge_fleet"),
}
"""Codes that tests of their own reach, beside the tables."""


def tabled() -> set[str]:
    """Return the codes the tables of the judge's tests expect."""
    tables: list[Any] = [test_judge_rules.CASES, test_judge_rules.RACK, test_judge_fleet.CASES, test_judge_fleet.RACK]
    found = {code for table in tables for case in table for code in case[2]}
    found |= {code for case in test_judge.CASES for code, *_ in case[2]}
    return found | set(test_audit_command.CODES)


def test_every_code_is_reached_by_a_case() -> None:
    assert tabled() | set(ELSEWHERE) == set(catalogue())


@pytest.mark.parametrize("code", sorted(ELSEWHERE))
def test_a_code_reached_elsewhere_is_named_there(code: str, project_root: Path) -> None:
    assert f'"{code}"' in (project_root / f"tests/unit/{ELSEWHERE[code]}.py").read_text(encoding="utf-8")


def emitted(project_root: Path) -> Iterator[str]:
    """Yield every literal text of the rules' sources; the codes are among them."""
    sources = [*(project_root / "src/kimi_runbook/rules").glob("*.py")]
    sources += [project_root / f"src/kimi_runbook/{name}.py" for name in ("judge", "fleet")]
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_code_has_a_rule_that_names_it(project_root: Path) -> None:
    named = set(emitted(project_root))
    by_name = {f"driver.{name}" for name in ("install", "repair", "reload", "reboot")}  # of the driver's verdict
    by_name |= {"interconnect.contradiction", "interconnect.caution"}  # of the settings' check
    assert set(catalogue()) - named == by_name


def test_no_rule_names_a_code_that_is_not_in_the_table(project_root: Path) -> None:
    prefixes = {code.partition(".")[0] for code in catalogue()}
    shaped = {text for text in emitted(project_root) if re.fullmatch(r"[a-z]+\.[a-z0-9_]+", text)}
    others = {check.name for check in CHECKS} | {"daemon.json"}
    codes = {text for text in shaped if text.partition(".")[0] in prefixes} - others
    assert codes <= set(catalogue()), codes - set(catalogue())


def test_an_unlisted_code_cannot_become_a_finding() -> None:
    with pytest.raises(KeyError):
        make_finding("no.such_code", host="k3-a", observed="x", expected="y")


def test_the_files_share_no_code() -> None:
    names = [code for name in CATALOGUE for code in data_file(name).names()]
    assert len(names) == len(set(names)) == len(catalogue())
    assert len({anchor(code) for code in names}) == len(names)


@pytest.mark.parametrize("code", sorted(catalogue()))
def test_an_entry_is_complete_and_has_its_page(code: str, project_root: Path) -> None:
    entry = catalogue()[code]
    assert entry.text("severity") in SEVERITIES
    assert (entry.optional_text("action") in ACTIONS) == (entry.text("severity") == "change")
    assert entry.text("title") and entry.text("source")
    assert not entry.flag("by_hand", False) or entry.text("severity") == "change"
    entry.refuse_unknown(KEYS)
    finding = make_finding(
        code, host="k3-a", observed="x", expected="y", subject="z", role=entry.optional_text("role") or "rdma"
    )
    assert "{" not in finding.next_step and finding.next_step.endswith((".", ")"))
    page, _, _ = finding.page.partition("#")
    text = (project_root / page).read_text(encoding="utf-8")
    told = re.search(rf"^### {re.escape(code)}\n\n(.+)", text, re.MULTILINE)
    if entry.text("severity") == "stop":
        assert told and len(told[1]) > 40, f"{page} has no section for the stop code {code}"
    else:
        assert f"`{code}`" in text, f"{page} does not name {code}"


def test_no_page_explains_a_code_that_is_gone(project_root: Path) -> None:
    for path in (project_root / "docs/checks").glob("*.md"):
        named = re.findall(r"^### ([a-z]+\.[a-z0-9_]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= set(catalogue()), path.name


def test_verdict_names_are_not_confused_with_the_acceptance_verdict() -> None:
    assert not {str(name) for name in VerdictName} & {"stop", "repair", "install", "reboot", "reload", "ok"}
