"""Freezing: what is written, what is held back and why, the first exception, and folders that are always whole."""

import hashlib
import json
from pathlib import Path

import pytest

from kimi_runbook.errors import RunbookError
from kimi_runbook.evidence import Part, Pseudonyms, Redactor, freeze, freezing, scan_folder
from kimi_runbook.evidence.exceptions import first_exception


def frozen(folder, *parts):
    result = freeze(folder, parts, Redactor(Pseudonyms(b"k" * 32)))
    return result, json.loads((folder / "manifest.json").read_text())


def test_what_was_kept_is_hashed_and_what_is_missing_has_its_reason(tmp_path):
    result, manifest = frozen(
        tmp_path / "k3-a",
        Part(name="engine.log", text="line"),
        Part(name="nvidia-smi.txt", text=None, reason="no such program"),
        Part(name="pods.yml", text=None, reason="not on this host: kubectl", skipped=True),
    )
    content = (tmp_path / "k3-a/engine.log").read_bytes()
    assert content == b"line\n"
    assert result.kept == ("engine.log",)
    assert manifest["sha256"] == {"engine.log": hashlib.sha256(content).hexdigest()}
    assert manifest["missing"] == {"nvidia-smi.txt": "no such program"}
    assert manifest["skipped"] == {"pods.yml": "not on this host: kubectl"}
    assert manifest["partial"] is True


def test_what_there_is_nothing_to_ask_for_makes_evidence_not_partial(tmp_path):
    _, manifest = frozen(
        tmp_path / "k3-a", Part(name="a.txt", text="x"), Part(name="pods.yml", text=None, reason="none", skipped=True)
    )
    assert manifest["partial"] is False


def test_a_part_that_was_cut_is_labelled_and_its_reason_redacted(tmp_path):
    _, manifest = frozen(
        tmp_path / "k3-a",
        Part(name="a.log", text="x", notes=("exit 1: password=opensesame",)),
        Part(name="b.log", text=None, reason="cannot reach http://bob:opensesame@mirror/"),
    )
    assert manifest["partial"] is True
    assert set(manifest["notes"]) == {"a.log"}
    assert "opensesame" not in json.dumps(manifest)


@pytest.fixture
def blind(monkeypatch):
    """A redaction that sees nothing, so that the scan stands alone."""
    monkeypatch.setattr(Redactor, "redact_all", lambda _, parts: {name: text for name, (text, _) in parts.items()})
    monkeypatch.setattr(Redactor, "redact", lambda _, text, form="text": text)


@pytest.mark.usefixtures("blind")
def test_the_scan_holds_a_part_back_and_names_lines_and_rules_but_no_secret(tmp_path):
    result, manifest = frozen(
        tmp_path / "k3-a",
        Part(name="engine.log", text="fine\npassword=opensesame\nAuthorization: Basic b3BlbjpzZXNhbWU=\n"),
        Part(name="other.txt", text="fine"),
    )
    assert result.kept == ("other.txt",)
    assert not (tmp_path / "k3-a/engine.log").exists()
    reason = manifest["missing"]["engine.log"]
    assert "line 2 (password); line 3 (Authorization header)" in reason
    assert "opensesame" not in json.dumps(manifest)
    assert "b3BlbjpzZXNhbWU=" not in json.dumps(manifest)


@pytest.mark.usefixtures("blind")
def test_a_reason_that_holds_a_secret_keeps_the_manifest_from_giving_reasons(tmp_path):
    _, manifest = frozen(tmp_path / "k3-a", Part(name="a.txt", text=None, reason="exit 1: password=opensesame"))
    assert manifest["missing"] == {"a.txt": "the reason was held back by the secret scan; look at the host"}
    assert scan_folder(tmp_path) == []


def test_a_second_run_replaces_the_folder_whole(tmp_path):
    folder = tmp_path / "k3-a"
    frozen(folder, Part(name="old.txt", text="x"), Part(name="both.txt", text="x"))
    frozen(folder, Part(name="both.txt", text="y"))
    assert sorted(path.name for path in folder.iterdir()) == ["both.txt", "manifest.json"]
    assert (folder / "both.txt").read_text() == "y\n"
    assert [path.name for path in tmp_path.iterdir()] == ["k3-a"]


