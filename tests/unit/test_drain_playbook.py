"""Drain, restore, return and the gap as playbooks run them, with stand-ins for systemctl and the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripted_server import ScriptedServer, json_answer, read_request

ROOT = Path(__file__).resolve().parents[2]
SYSTEMCTL = f"""#!{sys.executable}
import json, os, sys
path = os.environ["FAKE_UNITS"]
units = json.load(open(path))
verb, names = sys.argv[1], [word for word in sys.argv[2:] if word.endswith(".service")]
if "--value" in sys.argv:
    print(1)  # microseconds after the boot, when the unit was started
elif verb == "show":
    for name in names:
        unit = units.get(name)
        print("LoadState=" + ("loaded" if unit else "not-found"))
        print("ActiveState=" + ("active" if unit and unit["active"] else "inactive"))
        print("UnitFileState=" + ("enabled" if unit and unit["enabled"] else "disabled" if unit else ""))
        print()
else:
    units[names[0]]["active" if verb in ("stop", "start") else "enabled"] = verb in ("start", "enable")
    json.dump(units, open(path, "w"))
    with open(path + ".log", "a") as log:
        print(os.environ["FAKE_HOST"], verb, names[0], file=log)
"""
HOOK = f"""#!{sys.executable}
import sys
open(sys.argv[1], "a").write(sys.argv[2] + " hook\\n")
"""
INSTALL = [{"role": "gpu_driver", "action": "install", "what": "Package of another version: x"}]


class Site:
    """An inventory of one replica over two hosts that are both this machine."""

    def __init__(self, folder, port):
        self.folder, self.log = folder, folder / "units.json.log"
        (folder / "bin").mkdir()
        for name, text in (("systemctl", SYSTEMCTL), ("hook", HOOK)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.set_units(True)
        self.condition = True
        hook = [str(folder / "bin/hook"), str(self.log)]
        self.variables = {
            "engine_nodes": ["k3-a", "k3-b"],
            "engine_address": "127.0.0.1",
            "engine_port": port,
            "engine_served_name": "kimi-k3",
            "engine_unit": "engine.service",
            "kimi_run": {"id": "r1", "dir": str(folder)},
            "kimi_plan": {"hosts": {"k3-a": INSTALL, "k3-b": []}},
            "node_drain_state_dir": str(folder / "k"),
            "node_drain_stop_units": ["dcgm.service"],
            "node_drain_hook": {"command": [*hook, "drain"]},
            "node_drain_return_hook": {"command": [*hook, "return"]},
            "node_drain_deadline_s": 0,
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
        }

    def set_units(self, up):
        state = {"active": up, "enabled": up}
        (self.folder / "units.json").write_text(json.dumps({"engine.service": state, "dcgm.service": state}))

    @property
    def units(self):
        return {name: unit["active"] for name, unit in json.loads((self.folder / "units.json").read_text()).items()}

    @property
    def done(self):
        """What was done since the last look, line by line."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def play(self, entry, hosts="k3-a", role="node_drain", **variables):
        inventory = {"all": {"hosts": {"k3-a": {}, "k3-b": {}}, "vars": {**self.variables, **variables}}}
        (self.folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        play = {
            "name": "Play",
            "hosts": hosts,
            "environment": {"FAKE_UNITS": str(self.folder / "units.json"), "FAKE_HOST": "{{ inventory_hostname }}"},
            "tasks": [
                {
                    "name": "Do it",
                    "ansible.builtin.include_role": {"name": role, "tasks_from": entry},
                    "when": self.condition,
                }
            ],
        }
        (self.folder / "play.yml").write_text(yaml.safe_dump([play]))
        return subprocess.run(
            [
                Path(sys.executable).parent / "ansible-playbook",
                "-i",
                self.folder / "hosts.yml",
                self.folder / "play.yml",
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            },
            capture_output=True,
            text=True,
            check=False,
        )


def engine(running):
    def script(sock):
        head, _ = read_request(sock)
        page = f'vllm:num_requests_running{{engine="0"}} {running}\n'
        models = json.dumps({"data": [{"id": "kimi-k3"}]})
        sock.sendall(json_answer((page if b"/metrics" in head.split(b"\r\n")[0] else models).encode()))

    return script


@pytest.fixture
def site(tmp_path):
    with ScriptedServer(engine(0.0)) as server:
        yield Site(tmp_path, server.port)


def worked(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_replica_is_taken_away_changed_and_given_back_once(site):
    worked(site.play("drain"))
    assert site.done == [
        "drain hook",
        *("k3-a stop engine.service", "k3-a stop dcgm.service"),
        *("k3-a disable engine.service", "k3-a disable dcgm.service"),
    ]
    assert json.loads((site.folder / "k/service-gap.json").read_text())["requests_cut"] == 0

    restored = worked(site.play("restore", node_drain_reboot_s=31.5))
    assert site.done == ["k3-a enable dcgm.service", "k3-a start dcgm.service"]
    assert site.units == {"engine.service": False, "dcgm.service": True}
    assert json.loads((site.folder / "k/reboot.json").read_text())["reboot_s"] == 31.5
    assert "changed=2" in restored

    assert "changed=2" in worked(site.play("return", hosts="all"))
    assert site.done == ["return hook"]
    assert "changed=0" in worked(site.play("return", hosts="all"))
    assert site.done == []


def test_ranks_on_other_hosts_stop_with_the_replica_and_their_units_stay(site):
    site.variables["kimi_plan"] = {"hosts": {"k3-a": [], "k3-b": INSTALL}}
    result = worked(site.play("drain", hosts="k3-b", node_drain_stop_units=[]))
    done = site.done
    assert done[0] == "drain hook"
    assert "[k3-b -> k3-a] => (item=k3-a)" in result
    assert sorted(done[1:]) == ["k3-b disable engine.service", "k3-b stop engine.service"]
    assert site.units["dcgm.service"] is True


def test_a_plan_that_no_service_notices_drains_nothing(site):
    harmless = {"role": "gpu_driver", "action": "install", "what": "File differs: /etc/apt/sources.list.d/x"}
    site.variables["kimi_plan"] = {"hosts": {"k3-a": [harmless], "k3-b": []}}
    assert "changed=0" in worked(site.play("drain"))
    assert site.done == []


def test_requests_that_do_not_end_stop_the_run_and_clients_get_the_replica_back(tmp_path):
    with ScriptedServer(engine(3.0)) as server:
        site = Site(tmp_path, server.port)
        result = site.play("drain", hosts="all")
        assert result.returncode != 0
        assert "3 requests run or wait after" in result.stdout
        assert "k3-b: nothing was stopped here, because of" in result.stdout
        assert site.done == ["drain hook", "return hook"]
        assert site.units == {"engine.service": True, "dcgm.service": True}
        assert "3 requests are cut" in worked(site.play("drain", node_drain_on_deadline="cut"))
        assert site.units == {"engine.service": False, "dcgm.service": False}


def test_a_host_of_no_replica_is_given_back_when_it_is_done(site):
    site.variables["engine_nodes"] = ["k3-b"]
    worked(site.play("drain"))
    worked(site.play("restore"))
    assert site.done[-1] == "return hook"


def test_the_first_that_gets_there_leads_even_when_the_head_has_nothing_to_do(site):
    site.variables["kimi_plan"] = {"hosts": {"k3-a": [], "k3-b": INSTALL}}
    site.condition = "kimi_plan.hosts[inventory_hostname] | length > 0"  # as a transaction plays its steps
    told = worked(site.play("drain", hosts="all"))
    assert site.done[:2] == ["drain hook", "k3-b stop engine.service"]
    assert "[k3-b -> k3-a] => (item=k3-a)" in told


def test_the_gap_is_told_once(site):
    worked(site.play("drain"))
    gap = {
        "role": "service_gap",
        "service_gap_state_dir": str(site.folder / "k"),
        "__engine_restart": True,
        "__engine_ready": {"ready_at": 1.0, "became_ready": True},
        "engine_nodes": ["k3-a"],
        "kimi_replica": ["k3-a"],
    }
    (site.folder / "k/reboot.json").write_text('{"schema_version": 1, "reboot_s": 9.5}')
    told = worked(site.play("main", **gap))
    assert "k3-a: service gap" in told
    assert "one reboot (9.5 s)" in told
    assert list((site.folder / "k").glob("*-gap.json")) == []
    kept = json.loads((site.folder / "service_gap.json").read_text())["replicas"]["k3-a"]
    assert (kept["drained_by"], kept["requests_cut"], kept["engine_start_s"]) == ("r1", 0, None)
    told = worked(site.play("main", **gap))
    assert "service gap" not in told
    assert "changed=0" in told
