"""What the modules of a drain ask, wait for and write down: against a server that says what a test tells it to."""

import json
import sys
import time

import engine_answer
import engine_drain
import engine_first_answer
import host_record
import node_drain_units
import pytest
from ansible.module_utils.testing import patch_module_args
from scripted_server import ScriptedServer, closed_port, json_answer, read_request

MODEL = "kimi-k3"
GAUGES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="kimi {{k3}}"}} {running}
vllm:num_requests_running{{engine="1",model_name="kimi-k3"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="kimi-k3"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 9.0
"""


def metrics(running, waiting=0.0):
    return GAUGES.format(running=running, waiting=waiting)


def engine(pages, health=b"200 OK", served=MODEL):
    """Return a script: each GET of /metrics gets the next page, the last one again and again."""
    pages = list(pages)

    def script(sock):
        head, _ = read_request(sock)
        path = head.split()[1].decode()
        if path == "/metrics":
            page = pages.pop(0) if len(pages) > 1 else pages[0]
            body = page if isinstance(page, bytes) else json_answer(page.encode())
        elif path == "/health":
            body = json_answer(b"", status=health)
        else:
            body = json_answer(json.dumps({"data": [{"id": served}]}).encode())
        sock.sendall(body)

    return script


def result_of(module, capsys, check=False, **args):
    """Run a module's main and return what it tells Ansible."""
    with patch_module_args({**args, "_ansible_check_mode": check}), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def drain(tmp_path, capsys):
    def run(url, **args):
        wanted = {"url": url, "model": MODEL, "deadline_s": 5, "poll_s": 0.01, "run_id": "r1", "answer_timeout_s": 2}
        return result_of(engine_drain, capsys, mark=str(tmp_path / "k/gap.json"), **{**wanted, **args})

    return run


def test_requests_in_flight_adds_engines_and_queues_and_nothing_else():
    assert engine_answer.requests_in_flight(metrics(3.0, 2.0)) == 5
    assert engine_answer.requests_in_flight(metrics(0.0)) == 0
    assert engine_answer.requests_in_flight("# TYPE vllm:num_requests_running gauge\n") is None


def test_running_requests_are_awaited_to_none(drain, tmp_path):
    with ScriptedServer(engine([metrics(2.0, 1.0), metrics(1.0), metrics(0.0)])) as server:
        before = time.time()
        result = drain(server.url)
    assert (result["engine"], result["left"], result["changed"]) == (True, 0, False)
    mark = json.loads((tmp_path / "k/gap.json").read_text())
    assert before <= mark["last_answer_at"] <= time.time()
    assert (mark["run_id"], mark["requests_cut"]) == ("r1", 0)


def test_requests_left_at_the_deadline_stop_the_run(drain, tmp_path):
    with ScriptedServer(engine([metrics(2.0)])) as server:
        result = drain(server.url, deadline_s=0)
    assert result["failed"]
    assert "2 requests run or wait after" in result["msg"]
    assert "The engine was not stopped" in result["msg"]
    assert not (tmp_path / "k/gap.json").exists()


def test_requests_left_at_the_deadline_are_cut_and_counted(drain, tmp_path):
    with ScriptedServer(engine([metrics(2.0, 1.0)])) as server:
        result = drain(server.url, deadline_s=0, on_deadline="cut")
    assert result["left"] == 3
    assert json.loads((tmp_path / "k/gap.json").read_text())["requests_cut"] == 3


@pytest.mark.parametrize(
    ("page", "said"),
    [
        pytest.param(json_answer(b"", status=b"500 Oops"), "HTTP 500", id="broken"),
        pytest.param("go_threads 9\n", "no vllm:num_requests_running", id="of-something-else"),
    ],
)
def test_a_page_that_does_not_say_is_not_taken_for_idle(drain, page, said):
    with ScriptedServer(engine([page])) as server:
        result = drain(server.url, deadline_s=0)
        assert said in result["msg"]
        assert drain(server.url, deadline_s=0, on_deadline="cut")["left"] is None


def test_no_answer_in_time_is_not_taken_for_no_engine(drain):
    def silent(sock):
        read_request(sock)
        sock.recv(1)

    with ScriptedServer(silent) as server:
        result = drain(server.url, deadline_s=0, answer_timeout_s=0.1)
    assert result["failed"]


def test_no_engine_is_nothing_to_await_and_keeps_the_mark_of_a_gap_that_lasts(drain, tmp_path):
    host_record.write_record(str(tmp_path / "k/gap.json"), {"schema_version": 1, "last_answer_at": 7.0})
    with closed_port() as port:
        result = drain(f"http://127.0.0.1:{port}")
    assert (result["engine"], result["left"], result["last_answer_at"]) == (False, 0, None)
    assert json.loads((tmp_path / "k/gap.json").read_text())["last_answer_at"] == 7.0


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(engine([metrics(0.0)], health=b"503 Dead"), id="unhealthy"),
        pytest.param(engine([metrics(0.0)], served="other"), id="another-model"),
    ],
)
def test_an_engine_that_answers_badly_leaves_no_mark(drain, tmp_path, script):
    with ScriptedServer(script) as server:
        assert drain(server.url)["last_answer_at"] is None
    assert not (tmp_path / "k/gap.json").exists()


