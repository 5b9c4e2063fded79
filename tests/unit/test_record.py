"""The record: the same values give the same bytes, and what is no record is refused."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.errors import RunbookError
from kimi_runbook.record import Fingerprint, Record, load_record, with_verdict


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
    assert value["schema_version"] == 1
    assert value["verdict"]["name"] == "accept"
    assert value["scope"] == {"planned": [2, 3, 4], "not_planned": [0, 1, 5, 6]}
    assert value["observation"] == "pending"
    assert value["started"] == "2026-11-30T14:45:01Z"


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"schema_version": 2}', '{"schema_version": 1}', "{", '{"schema_version": 1, "steps": 3}']
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunbookError):
        load_record(tmp_path)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunbookError, match="no such file"):
        load_record(tmp_path)
