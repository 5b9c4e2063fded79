"""junit.xml: the same checks for machines. Pure."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.record import Record
from kimi_runbook.report.text import clean


def junit(record: Record) -> str:
    """Return junit.xml: one suite per step, one case per check; what was not looked at is an error, never a pass."""
    root = ET.Element("testsuites", name="acceptance")
    for step in record.steps:
        suite = ET.SubElement(root, "testsuite", name=f"step {step.step} {clean(step.name)}")
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


def _case(suite: ET.Element, step: StepResult, check: Check) -> None:
    classname = f"acceptance.step{step.step}"
    case = ET.SubElement(suite, "testcase", classname=classname, name=clean(check.name))
    text = clean(check.sentence())
    if check.state is State.FAIL:
        ET.SubElement(case, "failure", type=str(check.state), message=text).text = clean(check.evidence)
    elif not check.state.lets_next_layer_run:
        ET.SubElement(case, "error", type=str(check.state), message=text).text = clean(check.evidence)
    else:
        ET.SubElement(case, "system-out").text = f"{check.state}: {text}"
