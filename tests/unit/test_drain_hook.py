"""A site's hooks: a request or a program, done or told why not, and no secret in any message."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail
from scripted_server import ScriptedServer, closed_port, json_answer, read_request

from kimi_runbook.errors import RunbookError
from kimi_runbook.transaction.drain import needs_drain
from kimi_runbook.transaction.hook import call, parse_hook

CALLS_FOR = {"gpu_driver": ["install", "reboot"], "container_runtime": ["configure"]}


@pytest.mark.parametrize(
    ("role", "action", "what", "needed"),
    [
        pytest.param("gpu_driver", "install", "Package of another version: x 1", True, id="driver"),
        pytest.param("gpu_driver", "configure", "Package not held: x", False, id="another-action"),
        pytest.param("engine_image", "pull", "Image not on the host", False, id="another-role"),
        pytest.param("container_runtime", "configure", "Docker setting differs: mtu", True, id="docker-restarts"),
        pytest.param(
            "container_runtime", "configure", "File differs: /etc/apt/sources.list.d/x", False, id="no-service"
        ),
    ],
)
def test_only_what_no_running_engine_survives_needs_a_drain(role, action, what, needed):
    item = {"role": role, "action": action, "what": what}
    harmless = {"role": "engine", "action": "restart", "what": "x"}
    assert needs_drain([harmless, item], CALLS_FOR, "/etc/apt/") is needed


def test_without_a_pattern_nothing_is_harmless():
    item = {"role": "gpu_driver", "action": "install", "what": ""}
    assert needs_drain([item], CALLS_FOR)
    assert not needs_drain([{**item, "action": "pull"}], CALLS_FOR)


def test_a_drain_with_nothing_planned_is_a_killed_runs_and_takes_place():
    assert needs_drain([], CALLS_FOR)


@pytest.mark.parametrize(
    ("value", "observed"),
    [
        pytest.param({}, "neither url nor command", id="empty"),
        pytest.param({"url": "http://x", "command": ["y"]}, "url and command", id="both"),
        pytest.param({"url": "http://x", "header": {}}, "unknown key header", id="misspelt"),
        pytest.param({"command": "systemctl stop x"}, "'systemctl stop x'", id="a-string-is-no-argv"),
        pytest.param([], "a list", id="no-mapping"),
    ],
)
def test_a_hook_that_is_none_is_refused(value, observed):
    with pytest.raises(RunbookError) as told:
        parse_hook(value, "node_drain_hook")
    assert told.value.observed == observed
    assert "node_drain_hook" in str(told.value)


def test_a_request_carries_its_headers_from_the_environment():
    seen = []

    def script(sock):
        seen.append(read_request(sock))
        sock.sendall(json_answer(b"", status=b"202 Accepted"))

    with ScriptedServer(script) as server:
        value = {
            "url": f"{server.url}/drain",
            "method": "put",
            "headers_env": {"X-Token": "LB_TOKEN"},
            "body": {"n": 1},
        }
        assert call(parse_hook(value, "h"), {"LB_TOKEN": "opensesame"}) == "HTTP 202"
    head, body = seen[0]
    assert head.startswith(b"PUT /drain ")
    assert b"x-token: opensesame" in head.lower()
    assert body == b'{"n": 1}'


def refused(value, environment=None):
    hook = parse_hook(value, "node_drain_hook")
    with pytest.raises(RunbookError) as told:
        call(hook, environment or {"LB_TOKEN": "opensesame"})
    assert "opensesame" not in str(told.value)
    return told.value


def test_a_header_that_is_not_set_stops_before_anything_is_sent():
    with ScriptedServer(lambda sock: None) as server:
        value = {"url": server.url, "headers_env": {"X-Token": "LB_TOKEN"}}
        assert refused(value, {"OTHER": "x"}).observed == "LB_TOKEN is not set on the controller"
        assert server.connections == 0


@pytest.mark.parametrize(
    ("status", "wanted", "observed"),
    [
        pytest.param(b"403 Forbidden", [], "HTTP 403", id="refused"),
        pytest.param(b"200 OK", [204], "HTTP 200", id="not-the-expected-status"),
    ],
)
def test_another_status_is_a_failure(status, wanted, observed):
    def script(sock):
        read_request(sock)
        sock.sendall(json_answer(b'{"token": "opensesame"}', status=status))

    with ScriptedServer(script) as server:
        value = {"url": server.url, "headers_env": {"X-Token": "LB_TOKEN"}, "status": wanted}
        assert refused(value).observed == observed


def test_no_answer_is_a_failure():
    with closed_port() as port:
        assert "refused" in refused({"url": f"http://127.0.0.1:{port}"}).observed


@pytest.mark.parametrize(
    ("code", "observed"),
    [
        pytest.param("import os, sys; sys.exit(os.environ['LB_TOKEN'])", "exit 1", id="fails"),
        pytest.param("import time; time.sleep(60)", "no end after 0.5 s", id="hangs"),
    ],
)
def test_a_program_that_fails_is_told_without_its_output(code, observed):
    value = {"command": [sys.executable, "-c", code], "timeout_s": 0.5 if "sleep" in code else 30}
    assert refused(value).observed == observed


def test_a_program_runs_in_the_given_environment_and_one_that_is_not_there_is_told():
    code = "import os, sys; sys.exit(os.environ['LB_TOKEN'] != 'opensesame')"
    assert call(parse_hook({"command": [sys.executable, "-c", code]}, "h"), {"LB_TOKEN": "opensesame"}) == "exit 0"
    assert refused({"command": ["/nonexistent/drain"]}).observed == "No such file or directory"


def act(project_root, monkeypatch, hook, *, check_mode):
    path = project_root / "plugins/action/kimi_hook.py"
    spec = importlib.util.spec_from_file_location("kimi_hook", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    action = module.ActionModule.__new__(module.ActionModule)
    action._task = SimpleNamespace(args={"hook": hook, "name": "node_drain_hook"}, check_mode=check_mode)
    monkeypatch.setattr(module.ActionBase, "run", lambda *_: {})
    return action.run(task_vars={})


def test_the_plugin_calls_a_hook_and_in_check_mode_only_reads_it(project_root, monkeypatch, tmp_path):
    hook = {"command": ["touch", str(tmp_path / "called")]}
    assert act(project_root, monkeypatch, hook, check_mode=True)["changed"] is True
    assert not (tmp_path / "called").exists()
    assert act(project_root, monkeypatch, hook, check_mode=False)["said"] == "exit 0"
    assert (tmp_path / "called").exists()
    with pytest.raises(AnsibleActionFail, match="neither url nor command"):
        act(project_root, monkeypatch, {"method": "PUT"}, check_mode=True)


def test_the_plugin_has_nothing_to_call_where_there_is_no_hook(project_root, monkeypatch):
    assert act(project_root, monkeypatch, {}, check_mode=False)["changed"] is False
