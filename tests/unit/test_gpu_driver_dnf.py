"""RHEL's transactions, resolved by the real dnf in a root of its own against a local repository of stand-ins."""

import functools
import http.server
import threading

import dnf_module_stream
import dnf_preflight
import package_holds
import pytest
import rpm_repository
from modules_run import run_module

from kimi_runbook.driver_packages import lock_lines
from kimi_runbook.wishes import dnf_names

pytestmark = pytest.mark.skipif(
    bool(rpm_repository.MISSING),
    reason=f"not installed: {' '.join(rpm_repository.MISSING)}; make prerequisites installs them",
)

VERSION = {el: f"3:580.178.04-1.el{el}" for el in (9, 10)}


def wishes(el):
    return [{"name": name, "version": VERSION[el], "held": True} for name in rpm_repository.NAMES]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rpm")
    return {el: rpm_repository.build(folder / f"el{el}", el, modular=el == 9) for el in (9, 10)}


@pytest.fixture
def system(tmp_path, repositories, monkeypatch):
    """A system of one major version, and a way to ask the preflight about it."""

    class System:
        def __init__(self, el):
            self.el = el
            self.root = rpm_repository.root(tmp_path / "root", el)
            self.source = rpm_repository.source(repositories[el], modular=el == 9)

        def module(self, main, **arguments):
            return run_module(monkeypatch, tmp_path, main, **arguments)

        def preflight(self, **changes):
            asked = {
                "sources": [self.source],
                "packages": dnf_names(wishes(self.el)),
                "pins": [f"{wish['name']}={wish['version']}" for wish in wishes(self.el)],
                "stream": "580-open" if self.el == 9 else "",
                "stream_packages": list(rpm_repository.NAMES),
                "locks": lock_lines(wishes(self.el), ["libnvidia-ml"], VERSION[self.el]),
                "branch": "580",
                "installroot": str(self.root),
                **changes,
            }
            return self.module(dnf_preflight.main, **asked)

    return System


@pytest.mark.parametrize("el", [9, 10])
def test_every_version_of_the_lock_resolves_and_nothing_of_the_host_changes(system, el):
    host = system(el)
    before = sorted(path for path in host.root.rglob("*") if "cache" not in path.parts)
    answer = host.preflight()
    assert answer["resolved"] == dict.fromkeys((*rpm_repository.NAMES, "libnvidia-ml"), VERSION[el])
    assert sorted(path for path in host.root.rglob("*") if "cache" not in path.parts) == before


@pytest.mark.parametrize("el", [9, 10])
def test_a_version_nobody_offers_stops(system, el):
    answer = system(el).preflight(packages=[f"nvidia-driver-cuda-3:580.999.99-1.el{el}"])
    assert answer["failed"]
    assert "580.999.99" in answer["msg"]
    assert "Nothing was changed" in answer["msg"]


def test_a_lower_bound_drags_another_branch_in_where_nothing_locks_it(system):
    """What C01 is about: without the lock the newest branch of a dependency comes."""
    answer = system(10).preflight(locks=[])
    assert answer["failed"]
    assert "libnvidia-ml resolves to 3:595.91.07-1.el10, expected branch 580" in answer["msg"]


def test_a_stream_nobody_offers_stops(system):
    answer = system(9).preflight(stream="620-open")
    assert answer["failed"]
    assert "expected stream 620-open of nvidia-driver" in answer["msg"]


def test_a_repository_that_is_gone_stops(system, tmp_path):
    host = system(10)
    gone = {**host.source, "content": host.source["content"].replace("el10", "gone")}
    answer = host.preflight(sources=[gone])
    assert answer["failed"]
    assert "do not answer" in answer["msg"]