@pytest.mark.parametrize(
    ("step", "done_before"),
    [
        pytest.param("write_bytes", 0, id="while-writing"),
        pytest.param("rename", 0, id="before-the-swap"),
        pytest.param("rename", 1, id="between-the-renames"),
    ],
)
def test_a_run_that_dies_leaves_the_earlier_evidence_and_the_next_run_finds_it(
    tmp_path, monkeypatch, step, done_before
):
    folder = tmp_path / "k3-a"
    frozen(folder, Part(name="a.txt", text="earlier"))
    real, count = getattr(Path, step), iter(range(100))

    def dying(*arguments):
        if next(count) >= done_before:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Path, step, dying)
    with pytest.raises(KeyboardInterrupt):
        frozen(folder, Part(name="a.txt", text="later"))
    monkeypatch.undo()
    place = folder if folder.exists() else tmp_path / ".k3-a.old"
    assert (place / "a.txt").read_text() == "earlier\n"
    frozen(folder, Part(name="a.txt", text="last"))
    assert [path.name for path in tmp_path.iterdir()] == ["k3-a"]
    assert (folder / "a.txt").read_text() == "last\n"


def test_a_folder_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(freezing, "_replace", full)
    with pytest.raises(RunbookError, match=r"k3-a: evidence cannot be written \(No space left on device\)"):
        freeze(tmp_path / "k3-a", [Part(name="a.txt", text="x")], Redactor(Pseudonyms(b"k" * 32)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"name": "../x", "text": "a"}, "expected a file name", id="path"),
        pytest.param({"name": "manifest.json", "text": "a"}, "expected a file name", id="manifest"),
        pytest.param(
            {"name": "x", "text": "a", "format": "toml"}, "format toml; expected one of text, json", id="format"
        ),
        pytest.param({"text": "a"}, "name", id="no-name"),
    ],
)
def test_a_part_that_is_none_is_refused(row, message):
    with pytest.raises(RunbookError, match=message):
        Part.from_json(row)


def test_two_parts_of_one_name_are_refused(tmp_path):
    with pytest.raises(RunbookError, match=r"a\.txt twice"):
        frozen(tmp_path / "k3-a", Part(name="a.txt", text="x"), Part(name="a.txt", text="y"))


LOG = """\
INFO non-default args: {'port': 1}
ERROR Traceback (most recent call last):
ERROR   File "x.py", line 1, in f
ERROR RuntimeError: first failure
INFO non-default args: {'port': 1}
INFO fine
ERROR torch.OutOfMemoryError: CUDA out of memory.
"""


def test_the_first_exception_of_a_log_is_in_the_manifest_with_its_line(tmp_path):
    _, manifest = frozen(tmp_path / "k3-a", Part(name="engine.log", text=LOG), Part(name="note.txt", text=LOG))
    assert manifest["first_exception"] == {
        "engine.log": {
            "line": 2,
            "text": "ERROR Traceback (most recent call last):",
            "named": "RuntimeError: first failure",
            "last_start": 5,
            "since_start": 7,
        }
    }
    written = (tmp_path / "k3-a/engine.log").read_text().splitlines()
    assert written[6].endswith("CUDA out of memory.")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("fine\nWorkerProc hit an exception.\n", 2, id="fatal-line-of-the-engine"),
        pytest.param("fine\nNVRM: Xid (PCI:0000:1b:00): 79, pid=1", 2, id="xid"),
        pytest.param("terminate called after throwing an instance of 'c10::Error'", 1, id="c++"),
        pytest.param("INFO no errors: 0\nError rate 0.0, exceptions none", None, id="words-alone"),
        pytest.param("", None, id="empty"),
    ],
)
def test_what_counts_as_a_failure(text, line):
    found = first_exception(text)
    assert (found.line if found else None) == line


def test_the_log_of_a_rank_that_lost_its_peer_names_the_exception(project_root):
    text = (project_root / "tests/data/engine_logs/peer_loss_head.log").read_text(encoding="utf-8")
    found = first_exception(text)
    assert found.line == 1
    assert "WorkerProc hit an exception" in found.text
