"""The lock: what is accepted, and each refusal down to the path of its key and its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from judging import lock_data, spoil
from lock_cases import full_lock

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import load_lock, lock_warnings, open_fields, parse_lock


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


REFUSED = [  # path in the lock, value, message; shape says whether the schema refuses it too
    pytest.param("schema_version", 2, "schema_version: 2; expected 1", True, id="schema"),
    pytest.param("extra", 1, "extra: unknown key; expected only container_runtime", True, id="unknown-key"),
    pytest.param("platform", "tpu-v9", "platform: tpu-v9; expected hardware known here: h100", False, id="hardware"),
    pytest.param("driver|vresion", "1", r"driver.vresion: unknown key.*mean version\?", True, id="unknown-nested-key"),
    pytest.param("driver|version", 595.84, r"driver.version: 595.84.*\(quote it\)", True, id="unquoted"),
    pytest.param("driver|version", "latest", "driver.version: latest; expected one exact version", True, id="latest"),
    pytest.param("image|tag", "Latest", "image.tag: Latest; expected one exact", False, id="latest-tag"),
    pytest.param("image|tag", "nightly-latest", "image.tag: nightly-latest; expected one exact", False, id="latest-in"),
    pytest.param("image|repository", "r.example/x:latest", "expected one exact", False, id="latest-in-reference"),
    pytest.param("toolkit|packages", ["a", "latest"], r"toolkit.packages\[1\]: latest", False, id="latest-in-list"),
    pytest.param("driver|version", "580", "driver.version: 580; expected two or three", True, id="version-grammar"),
    pytest.param("driver|version", ">=580.1", "two or three numbers", True, id="version-range"),
    pytest.param("driver|branch", "595", "driver.branch: 595; expected the branch of version 580", False, id="branch"),
    pytest.param("driver|package_version", "580.167.08-1", "expected a build of 580.178.04", False, id="package"),
    pytest.param("driver|package_version", "580.178.04-1 || true", "one version as the", True, id="no-version"),
    pytest.param("driver|package_version", "580.178.041-1", "a build of 580.178.04", False, id="only-a-prefix"),
    pytest.param("driver|flavour", "proprietary", "driver.flavour: proprietary; expected open", True, id="flavour"),
    pytest.param("driver|activation", "hope", "expected reboot or reload", True, id="activation"),
    pytest.param("driver|companions", {"cuda-drivers": "1-1"}, "companions.cuda-drivers: unknown", False, id="stray"),
    pytest.param("driver|companions", {"nvlsm": None}, "driver.companions.nvlsm: nothing", True, id="unresolved"),
    pytest.param(
        "driver|companions",
        {"nvidia-fabricmanager": "580.167.08-1"},
        "driver.companions.nvidia-fabricmanager: 580.167.08-1; expected a build of 580.178.04, the driver's version",
        False,
        id="fabric-manager-differs",
    ),
    pytest.param(
        "driver|companions", {"nvidia-imex-575": "575.57.08-1"}, "nvidia-imex-575: unknown", False, id="other-branch"
    ),
    pytest.param(
        "driver|companions", {"nvlsm": "580.178.04-1"}, "nvlsm does not follow the driver's", False, id="nvlsm-number"
    ),
    pytest.param("image|size_bytes", 10**400, "image.size_bytes: 10+ or more", False, id="size-beyond-all-measure"),
    pytest.param("image|digest", "sha256:123", "image.digest: .*64 hexadecimal digits", True, id="digest"),
    pytest.param("image|manifests", {"amd64": "x"}, "lock.yml: image.manifests.amd64: ", True, id="manifest-digest"),
    pytest.param("image|manifests", {"amd64": None}, "image.manifests.amd64: nothing", True, id="null-manifest"),
    pytest.param("image|manifests", {}, "image.manifests: ", True, id="no-manifests"),
    pytest.param(
        "image|manifests",
        {"arm64": "sha256:" + "b" * 64},
        "image.manifests: only arm64; expected amd64 among them: lab hosts are x86_64",
        False,
        id="architecture-missing",
    ),
    pytest.param("image|repository", "r.example/x:v1", "without tag or digest", False, id="tag-in-repository"),
    pytest.param("image|size_bytes", 0, "image.size_bytes: 0; expected the size of the image", True, id="size"),
    pytest.param("image|engine|name", "sglang", "image.engine.name: .*sglang.*; expected vllm", True, id="engine"),
    pytest.param("image|cuda", "14.0", "image.cuda: 14.0; expected an image of a CUDA version", False, id="cuda"),
    pytest.param("toolkit|packages", [], "toolkit.packages: ", True, id="toolkit"),
    pytest.param("toolkit|packages", ["nvidia-docker2"], r"packages\[0\]: nvidia-docker2", False, id="old-toolkit"),
    pytest.param(
        "toolkit|packages", ["libnvidia-container1=1.19.0-1"], "alone: all packages have", True, id="mixed-toolkit"
    ),
    pytest.param(
        "toolkit|packages", ["libnvidia-container1"] * 2, "libnvidia-container1 twice", True, id="toolkit-twice"
    ),
    pytest.param("model", None, "model: nothing; expected a mapping", True, id="no-model"),
    pytest.param("os", "ubuntu 24.04 lts", "os: 'ubuntu 24.04 lts'; expected ID and VERSION_ID", True, id="os"),
]


@pytest.mark.parametrize(("path", "value", "message", "_shape"), REFUSED)
def test_refused(path: str, value: Any, message: str, _shape: bool) -> None:
    data = lock_data()
    spoil(data, path, value)
    with pytest.raises(RunbookError, match=message) as caught:
        parse_lock(data, "lock.yml")
    assert caught.value.where.startswith("lock.yml: " + path.replace("|", "."))
    assert caught.value.next_step


def test_the_place_is_a_dotted_path_whatever_the_source_is_called() -> None:
    data = lock_data()
    spoil(data, "image|manifests|amd64", "x")
    with pytest.raises(RunbookError) as caught:
        parse_lock(data, "plan.json: lock")
    assert caught.value.where == "plan.json: lock: image.manifests.amd64"


def driver_lock(version: str, cuda: str | None = "13.0", **driver: Any) -> dict[str, Any]:
    data = lock_data()
    branch = version.split(".", maxsplit=1)[0]
    data["driver"] |= {"branch": branch, "version": version, "package_version": f"{version}-1", "companions": {}}
    data["driver"] |= driver
    data["image"]["cuda"] = cuda
    return data


@pytest.mark.parametrize(
    ("version", "cuda", "feature", "message"),
    [
        ("580.178.04", "13.0", False, None),
        ("595.91.07", "13.0", False, None),
        ("620.70.06", "13.5", False, None),
        ("595.84", "13.0", False, None),
        ("570.133.20", "13.0", False, "driver.version: 570.133.20; expected branch 580 or newer, as CUDA 13 needs"),
        ("570.133.20", "12.9", False, None),
        ("570.133.20", None, False, None),
        ("590.48.01", "13.0", False, "driver.branch: 590, a short-lived feature branch that has ended.*take 595"),
        ("610.57.04", "13.0", False, "short-lived feature branch that has ended.*take 620"),
        ("615.71.10", "13.0", False, "615, a short-lived feature branch; expected .*580, 595 or 620"),
        ("610.57.04", "13.0", True, None),
    ],
)
def test_driver_branches(version: str, cuda: str | None, feature: bool, message: str | None) -> None:
    data = driver_lock(version, cuda, allow_feature_branch=feature)
    if message is None:
        assert parse_lock(data, "lock.yml").driver.version == version
    else:
        with pytest.raises(RunbookError, match=message):
            parse_lock(data, "lock.yml")


@pytest.mark.parametrize(
    ("os", "package_version", "message"),
    [
        ("debian 12", "580.178.04-1", None),
        ("ubuntu 24.04", "580.178.04-1ubuntu1", None),
        ("ubuntu 24.04", "580.178.04-0ubuntu0.24.04.1", None),
        ("rhel 9", "3:580.178.04-1.el9", None),
        ("rocky 10", "3:580.178.04-1.el10", None),
        ("sles 15.7", "580.178.04-1", None),
        ("gentoo", "580.178.04", None),  # nothing is known of it, so nothing is said
        ("debian 12", "580.178.04", "a version of debian 12: with its revision"),
        ("debian 12", "580.178.04-1ubuntu1", "1ubuntu1 is an Ubuntu revision"),
        ("ubuntu 24.04", "3:580.178.04-1.el9", ".el9 is an RPM release"),
        ("rhel 10", "3:580.178.04-1.el9", ".el9 is a release for version 9"),
        ("rhel 9.4", "580.178.04-1ubuntu1", "is an Ubuntu revision"),
    ],
)
def test_packages_of_the_distribution(os: str, package_version: str, message: str | None) -> None:
    data = driver_lock("580.178.04", package_version=package_version) | {"os": os}
    if message is None:
        assert parse_lock(data, "lock.yml").driver.package_version == package_version
    else:
        with pytest.raises(RunbookError, match=f"driver.package_version: {package_version}; expected .*{message}"):
            parse_lock(data, "lock.yml")


def test_rpm_companions_are_compared_without_epoch_and_release() -> None:
    companions = {
        "nvidia-fabricmanager": "580.178.04-1",
        "nvidia-imex-580": "3:580.178.04-1.el9",
        "nvlsm": "2025.10.14-1",
    }
    data = driver_lock("580.178.04", package_version="3:580.178.04-1.el9", companions=companions) | {"os": "rhel 9"}
    assert parse_lock(data, "lock.yml").driver.companions == companions


def test_grace_needs_its_own_architecture() -> None:
    data = lock_data() | {"platform": "gb300"}
    with pytest.raises(RunbookError, match="only amd64; expected arm64 among them: gb300 hosts are aarch64"):
        parse_lock(data, "lock.yml")
    data["image"]["manifests"] = {"arm64": "sha256:" + "b" * 64}
    assert parse_lock(data, "lock.yml").platform == "gb300"


def test_without_a_cuda_version_the_images_own_counts() -> None:
    data = lock_data()
    del data["image"]["cuda"]
    assert parse_lock(data, "lock.yml").image.cuda == "13"


def test_a_lock_without_reservations_has_no_warning() -> None:
    assert lock_warnings(parse_lock(full_lock(), "lock.yml")) == ()


@pytest.mark.parametrize(
    ("path", "value", "warning"),
    [
        pytest.param("image|tag", "kimi-k3", "image.tag: kimi-k3 is pushed again", id="bring-up-tag"),
        pytest.param("image|tag", "nightly", "only image.digest says", id="nightly"),
        pytest.param("image|tag", "nightly-dev-arm64-cu13-3696c77", "only image.digest says", id="nightly-dev"),
        pytest.param("model|revision", "main", "model.revision: main is a branch", id="model-branch"),
        pytest.param("toolkit|packages", ["nvidia-container-toolkit"], "libnvidia-container1 not named", id="toolkit"),
        pytest.param("container_runtime|version", "5:29.0.1-1~debian.12", "has open issues with", id="docker-29"),
        pytest.param("container_runtime|version", "20.10.24+dfsg1-1", "reads no CDI 0.7.0", id="docker-20"),
    ],
)
def test_warned_about(path: str, value: Any, warning: str) -> None:
    data = full_lock()
    spoil(data, path, value)
    (text,) = lock_warnings(parse_lock(data, "lock.yml"))
    assert warning in text


@pytest.mark.parametrize(
    ("version", "feature", "warning"),
    [
        ("570.133.20", False, "570 gets no more fixes (CUDA 12 only); take 580"),
        ("590.48.01", True, "590 gets no more fixes"),
        ("615.71.10", True, "615 is a feature branch"),
        ("640.10.01", False, "640 is not known here"),
    ],
)
def test_branches_that_load_with_a_warning(version: str, feature: bool, warning: str) -> None:
    data = driver_lock(version, None, allow_feature_branch=feature)
    data["toolkit"] = full_lock()["toolkit"]
    (text,) = lock_warnings(parse_lock(data, "lock.yml"))
    assert warning in text


def test_an_unusual_revision_is_named_with_the_way_to_check_it() -> None:
    data = full_lock() | {"os": "ubuntu 24.04"}
    (text,) = lock_warnings(parse_lock(data, "lock.yml"))
    assert "580.178.04-1, where" in text and "580.178.04-1ubuntu1" in text and "apt-cache madison" in text


def test_cdi_only_hosts_need_one_package_and_harmless_pairs_get_no_note() -> None:
    data = full_lock()
    data["toolkit"] = {"version": "1.18.0-1", "packages": ["nvidia-container-toolkit-base"]}
    data["container_runtime"]["version"] = "5:29.0.1-1~debian.12"
    assert lock_warnings(parse_lock(data, "lock.yml")) == ()


def test_open_fields() -> None:
    data = full_lock()
    assert open_fields(parse_lock(data, "lock.yml")) == ("os", "kernel", "container_runtime.version")
    data |= {"os": "debian 12", "kernel": "6.1.0-30-amd64"}
    data["container_runtime"]["version"] = "28.3.2-1"
    assert open_fields(parse_lock(data, "lock.yml")) == ()


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        pytest.param("a: 1\nb: [1, 2\nc: 3\n", "lock.yml:3:2", "expected ',' or ']'", id="syntax"),
        pytest.param("a: 1\n\ta: 2\n", "lock.yml:2:1", "while scanning", id="tab"),
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
