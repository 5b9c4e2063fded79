"""The stage of packages, with the real apt against signed repositories that are then taken away."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import apt_preflight
import apt_stage
import pytest

from lab.standin.plan import plan_packages
from lab.standin.repository import build_repositories, create_signing_key

PLANS = plan_packages()
NEW, OLD = "580.178.04-1", "570.133.20-1"
PACKAGES = {"libcuda1": NEW, "nvidia-modprobe": NEW}
PIN = "nvidia-driver-pinning-580.178.04"
WANTED = [f"{name}={version}" for name, version in PACKAGES.items()] + [PIN]
pytestmark = pytest.mark.skipif(shutil.which("apt-ftparchive") is None, reason="needs apt-utils: run it on Debian")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    base = tmp_path_factory.mktemp("site")
    key = create_signing_key(base / "keys")
    build_repositories(base / "repositories", base / "keys", {})
    return base / "repositories/cuda", key


class Host:
    """An apt of its own, whose only source is one of ours, served until it is cut off."""

    def __init__(self, folder: Path, repository: Path, key: Path) -> None:
        self.folder = folder
        for name in (
            "etc/sources.list.d",
            "etc/preferences.d",
            "etc/apt.conf.d",
            "lists/partial",
            "archives/partial",
            "dpkg",
        ):
            (folder / name).mkdir(parents=True)
        (folder / "etc/sources.list").write_text("")
        (folder / "dpkg/status").write_text("")
        (folder / "apt.conf").write_text(
            "".join(
                f'{name} "{value}";\n'
                for name, value in {
                    "Dir::Etc": f"{folder}/etc",
                    "Dir::Etc::SourceParts": f"{folder}/etc/sources.list.d",
                    "Dir::Etc::PreferencesParts": f"{folder}/etc/preferences.d",
                    "Dir::State": folder,
                    "Dir::State::status": f"{folder}/dpkg/status",
                    "Dir::State::Lists": f"{folder}/lists",
                    "Dir::Cache::Archives": f"{folder}/archives",
                    "APT::Architecture": "amd64",
                    "APT::Sandbox::User": "root",
                    "Acquire::http::Proxy": "false",
                }.items()
            )
        )
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(repository)))
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        self.key = key
        port = self.server.server_address[1]
        self.entry = f"Types: deb\nURIs: http://127.0.0.1:{port}\nSuites: stable\nComponents: main\n"

    @property
    def sources(self):
        on_host = f"{self.folder}/etc/kimi-cuda.asc"
        return [
            {"path": on_host, "content": self.key.read_text()},
            {
                "path": f"{self.folder}/etc/sources.list.d/kimi-cuda.sources",
                "content": f"{self.entry}Signed-By: {on_host}\n",
            },
        ]

    def write_sources(self):
        """Do what the role does before it installs."""
        for source in self.sources:
            Path(source["path"]).write_text(source["content"])

    def have(self, name, version):
        """Mark a package as installed."""
        fields = next((dict(plan.control) for plan in PLANS if (plan.name, plan.version) == (name, version)), {})
        record = {"Package": name, "Version": version, "Architecture": "amd64", "Maintainer": "t", "Description": "t"}
        record |= fields | {"Status": "install ok installed"}
        with (self.folder / "dpkg/status").open("a") as file:
            file.write("".join(f"{key}: {value}\n" for key, value in record.items()) + "\n")

    def resolve(self):
        """Return what apt would install, as the preflight finds out; leave no list behind."""
        self.write_sources()
        assert self.apt("update").returncode == 0
        done = self.apt("install", "--simulate", "--no-install-recommends", *WANTED)
        shutil.rmtree(self.folder / "lists")
        for source in self.sources:
            Path(source["path"]).unlink()
        return apt_preflight.resolved_versions(done.stdout)

    def cut(self):
        """Take the repository away."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()

    def apt(self, *words):
        return subprocess.run(
            ["apt-get", "--quiet", *words],
            env={**os.environ, "APT_CONFIG": str(self.folder / "apt.conf"), "LC_ALL": "C"},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def act(self, action, check_mode=False, **more):
        params = {
            "action": action,
            "wanted": WANTED,
            "sources": self.sources,
            "packages": PACKAGES,
            "first": [PIN],
            "folder": str(self.folder / "stage"),
            "timeout_s": 60,
            **more,
        }
        return apt_stage.act(params, check_mode=check_mode)


@pytest.fixture
def host(tmp_path, repository, monkeypatch):
    made = Host(tmp_path / "host", *repository)
    monkeypatch.setenv("APT_CONFIG", str(made.folder / "apt.conf"))
    monkeypatch.setenv("DPKG_ADMINDIR", str(made.folder / "dpkg"))
    monkeypatch.setattr(apt_stage, "LISTS", str(made.folder / "lists"))
    monkeypatch.setattr(apt_stage, "ARCHIVES", str(made.folder / "archives"))
    monkeypatch.setattr(apt_stage.apt_sandbox, "SOURCE_PARTS", str(made.folder / "etc/sources.list.d"))
    yield made
    made.cut()


def debs(folder):
    return sorted(path.name for path in folder.glob("*.deb"))


def test_staged_once_and_then_installable_without_the_repository(host):
    host.have("python3", "1")
    packages = host.resolve()
    first = host.act("fetch", packages=packages)
    assert first["changed"] and first["usable"]
    assert {name.split("_")[0] for name in first["fetched"]} == {*packages, PIN}
    assert len(packages) > len(PACKAGES)  # what they depend on as well
    assert debs(host.folder / "archives") == [] and not list((host.folder / "lists").glob("*InRelease"))
    assert host.act("fetch", packages=packages)["changed"] is False
    host.cut()
    assert host.act("check")["usable"] is True
    used = host.act("use")
    assert used["changed"] and host.act("use")["changed"] is False
    host.write_sources()
    done = host.apt("install", "--yes", "--download-only", "--no-install-recommends", *WANTED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Need to get 0 B" in done.stdout
    # The same without the stage's packages asks the repository, which is gone: the test above could fail.
    for path in (host.folder / "archives").glob("libcuda1*.deb"):
        path.unlink()
    assert host.apt("install", "--yes", "--download-only", "--no-install-recommends", *WANTED).returncode != 0


def test_what_a_rollback_needs_is_kept_too(host):
    host.have("libcuda1", OLD)
    result = host.act("fetch")
    note = json.loads((host.folder / "stage/note.json").read_text())
    assert note["previous"] == {"libcuda1": OLD} and result["rollback_missing"] == []
    assert any(name.startswith(f"libcuda1_{OLD}_") for name in note["archives"])
    host.act("use")
    host.cut()
    host.write_sources()
    done = host.apt("install", "--yes", "--download-only", "--reinstall", f"libcuda1={OLD}")
    assert done.returncode == 0, done.stderr


def test_a_version_no_repository_has_any_more_is_named(host):
    host.have("libcuda1", OLD)
    status = host.folder / "dpkg/status"
    status.write_text(status.read_text().replace(OLD, "535.1-1"))
    assert host.act("fetch")["rollback_missing"] == ["libcuda1=535.1-1"]
    assert host.act("fetch")["rollback_missing"] == ["libcuda1=535.1-1"]  # remembered


def test_a_file_in_apts_own_cache_is_taken_from_there(host):
    host.act("fetch")
    host.act("use")
    shutil.rmtree(host.folder / "stage/archives")
    assert host.act("check")["reason"].endswith("is gone or of another size")
    again = host.act("fetch")
    assert again["usable"] and len(again["fetched"]) == 3


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        pytest.param({"wanted": ["libcuda1=595.91.07-1"]}, "other packages or sources", id="other-version"),
        pytest.param({"sources": []}, "other packages or sources", id="other-source"),
    ],
)
def test_a_stage_for_something_else_does_not_count(host, more, reason):
    assert host.act("check")["reason"] == "nothing was staged"
    host.act("fetch")
    assert reason in host.act("check", **more)["reason"]
    assert host.act("use", **more)["changed"] is False


