"""The report: headline, scope, reasons; JUnit that machines can count; the command that writes both again."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from test_record import check, record

from kimi_runbook.acceptance.result import State, StepResult
from kimi_runbook.cli import main
from kimi_runbook.report import headline, junit, markdown, write_reports

PASSED = StepResult.of(2, "short request", [check(State.PASS)], {"chat_total_s": 0.1})
WARNED = StepResult.of(4, "concurrency", [check(State.WARN, "kv-headroom")], {})
FAILED = StepResult.of(3, "shared prefix", [check(State.FAIL, "second.counted-hits")], {})
UNKNOWN = StepResult.of(3, "shared prefix", [check(State.INCONCLUSIVE, "geometry")], {})
NOT_RUN = StepResult.not_run(4, "concurrency", "step 3 (shared prefix) is FAIL: one layer at a time")


def test_the_headline_says_verdict_simulation_and_scope() -> None:
    text = headline(record(PASSED, WARNED))
    assert text.startswith("verdict: accept · advice: extend · simulated GPUs · not planned: 0 host, 1 start")


def test_the_page_has_what_a_signatory_needs() -> None:
    page = markdown(record(PASSED, FAILED, NOT_RUN))
    assert page.startswith("# verdict: tune")
    for part in ("**Simulated: GPUs.**", "## Reasons", "second.counted-hits: seen; expected wanted", "## Signatures"):
        assert part in page
    assert "| 4 | concurrency | NOT_RUN | 0 | step 3 (shared prefix) is FAIL: one layer at a time |" in page
    assert "| second | 323 | 256 | - | - | - |" in page


def test_a_site_without_stand_ins_does_not_mention_them() -> None:
    page = markdown(replace(record(PASSED), simulated=()))
    assert "imulated" not in page


def test_text_of_an_engine_cannot_break_the_page_or_the_xml() -> None:
    nasty = replace(check(State.FAIL), observed="a|b\n# c\x00\x1b<script>`d`")
    broken = record(StepResult.of(2, "short request", [nasty], {}))
    assert "a\\|b # c" in markdown(broken)
    assert "<script>" not in markdown(broken)
    ET.fromstring(junit(broken))  # noqa: S314 - our own text


def test_every_check_is_a_case_and_what_was_not_run_is_an_error() -> None:
    root = ET.fromstring(junit(record(PASSED, FAILED, NOT_RUN)))  # noqa: S314 - our own text
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "1")
    assert [case.get("name") for case in root.iter("testcase")] == ["chat-answer", "second.counted-hits", "step"]
    assert "one layer at a time" in str(root.find(".//error").get("message"))  # type: ignore[union-attr] # there is one
    assert not list(root.iter("skipped"))  # a skipped case reads as fine


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        pytest.param([PASSED], 0, id="accepted"),
        pytest.param([PASSED, FAILED], 1, id="no"),
        pytest.param([PASSED, UNKNOWN], 3, id="inconclusive"),
    ],
)
def test_the_command_writes_both_again_and_exits_by_the_verdict(
    steps: list[StepResult], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = record(*steps)
    one.write(tmp_path)
    write_reports(one, tmp_path)
    first = {name: (tmp_path / name).read_text() for name in ("report.md", "junit.xml")}
    for name in first:
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == code
    assert {name: (tmp_path / name).read_text() for name in first} == first
    assert "verdict: " in capsys.readouterr().out


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is no directory" in capsys.readouterr().err
