"""The schema: it takes every lock and template there is, and refuses what the parser refuses, with the same paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from judging import lock_data, spoil
from lock_cases import MANIFEST, full_lock, template
from records import _LOCK as RECORDED_LOCK
from test_lock import REFUSED

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import parse_lock, resolve_lock
from kimi_runbook.lock.schema import check_shape, lock_schema, shape_errors

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted(ROOT.glob("inventories/**/lock.template.yml"))


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(lock_schema())


def test_there_are_templates_to_check() -> None:
    assert {path.parent.name for path in TEMPLATES} >= {"lab", "b300-rdma", "gb300-nvl72"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name)
def test_every_template_has_the_shape(path: Path) -> None:
    check_shape(yaml.safe_load(path.read_text(encoding="utf-8")), str(path), template=True)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name)
def test_every_lock_made_from_one_has_the_shape(path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    check_shape(resolve_lock(data, lambda *_, **__: MANIFEST).lock.to_json(), "lock.yml")


@pytest.mark.parametrize("data", [lock_data(), full_lock(), RECORDED_LOCK], ids=["judging", "full", "records"])
def test_locks_of_other_tests_have_the_shape_and_parse(data: dict[str, Any]) -> None:
    check_shape(data, "lock.yml")
    check_shape(parse_lock(data, "lock.yml").to_json(), "again")


def test_a_template_is_no_lock() -> None:
    check_shape(template(package_version=None, branch=None), "t.yml", template=True)
    with pytest.raises(RunbookError, match=r"t.yml: driver.branch: absent.*image.digest is absent") as caught:
        check_shape(template(package_version=None, branch=None), "t.yml")
    assert "4 more" in caught.value.next_step


@pytest.mark.parametrize(("path", "value", "_message", "shape"), REFUSED)
def test_schema_and_parser_agree(path: str, value: Any, _message: str, shape: bool) -> None:
    data = lock_data()
    spoil(data, path, value)
    found = [error.where for error in shape_errors(data, "lock.yml")]
    if shape:
        assert found and all(where.startswith("lock.yml: " + path.replace("|", ".")) for where in found)
    else:
        assert found == []  # the parser's rules refuse it, or a fact file does


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param(
            "driver|vresion", "1", "lock.yml: driver.vresion: unknown key; expected only activation", id="key"
        ),
        pytest.param(
            "driver|version", 595.84, r"driver.version: 595.84; expected two or three.*\(quote it\)", id="quote"
        ),
        pytest.param("image|manifests|amd64", "x", "image.manifests.amd64: 'x'; expected sha256: and 64", id="digest"),
        pytest.param("toolkit|packages", ["a", 7], r"toolkit.packages\[1\]: 7; expected a package name", id="item"),
        pytest.param("driver|companions", [], "driver.companions: a list; expected package names", id="companions"),
        pytest.param("model", "x", "lock.yml: model: 'x'; expected a mapping", id="mapping"),
    ],
)
def test_messages_name_the_path_and_what_was_expected(path: str, value: Any, message: str) -> None:
    data = lock_data()
    spoil(data, path, value)
    with pytest.raises(RunbookError, match=message):
        check_shape(data, "lock.yml")


@pytest.mark.parametrize("data", [None, [], "text", {}, {"driver": None}])
def test_wrong_shapes_are_errors_and_never_tracebacks(data: object) -> None:
    with pytest.raises(RunbookError):
        check_shape(data, "lock.yml")
    with pytest.raises(RunbookError):
        parse_lock(data, "lock.yml")


def test_all_wrong_keys_are_named_at_once() -> None:
    data = lock_data()
    data["driver"]["version"] = 595.84
    data["image"]["digest"] = "x"
    del data["model"]
    assert [error.where for error in shape_errors(data, "lock.yml")] == [
        "lock.yml: driver.version",
        "lock.yml: image.digest",
        "lock.yml: model",
    ]
