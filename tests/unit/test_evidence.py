"""Evidence is hashed, redacted and says what is missing."""

import hashlib
import json

import pytest

from kimi_runbook import evidence


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        pytest.param("HF_TOKEN=hf_abcdefghijklmnopqrstuv", "hf_abc", id="env"),
        pytest.param('"VLLM_API_KEY": "sesame-42"', "sesame-42", id="json"),
        pytest.param("Authorization: Bearer abc.def", "abc.def", id="header"),
        pytest.param("pull http://bob:hunter2@mirror.example/x", "hunter2", id="url"),
        pytest.param("token sk-abcdefghijklmnopqrstuvwx in a log", "sk-abc", id="bare"),
    ],
)
def test_redact_blots_out_secrets(text, secret):
    assert secret not in evidence.redact(text)
    assert "[redacted]" in evidence.redact(text)


def test_redact_leaves_ordinary_lines_alone():
    line = "Avg prompt throughput: 12.0 tokens/s, NCCL_SOCKET_IFNAME==eth0, Prefix cache hit rate: 50.0%"
    assert evidence.redact(line) == line


def test_freeze_hashes_what_it_kept_and_names_what_it_did_not(tmp_path):
    parts = [
        {"name": "engine.log", "text": "line", "reason": ""},
        {"name": "nvidia-smi.txt", "text": None, "reason": "no such file"},
    ]
    kept, missing = evidence.freeze(tmp_path / "k3-a", parts)
    manifest = json.loads((tmp_path / "k3-a/manifest.json").read_text())
    assert (kept, missing) == (["engine.log"], ["nvidia-smi.txt"])
    assert manifest["sha256"]["engine.log"] == hashlib.sha256((tmp_path / "k3-a/engine.log").read_bytes()).hexdigest()
    assert manifest["partial"] is True
    assert manifest["missing"] == {"nvidia-smi.txt": "no such file"}


def test_parts_take_a_stopped_unit_for_an_answer():
    results = [
        {"item": {"name": "unit.txt"}, "rc": 3, "stdout": "inactive"},
        {"item": {"name": "x.txt"}, "rc": 127, "stdout": "", "stderr": "not found"},
        {"item": {"name": "y.txt"}, "msg": "no such program", "rc": 2, "stdout": ""},
    ]
    assert [part["text"] for part in evidence.parts_from_results(results)] == ["inactive", None, None]
    assert evidence.parts_from_results(results)[1]["reason"] == "not found"
