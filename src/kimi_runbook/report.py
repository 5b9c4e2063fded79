"""The report: a page to sign (Markdown) and the same checks for machines (JUnit). Made from the record alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.errors import RunbookError
from kimi_runbook.record import Record, load_record
from kimi_runbook.verdict import Verdict, judge_steps

MARKDOWN = "report.md"
JUNIT = "junit.xml"

# XML 1.0 has no place for most control characters, and an engine's answer may hold any.
_UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if code not in (9, 10, 13)}


def headline(record: Record) -> str:
    """Return the one line that says it all: verdict, advice, what was simulated, what was not looked at."""
    verdict = verdict_of(record)
    parts = [f"verdict: {verdict.name}"]
    if verdict.advice:
        parts.append(f"advice: {', '.join(verdict.advice)}")
    if record.simulated:
        parts.append(f"simulated {', '.join(record.simulated)}")
    if record.not_planned:
        left_out = ", ".join(f"{step} {STEP_NAMES.get(step, '?')}" for step in record.not_planned)
        parts.append(f"not planned: {left_out}")
    return " · ".join(parts)


def verdict_of(record: Record) -> Verdict:
    """Return the record's verdict; one that holds none is judged by its steps."""
    return record.verdict or judge_steps(record.steps)


def markdown(record: Record) -> str:
    """Return report.md."""
    verdict = verdict_of(record)
    lines = [f"# {headline(record)}", "", verdict.why[:1].upper() + verdict.why[1:] + ".", ""]
    if record.simulated:
        what = ", ".join(record.simulated)
        lines += [f"**Simulated: {what}.** Nothing here says anything about real ones; everything else is real.", ""]
    lines += _scope(record)
    lines += ["## Steps", "", "| step | name | state | checks | what did not pass |", "|---|---|---|---|---|"]
    lines += [_step_row(step) for step in record.steps]
    lines += ["", "## Reasons", ""]
    lines += [f"- {_cell(reason.text)}" for reason in verdict.reasons] or ["Nothing to explain: no check failed."]
    lines += ["", f"Next: `{verdict.next_command}`", ""]
    lines += _expectation(record)
    lines += _fingerprint(record)
    lines += ["## Figures", ""]
    for step in record.steps:
        if step.figures:
            lines += [f"### Step {step.step}, {step.name}", "", "| figure | value |", "|---|---|"]
            lines += [f"| {name} | {_cell(_value(value))} |" for name, value in step.figures.items()]
            lines.append("")
    lines += ["## Checks", "", "| step | check | state | observed | expected |", "|---|---|---|---|---|"]
    lines += [
        f"| {step.step} | {_cell(c.name)} | {c.state} | {_cell(c.observed)} | {_cell(c.expected)} |"
        for step in record.steps
        for c in step.checks
    ]
    lines += ["", "## Signatures", "", "| role | name | date | signature |", "|---|---|---|---|"]
    lines += ["| platform | | | |", "| service owner | | | |", ""]
    return "\n".join(lines)


def junit(record: Record) -> str:
    """Return junit.xml: one suite per step, one case per check; what was not looked at is an error, never a pass."""
    root = ET.Element("testsuites", name="acceptance")
    for step in record.steps:
        suite = ET.SubElement(root, "testsuite", name=f"step {step.step} {step.name}")
        checks = step.checks or (
            Check(name="step", state=step.state, observed=step.note or "no checks", expected="the step to be run"),
        )
        for check in checks:
            _case(suite, step, check)
        bad = [case for case in suite if case.find("failure") is not None]
        unknown = [case for case in suite if case.find("error") is not None]
        suite.attrib |= {"tests": str(len(suite)), "failures": str(len(bad)), "errors": str(len(unknown))}
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_reports(record: Record, run_dir: Path) -> tuple[Path, ...]:
    """Write report.md and junit.xml into a run directory and return their paths."""
    written = []
    for name, text in ((MARKDOWN, markdown(record)), (JUNIT, junit(record))):
        path = run_dir / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return tuple(written)


def regenerate(run_dir: Path) -> Record:
    """Write a finished run's reports again from its record.json and return the record; raises RunbookError."""
    if not run_dir.is_dir():
        raise RunbookError(
            where=str(run_dir),
            observed="is no directory",
            expected="a run directory with a record.json",
            next_step="List runs with: ls runs",
        )
    record = load_record(run_dir)
    write_reports(record, run_dir)
    return record


def _scope(record: Record) -> list[str]:
    planned = ", ".join(f"{step} ({STEP_NAMES.get(step, '?')})" for step in record.planned)
    left_out = ", ".join(f"{step} ({STEP_NAMES.get(step, '?')})" for step in record.not_planned) or "nothing"
    return [
        "| scope | |",
        "|---|---|",
        f"| run | {record.run_id} |",
        f"| site | {_cell(record.site)} |",
        f"| model | {_cell(record.model)} at {_cell(record.endpoint)} |",
        f"| from, to | {record.started:%Y-%m-%d %H:%M:%S} UTC, {record.ended:%H:%M:%S} UTC |",
        f"| planned | {planned} |",
        f"| not planned | {left_out} |",
        f"| observation | {record.observation} |",
        "",
    ]


def _step_row(step: StepResult) -> str:
    unmet = "; ".join(check.name for check in step.unmet()) or step.note or "-"
    return f"| {step.step} | {step.name} | {step.state} | {len(step.checks)} | {_cell(unmet)} |"


def _expectation(record: Record) -> list[str]:
    """The hits as they were computed beside the hits as they were seen."""
    if not record.expectation:
        return []
    seen: dict[str, Any] = {
        str(request["label"]): request
        for step in record.steps
        for request in step.figures.get("requests", ())
        if isinstance(request, dict)
    }
    head = "| request | prompt tokens | expected hits | counted | cached_tokens | first token (s) |"
    lines = ["## Prefix cache, computed before the first request", "", head, "|---|---|---|---|---|---|"]
    for item in record.expectation:
        request = seen.get(str(item["label"]), {})
        got = (request.get(key) for key in ("counted_hit_tokens", "cached_tokens", "first_token_s"))
        told = " | ".join("-" if value is None else str(value) for value in got)
        lines.append(f"| {item['label']} | {item['prompt_tokens']} | {item['hit_tokens']} | {told} |")
    return [*lines, ""]


def _fingerprint(record: Record) -> list[str]:
    values = record.to_json()["fingerprint"]
    lines = ["## Fingerprint", "", "| what | value |", "|---|---|"]
    return [*lines, *(f"| {name} | {_cell(_value(value))} |" for name, value in values.items()), ""]


def _case(suite: ET.Element, step: StepResult, check: Check) -> None:
    classname = f"acceptance.step{step.step}"
    case = ET.SubElement(suite, "testcase", classname=classname, name=_xml(check.name))
    text = _xml(check.sentence())
    if check.state is State.FAIL:
        ET.SubElement(case, "failure", type=str(check.state), message=text).text = _xml(check.evidence)
    elif not check.state.lets_next_layer_run:
        ET.SubElement(case, "error", type=str(check.state), message=text).text = _xml(check.evidence)
    else:
        ET.SubElement(case, "system-out").text = f"{check.state}: {text}"


def _xml(text: str) -> str:
    return text.translate(_UNPRINTABLE)


def _value(value: Any) -> str:
    if value is None:
        return "not observed"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else str(value)


def _cell(text: str) -> str:
    """Return text that cannot break out of a table cell or a list item."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;").split())
