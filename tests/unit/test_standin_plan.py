"""The catalogue of stand-in packages: what is planned, and that everything says what it is."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from kimi_runbook.errors import RunbookError
from lab.standin.host import DRIVER_PACKAGES, GPU_NAME, hardware, preinstalled
from lab.standin.plan import PackagePlan, plan_packages
from lab.standin.shared_library import shared_library

DRIVER_VERSIONS = {"570.133.20-1", "580.167.08-1", "580.178.04-1", "595.91.07-1"}
TOOLKIT_VERSIONS = {"1.19.1-1", "1.20.0-1"}


@pytest.fixture(scope="module")
def plans() -> list[PackagePlan]:
    return plan_packages()


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        *[pytest.param(name, DRIVER_VERSIONS, id=name) for name in DRIVER_PACKAGES],
        pytest.param("nvidia-open", DRIVER_VERSIONS, id="nvidia-open"),
        pytest.param("nvidia-fabricmanager", DRIVER_VERSIONS, id="fabric-manager-follows-the-driver"),
        pytest.param("nvidia-imex", DRIVER_VERSIONS, id="imex-follows-the-driver"),
        pytest.param("libnvidia-nscq", DRIVER_VERSIONS, id="nscq-follows-the-driver"),
        pytest.param("nvlsm", {"2025.06.11-1"}, id="nvlsm-has-its-own-numbers"),
        pytest.param("nvidia-driver-pinning-580", {"580-1"}, id="branch-pin"),
        pytest.param("nvidia-driver-pinning-580.178.04", {"580.178.04-1"}, id="exact-pin"),
        pytest.param("nvidia-container-toolkit", TOOLKIT_VERSIONS, id="toolkit"),
        pytest.param("nvidia-container-toolkit-base", TOOLKIT_VERSIONS, id="toolkit-base"),
        pytest.param("libnvidia-container-tools", TOOLKIT_VERSIONS, id="container-tools"),
        pytest.param("libnvidia-container1", TOOLKIT_VERSIONS, id="container-library"),
    ],
)
def test_versions_of_a_package(plans: list[PackagePlan], name: str, versions: set[str]) -> None:
    assert {plan.version for plan in plans if plan.name == name} == versions


def test_every_package_says_that_it_is_a_standin(plans: list[PackagePlan]) -> None:
    assert all("stand-in" in dict(plan.control)["Description"] for plan in plans)
    texts = [file.content for plan in plans for file in plan.files if file.path.endswith((".service", ".path"))]
    assert texts
    assert all(b"stand-in" in text for text in texts)
    assert "simulated" in GPU_NAME


def test_the_metapackage_has_lower_bounds_only(plans: list[PackagePlan]) -> None:
    depends = {dict(plan.control)["Depends"] for plan in plans if plan.name == "nvidia-open"}
    assert all(set(re.findall(r"\((\S+) ", text)) == {">="} for text in depends)


def test_installing_the_kernel_modules_runs_no_script(plans: list[PackagePlan]) -> None:
    """On disk only: what is loaded must not change before a reload or a reboot."""
    assert all(plan.scripts == () for plan in plans if plan.name == "nvidia-kernel-open-dkms")


def test_no_two_packages_of_one_version_ship_the_same_file(plans: list[PackagePlan]) -> None:
    newest = [plan for plan in plans if plan.version in {"580.178.04-1", "1.20.0-1", "1.0-1", "2025.06.11-1"}]
    paths = [file.path for plan in newest for file in plan.files]
    assert len(paths) == len(set(paths))


def test_an_unknown_kind_of_content_is_named(tmp_path: Path) -> None:
    catalogue = tmp_path / "packages.yml"
    catalogue.write_text(
        "architecture: amd64\ntools_package: t\ncuda_of_branch: {}\nversion_sets: {one: ['1']}\n"
        "packages: [{name: p, repository: cuda, versions: one, synopsis: s, contents: [{kind: firmware}]}]\n"
    )
    with pytest.raises(RunbookError, match=r"packages\.yml, package p: no 'firmware' in it"):
        plan_packages(catalogue)


def test_the_shared_library_loads_and_has_no_functions(tmp_path: Path) -> None:
    path = tmp_path / "libcuda.so.580.178.04"
    path.write_bytes(shared_library("libcuda.so.1", "a stand-in"))
    library = ctypes.CDLL(str(path))
    with pytest.raises(AttributeError, match="undefined symbol: cuInit"):
        _ = library.cuInit


def test_a_new_host_gets_exact_versions() -> None:
    assert preinstalled()[0] == "kimi-standin-tools"
    assert set(preinstalled()[1:]) == {f"{name}=570.133.20-1" for name in DRIVER_PACKAGES}


def test_hardware_is_the_same_for_the_same_name() -> None:
    assert hardware("k3-a") == hardware("k3-a")
    assert hardware("k3-a")["gpus"] != hardware("k3-b")["gpus"]
    assert hardware("k3-a", 0)["autoload"] == []
    assert "mlx5_core" in str(hardware("k3-a", mlx5_devices=1)["autoload"])
