"""Which packages, sources, pins and files a host gets, by distribution, branch and source."""

from pathlib import Path

import pytest
import yaml

from kimi_runbook import driver_packages
from kimi_runbook.errors import RunbookError

ROLE = Path(__file__).resolve().parents[2] / "roles/gpu_driver"
NAMES = yaml.safe_load((ROLE / "vars/main/names.yml").read_text(encoding="utf-8"))
PLATFORMS, FAMILIES = NAMES["__gpu_driver_platforms"], NAMES["__gpu_driver_families"]
UNITS = yaml.safe_load((ROLE / "vars/main/units.yml").read_text(encoding="utf-8"))


def locked(version="580.178.04", revision="1"):
    return {"branch": version.partition(".")[0], "version": version, "package_version": f"{version}-{revision}"}


def chosen(id_, version, driver, source="cuda"):
    os = {"id": id_, "version_id": version, "kernel": "6.8.0-90-generic"}
    return driver_packages.driver_set(PLATFORMS, FAMILIES, os, driver, source)


def names(wishes):
    return [wish["name"] for wish in wishes]


RHEL = [
    "nvidia-driver-cuda",
    "nvidia-driver-cuda-libs",
    "kmod-nvidia-open-dkms",
    "nvidia-modprobe",
    "nvidia-persistenced",
]
UBUNTU_580 = [
    "libnvidia-compute-580",
    "nvidia-utils-580",
    "nvidia-dkms-580-open",
    "nvidia-modprobe",
    "nvidia-persistenced",
]
UBUNTU_LATER = ["libnvidia-compute", "nvidia-driver-cuda", "nvidia-dkms-open", "nvidia-modprobe", "nvidia-persistenced"]
DEBIAN = [
    "libcuda1",
    "libnvidia-ml1",
    "nvidia-driver-cuda",
    "nvidia-kernel-open-dkms",
    "nvidia-modprobe",
    "nvidia-persistenced",
]
CANONICAL = [
    "nvidia-headless-no-dkms-580-server-open",
    "nvidia-utils-580-server",
    "libnvidia-compute-580-server",
    "linux-modules-nvidia-580-server-open-6.8.0-90-generic",
]


@pytest.mark.parametrize(
    ("id_", "release", "driver", "source", "packages", "pin", "folder", "stream"),
    [
        ("debian", "12", locked(), "cuda", DEBIAN, ["nvidia-driver-pinning-580.178.04"], "debian12", None),
        ("debian", "13", locked("595.84"), "cuda", DEBIAN, ["nvidia-driver-pinning-595.84"], "debian13", None),
        ("ubuntu", "22.04", locked(), "cuda", UBUNTU_580, ["nvidia-driver-pinning-580.178.04"], "ubuntu2204", None),
        (
            "ubuntu",
            "24.04",
            locked("595.84"),
            "cuda",
            UBUNTU_LATER,
            ["nvidia-driver-pinning-595.84"],
            "ubuntu2404",
            None,
        ),
        ("ubuntu", "24.04", locked(), "mirror", UBUNTU_580, ["nvidia-driver-pinning-580.178.04"], "ubuntu2404", None),
        ("ubuntu", "24.04", locked(), "canonical", CANONICAL, [], None, None),
        ("rhel", "9.6", locked(), "cuda", RHEL, [], "rhel9", "580-open"),
        ("rocky", "9.6", locked("595.91.07"), "cuda", RHEL, [], "rhel9", "595-open"),
        ("almalinux", "10.1", locked(), "cuda", RHEL, [], "rhel10", None),
    ],
)
def test_every_platform_has_its_names(  # noqa: PLR0917 - a row of the table
    id_, release, driver, source, packages, pin, folder, stream
):
    made = chosen(id_, release, driver, source)
    assert names(made["packages"]) == packages
    assert names(made["pin"]) == pin
    assert (made["folder"], made["stream"]) == (folder, stream)
    assert made["manager"] == ("dnf" if folder and folder.startswith("rhel") else "apt")


@pytest.mark.parametrize(
    ("id_", "release", "source"),
    [("debian", "12", "canonical"), ("rocky", "9.6", "canonical"), ("fedora", "44", "cuda"), ("rocky", "8.10", "cuda")],
)
def test_a_platform_nobody_knows_gets_nothing(id_, release, source):
    assert chosen(id_, release, locked(), source)["packages"] == []


def test_exact_versions_are_of_the_driver_and_not_of_a_metapackage():
    """C02: pinning a metapackage alone does not pin the driver."""
    for platform in PLATFORMS.values():
        for one in platform["sets"]:
            assert not {"nvidia-open", "cuda-drivers", "nvidia-driver-open"} & set(one["packages"])
    made = chosen("ubuntu", "24.04", locked(), "canonical")
    assert [wish["version"] for wish in made["packages"]] == ["580.178.04-1"] * 3 + [None]  # the kernel's own number
    assert all(wish["held"] for wish in made["packages"])


def test_only_open_modules_are_offered():
    for platform in PLATFORMS.values():
        for one in platform["sets"]:
            modules = [
                name for name in one["packages"] + one.get("as_offered", []) if "dkms" in name or "modules" in name
            ]
            assert modules and all("open" in name for name in modules)


def test_the_snapshot_asks_for_the_names_of_every_platform():
    asked = driver_packages.asked_names(PLATFORMS, locked())
    assert set(DEBIAN + UBUNTU_580 + RHEL + CANONICAL[:3]) <= set(asked)
    assert not [name for name in asked if "{" in name or "6.8.0" in name]
    assert "nvidia-dkms-open" not in asked  # of another branch