def test_a_cut_short_package_or_note_is_no_stage(host):
    host.act("fetch")
    package = next((host.folder / "stage/archives").glob("libcuda1*.deb"))
    package.write_bytes(package.read_bytes()[:-1])
    assert "libcuda1" in host.act("check")["reason"]
    (host.folder / "stage/note.json").write_text("{")
    assert host.act("check")["reason"] == "nothing was staged"


def test_a_spoiled_package_of_the_right_size_is_not_used(host):
    """apt itself compares a file in its cache with the lists by size alone."""
    host.act("fetch")
    package = next((host.folder / "stage/archives").glob("libcuda1*.deb"))
    package.write_bytes(b"?" * package.stat().st_size)
    told = host.act("use")
    assert (told["usable"], told["changed"]) == (False, False)
    assert "has another content than when it was staged" in told["reason"]
    assert debs(host.folder / "archives") == []


def test_a_spoiled_package_in_apts_cache_is_not_adopted(host):
    host.act("fetch")
    host.act("use")
    for path in (host.folder / "archives").glob("*.deb"):
        path.write_bytes(b"?" * path.stat().st_size)
    shutil.rmtree(host.folder / "stage")
    host.act("fetch")
    assert host.act("use")["usable"]
    host.cut()
    host.write_sources()
    (package,) = (host.folder / "archives").glob("libcuda1*.deb")
    assert subprocess.run(["dpkg-deb", "--contents", str(package)], check=False, capture_output=True).returncode == 0


