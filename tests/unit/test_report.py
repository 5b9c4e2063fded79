"""The report's plain forms: headline, Markdown, JUnit, Prometheus text, and the command that writes all again."""

import errno
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_record import check, record

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.cli import main
from kimi_runbook.errors import RunbookError
from kimi_runbook.record import Record, load_record
from kimi_runbook.report import FORMS, HTML, headline, junit, markdown, older, prometheus, regenerate, write_reports
from kimi_runbook.report.text import clean, clipped, rounded
from tests.unit import records
from tests.unit.hostile import EVIL, hostile

PASSED = StepResult.of(2, "short request", [check(State.PASS)], {"chat_total_s": 0.1})
WARNED = StepResult.of(4, "concurrency", [check(State.WARN, "kv-headroom")], {})
FAILED = StepResult.of(3, "shared prefix", [check(State.FAIL, "second.counted-hits")], {})
UNKNOWN = StepResult.of(3, "shared prefix", [check(State.INCONCLUSIVE, "geometry")], {})
NOT_RUN = StepResult.not_run(4, "concurrency", "step 3 (shared prefix) is FAIL: one layer at a time")
OLD = records.FOLDER / "schema1_lab.json"
EVERY = [*records.MAKERS.values(), hostile, lambda: load_record(OLD)]
EVERY_ID = [*(name.removesuffix(".json") for name in records.MAKERS), "hostile", "schema-1"]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(record: Record) -> Series:
    """Return every sample of metrics.prom by name and labels, the ones all series carry left out."""
    found: Series = {}
    for family in text_string_to_metric_families(prometheus(record)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("site") == clean(record.site)
            assert labels.pop("model") == clean(record.model)
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(found: Series, name: str, /, **labels: str) -> float | None:
    return found.get((f"kimi_runbook_{name}", frozenset(labels.items())))


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


@pytest.mark.parametrize("make", EVERY, ids=EVERY_ID)
def test_every_form_can_be_made_of_every_record(make: Callable[[], Record]) -> None:
    made = make()
    for name, form in FORMS.items():
        text = form(made)
        assert text.endswith("\n"), name
        assert text == form(made), f"{name} is not the same twice"
        text.encode("utf-8")


def test_hostile_text_stays_text_in_markdown() -> None:
    page = markdown(hostile())
    assert "<script" not in page
    assert "<img" not in page
    assert not re.search(r"(?<!\\)\[link\]\(", page)  # neither a link nor an image that a viewer would fetch
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        rows = [len(re.split(r"(?<!\\)(?:\\\\)*\|", line)) for line in table.splitlines()]
        assert len(rows) > 2
        assert len(set(rows)) == 1, table[:500]  # no text makes a cell of its own
    assert clean(page) == page


def test_hostile_text_stays_text_in_junit() -> None:
    root = ET.fromstring(junit(hostile()))  # noqa: S314 - our own text
    names = [case.get("name") for case in root.iter("testcase")]
    assert any(name and "<script" in name for name in names)
    assert {element.tag for element in root.iter()} == {"testsuites", "testsuite", "testcase", "failure", "system-out"}


def test_the_page_has_sheet_and_checklist() -> None:
    page = markdown(records.accepted())
    assert "| Image and vLLM version | image | mirror.example:5000/vllm/vllm-openai:v0.33.0@sha256:5f" in page
    assert "|  | vLLM | 0.33.0 | GET /version |" in page
    assert "| revision | not observed | the lock says 9c1f4e7; no step compares the weights |" in page
    assert len(re.findall(r"^- \[x\] .*\*\*ticked\*\*", page, re.M)) == 4
    assert len(re.findall(r"^- \[ \] .*\*\*(open|not measured)\*\*", page, re.M)) == 6


def test_rows_of_figures_are_tables_and_no_cells() -> None:
    page = markdown(records.accepted())
    assert "| ladder | 8 rows, see record.json |" in page
    assert "| 32 | 128/128 | 2221.5 | 0.464 |" in page
    assert max(map(len, page.splitlines())) < 1000


def test_an_earlier_record_says_what_it_lacks_and_invents_nothing(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(OLD.read_bytes())
    made = regenerate(tmp_path)
    assert "schema version 1, from before the campaign sheet" in older(made)
    assert older(records.accepted()) == ""
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "This record is of schema version 1" in text
        assert "not observed" not in text.split("Fingerprint")[0]
    assert "## Campaign sheet" not in markdown(made)
    assert (tmp_path / "record.json").read_bytes() == OLD.read_bytes()


def test_states_are_sets_of_which_one_holds() -> None:
    found = series(records.rejected())
    verdicts = {v: value(found, "verdict", verdict=v) for v in ("accept", "fix_environment", "tune", "inconclusive")}
    assert verdicts == {"accept": 0, "fix_environment": 1, "tune": 0, "inconclusive": 0}
    states = {
        state: value(found, "step_state", step="3", name="shared prefix", state=state)
        for state in ("PASS", "WARN", "FAIL", "NOT_RUN", "INCONCLUSIVE")
    }
    assert states == {"PASS": 0, "WARN": 0, "FAIL": 0, "NOT_RUN": 1, "INCONCLUSIVE": 0}
    assert value(found, "observation", observation="pending") == 1
    assert value(found, "step_planned", step="6", name="observation") == 0
    assert value(found, "step_state", step="6", name="observation", state="NOT_RUN") is None
    assert value(found, "step_checks", step="2", name="short request", state="FAIL") == 1


def test_figures_are_samples_in_base_units() -> None:
    found = series(records.accepted())
    assert value(found, "prefix_expected_hit_tokens") == value(found, "prefix_counted_hit_tokens") == 10_624
    assert value(found, "ttft_seconds", concurrency="32", quantile="0.5") == 0.464
    assert value(found, "tpot_seconds", concurrency="1", quantile="0.99") == 0.0133
    assert value(found, "kv_cache_usage_peak_ratio", concurrency="64") == 0.9344
    assert value(found, "client_lag_seconds", concurrency="8", quantile="0.99") == 0.00068
    assert value(found, "requests", concurrency="64", outcome="failed") == 0
    assert value(found, "concurrency", kind="knee") == 48
    assert value(found, "run_start_timestamp_seconds") == records.STARTED.timestamp()
    assert value(found, "gpu_memory_used_peak_bytes", host="k3-02", gpu="0") == 246_945 * 1024**2
    assert value(found, "start_phase_seconds", host="k3-01", phase="ready") == 1012.4
    assert value(found, "peer_loss_noticed_seconds") == 11.8
    assert value(found, "checklist_boxes", state="ticked") == 4


def test_what_was_not_observed_has_no_sample() -> None:
    found = series(records.endpoint())
    names = {name.removeprefix("kimi_runbook_") for name, _ in found}
    assert "ttft_seconds" in names
    assert not names & {"gpu_memory_used_peak_bytes", "start_phase_seconds", "peer_loss_noticed_seconds"}
    lost = replace(
        records.accepted(),
        steps=(
            StepResult.of(4, "concurrency", [], {"ladder": [{"concurrency": 4, "ttft_s": {"p50": 1, "p99": None}}]}),
        ),
    )
    found = series(lost)
    assert value(found, "ttft_seconds", concurrency="4", quantile="0.5") == 1
    assert value(found, "ttft_seconds", concurrency="4", quantile="0.99") is None
    assert value(found, "preemptions", concurrency="4") is None


def test_every_family_has_its_help_type_and_prefix() -> None:
    for make in EVERY:
        for family in text_string_to_metric_families(prometheus(make())):
            assert family.name.startswith("kimi_runbook_")
            assert family.documentation
            assert family.type == "gauge"
            assert family.samples


def test_labels_hold_any_text() -> None:
    found = series(replace(record(), simulated=(EVIL,)))
    assert value(found, "simulated", what=clean(EVIL)) == 1


@pytest.mark.parametrize(
    ("text", "most", "cut"),
    [
        ("short", 10, "short"),
        ("  two\n words ", 10, "two words"),
        ("one two three", 9, "one two…"),
        ("x" * 20, 10, "x" * 9 + "…"),
        ("", 5, ""),
    ],
)
def test_a_text_is_cut_at_a_word(text: str, most: int, cut: str) -> None:
    assert clipped(text, most) == cut
    assert len(cut) <= most


@pytest.mark.parametrize(
    ("number", "text"), [(None, "-"), (0, "0"), (0.1239, "0.124"), (12.0, "12"), (0.0004, "0.000")]
)
def test_numbers_are_told(number: float | None, text: str) -> None:
    assert rounded(number) == text


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        pytest.param([PASSED], 0, id="accepted"),
        pytest.param([PASSED, FAILED], 1, id="no"),
        pytest.param([PASSED, UNKNOWN], 3, id="inconclusive"),
    ],
)
def test_the_command_writes_all_again_and_exits_by_the_verdict(
    steps: list[StepResult], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = record(*steps)
    one.write(tmp_path)
    write_reports(one, tmp_path)
    first = {name: (tmp_path / name).read_text() for name in FORMS}
    for name in first:
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == code
    assert {name: (tmp_path / name).read_text() for name in first} == first
    told = capsys.readouterr().out
    assert "verdict: " in told
    assert all(str(tmp_path / name) in told for name in ("report.html", "report.md", "junit.xml", "metrics.prom"))


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_a_run_may_be_named_by_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(PASSED).write(tmp_path)
    assert main(["report", str(tmp_path / "record.json")]) == 0
    assert f"{tmp_path / 'report.html'}\n" in capsys.readouterr().out


def test_a_run_that_only_audited_says_how_to_accept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "findings.json").write_text("[]", encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "no acceptance was run here, only an audit (findings.json)" in told
    assert "playbooks/accept.yml" in told and "kimi-runbook accept --endpoint URL" in told


def test_a_no_says_what_to_mend_before_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(name="metrics", state=State.FAIL, observed="HTTP 500", expected="HTTP 200", next_step="Read the log.")
    record(StepResult.of(3, "shared prefix", [check], {})).write(tmp_path)
    main(["report", str(tmp_path)])
    mend, command = capsys.readouterr().out.splitlines()[-2:]
    assert mend == "next: Read the log."
    assert command.startswith("then: ansible-playbook ")


def test_a_disk_that_takes_no_report_is_told_and_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: Any) -> None:
    write_reports(record(), tmp_path)
    before = (tmp_path / HTML).read_text(encoding="utf-8")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunbookError, match=r"No space left on device.*kimi-runbook report"):
        write_reports(record(), tmp_path)
    assert (tmp_path / HTML).read_text(encoding="utf-8") == before
    assert not list(tmp_path.glob(".*"))
