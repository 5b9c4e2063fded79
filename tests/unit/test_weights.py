"""A model's files: lists in both forms, made and compared, and the command around them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tracemalloc
from pathlib import Path

import pytest

from kimi_runbook import cli
from kimi_runbook.errors import RunbookError
from kimi_runbook.weights import BUFFER_BYTES, compare, files_below, make_manifest, parse_manifest

SUM = hashlib.sha256(b"abc").hexdigest()


def silent(done: int, total: int) -> None:
    """Take the progress and say nothing."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "config.json").write_bytes(b"abc")
    (folder / "sub/model-1.safetensors").write_bytes(b"x" * 1000)
    (folder / ".cache/hidden").write_bytes(b"?")
    (folder / "REVISION").write_bytes(b"v1\n")
    return folder


def test_a_folder_becomes_a_list_and_is_what_the_list_says(model: Path) -> None:
    made = make_manifest(model, "v1", 2, silent)
    assert set(made.files) == {"config.json", "sub/model-1.safetensors"}
    assert (made.files["config.json"].sha256, made.files["config.json"].size) == (SUM, 3)
    again = parse_manifest(json.dumps(made.to_json()), "m.json")
    assert again == made and compare(model, again, 2, silent) == ()


def test_links_to_files_are_followed_and_links_to_folders_are_not(model: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"abc")
    (model / "linked.safetensors").symlink_to(tmp_path / "blob")
    (model / "loop").symlink_to(model)
    assert set(files_below(model)) == {"config.json", "linked.safetensors", "sub/model-1.safetensors"}


def test_every_kind_of_difference_is_named(model: Path) -> None:
    made = make_manifest(model, None, 1, silent)
    (model / "config.json").write_bytes(b"abd")
    (model / "sub/model-1.safetensors").write_bytes(b"x" * 999)
    (model / "new.json").write_bytes(b"")
    text = json.dumps(made.to_json()).replace('"files": {', f'"files": {{"gone.json": {{"sha256": "{SUM}"}}, ')
    found = compare(model, parse_manifest(text, "m"), 2, silent)
    assert [(row.name, row.kind) for row in found] == [
        ("config.json", "content"),
        ("gone.json", "missing"),
        ("new.json", "extra"),
        ("sub/model-1.safetensors", "size"),
    ]
    assert str(found[3]) == "sub/model-1.safetensors: 999 bytes, expected 1000 bytes"


def test_a_file_that_vanishes_while_it_is_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_manifest(model, None, 1, silent)

    def failing(path: Path, advance: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kimi_runbook.weights._sha256", failing)
    assert {row.kind for row in compare(model, made, 2, silent)} == {"unreadable"}
    with pytest.raises(RunbookError, match="Input/output error; expected a file that can be read to its end"):
        make_manifest(model, None, 1, silent)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(64 << 20)  # sparse
    tracemalloc.start()
    make_manifest(tmp_path, None, 1, silent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_cancelled_reading_ends_at_once(tmp_path: Path) -> None:
    with (tmp_path / "endless.bin").open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no room and would take minutes

    def interrupted(done: int, total: int) -> None:
        if done == BUFFER_BYTES:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make_manifest(tmp_path, None, 1, interrupted)


def test_what_sha256sum_prints_is_a_list() -> None:
    listed = parse_manifest(f"# of v1\n{SUM}  ./config.json\n{SUM} *model.safetensors\r\n\n", "SHA256SUMS")
    assert {name: file.size for name, file in listed.files.items()} == {"config.json": None, "model.safetensors": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "no file listed", id="empty"),
        pytest.param("hello\n", "m:1: 'hello'; expected <64", id="no-sum"),
        pytest.param(f"{SUM}  ../../etc/passwd\n", "a path below the folder", id="leaves-the-folder"),
        pytest.param(f"{SUM}  /etc/passwd\n", "a path below the folder", id="absolute"),
        pytest.param(f"{SUM}  .kimi-proved.json\n", "without hidden parts", id="hidden"),
        pytest.param(f"{SUM}  a\n{'0' * 64}  a\n", "a second time with another sum", id="twice"),
        pytest.param('{"schema_version": 9, "files": {}}', "schema_version: 9", id="other-schema"),
        pytest.param('{"schema_version": 1, "files": {"a": {"sha256": "x"}}}', "64 hexadecimal", id="short-sum"),
        pytest.param(
            f'{{"schema_version": 1, "files": {{"a": {{"sha256": "{SUM}", "size": -1}}}}}}', "bytes, 0", id="size"
        ),
        pytest.param('{"schema_version": 1}', "files", id="no-files"),
        pytest.param("{", "m:1:2", id="half-json"),
    ],
)
def test_lists_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        parse_manifest(text, "m")


def test_the_digest_follows_names_and_contents_and_nothing_else() -> None:
    one = parse_manifest(f"{SUM}  a\n{'1' * 64}  b\n", "m")
    same = parse_manifest(f"{'1' * 64}  ./b\n{SUM}  a\n", "m")
    assert one.digest() == same.digest() != parse_manifest(f"{SUM}  a\n", "m").digest()


def test_the_command_makes_and_verifies(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", "manifest", str(model), "--revision", "v1"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["revision"] == "v1" and "of 0.0 GB" in told.err
    (tmp_path / "list.json").write_text(told.out, encoding="utf-8")
    assert cli.main(["weights", "verify", str(model), "--manifest", str(tmp_path / "list.json"), "--quiet"]) == 0
    told = capsys.readouterr()
    assert told.out.endswith("2 files listed, 0 differences\n") and told.err == ""
    (model / "config.json").write_bytes(b"abX")
    assert cli.main(["weights", "verify", str(model), "--manifest", str(tmp_path / "list.json"), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["same"] is False and answer["differences"][0]["kind"] == "content"


def test_the_command_reads_the_list_beside_the_files(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", "verify", str(model)]) == 2
    assert "no list of checksums beside the files" in capsys.readouterr().err
    assert cli.main(["weights", "manifest", str(model), "--sha256sum", "--quiet"]) == 0
    (model / "SHA256SUMS").write_text(capsys.readouterr().out, encoding="utf-8")
    assert cli.main(["weights", "verify", str(model)]) == 0
    (model / "extra.bin").write_bytes(b"")
    assert cli.main(["weights", "verify", str(model)]) == 1
    assert cli.main(["weights", "verify", str(model), "--allow-extra"]) == 0


def test_the_command_says_when_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", "manifest", str(tmp_path / "absent")]) == 2
    assert "No such file or directory; expected a readable folder" in capsys.readouterr().err
    assert cli.main(["weights", "manifest", str(tmp_path)]) == 2
    with pytest.raises(SystemExit, match="2"):
        cli.main(["weights", "manifest", str(tmp_path), "--workers", "0"])