@pytest.mark.parametrize(
    ("source", "folder", "arch", "expected"),
    [
        ("cuda", "ubuntu2404", "x86_64", "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"),
        ("cuda", "ubuntu2404", "aarch64", "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/sbsa"),
        ("cuda", "rhel9", "aarch64", "https://developer.download.nvidia.com/compute/cuda/repos/rhel9/sbsa"),
        ("canonical", None, "x86_64", None),
    ],
)
def test_the_address_of_nvidias_repository(source, folder, arch, expected):
    made = driver_packages.repository({"name": "kimi-cuda", "uris": []}, source, folder, arch)
    assert (made and made["uris"]) == ([expected] if expected else None)


def test_a_mirror_without_an_address_is_refused():
    with pytest.raises(RunbookError, match="the mirror's address"):
        driver_packages.repository({"name": "kimi-cuda", "uris": []}, "mirror", "rhel9", "x86_64")


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "cuda.asc"
    path.write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\n", encoding="utf-8")
    return path


def test_a_dnf_source_checks_signatures_by_itself(key):
    given = {"name": "kimi-cuda", "uris": ["https://mirror.example/rhel9"], "key_file": str(key)}
    _, repo = driver_packages.source_files(given, "dnf", modular=True)
    _, plain = driver_packages.source_files(given, "dnf", modular=False)
    assert repo["path"] == "/etc/yum.repos.d/kimi-cuda.repo"
    assert "gpgcheck=1\n" in repo["content"]
    assert "gpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-kimi-cuda\n" in repo["content"]
    assert ("module_hotfixes" in repo["content"], "module_hotfixes=1" in plain["content"]) == (False, True)


@pytest.mark.parametrize("manager", ["apt", "dnf"])
def test_the_snapshot_asks_for_every_file_a_source_may_have(key, manager):
    given = {
        "name": "kimi-cuda", "uris": ["https://mirror.example"], "suites": ["/"], "components": [], "key_file": str(key)
    }  # fmt: skip
    written = driver_packages.source_files(given, manager, modular=False)
    assert {file["path"] for file in written} <= set(driver_packages.known_paths("kimi-cuda"))


def test_the_parameter_file_holds_everything_in_one_place():
    parameters = {
        "NVreg_CoherentGPUMemoryMode": "driver",
        "NVreg_RegistryDwords": "PeerMappingOverride=1",
        "NVreg_X": 1,
    }
    (file,) = driver_packages.parameter_file("/etc/modprobe.d/k.conf", parameters, blacklist_nouveau=True)
    assert file["content"].splitlines()[1:] == [
        "blacklist nouveau",
        "options nouveau modeset=0",
        'options nvidia NVreg_CoherentGPUMemoryMode=driver NVreg_RegistryDwords="PeerMappingOverride=1" NVreg_X=1',
    ]
    assert driver_packages.parameter_file("/x", {}, blacklist_nouveau=False) == []


@pytest.mark.parametrize(
    ("name", "value"), [("NVreg_EnableGpuFirmware", 0), ("NVreg X", 1), ("NVreg_A", 'a"b'), ("NVreg_A", "a\nb")]
)
def test_a_parameter_that_must_not_be_set_is_refused(name, value):
    with pytest.raises(RunbookError, match="gpu_driver_parameters"):
        driver_packages.parameter_file("/x", {name: value}, blacklist_nouveau=True)


def test_locks_hold_what_is_pulled_in_at_the_same_version():
    wishes = [
        {"name": "a", "version": "3:580.1-1.el9"},
        {"name": "fm", "version": "580.1-1"},
        {"name": "k", "version": None},
    ]
    assert driver_packages.lock_lines(wishes, ["lib"], "3:580.1-1.el9") == [
        "lib-3:580.1-1.el9.*",
        "a-3:580.1-1.el9.*",
        "fm-580.1-1.*",
    ]


def test_installed_companions_change_with_the_driver():
    companions = {"nvidia-fabricmanager": "580.178.04-1", "nvidia-imex": "580.178.04-1"}
    packages = {"nvidia-fabricmanager": {"version": "570.133.20-1", "held": True}, "nvidia-imex": None}
    assert names(driver_packages.installed_companions(companions, packages)) == ["nvidia-fabricmanager"]


def test_a_sites_units_stop_before_the_daemons_they_use():
    daemons = UNITS["__gpu_driver_daemons"]
    order = [row["unit"] for row in driver_packages.stops(["site-exporter.service", "gpud.service"], 30, daemons)]
    assert order[:2] == ["site-exporter.service", "gpud.service"]
    assert order.count("gpud.service") == 1
    for earlier, later in [
        ("dcgm-exporter.service", "nvidia-dcgm.service"),
        ("nvidia-dcgm.service", "nvidia-cdi-refresh.path"),
        ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"),
        ("nvidia-cdi-refresh.service", "nvidia-persistenced.service"),
        ("nvidia-persistenced.service", "nvidia-fabricmanager.service"),
        ("nvidia-fabricmanager.service", "nvlsm.service"),
        ("nvlsm.service", "nvidia-imex.service"),
    ]:
        assert order.index(earlier) < order.index(later)
    assert all(row["limit_s"] > 0 for row in daemons)


def test_dependents_are_unloaded_before_what_they_use():
    order = UNITS["__gpu_driver_unload_order"]
    assert order[-1] == "nvidia"
    assert order.index("nvidia_drm") < order.index("nvidia_modeset") < order.index("nvidia")
    assert order.index("nvidia_peermem") < order.index("nvidia_uvm")
