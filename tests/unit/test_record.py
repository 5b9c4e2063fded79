"""The record: the same values give the same bytes, and what is no record is refused."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import data_file
from kimi_runbook.record import SCHEMA_VERSION, Fingerprint, Record, load_record, schema, with_verdict
from tests.unit import records

VALIDATOR = jsonschema.Draft202012Validator(schema())
FILES = sorted(records.FOLDER.glob("*.json"))
OLD = records.FOLDER / "schema1_lab.json"


def record(*steps: StepResult) -> Record:
    return with_verdict(
        Record(
            run_id="20261130T144501Z-0a1b",
            site="lab",
            started=datetime(2026, 11, 30, 14, 45, 1, tzinfo=UTC),
            ended=datetime(2026, 11, 30, 14, 47, 30, tzinfo=UTC),
            planned=(2, 3, 4),
            not_planned=(0, 1, 5, 6),
            simulated=("GPUs",),
            model="moonshotai/Kimi-K3",
            endpoint="http://172.31.240.11:8000",
            fingerprint=Fingerprint(
                image_digest=None,
                engine_version="0.32.0",
                driver=None,
                gpus={"k3-a": {"NVIDIA H200 (stand-in)": 2}},
                interconnect="ethernet",
                parallelism={"tensor": 2},
                nodes=2,
                block_size_tokens=128,
                retention="0",
                prefix_caching=True,
                request_set="sha256:0",
                client="1",
            ),
            expectation=({"label": "second", "prompt_tokens": 323, "hit_tokens": 256},),
            environment={"k3-a": {"VLLM_HOST_IP": "172.31.240.11"}},
            steps=steps or (StepResult.of(2, "short request", [check(State.PASS)], {"total_s": 0.1}),),
        )
    )


def check(state: State, name: str = "chat-answer") -> Check:
    return Check(name=name, state=state, observed="seen", expected="wanted", evidence="here", next_step="Look.")


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    written = record()
    written.write(tmp_path)
    assert load_record(tmp_path) == written
    assert load_record(tmp_path / "record.json") == written


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    text = record().dumps()
    assert text == Record.from_json(json.loads(text)).dumps()
    assert text.endswith("\n")


def test_the_form_others_rely_on() -> None:
    value = record().to_json()
    assert value["schema_version"] == SCHEMA_VERSION == 2
    assert value["verdict"]["name"] == "accept"
    assert value["scope"] == {"planned": [2, 3, 4], "not_planned": [0, 1, 5, 6]}
    assert value["observation"] == "pending"
    assert value["started"] == "2026-11-30T14:45:01Z"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "{",
        *(f'{{"schema_version": {v}}}' for v in (0, 1, 2, 3, '"2"')),
        '{"schema_version": 2, "steps": 3}',
    ],
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunbookError):
        load_record(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"expectation": "x"},
        {"expectation": [1]},
        {"environment": {"k3-a": 1}},
        {"fingerprint": records.endpoint().to_json()["fingerprint"] | {"engine_version": 5}},
    ],
)
def test_a_damaged_record_is_refused_before_a_report_trips_over_it(damage: dict[str, Any]) -> None:
    with pytest.raises(RunbookError, match="does not hold together"):
        Record.from_json(records.endpoint().to_json() | damage)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunbookError, match="no such file"):
        load_record(tmp_path)


def test_a_record_of_a_newer_version_is_refused_by_its_version(tmp_path: Path) -> None:
    newer = record().to_json() | {"schema_version": 3}
    with pytest.raises(RunbookError, match="has schema version 3; expected a record of schema version 1 to 2"):
        Record.from_json(newer)


def test_an_earlier_record_is_read_and_written_as_it_was() -> None:
    """It was captured before the sheet: reading it must neither invent one nor change its bytes."""
    old = load_record(OLD)
    assert (old.schema_version, old.campaign, old.checklist) == (1, (), ())
    assert old.dumps() == OLD.read_text(encoding="utf-8")


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_schema_counts_what_the_data_file_asks_for() -> None:
    fields, properties = data_file("campaign_sheet.yml"), schema()["properties"]
    for key, section in (("campaign", "sheet"), ("checklist", "checklist")):
        count = len(fields.each(section))
        assert (properties[key]["minItems"], properties[key]["maxItems"]) == (count, count)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_record_on_file_fits_the_schema(file: Path) -> None:
    VALIDATOR.validate(json.loads(file.read_text(encoding="utf-8")))
    assert load_record(file).dumps() == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", records.MAKERS)
def test_the_made_records_are_as_made(name: str) -> None:
    """All but the verdict, whose rules have their own tests and may change without these files."""
    made, on_file = records.MAKERS[name](), load_record(records.FOLDER / name)
    assert replace(made, verdict=None) == replace(on_file, verdict=None), "write them again: see the README beside them"
    VALIDATOR.validate(made.to_json())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"observation": "soon"}, id="observation"),
        pytest.param({"started": "2026-11-30 14:45:01"}, id="time"),
        pytest.param({"campaign": []}, id="sheet-empty"),
        pytest.param({"checklist": None}, id="checklist-null"),
        pytest.param({"schema_version": 1}, id="version-1-with-a-sheet"),
        pytest.param({"colour": "red"}, id="unknown-key"),
        pytest.param({"verdict": {"name": "maybe"}}, id="verdict"),
        pytest.param({"fingerprint": {}}, id="fingerprint"),
        pytest.param(
            {"steps": [StepResult.of(4, "concurrency", [], {"ladder": [{"concurrency": "four"}]}).to_json()]},
            id="rung",
        ),
        pytest.param({"steps": [StepResult.not_run(3, "shared prefix", "").to_json()]}, id="not-run-without-why"),
        pytest.param({"steps": [StepResult.of(3, "x", [], {"memory": {"before": 1}}).to_json()]}, id="memory"),
    ],
)
def test_the_schema_refuses_what_is_no_record(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(records.endpoint().to_json() | change)


def test_a_value_json_has_no_place_for_does_not_lose_the_run(tmp_path: Path) -> None:
    odd = {"ratio": float("nan"), "nested": [{"rate": float("inf")}], "said": "half \ud83d a pair"}
    written = record(StepResult.of(3, "shared prefix", [check(State.PASS)], odd))
    read = load_record(written.write(tmp_path))
    assert read.steps[0].figures == {"ratio": None, "nested": [{"rate": None}], "said": "half \ud83d a pair"}
