"""Resolving: what is filled in from the registry and NVIDIA's files, what is derived, and what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from judging import spoil
from lock_cases import MANIFEST, a_release, full_lock, redistrib_json, releases_json, template, the_releases

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock import Lock, lock_warnings, resolve_lock
from kimi_runbook.lock.vendor import read_redistrib, read_releases
from kimi_runbook.registry import Manifest


def resolve(data: dict[str, Any], **files: Any) -> Lock:
    return resolve_lock(data, lambda *_, **__: MANIFEST, "t.yml", **files).lock


def test_fills_in_what_the_registry_says() -> None:
    asked: list[tuple[str, str, bool]] = []

    def fetch(repository: str, reference: str, *, insecure: bool) -> Manifest:
        asked.append((repository, reference, insecure))
        return MANIFEST

    resolved = resolve_lock(template(), fetch)
    assert asked == [("registry.example:5000/vllm/vllm-openai", "v0.32.0", False)]
    image = resolved.lock.image
    assert image.digest == MANIFEST.digest and image.manifests == MANIFEST.manifests
    assert image.size_bytes == 20  # the largest architecture
    assert resolved.notes == ()


def test_again_notices_a_moved_tag() -> None:
    with pytest.raises(RunbookError, match=r"t.yml: image.digest: .* resolves to sha256:ddd.*The tag has moved"):
        resolve(full_lock())


@pytest.mark.parametrize("tag", ["latest", "v0.32.0-latest"])
def test_asks_no_registry_for_latest(tag: str) -> None:
    data = template()
    data["image"]["tag"] = tag
    with pytest.raises(RunbookError, match=f"image.tag: {tag}; expected one exact version"):
        resolve_lock(data, lambda *_, **__: pytest.fail("the registry was asked"))


def test_a_floating_tag_needs_a_digest_and_is_read_by_it() -> None:
    data = template()
    data["image"]["tag"] = "kimi-k3"
    with pytest.raises(RunbookError, match=r"image.tag: kimi-k3, a tag that is pushed again.*image.digest"):
        resolve_lock(data, lambda *_, **__: pytest.fail("the registry was asked"))
    data["image"]["digest"] = MANIFEST.digest
    asked: list[str] = []

    def fetch(_repository: str, reference: str, **_: object) -> Manifest:
        asked.append(reference)
        return MANIFEST

    lock = resolve_lock(data, fetch).lock
    assert asked == [MANIFEST.digest]
    assert any("kimi-k3 is pushed again" in text for text in lock_warnings(lock))


def test_the_labs_template_resolves(project_root: Any) -> None:
    data = yaml.safe_load((project_root / "inventories/lab/lock.template.yml").read_text(encoding="utf-8"))
    lock = resolve(data)
    assert lock.image.insecure and lock.image.cuda is None
    assert len(lock.toolkit.packages) == 4


@pytest.mark.parametrize("example", ["b300-rdma", "gb300-nvl72"])
def test_the_examples_resolve(project_root: Any, example: str) -> None:
    data = yaml.safe_load((project_root / f"inventories/examples/{example}/lock.template.yml").read_text("utf-8"))
    assert resolve(data).platform == example.partition("-")[0]


def test_an_index_without_the_platforms_architecture_is_refused(project_root: Any) -> None:
    data = yaml.safe_load((project_root / "inventories/examples/gb300-nvl72/lock.template.yml").read_text("utf-8"))
    only = Manifest(
        digest=MANIFEST.digest, media_type=MANIFEST.media_type, manifests={"amd64": MANIFEST.digest}, sizes={"amd64": 1}
    )
    with pytest.raises(RunbookError, match=r"image.manifests: only amd64; expected arm64 among them"):
        resolve_lock(data, lambda *_, **__: only, "t.yml")


def test_companions_come_from_nvidias_file_with_the_distributions_revision() -> None:
    wanted = {"nvidia-fabricmanager": None, "nvidia-imex-580": None, "libnvsdm": None, "nvlsm": None}
    data = template(package_version=None, branch=None, companions=wanted) | {"os": "debian 12"}
    resolved = resolve_lock(data, lambda *_, **__: MANIFEST, "t.yml", release=a_release(), releases=the_releases())
    driver = resolved.lock.driver
    assert (driver.branch, driver.package_version) == ("580", "580.178.04-1")
    assert driver.companions == {
        "nvidia-fabricmanager": "580.178.04-1",
        "nvidia-imex-580": "580.178.04-1",
        "libnvsdm": "580.178.04-1",
        "nvlsm": "2025.10.14-1",
    }
    assert len(resolved.notes) == 5 and all("check with: apt-cache madison" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("os", "version", "package_version"),
    [
        ("debian 13", "580.178.04", "580.178.04-1"),
        ("ubuntu 24.04", "580.105.08", "580.105.08-0ubuntu1"),
        ("ubuntu 24.04", "580.126.09", "580.126.09-1ubuntu1"),
        ("ubuntu 22.04", "595.91.07", "595.91.07-1ubuntu1"),
        ("rhel 9", "580.178.04", "3:580.178.04-1.el9"),
        ("rocky 10.1", "580.178.04", "3:580.178.04-1.el10"),
        ("fedora 43", "580.142", "3:580.142-1.fc43"),
    ],
)
def test_package_versions_are_derived_where_the_packaging_is_known(os: str, version: str, package_version: str) -> None:
    data = template(package_version=None, branch=None, version=version, companions={}) | {"os": os}
    assert resolve(data).driver.package_version == package_version


@pytest.mark.parametrize(
    ("os", "version", "message"),
    [
        (None, "580.178.04", "driver.package_version: absent, and os is left open"),
        ("ubuntu 24.04", "580.119.02", "its revision for ubuntu 24.04 is not known here.*apt-cache madison"),
        ("sles 15.7", "580.178.04", "not known here.*dnf list --showduplicates"),
        ("gentoo", "580.178.04", "not known here.*ask the package manager"),
        ("rhel", "580.178.04", "not known here"),
    ],
)
def test_package_versions_are_asked_for_elsewhere(os: str | None, version: str, message: str) -> None:
    data = template(package_version=None, branch=None, version=version, companions={}) | {"os": os}
    with pytest.raises(RunbookError, match=message):
        resolve(data)


@pytest.mark.parametrize(
    ("driver", "os", "platform", "message"),
    [
        pytest.param({"companions": {"nvlsm": None}}, "debian 12", "lab", "--driver-json redistrib_580", id="no-file"),
        pytest.param({"version": None}, None, "lab", "driver.version: absent; .*qualified for", id="no-version"),
        pytest.param({"version": "580"}, None, "lab", "driver.version: 580; expected two or", id="grammar"),
        pytest.param({"companions": {"cuda-drivers": None}}, None, "lab", "companions.cuda-drivers", id="stray"),
        pytest.param(
            {"companions": {"nvidia-imex": None}}, "ubuntu 24.04", "lab", "madison nvidia-imex", id="asked-companion"
        ),
    ],
)
def test_what_is_missing_is_asked_for(driver: dict[str, Any], os: str | None, platform: str, message: str) -> None:
    with pytest.raises(RunbookError, match=message) as caught:
        resolve(template(**driver) | {"os": os, "platform": platform})
    assert caught.value.where.startswith("t.yml: driver.")


def test_a_missing_version_lists_the_branchs_releases_and_chooses_none() -> None:
    with pytest.raises(RunbookError, match=r"releases.json has 580.178.04 \(2026-08-03\), 580.173.02"):
        resolve(template(version=None), releases=the_releases())


@pytest.mark.parametrize(
    ("driver", "platform", "message"),
    [
        pytest.param({"version": "580.173.02"}, "lab", "driver.version: 580.173.02; expected 580.178.04", id="driver"),
        pytest.param(
            {"companions": {"nvlsm": "2025.06.6-1"}},
            "lab",
            "nvlsm: 2025.06.6-1; expected a build of 2025.10.14",
            id="own",
        ),
        pytest.param(
            {"companions": {"nvlsm": "not a version"}}, "lab", "driver.companions.nvlsm: not a version", id="no-version"
        ),
        pytest.param(
            {"companions": {"libnvsdm": None}}, "gb300", "libnvsdm.linux-sbsa: absent; expected .*aarch64", id="arm"
        ),
    ],
)
def test_contradictions_with_the_drivers_file(driver: dict[str, Any], platform: str, message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        resolve(template(**driver) | {"os": "debian 12", "platform": platform}, release=a_release())


@pytest.mark.parametrize(
    ("version", "feature", "message"),
    [
        ("580.178.04", False, None),
        ("595.84", False, None),
        ("630.10.01", True, None),
        ("630.10.01", False, "driver.branch: 630, a new feature branch by releases.json"),
        ("580.1.1", False, r"releases.json: 580: no release 580.1.1; expected one of 580.178.04 \(2026-08-03\)"),
        ("700.1.1", False, "releases.json: 700: absent; expected driver branch 700; the file has 580, 595, 615, 630"),
        ("580.167.08", False, "580.167.08.architectures: aarch64; expected x86_64"),
    ],
)
def test_releases_file(version: str, feature: bool, message: str | None) -> None:
    driver = {"version": version, "branch": None, "package_version": f"{version}-1", "companions": {}}
    data = template(**driver, allow_feature_branch=feature)
    if message is None:
        assert resolve(data, releases=the_releases()).driver.version == version
    else:
        with pytest.raises(RunbookError, match=message):
            resolve(data, releases=the_releases())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d["driver"].update(branch="570", version="570.133.20"), "living branch: 580", id="dead"),
        pytest.param(
            lambda d: d["toolkit"].update(packages=["libnvidia-container1"]), "without nvidia-c", id="toolkit"
        ),
    ],
)
def test_no_new_lock_starts_outdated(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = template(companions={})
    data["image"]["cuda"] = None
    change(data)
    data["driver"]["package_version"] = f"{data['driver']['version']}-1"
    with pytest.raises(RunbookError, match=message):
        resolve(data)


REDISTRIB = "r.json"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param(
            "fabricmanager|version", None, "r.json: fabricmanager.version: nothing; expected a string", id="no"
        ),
        pytest.param("nvidia_driver|version", "x", "nvidia_driver.version: x; expected the driver's version", id="bad"),
        pytest.param("imex|version", 580, "r.json: imex.version: 580; expected a string", id="number"),
    ],
)
def test_redistrib_names_the_wrong_key(path: str, value: Any, message: str) -> None:
    data = redistrib_json()
    spoil(data, path, value)
    with pytest.raises(RunbookError, match=message):
        read_redistrib(data, REDISTRIB)


def test_redistrib_is_read_tolerantly() -> None:
    data = redistrib_json() | {"release_notes": "x", "future": {"version": "1", "linux-riscv": {}, "flag": True}}
    data["driver"] = data.pop("nvidia_driver")
    assert read_redistrib(data, REDISTRIB).version == "580.178.04"
    del data["driver"]
    assert read_redistrib(data, REDISTRIB).version == "580.178.04"  # by its label
    data |= {"release_product": "cuda", "release_label": "13.4.2"}
    with pytest.raises(RunbookError, match=r"nvidia_driver.version: absent"):
        read_redistrib(data, REDISTRIB)


def test_a_component_the_file_lacks_is_named() -> None:
    data = redistrib_json()
    del data["fabricmanager"]
    wanted = template(companions={"nvidia-fabricmanager": None}) | {"os": "debian 12"}
    with pytest.raises(RunbookError, match=r"r.json: fabricmanager: absent; expected the component; the file has cuda"):
        resolve(wanted, release=read_redistrib(data, REDISTRIB))


def test_a_file_that_contradicts_itself_is_refused() -> None:
    data = redistrib_json()
    data["imex"]["version"] = "580.173.02"
    wanted = template(companions={"nvidia-imex": None}) | {"os": "debian 12"}
    with pytest.raises(RunbookError, match=r"imex.version: 580.173.02; expected 580.178.04, the driver's version"):
        resolve(wanted, release=read_redistrib(data, REDISTRIB))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["580"].pop("type"), "releases.json: 580.type: absent"),
        (lambda d: d["580"].pop("driver_info"), "releases.json: 580.driver_info: absent"),
        (lambda d: d["580"]["driver_info"][1].pop("release_version"), r"580.driver_info\[1\].release_version: absent"),
        (
            lambda d: d["580"]["driver_info"][0].update(architectures="x86_64"),
            r"580.driver_info\[0\].architectures: 'x86_64'",
        ),
        (lambda d: [d.pop(key) for key in list(d)], "releases.json: keys none; expected driver branches"),
    ],
)
def test_releases_names_the_wrong_key(change: Callable[[dict[str, Any]], object], message: str) -> None:
    data = releases_json()
    change(data)
    with pytest.raises(RunbookError, match=message):
        read_releases(data, "releases.json")


def test_releases_is_read_tolerantly() -> None:
    data = releases_json() | {"generated": "2026-11-01"}
    data["580"]["type"] = "LTS Branch "
    data["595"]["type"] = "something new"
    del data["580"]["driver_info"][0]["architectures"]
    releases = read_releases(data, "releases.json")
    assert releases.classes == {"615": "New Feature", "630": "New Feature", "595": None, "580": "LTS"}
    assert releases.find("580.178.04", "aarch64").machines == ()
    assert releases.find("595.84", "x86_64").date is None


def test_a_size_that_no_manifest_gives_is_asked_for() -> None:
    part = Manifest(
        digest=MANIFEST.digest, media_type=MANIFEST.media_type, manifests=MANIFEST.manifests, sizes={"amd64": 10}
    )
    with pytest.raises(RunbookError, match=r"image.size_bytes: absent, and no manifest was given for arm64"):
        resolve_lock(template(), lambda *_, **__: part, "t.yml")
    data = template()
    data["image"]["size_bytes"] = 12
    assert resolve_lock(data, lambda *_, **__: part, "t.yml").lock.image.size_bytes == 12