def test_an_old_version_only_apts_cache_has_is_kept(host, repository):
    old = next((repository[0] / "pool").rglob(f"libcuda1_{OLD}_*.deb"))
    kept = host.folder / "archives" / old.name.replace(OLD, "535.1-1")
    shutil.copy(old, kept)
    host.have("libcuda1", OLD)
    status = host.folder / "dpkg/status"
    status.write_text(status.read_text().replace(OLD, "535.1-1"))
    assert host.act("fetch")["rollback_missing"] == []
    assert json.loads((host.folder / "stage/note.json").read_text())["previous"] == {"libcuda1": "535.1-1"}
    kept.write_bytes(b"?")
    shutil.rmtree(host.folder / "stage")
    assert host.act("fetch")["rollback_missing"] == ["libcuda1=535.1-1"]


def test_packages_that_changed_since_are_looked_at_again_by_the_next_stage_only(host):
    host.act("fetch")
    host.have("nvidia-modprobe", NEW)
    told = host.act("check")
    assert (told["usable"], told["current"]) == (True, False)  # a run that was killed halfway goes on with it
    assert host.act("fetch", check_mode=True)["changed"] is True
    again = host.act("fetch")
    assert (again["current"], again["changed"]) == (True, False)  # nothing had to come


def test_what_was_there_before_an_upgrade_is_kept_after_it(host):
    host.have("libcuda1", OLD)
    host.act("fetch")
    (host.folder / "dpkg/status").write_text("")
    host.have("libcuda1", NEW)
    told = host.act("fetch", packages={}, first=[])
    assert (told["usable"], told["changed"]) == (True, False)
    note = json.loads((host.folder / "stage/note.json").read_text())
    assert note["previous"]["libcuda1"] == OLD
    assert any(name.startswith(f"libcuda1_{OLD}_") for name in note["archives"])


def test_a_bad_signature_and_a_repository_that_is_away_are_apts_words(host, tmp_path):
    other = create_signing_key(tmp_path / "other")
    host.key, right = other, host.key
    with pytest.raises(apt_stage.StageError, match=r"NO_PUBKEY|not signed"):
        host.act("fetch")
    host.key = right
    host.cut()
    with pytest.raises(apt_stage.StageError, match=r"Failed to fetch|Could not connect|refused"):
        host.act("fetch")
    assert host.act("check")["usable"] is False


def test_a_version_that_vanished_is_named(host):
    with pytest.raises(apt_stage.StageError, match=r"libcuda1.*9\.9-1|9\.9-1.*libcuda1"):
        host.act("fetch", packages={"libcuda1": "9.9-1"})


def test_a_killed_fetch_leaves_no_stage_that_looks_whole(host, monkeypatch):
    host.act("fetch")

    def killed(stage, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(apt_stage.Stage, "write_note", killed)
    with pytest.raises(KeyboardInterrupt):
        host.act("fetch", wanted=["libcuda1"])
    assert host.act("check")["reason"] == "nothing was staged"


def test_check_mode_fetches_nothing(host):
    told = host.act("fetch", check_mode=True)
    assert (told["changed"], told["usable"]) == (True, False)
    assert not (host.folder / "stage").exists()


@pytest.mark.parametrize(
    ("name", "version", "file"),
    [
        pytest.param("a", "1.0-1", "a_1.0-1_amd64.deb", id="plain"),
        pytest.param("a", "3:1.0-1", "a_3%3a1.0-1_amd64.deb", id="epoch"),
        pytest.param("a", "1.0+b~1", "a_1.0+b~1_all.deb", id="signs"),
        pytest.param("a", "1.0-1", None, id="another"),
    ],
)
def test_files_are_found_as_apt_names_them(name, version, file):
    assert apt_stage.file_of([file or "ab_1.0-1_amd64.deb", "x.txt"], name, version) == file
