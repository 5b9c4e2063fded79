"""The lab's apt repositories, judged by the real apt: signatures, the metapackage's trap, and the pins against it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from kimi_runbook.errors import RunbookError
from lab.standin.plan import plan_packages
from lab.standin.repository import build_package, build_repositories, create_signing_key

PLANS = plan_packages()
pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt: run it on Debian or Ubuntu")


@dataclass(frozen=True, slots=True)
class Site:
    """Built repositories and their public key."""

    repositories: Path
    gnupg_home: Path
    handed_in: Path
    key: Path

    def build(self) -> bool:
        return build_repositories(self.repositories, self.gnupg_home, {"debian": self.handed_in})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The repositories as the lab builds them; ``debian`` gets one package, built here, in place of real ones."""
    base = tmp_path_factory.mktemp("site")
    handed_in = base / "handed-in"
    handed_in.mkdir()
    build_package(next(plan for plan in PLANS if plan.name == "nvlsm"), handed_in)
    made = Site(base / "repositories", base / "keys", handed_in, create_signing_key(base / "keys"))
    assert made.build()
    return made


class Apt:
    """apt-get with every folder of its own, so that it neither reads nor changes this machine."""

    def __init__(self, folder: Path, repositories: Path, key: Path) -> None:
        self.folder = folder
        for name in ("lists/partial", "cache/archives/partial", "preferences.d", "dpkg", "none"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "apt.conf").write_text("")
        self.status = folder / "dpkg/status"
        self.status.write_text("")
        self.trust("python3")
        lines = [f"deb [arch=amd64 signed-by={key}] file:{path} stable main" for path in sorted(repositories.iterdir())]
        (folder / "sources.list").write_text("\n".join(lines) + "\n")

    def trust(self, name: str, version: str = "1") -> None:
        """Mark a package as installed, with the fields of its plan where it is one of ours."""
        fields = next((dict(plan.control) for plan in PLANS if (plan.name, plan.version) == (name, version)), {})
        basic = {"Package": name, "Version": version, "Architecture": "amd64", "Maintainer": "test", "Description": "t"}
        record = basic | fields | {"Status": "install ok installed"}
        with self.status.open("a") as stream:
            stream.write("".join(f"{field}: {value}\n" for field, value in record.items()) + "\n")

    def pin(self, package: str) -> None:
        """Put the file of a pinning package in place."""
        plan = next(plan for plan in PLANS if plan.name == package)
        file = next(file for file in plan.files if "/preferences.d/" in file.path)
        (self.folder / "preferences.d" / Path(file.path).name).write_bytes(file.content)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = {
            "Dir::Etc": self.folder,
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": self.folder / "none",
            "Dir::Etc::preferences": self.folder / "none/preferences",
            "Dir::Etc::preferencesparts": self.folder / "preferences.d",
            "Dir::State": self.folder,
            "Dir::State::lists": self.folder / "lists",
            "Dir::State::status": self.status,
            "Dir::Cache": self.folder / "cache",
            "APT::Architecture": "amd64",
            "APT::Sandbox::User": "",  # no change of user, so that it reads this test's folders
            "APT::Get::List-Cleanup": "false",
        }
        command = ["apt-get", *(f"-o{key}={value}" for key, value in options.items()), *arguments]
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "APT_CONFIG": str(self.folder / "apt.conf"),
        }
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)

    def would_install(self, *arguments: str) -> dict[str, str]:
        """Return name and version of what ``apt-get --simulate install`` would unpack."""
        done = self.run("--simulate", "install", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("Inst ")]
        return {line[1]: next(word for word in line[2:] if word.startswith("(")).strip("(") for line in lines}


@pytest.fixture
def apt(tmp_path: Path, site: Site) -> Apt:
    made = Apt(tmp_path / "apt", site.repositories, site.key)
    updated = made.run("update")
    assert updated.returncode == 0, updated.stdout + updated.stderr
    assert "W:" not in updated.stderr
    return made


