"""Holds, locks of package managers, and what an interrupted one leaves behind."""

import fcntl
import os
import subprocess
import sys

import package_holds
import package_lock
import package_repair
import pytest
from modules_run import run_module

LISTING = "hi \tnvidia-driver-cuda\nii \tlibcuda1\nhF \tnvidia-modprobe\nrc \tnvidia-imex\nun \tnvidia-open\n"


class Dpkg:
    """dpkg-query and apt-mark over a dictionary; ``stuck`` packages do not change."""

    def __init__(self, held, stuck=()):
        self.held, self.stuck, self.calls = dict(held), stuck, []

    def __call__(self, argv, timeout):
        self.calls.append(argv)
        if argv[0] == "apt-mark":
            for name in argv[2:]:
                if name not in self.stuck:
                    self.held[name] = argv[1] == "hold"
            return subprocess.CompletedProcess(argv, 0, "", "E: no")
        text = "".join(f"{'h' if held else 'i'}i \t{name}\n" for name, held in self.held.items())
        return subprocess.CompletedProcess(argv, 0, text, "")


@pytest.fixture
def holds(monkeypatch, tmp_path):
    def ask(dpkg, **arguments):
        monkeypatch.setattr(package_holds.with_dpkg, "__defaults__", (dpkg,))
        return run_module(monkeypatch, tmp_path, package_holds.main, manager="apt", **arguments)

    return ask


def test_selections_count_what_is_half_done_and_nothing_that_is_gone():
    assert package_holds.selections(LISTING) == {
        "nvidia-driver-cuda": True, "libcuda1": False, "nvidia-modprobe": True
    }  # fmt: skip


def test_holds_differ_in_one_call_and_a_repeat_changes_nothing(holds):
    dpkg = Dpkg({"a": False, "b": True, "c": False})
    first = holds(dpkg, packages=["a", "b", "c", "not-installed"])
    calls = [call for call in dpkg.calls if call[0] == "apt-mark"]
    again = holds(dpkg, packages=["a", "b", "c", "not-installed"])
    assert first["packages"] == ["a", "c"]
    assert calls == [["apt-mark", "hold", "a", "c"]]
    assert again["changed"] is False


def test_holds_are_lifted_and_put_back(holds):
    dpkg = Dpkg({"a": True, "b": False})
    assert holds(dpkg, packages=["a", "b"], state="released")["packages"] == ["a"]
    assert holds(dpkg, packages=["a"])["packages"] == ["a"]
    assert dpkg.held == {"a": True, "b": False}


def test_check_mode_says_and_does_nothing(holds):
    dpkg = Dpkg({"a": False})
    answer = holds(dpkg, packages=["a"], check=True)
    assert (answer["changed"], answer["diff"]["after"]) == (True, "a: held\n")
    assert dpkg.held == {"a": False}


def test_a_hold_that_does_not_take_is_an_error(holds):
    answer = holds(Dpkg({"a": False}, stuck=["a"]), packages=["a"])
    assert answer["failed"]
    assert "apt-mark hold: a did not change" in answer["msg"]


OURS = "nvidia-driver-cuda-3:580.178.04-1.el9.*"


@pytest.mark.parametrize(
    ("text", "lines", "names", "after"),
    [
        ("", [OURS], [], [package_holds._HEAD, OURS]),
        ("bash-0:5.1-1.el9.*\n", [OURS], [], ["bash-0:5.1-1.el9.*", package_holds._HEAD, OURS]),
        ("nvidia-driver-cuda-3:570.1-1.el9.*\n", [OURS], [], [package_holds._HEAD, OURS]),
        (f"{package_holds._HEAD}\n{OURS}\n", [], ["nvidia-driver-cuda"], []),
        (
            "*nvidia*580*\n!kernel-0:5-1.*\n",
            [OURS],
            ["kernel"],
            ["*nvidia*580*", "!kernel-0:5-1.*", package_holds._HEAD, OURS],
        ),
    ],
    ids=["empty", "others-stay", "replaced", "gone", "patterns-and-exclusions-stay"],
)
def test_the_version_locks_list(text, lines, names, after):
    assert package_holds.merged(text, lines, names).splitlines() == after


def test_what_is_installed_is_locked_where_it_is_after_an_installation_that_failed(monkeypatch, tmp_path):
    listing = "nvidia-driver-cuda\t3:570.133.20-1.el9\nkernel\t0:5.14.0-1.el9\nkernel\t0:5.14.0-2.el9\n"
    path = tmp_path / "versionlock.list"
    path.write_text(f"{OURS}\nlibnvidia-ml-3:580.178.04-1.el9.*\n")
    monkeypatch.setattr(
        package_holds.with_dnf, "__defaults__", (lambda argv, _: subprocess.CompletedProcess(argv, 0, listing, ""),)
    )
    answer = run_module(
        monkeypatch, tmp_path, package_holds.main, manager="dnf", list_file=str(path),
        packages=["nvidia-driver-cuda", "libnvidia-ml", "kernel"],
    )  # fmt: skip
    assert path.read_text().splitlines()[1:] == [
        "nvidia-driver-cuda-3:570.133.20-1.el9.*", "kernel-0:5.14.0-1.el9.*", "kernel-0:5.14.0-2.el9.*"
    ]  # fmt: skip
    assert answer["packages"] == ["kernel", "libnvidia-ml", "nvidia-driver-cuda"]


