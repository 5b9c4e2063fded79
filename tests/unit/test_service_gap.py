"""The gap's arithmetic, its file, and the line that is printed."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail

from kimi_runbook.errors import RunbookError
from kimi_runbook.transaction.service_gap import measure, write

MARK = {
    "schema_version": 1,
    "run_id": "r1",
    "last_answer_at": 1000.0,
    "first_answer_at": 1160.5,
    "unit_started_at": 1040.0,
    "rebooted": False,
    "requests_cut": 0,
}


@pytest.mark.parametrize(
    ("mark", "ready_at", "reboots", "judged"),
    [
        pytest.param({}, 1150.0, [None], (110.0, 50.5, False), id="over"),
        pytest.param({"unit_started_at": 1015.0}, 1160.0, [None], (145.0, 15.5, True), id="within"),
        pytest.param({}, 1150.0, [12.0, 31.0, None], (110.0, 50.5, True), id="the-longest-reboot-counts-once"),
        pytest.param({}, 1150.0, [30.0], (110.0, 50.5, False), id="over-with-its-reboot"),
        pytest.param({"rebooted": True}, 1150.0, [None], (110.0, 50.5, None), id="a-reboot-nobody-timed"),
        pytest.param(
            {"rebooted": True, "unit_started_at": 1010.0}, 1160.0, [None], (150.0, 10.5, True), id="within-anyway"
        ),
        pytest.param({}, None, [None], (None, None, None), id="nobody-saw-it-become-ready"),
        pytest.param({"unit_started_at": None}, 1150.0, [None], (None, None, None), id="no-start-told"),
        pytest.param({"unit_started_at": 900.0}, 1150.0, [None], (None, None, None), id="started-before-the-drain"),
        pytest.param(
            {"first_answer_at": 990.0, "unit_started_at": 1000.0},
            1150.0,
            [None],
            (None, None, None),
            id="clock-set-back",
        ),
    ],
)
def test_the_engines_own_start_is_taken_off(mark, ready_at, reboots, judged):
    gap = measure("k3-a", {**MARK, **mark}, ready_at, reboots)
    assert (gap.engine_start_s, gap.ours_s, gap.within_bar) == judged


def test_a_mark_without_its_moments_is_told():
    with pytest.raises(RunbookError, match="first_answer_at: absent; expected a number"):
        measure("k3-a", {key: MARK[key] for key in MARK if key != "first_answer_at"}, 1.0, [])


@pytest.mark.parametrize(
    ("gap", "line"),
    [
        pytest.param(
            measure("k3-a", MARK, 1150.0, [31.0]),
            "k3-a: service gap 160.5 s, engine's own start 110.0 s, our share 50.5 s; "
            "bar 20 s + one reboot (31.0 s): within; 0 requests cut",
            id="all-known",
        ),
        pytest.param(
            measure("k3-a", {**MARK, "rebooted": True, "requests_cut": None}, None, [None]),
            "k3-a: service gap 160.5 s, engine's own start not seen, our share not known; "
            "bar 20 s + one reboot (time not noted): not judged; an unknown number of requests cut",
            id="little-known",
        ),
    ],
)
def test_the_line_says_what_is_known_and_what_is_not(gap, line):
    assert str(gap) == line


def test_the_file_keeps_every_replica_of_the_run(tmp_path):
    write(tmp_path, [measure("k3-a", MARK, 1150.0, [])])
    path = write(tmp_path, [measure("k3-c", MARK, None, [])])
    replicas = json.loads(path.read_text())["replicas"]
    assert replicas["k3-a"]["ours_s"] == 50.5
    assert replicas["k3-a"]["within_bar"] is False
    assert replicas["k3-c"]["ours_s"] is None
    (tmp_path / "service_gap.json").write_text("{half")
    with pytest.raises(RunbookError):
        write(tmp_path, [])


def act(project_root, monkeypatch, run_dir, hosts):
    path = project_root / "plugins/action/kimi_service_gap.py"
    spec = importlib.util.spec_from_file_location("kimi_service_gap", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    action = module.ActionModule.__new__(module.ActionModule)
    action._task = SimpleNamespace(args={"run": {"dir": str(run_dir)}})
    monkeypatch.setattr(module.ActionBase, "run", lambda *_: {})
    said = []
    monkeypatch.setattr(module, "Display", lambda: SimpleNamespace(display=said.append))
    result = action.run(task_vars={"hostvars": hosts, "ansible_play_hosts": list(hosts)})
    return result, said


def rank(mark, reboot_s=None, *, restart=True, became_ready=True):
    return {
        "__service_gap_answer": {"mark": mark, "reboot_s": reboot_s},
        "__engine_ready": {"ready_at": 1150.0, "became_ready": became_ready},
        "__engine_restart": restart,
        "kimi_replica": ["k3-a", "k3-b"],
    }


def test_the_plugin_tells_one_line_per_drained_replica(project_root, monkeypatch, tmp_path):
    hosts = {"k3-a": rank(MARK), "k3-b": rank({}, reboot_s=40.0)}
    result, said = act(project_root, monkeypatch, tmp_path, hosts)
    assert len(said) == 1
    assert "one reboot (40.0 s): within" in said[0]
    assert result["gaps"] == [json.loads((tmp_path / "service_gap.json").read_text())["replicas"]["k3-a"]]


def test_the_plugin_says_nothing_where_nothing_was_drained(project_root, monkeypatch, tmp_path):
    result, said = act(project_root, monkeypatch, tmp_path, {"k3-a": rank({}), "k3-b": rank({})})
    assert (result["gaps"], said, list(tmp_path.iterdir())) == ([], [], [])


def test_an_engine_that_was_ready_before_anybody_looked_has_no_known_start(project_root, monkeypatch, tmp_path):
    hosts = {"k3-a": rank(MARK, restart=False, became_ready=False), "k3-b": rank({})}
    result, _ = act(project_root, monkeypatch, tmp_path, hosts)
    assert result["gaps"][0]["engine_start_s"] is None


def test_the_plugin_tells_a_broken_mark(project_root, monkeypatch, tmp_path):
    with pytest.raises(AnsibleActionFail, match="expected a number"):
        act(project_root, monkeypatch, tmp_path, {"k3-a": rank({"first_answer_at": "x"}), "k3-b": rank({})})