def test_check_mode_looks_once_and_notes_nothing(drain, tmp_path):
    with ScriptedServer(engine([metrics(2.0)])) as server:
        assert drain(server.url, check=True, deadline_s=60)["left"] == 2
    assert not (tmp_path / "k/gap.json").exists()


def test_no_proxy_stands_between_the_module_and_its_own_engine(drain, monkeypatch):
    with closed_port() as port, ScriptedServer(engine([metrics(0.0)])) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        assert drain(server.url)["engine"]


@pytest.fixture
def first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine_first_answer, "unit_started_at", lambda unit: 40.0)

    def run(url, **args):
        files = {"mark": str(tmp_path / "gap.json"), "reboot": str(tmp_path / "reboot.json")}
        return result_of(
            engine_first_answer, capsys, url=url, model=MODEL, unit="x.service", poll_s=0.01, **files, **args
        )

    def noted(name, **values):
        host_record.write_record(str(tmp_path / name), {"schema_version": 1, **values})

    run.noted = noted
    return run


def test_without_a_drain_nothing_is_asked(first):
    with ScriptedServer(engine([metrics(0.0)])) as server:
        assert first(server.url)["mark"] == {}
        assert server.connections == 0


def test_the_first_good_answer_is_noted_once(first):
    first.noted("gap.json", last_answer_at=1.0, run_id="r1", boot=engine_answer.boot_of())
    first.noted("reboot.json", reboot_s=31.5)
    bad, good = engine([""], health=b"503 No"), engine([""])
    with ScriptedServer(bad, bad, good) as server:
        result = first(server.url)
        mark = result["mark"]
        assert time.time() - mark["first_answer_at"] < 60
        assert (mark["unit_started_at"], mark["rebooted"], result["reboot_s"]) == (40.0, False, 31.5)
        asked = server.connections
        assert first(server.url)["mark"] == mark
        assert server.connections == asked


def test_another_boot_is_told(first):
    first.noted("gap.json", last_answer_at=1.0, run_id="r1", boot="an earlier one")
    with ScriptedServer(engine([""])) as server:
        assert first(server.url)["mark"]["rebooted"] is True


def test_an_engine_that_never_answers_well_ends_the_wait(first):
    first.noted("gap.json", last_answer_at=1.0, run_id="r1", boot="b")
    with ScriptedServer(engine([""], served="other")) as server:
        result = first(server.url, timeout_s=0)
    assert "GET /v1/models: other, not kimi-k3" in result["msg"]


def test_a_record_that_is_none_stops_with_what_to_do(first, tmp_path):
    (tmp_path / "gap.json").write_text("{half")
    assert "Move it away" in first("http://127.0.0.1:1")["msg"]


def test_a_record_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "a/b.json"
    host_record.write_record(str(path), {"schema_version": 1, "n": 1})
    monkeypatch.setattr(host_record.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError):
        host_record.write_record(str(path), {"schema_version": 1, "n": 2})
    assert host_record.read_record(str(path))["n"] == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]


def test_boot_differs_where_process_one_started_anew(tmp_path):
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("abc\n")
    (tmp_path / "1").mkdir()
    stat = "1 (init (x) y) S " + " ".join(str(n) for n in range(4, 53))
    (tmp_path / "1/stat").write_text(stat)
    assert engine_answer.boot_of(str(tmp_path)) == "abc 22"


SHOWN = """\
LoadState=loaded
ActiveState=active
UnitFileState=enabled

LoadState=not-found
ActiveState=inactive
UnitFileState=

LoadState=loaded
ActiveState=activating
UnitFileState=static

LoadState=loaded
ActiveState=inactive
UnitFileState=disabled
"""
UNITS = ["engine.service", "gone.service", "agent.service", "off.service"]


def test_units_on_the_host_are_stopped_and_taken_out_of_the_boot():
    found = node_drain_units.as_found(node_drain_units.parse_states(SHOWN, UNITS))
    assert found == {
        "engine.service": {"active": True, "enabled": True},
        "agent.service": {"active": True, "enabled": False},
        "off.service": {"active": False, "enabled": False},
    }
    assert node_drain_units.to_stop(UNITS, found) == [
        ["stop", "engine.service"],
        ["stop", "agent.service"],
        ["disable", "engine.service"],
    ]


