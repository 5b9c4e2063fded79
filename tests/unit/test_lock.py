"""The lock: what is accepted, and each refusal down to its place and words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from judging import lock_data, spoil

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import load_lock, parse_lock, resolve_lock
from kimi_runbook.registry import Manifest

MANIFEST = Manifest(
    digest="sha256:" + "d" * 64,
    media_type="application/vnd.oci.image.index.v1+json",
    manifests={"amd64": "sha256:" + "e" * 64, "arm64": "sha256:" + "f" * 64},
    sizes={"amd64": 10, "arm64": 20},
)


def template() -> dict[str, Any]:
    data = lock_data()
    for key in ("digest", "manifests", "size_bytes"):
        del data["image"][key]
    return data


def test_round_trip_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "lock.yml"
    path.write_text(yaml.safe_dump(lock_data()), encoding="utf-8")
    lock = load_lock(path)
    assert lock.to_json() == lock_data()
    assert parse_lock(lock.to_json(), "again") == lock
    assert lock.image.reference.endswith("@" + lock.image.digest)
    data = lock_data()
    assert parse_lock(dict(reversed(data.items())), "other order").digest() == lock.digest()
    data["model"]["revision"] = "def"
    assert parse_lock(data, "other model").digest() != lock.digest()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param("schema_version", 2, "schema_version: 2; expected 1", id="schema"),
        pytest.param("extra", 1, "unknown key extra; expected only container_runtime", id="unknown-key"),
        pytest.param("platform", "tpu-v9", "tpu-v9; expected hardware known here: h100", id="unknown-hardware"),
        pytest.param("driver|vresion", "1", "driver: unknown key vresion", id="unknown-nested-key"),
        pytest.param("driver|version", 595.84, r"version: 595.84; expected a string \(quote it\)", id="unquoted"),
        pytest.param("driver|version", "latest", "driver: version: latest; expected one exact version", id="latest"),
        pytest.param("image|tag", "Latest", "image: tag: Latest; expected one exact", id="latest-tag"),
        pytest.param("image|repository", "r.example/x:latest", "expected one exact", id="latest-in-reference"),
        pytest.param("driver|version", "580", "two or three numbers", id="version-grammar"),
        pytest.param("driver|branch", "595", "expected the branch of version 580.178.04", id="branch-and-version"),
        pytest.param("driver|package_version", "580.167.08-1", "expected a build of 580.178.04", id="package"),
        pytest.param("driver|flavour", "proprietary", "flavour: proprietary; expected open", id="flavour"),
        pytest.param("driver|activation", "hope", "expected reboot or reload", id="activation"),
        pytest.param("image|digest", "sha256:123", "64 hexadecimal digits", id="digest"),
        pytest.param("image|manifests", {"amd64": "x"}, "manifests: amd64: x", id="manifest-digest"),
        pytest.param("image|manifests", {}, "no architecture", id="no-manifests"),
        pytest.param("image|repository", "r.example/x:v1", "without tag or digest", id="tag-in-repository"),
        pytest.param("image|size_bytes", 0, "size of the image", id="size"),
        pytest.param("image|engine|name", "sglang", "expected vllm", id="engine"),
        pytest.param("image|cuda", "14.0", "image of a CUDA version known here", id="cuda-unknown"),
        pytest.param("toolkit|packages", [], "no package", id="toolkit"),
        pytest.param("model", None, "model: nothing; expected a mapping", id="no-model"),
    ],
)
def test_refused(path: str, value: Any, message: str) -> None:
    data = lock_data()
    spoil(data, path, value)
    with pytest.raises(RunbookError, match=message) as caught:
        parse_lock(data, "lock.yml")
    assert caught.value.where.startswith("lock.yml")
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("version", "cuda", "feature", "message"),
    [
        ("580.178.04", "13.0", False, None),
        ("595.91.07", "13.0", False, None),
        ("620.70.06", "13.5", False, None),
        ("595.84", "13.0", False, None),
        ("570.133.20", "13.0", False, "branch 580 or newer, as CUDA 13 needs"),
        ("570.133.20", "12.9", False, None),
        ("570.133.20", None, False, None),
        ("590.48.01", "13.0", False, "short-lived feature branch"),
        ("610.57.04", "13.0", False, "short-lived feature branch"),
        ("615.71.10", "13.0", False, "short-lived feature branch"),
        ("610.57.04", "13.0", True, None),
    ],
)
def test_driver_branches(version: str, cuda: str | None, feature: bool, message: str | None) -> None:
    data = lock_data()
    data["driver"] |= {
        "branch": version.split(".", maxsplit=1)[0],
        "version": version,
        "package_version": f"{version}-1",
        "allow_feature_branch": feature,
    }
    data["image"]["cuda"] = cuda
    if message is None:
        assert parse_lock(data, "lock.yml").driver.version == version
    else:
        with pytest.raises(RunbookError, match=message):
            parse_lock(data, "lock.yml")


def test_without_a_cuda_version_the_images_own_counts() -> None:
    data = lock_data()
    del data["image"]["cuda"]
    assert parse_lock(data, "lock.yml").image.cuda == "13"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        pytest.param("a: 1\nb: [1, 2\nc: 3\n", "lock.yml:3:2", "expected ',' or ']'", id="syntax"),
        pytest.param("a: 1\n\ta: 2\n", "lock.yml:2:1", "cannot start any token", id="tab"),
        pytest.param("driver: 1\nmodel: 2\ndriver: 3\n", "lock.yml:3:1", "'driver' occurs twice", id="duplicate"),
        pytest.param("", "lock.yml", "nothing; expected a mapping", id="empty"),
        pytest.param("- 1\n", "lock.yml", "a list; expected a mapping", id="list"),
    ],
)
def test_malformed_file(tmp_path: Path, text: str, where: str, message: str) -> None:
    path = tmp_path / "lock.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunbookError) as caught:
        load_lock(path)
    assert caught.value.where.startswith(f"{tmp_path}/{where}")
    assert message in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RunbookError, match=r"no such file; expected a lock file.*lock resolve"):
        load_lock(tmp_path / "absent.yml")


def test_resolve_fills_in_what_the_registry_says() -> None:
    asked: list[tuple[str, str, bool]] = []

    def fetch(repository: str, reference: str, *, insecure: bool) -> Manifest:
        asked.append((repository, reference, insecure))
        return MANIFEST

    resolved = resolve_lock(template(), fetch)
    assert asked == [("registry.example:5000/vllm/vllm-openai", "v0.32.0", False)]
    assert resolved["image"]["digest"] == MANIFEST.digest
    assert resolved["image"]["manifests"] == MANIFEST.manifests
    assert resolved["image"]["size_bytes"] == 20  # the largest architecture
    assert parse_lock(resolved, "resolved").to_json() == resolved


def test_resolve_again_notices_a_moved_tag() -> None:
    with pytest.raises(RunbookError, match=r"digest: .* resolves to sha256:ddd.*The tag has moved"):
        resolve_lock(lock_data(), lambda *_, **__: MANIFEST)


def test_resolve_asks_no_registry_for_latest() -> None:
    data = template()
    data["image"]["tag"] = "latest"
    with pytest.raises(RunbookError, match="expected one exact version"):
        resolve_lock(data, lambda *_, **__: pytest.fail("the registry was asked"))


def test_the_labs_template_resolves(project_root: Path) -> None:
    data = yaml.safe_load((project_root / "inventories/lab/lock.template.yml").read_text(encoding="utf-8"))
    lock = parse_lock(resolve_lock(data, lambda *_, **__: MANIFEST), "lab")
    assert lock.image.insecure and lock.image.cuda is None
    assert len(lock.toolkit.packages) == 4
