"""``kimi-runbook lock``: what it writes, prints and returns, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from judging import DIGEST
from lock_cases import DATA, MANIFEST, digest, full_lock, image_index, image_manifest, template
from yamllint import linter
from yamllint.config import YamlLintConfig

from kimi_runbook import cli
from kimi_runbook.commands import lock as lock_command
from kimi_runbook.lock import load_lock
from kimi_runbook.registry import Manifest


def written(path: Path, data: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return str(path)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers with MANIFEST; collects whether it was asked over plain HTTP."""
    asked: list[bool] = []

    def fetch(_repository: str, _reference: str, *, insecure: bool) -> Manifest:
        asked.append(insecure)
        return MANIFEST

    monkeypatch.setattr(lock_command, "fetch_manifest", fetch)
    return asked


def test_resolve_writes_a_lock_that_loads(
    tmp_path: Path, registry: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "lock.yml"
    arguments = ["lock", "resolve", "--template", written(tmp_path / "t.yml", template()), "--out", str(out)]
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--insecure"]) == 0
    assert registry == [False, True]
    capsys.readouterr()
    assert cli.main(["lock", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["image"]["digest"] == MANIFEST.digest and shown["image"]["insecure"] is True
    assert shown["warnings"] == [] and shown["left_open"] == ["os", "kernel", "container_runtime.version"]
    assert [path.name for path in out.parent.iterdir()] == ["lock.yml"]


def test_resolve_needs_no_network_with_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_command, "fetch_manifest", lambda *_, **__: pytest.fail("the registry was asked"))
    manifests = {name: image_manifest(name, size)[0] for name, size in (("amd64", 11), ("arm64", 12))}
    index = image_index(manifests)
    arguments: list[str] = []
    for name, content in (("index.json", index), *((f"{name}.json", content) for name, content in manifests.items())):
        (tmp_path / name).write_bytes(content)
        arguments += ["--image-manifest", str(tmp_path / name)]
    companions = {"nvidia-fabricmanager": None, "nvlsm": None}
    wanted = template(package_version=None, branch=None, companions=companions) | {"os": "debian 12"}
    wanted["image"]["tag"] = "kimi-k3"
    wanted["image"]["digest"] = digest(index)
    out = tmp_path / "lock.yml"
    arguments += ["--template", written(tmp_path / "t.yml", wanted), "--out", str(out), "--json"]
    arguments += ["--driver-json", str(DATA / "redistrib_580.178.04.json")]
    arguments += ["--releases-json", str(DATA / "releases.json")]
    assert cli.main(["lock", "resolve", *arguments]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["driver"]["companions"]["nvlsm"] == "2025.10.14-1"
    assert "note: driver.package_version: 580.178.04-1 is derived" in said.err
    assert "warning: image.tag: kimi-k3 is pushed again" in said.err
    lock = load_lock(out)
    assert lock.image.digest == digest(index) and lock.image.size_bytes == 12
    text = out.read_text(encoding="utf-8")
    assert f"# From index.json ({digest(index)})\n" in text and "# driver.package_version: 580.178.04-1 is" in text


def test_a_written_lock_passes_the_projects_yamllint(
    tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = full_lock()
    image = data["image"]
    manifest = Manifest(
        digest=image["digest"],
        media_type=MANIFEST.media_type,
        manifests=image["manifests"],
        sizes={"amd64": image["size_bytes"]},
    )
    monkeypatch.setattr(lock_command, "fetch_manifest", lambda *_, **__: manifest)
    out = tmp_path / "written.yml"
    assert cli.main(["lock", "resolve", "--template", written(tmp_path / "t.yml", data), "--out", str(out)]) == 0
    config = YamlLintConfig(file=str(project_root / ".yamllint"))
    text = out.read_text(encoding="utf-8")
    assert [str(problem) for problem in linter.run(text, config)] == []
    assert "  packages:\n    - nvidia-container-toolkit\n" in text
    assert load_lock(out).to_json() == data


def test_resolve_leaves_nothing_when_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = full_lock()
    data["image"]["repository"] = "127.0.0.1:1/x"
    out = tmp_path / "out.yml"
    arguments = ["--template", written(tmp_path / "t.yml", data), "--out", str(out), "--insecure"]
    assert cli.main(["lock", "resolve", *arguments]) == 2
    assert "registry unreachable" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--driver-json", b"{", "bad.json:1:2"),
        ("--driver-json", b"[" * 100_000, "bad.json: cannot be parsed (RecursionError)"),
        ("--releases-json", b"1" * 5000, "bad.json: cannot be parsed (ValueError)"),
        ("--image-manifest", b"[" * 100_000, "cannot be parsed (RecursionError)"),
        ("--driver-json", b"[]", "bad.json: a list; expected a mapping"),
        ("--driver-json", b"{}", "bad.json: nvidia_driver.version: absent"),
        ("--releases-json", b"\xff\xfe", "bad.json:1:1"),
        ("--releases-json", b'{"580": 1}', "bad.json: 580: 1; expected a mapping"),
        ("--image-manifest", b'{"fsLayers": []}', "schema 1, which no current client writes"),
        ("--image-manifest", b'{"manifests": []}\n', "ends in a newline"),
        ("--image-manifest", b" " * (16 * 1024 * 1024 + 1), "more than 16777216 bytes"),
        ("--image-manifest", None, "no such file|cannot be read"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_bad_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: Any, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_bytes(content)
    arguments = ["--template", written(tmp_path / "t.yml", template()), "--out", str(tmp_path / "out.yml")]
    assert cli.main(["lock", "resolve", *arguments, option, str(tmp_path / "bad.json")]) == 2
    said = capsys.readouterr().err
    assert any(part in said for part in message.split("|")) and "bad.json" in said
    assert not (tmp_path / "out.yml").exists()


def test_show_lists_every_field_and_what_to_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = full_lock()
    data["model"]["revision"] = "main"
    assert cli.main(["lock", "show", written(tmp_path / "lock.yml", data)]) == 0
    said = capsys.readouterr().out
    assert "driver.version: 580.178.04\n" in said
    assert "driver.companions.nvidia-fabricmanager: 580.178.04-1\n" in said
    assert "kernel: -\n" in said
    assert "left open, so that anything on a host is accepted: os, kernel, container_runtime.version\n" in said
    assert "warning: model.revision: main is a branch" in said


def test_show_names_every_wrong_key_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = template()
    data["driver"]["version"] = 595.84
    assert cli.main(["lock", "show", written(tmp_path / "lock.yml", data)]) == 2
    said = capsys.readouterr().err
    assert "lock.yml: driver.version: 595.84; expected two or three numbers" in said
    assert "3 more: image.digest is absent; image.manifests is absent; image.size_bytes is absent." in said


def other_lock() -> dict[str, Any]:
    data = full_lock()
    companions = {"nvidia-fabricmanager": "580.167.08-1", "nvlsm": "2025.06.6-1"}
    data["driver"] |= {"version": "580.167.08", "package_version": "580.167.08-1", "companions": companions}
    data["kernel"] = "6.1.0-30-amd64"
    data["image"]["digest"] = "sha256:" + "c" * 64
    return data


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = written(tmp_path / "a.yml", full_lock()), written(tmp_path / "b.yml", other_lock())
    assert cli.main(["lock", "diff", before, before]) == 0
    assert capsys.readouterr().out == "the locks are the same\n"
    assert cli.main(["lock", "diff", before, after]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "kernel: - -> 6.1.0-30-amd64 (added)",
        "driver.version: 580.178.04 -> 580.167.08 (older)",
        "driver.package_version: 580.178.04-1 -> 580.167.08-1 (older)",
        "driver.companions.nvidia-fabricmanager: 580.178.04-1 -> 580.167.08-1 (older)",
        "driver.companions.nvlsm: - -> 2025.06.6-1 (added)",
    ]
    assert lines[5] == f"image.digest: {DIGEST} -> sha256:{'c' * 64} (changed)"
    assert [line.split(": ")[0] for line in lines[6:]] == ["means for kernel", "means for driver", "means for image"]


def test_diff_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = written(tmp_path / "a.yml", full_lock()), written(tmp_path / "b.yml", other_lock())
    assert cli.main(["lock", "diff", after, before, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    directions = {change["field"]: change["direction"] for change in answer["changes"]}
    assert directions["kernel"] == "removed" and directions["driver.version"] == "newer"
    assert directions["driver.companions.nvlsm"] == "removed"
    assert answer["same"] is False and answer["before"]["digest"] == load_lock(after).digest()
    assert len(answer["means"]) == 3
    assert cli.main(["lock", "diff", before, before, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == []


def test_diff_of_an_unusable_lock_is_neither_same_nor_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path / "a.yml", full_lock())
    assert cli.main(["lock", "diff", good, str(tmp_path / "absent.yml")]) == 2
    assert "no such file; expected a lock file" in capsys.readouterr().err
    broken = full_lock()
    broken["driver"]["branch"] = "595"
    assert cli.main(["lock", "diff", good, written(tmp_path / "b.yml", broken)]) == 2
    assert "b.yml: driver.branch: 595; expected the branch of version 580.178.04" in capsys.readouterr().err
