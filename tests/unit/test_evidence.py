"""Evidence is hashed, redacted and says what is missing."""

import hashlib
import json
import subprocess

import node_evidence
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


@pytest.mark.parametrize(
    ("outcome", "text", "reason"),
    [
        pytest.param(
            subprocess.CompletedProcess([], 3, "inactive", ""), "inactive", "", id="stopped-unit-is-an-answer"
        ),
        pytest.param(subprocess.CompletedProcess([], 127, "", "not found"), None, "exit 127: not found", id="failed"),
        pytest.param(FileNotFoundError("nvidia-smi"), None, "nvidia-smi", id="no-such-program"),
        pytest.param(subprocess.TimeoutExpired("x", 5), None, "no answer within 5 s", id="hangs"),
    ],
)
def test_a_part_is_an_answer_or_a_reason(outcome, text, reason):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert node_evidence.ask("part", ["x"], 5, 1000, run) == {"name": "part", "text": text, "reason": reason}


def test_a_long_part_keeps_its_end():
    def run(*_, **__):
        return subprocess.CompletedProcess([], 0, "a" * 50 + "end", "")

    assert (
        node_evidence.ask("log", ["x"], 5, 10, run)["text"] == "[43 characters before this were left out]\naaaaaaaend"
    )