def test_units_come_back_as_they_were_and_in_reverse():
    was = node_drain_units.as_found(node_drain_units.parse_states(SHOWN, UNITS))
    now = {unit: {"active": False, "enabled": False} for unit in was}
    assert node_drain_units.to_restore(was, now, leave=[]) == [
        ["start", "agent.service"],
        ["enable", "engine.service"],
        ["start", "engine.service"],
    ]
    assert node_drain_units.to_restore(was, now, leave=["engine.service"]) == [["start", "agent.service"]]
    assert node_drain_units.to_restore(was, was, leave=[]) == []
    assert node_drain_units.to_restore(was, {}, leave=[]) == []


SYSTEMCTL = f"""#!{sys.executable}
import json, os, sys
path = os.environ["FAKE_UNITS"]
units = json.load(open(path))
verb, names = sys.argv[1], [word for word in sys.argv[2:] if word.endswith(".service")]
with open(path + ".log", "a") as log:
    print(*[word for word in sys.argv[1:] if word != "--" and not word.startswith("--property")], file=log)
if verb == "show":
    for name in names:
        unit = units.get(name)
        print("LoadState=" + ("loaded" if unit else "not-found"))
        print("ActiveState=" + ("active" if unit and unit["active"] else "inactive"))
        print("UnitFileState=" + ("enabled" if unit and unit["enabled"] else "disabled" if unit else ""))
        print()
elif units[names[0]].get("stuck"):
    sys.exit("Job for " + names[0] + " failed.")
else:
    units[names[0]].update({{"stop": {{"active": False}}, "start": {{"active": True}},
                             "disable": {{"enabled": False}}, "enable": {{"enabled": True}}}}[verb])
    json.dump(units, open(path, "w"))
"""


@pytest.fixture
def host(tmp_path, monkeypatch, capsys):
    """A host whose systemctl keeps its units in a file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL)
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_UNITS", str(tmp_path / "units.json"))
    (tmp_path / "units.json").write_text(
        json.dumps(
            {"engine.service": {"active": True, "enabled": True}, "dcgm.service": {"active": True, "enabled": True}}
        )
    )

    def run(state, check=False, **args):
        return result_of(
            node_drain_units,
            capsys,
            check=check,
            state=state,
            record=str(tmp_path / "k/units.json"),
            run_id="r1",
            **args,
        )

    run.units = lambda: json.loads((tmp_path / "units.json").read_text())
    run.record = tmp_path / "k/units.json"
    run.set = lambda **units: (tmp_path / "units.json").write_text(json.dumps(units))
    return run


DOWN, UP = {"active": False, "enabled": False}, {"active": True, "enabled": True}
BOTH = ["engine.service", "dcgm.service", "absent.service"]


def test_a_drain_and_its_end_leave_every_unit_but_the_engine_as_it_was(host):
    assert host("stopped", units=BOTH)["changed"] is True
    assert host.units() == {"engine.service": DOWN, "dcgm.service": DOWN}
    assert host("stopped", units=BOTH)["changed"] is False
    assert json.loads(host.record.read_text())["units"] == {"engine.service": UP, "dcgm.service": UP}
    assert host("restored", leave=["engine.service"])["acted"] == ["enable dcgm.service", "start dcgm.service"]
    assert host.units() == {"engine.service": DOWN, "dcgm.service": UP}
    assert not host.record.exists()
    assert host("restored", leave=["engine.service"])["changed"] is False


def test_check_mode_says_what_it_would_do(host):
    assert host("stopped", check=True, units=BOTH)["acted"] == [
        *("stop engine.service", "stop dcgm.service", "disable engine.service", "disable dcgm.service")
    ]
    assert host.units() == {"engine.service": UP, "dcgm.service": UP}
    assert not host.record.exists()


def test_a_unit_that_went_with_the_old_packages_is_named(host):
    host("stopped", units=BOTH)
    host.set(**{"engine.service": DOWN})
    assert host("restored", leave=["engine.service"])["missing"] == ["dcgm.service"]


def test_a_unit_that_does_not_stop_is_told_with_what_was_before_kept(host):
    host.set(**{"engine.service": UP, "dcgm.service": {**UP, "stuck": True}})
    result = host("stopped", units=BOTH)
    assert "systemctl stop dcgm.service: exit 1 (Job for dcgm.service failed.)" in result["msg"]
    assert json.loads(host.record.read_text())["units"]["engine.service"] == UP
    host.set(**{"engine.service": DOWN, "dcgm.service": UP})
    host("stopped", units=BOTH)
    assert json.loads(host.record.read_text())["units"]["engine.service"] == UP


def test_a_host_without_systemd_is_told(host, monkeypatch, tmp_path):
    monkeypatch.setattr(
        node_drain_units.command_run, "run", lambda *_: (_ for _ in ()).throw(FileNotFoundError(2, "No"))
    )
    assert "expected a host that runs systemd" in host("stopped", units=BOTH)["msg"]