def test_unpinned_the_metapackage_pulls_the_newest_branch(apt: Apt) -> None:
    versions = apt.would_install("nvidia-open")
    assert versions["nvidia-driver-cuda"] == versions["nvidia-kernel-open-dkms"] == "595.91.07-1"


def test_a_version_asked_of_the_metapackage_does_not_hold_the_driver(apt: Apt) -> None:
    versions = apt.would_install("nvidia-open=580.167.08-1")
    assert versions["nvidia-open"] == "580.167.08-1"
    assert versions["nvidia-kernel-open-dkms"] == "595.91.07-1"


@pytest.mark.parametrize(
    ("pin", "version"),
    [
        pytest.param("nvidia-driver-pinning-580", "580.178.04-1", id="branch"),
        pytest.param("nvidia-driver-pinning-580.167.08", "580.167.08-1", id="exact"),
        pytest.param("nvidia-driver-pinning-570.133.20", "570.133.20-1", id="the-old-one"),
    ],
)
def test_a_pin_keeps_every_driver_package_on_it(apt: Apt, pin: str, version: str) -> None:
    apt.pin(pin)
    versions = apt.would_install("nvidia-open", "nvidia-fabricmanager", "nvidia-imex", "libnvidia-nscq")
    driver = {name for name in versions if name not in {"kimi-standin-tools"}}
    assert {versions[name] for name in driver} == {version}
    assert {"nvidia-driver-cuda", "nvidia-persistenced", "libcuda1", "nvidia-fabricmanager"} <= driver


def test_an_exact_driver_without_a_pin_cannot_be_resolved(apt: Apt) -> None:
    done = apt.run("--simulate", "install", "nvidia-driver-cuda=580.178.04-1")
    assert done.returncode == 100
    assert "libcuda1 (= 580.178.04-1) but 595.91.07-1 is to be installed" in done.stdout


def test_a_pin_may_downgrade(apt: Apt) -> None:
    apt.pin("nvidia-driver-pinning-580.178.04")
    apt.trust("libnvidia-ml1", "595.91.07-1")
    assert apt.would_install("--allow-downgrades", "libnvidia-ml1") == {"libnvidia-ml1": "580.178.04-1"}


def test_two_pins_do_not_live_together(apt: Apt) -> None:
    apt.trust("nvidia-driver-pinning-580", "580-1")
    done = apt.run("--simulate", "install", "nvidia-driver-pinning-580.178.04")
    assert "Remv nvidia-driver-pinning-580 " in done.stdout


def test_the_toolkit_base_alone_leaves_the_library_unpinned(apt: Apt) -> None:
    versions = apt.would_install("nvidia-container-toolkit=1.19.1-1", "nvidia-container-toolkit-base=1.19.1-1")
    assert versions["libnvidia-container1"] == "1.20.0-1"


def test_a_wrong_key_is_refused(tmp_path: Path, site: Site) -> None:
    other = create_signing_key(tmp_path / "other")
    done = Apt(tmp_path / "apt", site.repositories, other).run("update")
    assert done.returncode == 100
    assert "NO_PUBKEY" in done.stderr


def test_a_changed_index_is_refused(tmp_path: Path, site: Site) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(site.repositories, copy)
    release = copy / "cuda/dists/stable/InRelease"
    release.write_text(release.read_text().replace("kimi-runbook lab", "kimi-runbook lob", 1))
    done = Apt(tmp_path / "apt", copy, site.key).run("update")
    assert done.returncode == 100
    assert "BADSIG" in done.stderr or "not valid" in done.stderr


def test_building_again_changes_nothing(site: Site) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.repositories.rglob("*")}
    assert not site.build()
    assert before == {path: path.stat().st_mtime_ns for path in site.repositories.rglob("*")}


def test_an_empty_handed_in_folder_is_named(tmp_path: Path, site: Site) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RunbookError, match=r"no \.deb file; expected the packages of one repository"):
        build_repositories(tmp_path / "out", site.gnupg_home, {"debian": empty})


def test_a_missing_program_is_named(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunbookError, match="apt-get install dpkg apt-utils gnupg"):
        site.build()