@pytest.fixture
def locked(tmp_path):
    """A system whose dpkg lock another process holds."""
    path = tmp_path / "var/lib/dpkg/lock-frontend"
    path.parent.mkdir(parents=True)
    path.touch()
    program = (
        "import fcntl,sys;f=open(sys.argv[1],'w');fcntl.lockf(f,fcntl.LOCK_EX);"
        "print('held',flush=True);sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        (tmp_path / f"proc/{other.pid}").mkdir(parents=True)
        (tmp_path / f"proc/{other.pid}/comm").write_text("unattended-upgr\n")
        yield tmp_path, other
        other.stdin.close()


def test_another_apt_is_named_with_its_number(locked):
    root, other = locked
    held = package_lock.wait("apt", 0, root=root)
    assert package_lock.told(held) == f"unattended-upgr (pid {other.pid}) holds /var/lib/dpkg/lock-frontend"


def test_a_lock_that_is_let_go_in_time_is_waited_for(locked):
    root, other = locked

    def sleep(_):
        other.stdin.close()
        other.wait(5)

    assert package_lock.wait("apt", 30, root=root, sleep=sleep) is None


def test_our_own_lock_is_nobodys(tmp_path):
    path = tmp_path / "var/lib/dpkg/lock"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert package_lock.holder("apt", tmp_path) is None


def test_a_running_dnf_is_found_by_its_pid_file(tmp_path):
    path = tmp_path / "var/lib/dnf/rpmdb_lock.pid"
    path.parent.mkdir(parents=True)
    path.write_text(f"{os.getppid()}\n")
    assert package_lock.holder("dnf", tmp_path) is None  # no such process any more
    (tmp_path / f"proc/{os.getppid()}").mkdir(parents=True)
    assert package_lock.holder("dnf", tmp_path)["pid"] == os.getppid()


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        ("ii  bash\nrc  nvidia-imex\nun  x\n", {}),
        ("iU nvidia-modprobe\n", {"nvidia-modprobe": "unpacked"}),
        ("iHR nvidia-dkms-580-open\n", {"nvidia-dkms-580-open": "half-installed"}),
        ("hF a\niW b\nit c\n", {"a": "half-configured", "b": "triggers awaited", "c": "triggers due"}),
    ],
)
def test_what_dpkg_did_not_finish(listing, found):
    assert package_lock.half_done(listing) == found


class Interrupted:
    """A dpkg that has unfinished packages; configuring finishes those in ``mends``."""

    def __init__(self, rows, mends):
        self.rows, self.mends, self.configured = dict(rows), mends, 0

    def __call__(self, argv, timeout):
        if argv[0] == "dpkg":
            self.configured += 1
            self.rows.update(dict.fromkeys(self.mends, "ii"))
        text = "".join(f"{abbrev} {name}\n" for name, abbrev in self.rows.items())
        return subprocess.CompletedProcess(argv, 0, text, "dpkg: error processing")


@pytest.fixture
def repair(monkeypatch, tmp_path):
    def ask(dpkg, **arguments):
        monkeypatch.setattr(package_repair.repair_dpkg, "__defaults__", (dpkg,))
        monkeypatch.setattr(package_repair, "journal", lambda: False)
        monkeypatch.setattr(package_repair, "wait", lambda *_: None)
        return run_module(monkeypatch, tmp_path, package_repair.main, manager="apt", **arguments)

    return ask


def test_what_was_interrupted_is_finished(repair):
    dpkg = Interrupted({"a": "iU", "b": "iHR", "c": "ii"}, mends=["a"])
    answer = repair(dpkg)
    assert answer["half_done"] == {"a": "unpacked", "b": "half-installed"}
    assert answer["left"] == {"b": "half-installed"}  # a transaction that names it brings its archive again
    assert answer["changed"] is True


def test_nothing_is_done_where_nothing_is_half_done(repair):
    dpkg = Interrupted({"c": "ii"}, mends=[])
    assert repair(dpkg)["changed"] is False
    assert dpkg.configured == 0


def test_check_mode_repairs_nothing(repair):
    dpkg = Interrupted({"a": "iU"}, mends=["a"])
    assert repair(dpkg, check=True)["changed"] is True
    assert dpkg.configured == 0


def test_what_cannot_be_finished_is_named(repair):
    answer = repair(Interrupted({"a": "iF"}, mends=[]))
    assert answer["failed"]
    assert "a (half-configured)" in answer["msg"]
    assert "dpkg: error processing" in answer["msg"]


def test_a_manager_that_does_not_end_is_named_and_nothing_is_changed(repair, monkeypatch, tmp_path):
    dpkg = Interrupted({"a": "iU"}, mends=["a"])
    monkeypatch.setattr(package_repair.repair_dpkg, "__defaults__", (dpkg,))
    monkeypatch.setattr(package_repair, "wait", lambda *_: {"path": "/x/lock", "pid": 7, "name": "apt-get"})
    answer = run_module(monkeypatch, tmp_path, package_repair.main, manager="apt", lock_timeout_s=3)
    assert "apt-get (pid 7) holds /x/lock after 3 s" in answer["msg"]
    assert dpkg.configured == 0


def test_rpm_packages_installed_twice_are_told_apart_from_kernels():
    listing = "kernel.x86_64\nkernel.x86_64\nnvidia-driver-cuda.x86_64\nnvidia-driver-cuda.x86_64\nbash.x86_64\n"
    assert package_lock.duplicates(listing) == ["nvidia-driver-cuda.x86_64"]
