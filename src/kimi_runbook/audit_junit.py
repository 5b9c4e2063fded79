"""An audit as JUnit XML: one suite per host, one case per finding, so that a pipeline shows what is in the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree as ET

from kimi_runbook.findings import Finding
from kimi_runbook.judge import Coverage
from kimi_runbook.report.text import clean

_ABOVE_WARN = ("stop", "change")


def audit_junit(findings: Iterable[Finding], coverage: Mapping[str, Coverage]) -> str:
    """Return the XML: a stop or a due change is a failure, a warning passes with its text, an unknown is skipped.

    Args:
        findings: The judge's findings.
        coverage: Host to how much of it was judged; every host of it gets a suite.
    """
    found = tuple(findings)
    root = ET.Element("testsuites", name="audit")
    hosts = dict.fromkeys([*coverage, *(finding.host for finding in found)])
    for host in hosts:
        own = [finding for finding in found if finding.host == host]
        suite = ET.SubElement(root, "testsuite", name=clean(host))
        _cases(suite, host, own, coverage.get(host))
        failures = sum(case.find("failure") is not None for case in suite)
        skipped = sum(case.find("skipped") is not None for case in suite)
        suite.attrib |= {"tests": str(len(suite)), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cases(suite: ET.Element, host: str, findings: Sequence[Finding], coverage: Coverage | None) -> None:
    for finding in findings:
        case = ET.SubElement(suite, "testcase", classname=f"audit.{clean(host)}", name=finding.code)
        text = clean(f"{host}: {finding.observed}; expected {finding.expected} ({finding.source}). {finding.next_step}")
        if finding.severity in _ABOVE_WARN:
            ET.SubElement(case, "failure", type=finding.severity, message=text).text = finding.page
        else:
            ET.SubElement(case, "system-out").text = f"{finding.severity}: {text}"
    if coverage is None or not coverage.seen:
        return
    for name in coverage.unknown:
        case = ET.SubElement(suite, "testcase", classname=f"audit.{clean(host)}", name=name)
        ET.SubElement(case, "skipped", message="the snapshot has no answer")
    if coverage.run and not any(finding.severity in _ABOVE_WARN for finding in findings):
        case = ET.SubElement(suite, "testcase", classname=f"audit.{clean(host)}", name="as locked")
        ET.SubElement(case, "system-out").text = f"{coverage.run} of {coverage.planned} checks had an answer"
