"""Stopping what holds the GPUs, taking the modules out and putting them back, on a host made of files."""

import subprocess
from pathlib import Path

import gpu_release
import pytest
from modules_run import run_module

UNITS = [
    {"unit": "dcgm-exporter.service", "limit_s": 20},
    {"unit": "nvidia-persistenced.service", "limit_s": 5},
    {"unit": "nvidia-imex.service", "limit_s": 60},
]
UNLOAD = ["nvidia_peermem", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia"]
LOAD = [
    {"module": "i2c_core", "optional": True},
    {"module": "nvidia"},
    {"module": "nvidia_uvm"},
    {"module": "nvidia_peermem", "optional": True, "needs_vendor": "0x15b3", "if_loaded_before": True},
]
USES = {
    "nvidia_uvm": ["nvidia"],
    "nvidia_modeset": ["nvidia"],
    "nvidia_drm": ["nvidia_modeset"],
    "nvidia_peermem": ["nvidia"],
}


class Machine:
    """A host whose systemctl, modprobe and rmmod change files; hung units do not stop, broken modules do not load."""

    def __init__(self, root: Path, *, units=(), modules=(), hung=(), immortal=(), broken=()):
        self.root, self.active, self.hung, self.immortal, self.broken = (
            root,
            set(units),
            set(hung),
            set(immortal),
            broken,
        )
        self.asked: list[str] = []
        (root / "sys/module").mkdir(parents=True)
        for name in modules:
            self.insert(name)

    def insert(self, name):
        folder = self.root / "sys/module" / name
        (folder / "holders").mkdir(parents=True)
        (folder / "refcnt").write_text("0\n")
        for used in USES.get(name, []):
            (self.root / "sys/module" / used / "holders" / name).touch()
            self.count(used, 1)

    def count(self, name, more):
        path = self.root / "sys/module" / name / "refcnt"
        path.write_text(f"{int(path.read_text()) + more}\n")

    def open_device(self, pid, name):
        folder = self.root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "fd/3").symlink_to("/dev/nvidia0")
        self.count("nvidia", 1)

    def run(self, argv, timeout):
        self.asked.append(" ".join(argv))
        return subprocess.CompletedProcess(argv, *getattr(self, argv[0])(list(argv[1:]), timeout))

    def systemctl(self, words, timeout):
        verb, units = words[0], [word for word in words[1:] if not word.startswith("-")]
        if verb == "show":
            blocks = (
                f"Id={u}\nLoadState=loaded\nActiveState={'active' if u in self.active else 'inactive'}" for u in units
            )
            return 0, "\n\n".join(blocks), ""
        for unit in units:
            if verb == "start":
                self.active.add(unit)
            elif verb == "stop" and unit in self.hung:
                raise subprocess.TimeoutExpired(verb, timeout)
            elif verb == "kill":
                self.hung.discard(unit)
            if verb in ("stop", "kill") and unit not in self.immortal:
                self.active.discard(unit)
        return 0, "", ""

    def rmmod(self, words, _):
        (name,) = words
        folder = self.root / "sys/module" / name
        if int((folder / "refcnt").read_text()):
            return 1, "", f"rmmod: ERROR: Module {name} is in use"
        for used in USES.get(name, []):
            (self.root / "sys/module" / used / "holders" / name).unlink()
            self.count(used, -1)
        (folder / "refcnt").unlink()
        (folder / "holders").rmdir()
        folder.rmdir()
        return 0, "", ""

    def modprobe(self, words, _):
        (name,) = words
        if name in self.broken:
            return 1, "", f"modprobe: FATAL: Module {name} not found"
        self.insert(name)
        return 0, "", ""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Ask the module about a machine."""

    def ask(machine, state, check=False):
        made = gpu_release.Host.__init__

        def with_machine(self, root, timeout_s):
            made(self, root, timeout_s, sleep=lambda _: None)
            self.probe._run = machine.run

        monkeypatch.setattr(gpu_release.Host, "__init__", with_machine)
        answer = run_module(
            monkeypatch, tmp_path, gpu_release.main, check=check, state=state, root=str(machine.root), units=UNITS,
            unload=UNLOAD, load=LOAD, timeout_s=0, memory=str(tmp_path / "run/released.json"),
        )  # fmt: skip
        monkeypatch.setattr(gpu_release.Host, "__init__", made)
        return answer

    return ask


ALL = [unit["unit"] for unit in UNITS]


def test_units_stop_in_order_and_come_back_in_reverse(tmp_path, ask):
    machine = Machine(tmp_path / "host", units=[ALL[2], ALL[1]], modules=["nvidia", "nvidia_uvm"])
    stopped = ask(machine, "stopped")
    again = ask(machine, "stopped")
    back = ask(machine, "loaded")
    assert (stopped["stopped"], stopped["escalated"]) == ([ALL[1], ALL[2]], [])
    assert (again["changed"], again["stopped"]) == (False, [])
    assert back["started"] == [ALL[2], ALL[1]]
    assert machine.active == {ALL[1], ALL[2]}
    assert ask(machine, "loaded")["changed"] is False


def test_a_stop_that_hangs_is_escalated_and_asked_again(tmp_path, ask):
    """C36: dcgm-exporter hangs on GB200."""
    machine = Machine(tmp_path / "host", units=ALL, hung=[ALL[0]])
    answer = ask(machine, "stopped")
    assert answer["escalated"] == [ALL[0]]
    assert answer["stopped"] == ALL
    assert machine.active == set()
    assert f"systemctl kill --signal=SIGKILL {ALL[0]}" in machine.asked


def test_a_unit_that_survives_sigkill_stops_the_run(tmp_path, ask):
    machine = Machine(tmp_path / "host", units=ALL, hung=[ALL[0]], immortal=[ALL[0]])
    answer = ask(machine, "stopped")
    assert answer["failed"]
    assert "dcgm-exporter.service runs on after stop (20 s) and SIGKILL" in answer["msg"]
    assert "stays drained" in answer["msg"]


def test_modules_leave_in_order_when_nothing_holds_them(tmp_path, ask):
    machine = Machine(tmp_path / "host", modules=["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"])
    answer = ask(machine, "released")
    assert answer["released"] is True
    assert answer["unloaded"] == ["nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia"]
    back = ask(machine, "loaded")
    assert back["loaded"] == ["i2c_core", "nvidia", "nvidia_uvm"]


def test_a_holder_is_named_and_nothing_is_unloaded(tmp_path, ask):
    machine = Machine(tmp_path / "host", modules=["nvidia", "nvidia_uvm"])
    machine.open_device(4711, "train.py")
    answer = ask(machine, "released")
    assert answer["released"] is False
    assert answer["holders"] == ["train.py (pid 4711) on /dev/nvidia0"]
    assert answer["references"] == {"nvidia": 1}
    assert answer["unloaded"] == []
    assert not [line for line in machine.asked if line.startswith("rmmod")]


def test_a_reference_without_a_process_is_told(tmp_path, ask):
    """A console on nvidia_drm has no open device that can be seen."""
    machine = Machine(tmp_path / "host", modules=["nvidia", "nvidia_modeset", "nvidia_drm"])
    machine.count("nvidia_drm", 2)
    answer = ask(machine, "released")
    assert (answer["released"], answer["holders"], answer["references"]) == (False, [], {"nvidia_drm": 2})


def test_peermem_comes_back_only_beside_its_hardware_and_where_it_was(tmp_path, ask):
    machine = Machine(tmp_path / "host", modules=["nvidia", "nvidia_peermem"])
    ask(machine, "released")
    assert "nvidia_peermem" not in ask(machine, "loaded")["loaded"]
    machine.insert("nvidia_peermem")
    ask(machine, "released")
    device = machine.root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x15b3\n")
    assert "nvidia_peermem" in ask(machine, "loaded")["loaded"]


def test_an_optional_module_may_be_missing_and_the_driver_may_not(tmp_path, ask):
    machine = Machine(tmp_path / "host", broken=["i2c_core"])
    assert ask(machine, "loaded")["missing"] == {"i2c_core": "modprobe: FATAL: Module i2c_core not found"}
    broken = Machine(tmp_path / "other", broken=["nvidia"])
    assert "module nvidia does not load" in ask(broken, "loaded")["msg"]


def test_a_run_that_was_killed_after_the_stops_still_starts_what_ran(tmp_path, ask):
    machine = Machine(tmp_path / "host", units=ALL, modules=["nvidia", "nvidia_uvm"])
    ask(machine, "stopped")
    # Killed here; the next run finds nothing to stop and brings everything back all the same.
    ask(machine, "stopped")
    assert ask(machine, "loaded")["started"] == list(reversed(ALL))


def test_check_mode_says_and_does_nothing(tmp_path, ask):
    machine = Machine(tmp_path / "host", units=ALL, modules=["nvidia"])
    assert ask(machine, "stopped", check=True)["stopped"] == ALL
    assert ask(machine, "released", check=True)["changed"] is True
    assert machine.active == set(ALL)
    assert not (tmp_path / "run").exists()
    assert {line.split()[1] for line in machine.asked} == {"show"}
