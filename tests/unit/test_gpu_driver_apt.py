"""Ubuntu's and Debian's transactions, resolved by the real apt in a system of its own against a local repository.

Simulated, as the coverage page says: nothing is installed here, the lab's hosts do that.
"""

import functools
import http.server
import threading

import apt_preflight
import deb_repository
import pytest
from modules_run import run_module

from kimi_runbook.driver_packages import preferences

pytestmark = pytest.mark.skipif(
    bool(deb_repository.MISSING), reason=f"not installed: {' '.join(deb_repository.MISSING)}"
)

VERSION = "580.178.04-1ubuntu1"
WANTED = [f"{name}={VERSION}" for name in deb_repository.UBUNTU]
PIN = [f"nvidia-driver-pinning-580.178.04={VERSION}"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return deb_repository.build(tmp_path_factory.mktemp("deb") / "repository", "1ubuntu1")


@pytest.fixture
def served(repository):
    """The repository over HTTP: apt uses file: sources in place and would fetch nothing."""
    handler = functools.partial(Quiet, directory=str(repository))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def host(tmp_path, monkeypatch, repository):
    """Asks the preflight about a system whose apt lives below one folder."""

    class Host:
        root = tmp_path / "system"
        installed: tuple[str, ...] = ()
        source = deb_repository.source(f"file:{repository}")

        def preflight(self, check=False, **changes):
            asked = {
                "sources": [self.source], "packages": WANTED, "pins": WANTED, "pin_packages": PIN, "branch": "580",
                "timeout_s": 60, **changes,
            }  # fmt: skip
            return run_module(monkeypatch, tmp_path, apt_preflight.main, check=check, **asked)

    made = Host()
    config = deb_repository.system(made.root)
    monkeypatch.setenv("APT_CONFIG", str(config))
    monkeypatch.setattr(apt_preflight, "_LISTS", str(made.root / "lib/lists"))
    monkeypatch.setattr(apt_preflight, "_ARCHIVES", str(made.root / "cache/archives"))
    monkeypatch.setattr(apt_preflight.publish, "__defaults__", (str(made.root / "lib/lists"),))
    monkeypatch.setattr(apt_preflight.Sandbox.__init__, "__defaults__", (str(made.root / "etc"),))
    monkeypatch.setattr(apt_preflight, "holder", lambda manager: None)
    listing = made.root / "dpkg/listing"
    listing.write_text("")
    real = apt_preflight.run

    def run(argv, timeout):
        return real(["cat", str(listing)] if argv[0] == "dpkg-query" else argv, timeout)

    monkeypatch.setattr(apt_preflight, "run", run)
    made.listing = listing
    return made


def test_every_version_of_the_lock_resolves_and_the_lists_stay_for_the_change(host):
    answer = host.preflight()
    assert answer["resolved"] == dict.fromkeys(deb_repository.UBUNTU, VERSION)
    assert answer["changed"] is False
    assert list((host.root / "lib/lists").glob("*Packages*"))
    assert not list((host.root / "etc/sources.list.d").iterdir())


def test_check_mode_leaves_no_list(host):
    host.preflight(check=True)
    assert not list((host.root / "lib/lists").glob("*Packages*"))


def test_a_metapackage_with_a_lower_bound_drags_another_branch_in_without_the_pin(host):
    """C01: cuda-drivers-580 pulled 590."""
    asked = {"packages": [f"nvidia-driver-cuda={VERSION}"], "pins": []}
    free = host.preflight(pin_packages=[], **asked)
    assert free["failed"]
    assert "libcuda1 resolves to 595.91.07-1ubuntu1, expected branch 580" in free["msg"]
    pinned = host.preflight(**asked)
    assert pinned["resolved"]["libcuda1"] == VERSION


def test_preferences_of_the_role_pin_where_no_pinning_package_exists(host):
    pin = preferences("/etc/apt/preferences.d/kimi-gpu-driver", ["*nvidia*", "libcuda1"], "580.178.04")
    answer = host.preflight(
        sources=[host.source, *pin], pin_packages=[], packages=[f"nvidia-driver-cuda={VERSION}"], pins=[]
    )
    assert answer["resolved"]["libcuda1"] == VERSION


def test_a_newer_branch_is_taken_back(host):
    """C24: versions are taken back per platform, and rollback is the same transaction."""
    names = ("nvidia-driver-cuda", "libcuda1", "nvidia-persistenced")
    for name in names[1:]:
        deb_repository.install(host.root, name, "595.91.07-1ubuntu1")
    wanted = [f"{name}={VERSION}" for name in names]
    assert host.preflight(packages=wanted, pins=wanted)["resolved"] == dict.fromkeys(names, VERSION)


def test_a_pin_somebody_left_on_the_host_is_named(host):
    text = "Package: nvidia-modprobe\nPin: version 570.*\nPin-Priority: 1001\n"
    (host.root / "etc/preferences.d/site").write_text(text)
    answer = host.preflight(pin_packages=[], packages=["nvidia-modprobe"], pins=[f"nvidia-modprobe={VERSION}"])
    assert "nvidia-modprobe resolves to 570.133.20-1ubuntu1, expected 580.178.04-1ubuntu1" in answer["msg"]
    assert "/etc/apt/preferences.d" in answer["msg"]


def test_a_version_that_vanished_stops(host):
    answer = host.preflight(packages=["nvidia-utils-580=580.999.99-1ubuntu1"])
    assert answer["failed"]
    assert "580.999.99" in answer["msg"]
    assert "Nothing was changed" in answer["msg"]


def test_a_source_whose_signature_is_missing_never_passes_as_unreachable(host, repository):
    unsigned = {**host.source, "content": host.source["content"].replace("Trusted: yes\n", "")}
    answer = host.preflight(sources=[unsigned])
    assert answer["failed"]
    assert "signed" in answer["msg"]


def test_what_was_staged_is_enough_when_the_repository_is_gone(host, served):
    """stage fetches, then the window runs with the network cut."""
    source = deb_repository.source(f"http://127.0.0.1:{served.server_port}")
    first = host.preflight(sources=[source], download=True)
    served.shutdown()
    served.server_close()
    second = host.preflight(sources=[source])
    assert (first["offline"], second["offline"]) == (False, True)
    assert second["resolved"] == first["resolved"]
    assert len([name for name in first["downloaded"] if "pinning" not in name]) == len(WANTED)
    (host.root / "cache/archives" / first["downloaded"][0]).unlink()
    third = host.preflight(sources=[source])
    assert third["failed"]
    assert "what was fetched before is not enough" in third["msg"]


def test_a_repository_that_is_gone_stops_where_nothing_was_staged(host):
    answer = host.preflight(sources=[deb_repository.source("http://127.0.0.1:9")])
    assert answer["failed"]
    assert "Nothing was changed" in answer["msg"]


def test_what_would_change_is_announced_with_its_versions(host):
    deb_repository.install(host.root, "nvidia-modprobe", "570.133.20-1ubuntu1")
    host.listing.write_text("ii \tnvidia-modprobe\t570.133.20-1ubuntu1\n")
    answer = host.preflight(check=True, announce=True)
    assert answer["changed"] is True
    assert answer["diff"]["before"] == "nvidia-modprobe 570.133.20-1ubuntu1\n"
    assert f"nvidia-modprobe {VERSION}\n" in answer["diff"]["after"]


def test_packages_an_interrupted_dpkg_left_are_named(host):
    host.listing.write_text("iU \tnvidia-modprobe\t580.178.04-1ubuntu1\nii \tbash\t5.2\n")
    assert host.preflight()["half_done"] == {"nvidia-modprobe": "unpacked"}


def test_a_kernel_without_headers_stops(host, monkeypatch):
    monkeypatch.setattr(apt_preflight, "without_headers", lambda: ["6.8.0-90-generic"])
    answer = host.preflight(headers=True)
    assert "no headers of kernel 6.8.0-90-generic" in answer["msg"]
    assert "linux-headers-6.8.0-90-generic" in answer["msg"]