def test_what_was_staged_is_enough_when_the_repository_is_gone(system, repositories):
    """stage fetches, then the window runs with the network cut."""
    host = system(10)
    handler = functools.partial(Quiet, directory=str(repositories[10]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    source = {**host.source, "content": host.source["content"].replace(f"file://{repositories[10]}", address)}
    asked = {"sources": [source], "options": ["--setopt=retries=1"]}
    first = host.preflight(download=True, **asked)
    server.shutdown()
    server.server_close()
    second = host.preflight(**asked)
    assert (first["offline"], second["offline"]) == (False, True)
    assert len(first["downloaded"]) == len(first["resolved"])
    assert second["resolved"] == first["resolved"]


def test_the_stream_changes_with_reset_removal_and_enabling(system):
    """C03: an enabled stream is sticky, so the old one is left before the new one is enabled."""
    host = system(9)
    (host.root / "etc/yum.repos.d/kimi-cuda.repo").write_text(host.source["content"])
    options = [f"--setopt=reposdir={host.root}/etc/yum.repos.d"]
    asked = {
        "name": "nvidia-driver",
        "installroot": str(host.root),
        "options": options,
        "remove": list(rpm_repository.NAMES),
    }
    first = host.module(dnf_module_stream.main, stream="570-open", **asked)
    install(host, "nvidia-driver-cuda-3:570.133.20-1.el9")
    planned = host.module(dnf_module_stream.main, stream="580-open", check=True, **asked)
    second = host.module(dnf_module_stream.main, stream="580-open", **asked)
    again = host.module(dnf_module_stream.main, stream="580-open", **asked)
    assert (first["changed"], first["before"]) == (True, "")
    assert (planned["changed"], planned["removed"]) == (True, [])
    assert (second["changed"], second["before"]) == (True, "570-open")
    assert second["removed"] == ["nvidia-driver-cuda", "nvidia-driver-cuda-libs"]
    assert again["changed"] is False


def test_the_preflight_of_a_change_of_stream_sees_the_packages_of_the_old_one_gone(system):
    host = system(9)
    (host.root / "etc/yum.repos.d/kimi-cuda.repo").write_text(host.source["content"])
    options = [f"--setopt=reposdir={host.root}/etc/yum.repos.d"]
    host.module(
        dnf_module_stream.main, name="nvidia-driver", stream="595-open", installroot=str(host.root), options=options
    )
    install(host, "nvidia-driver-cuda-3:595.91.07-1.el9")
    answer = host.preflight(stream_packages=[*rpm_repository.NAMES, "libnvidia-ml"])
    assert answer["resolved"]["nvidia-driver-cuda"] == VERSION[9]
    assert answer["resolved"]["libnvidia-ml"] == VERSION[9]
    assert "595-open" in (host.root / "etc/dnf/modules.d/nvidia-driver.module").read_text()


def test_a_stream_nobody_offers_leaves_the_old_one_enabled(system):
    host = system(9)
    (host.root / "etc/yum.repos.d/kimi-cuda.repo").write_text(host.source["content"])
    asked = {
        "name": "nvidia-driver",
        "installroot": str(host.root),
        "options": [f"--setopt=reposdir={host.root}/etc/yum.repos.d"],
    }
    host.module(dnf_module_stream.main, stream="570-open", **asked)
    answer = host.module(dnf_module_stream.main, stream="620-open", **asked)
    assert "570-open is enabled as before" in answer["msg"]
    assert dnf_module_stream.current_stream(str(host.root), "nvidia-driver") == "570-open"


def test_the_version_lock_keeps_a_plain_upgrade_off_the_driver(system):
    """C04: the second transaction of anybody changes nothing."""
    host = system(10)
    (host.root / "etc/yum.repos.d/kimi-cuda.repo").write_text(host.source["content"])
    lock = host.root / "etc/dnf/plugins/versionlock.list"
    lines = lock_lines(wishes(10), ["libnvidia-ml"], VERSION[10])
    host.module(package_holds.main, manager="dnf", locks=lines, list_file=str(lock))
    install(host, *dnf_names(wishes(10)))
    locked = dnf(host, "--assumeno", "upgrade")
    lock.write_text("")
    free = dnf(host, "--assumeno", "upgrade")
    assert "Nothing to do" in locked.stdout + locked.stderr
    assert "595.91.07" in free.stdout


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, *_):
        """Say nothing."""


def dnf(host, *words):
    options = [
        f"--installroot={host.root}", f"--setopt=reposdir={host.root}/etc/yum.repos.d",
        f"--setopt=pluginconfpath={host.root}/etc/dnf/plugins",
    ]  # fmt: skip
    return dnf_preflight.run(["dnf", *options, *words], 120)


def install(host, *names):
    done = dnf(host, "--assumeyes", "install", *names)
    assert done.returncode == 0, done.stdout + done.stderr
