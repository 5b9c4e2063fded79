"""What the role asks for, and the action plugin that writes it."""

import base64
import importlib.util
import json
import zlib
from types import SimpleNamespace

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible.template import Templar

from kimi_runbook import cli
from kimi_runbook.evidence import Part, scan_folder

SITE = {
    "engine_unit": "kimi-engine.service",
    "engine_container": "kimi-engine",
    "engine_port": 8000,
    "engine_launch_file": "/etc/kimi-runbook/launch.json",
}
# What the evidence has to hold, and the part that does.
WANTED = {
    "full command as it ran": {"engine-processes.json", "engine-container.json", "launch.json"},
    "Kubernetes": {"pods.yml", "pods.log", "pods-before-restart.log"},
    "image with tag and digest": {"images.json", "engine-container.json"},
    "loaded vLLM version": {"vllm-version.json", "vllm-installed.txt"},
    "nvidia-smi in full": {"nvidia-smi.txt"},
    "logs": {"engine.log", "kernel.log", "dmesg.log", "fabric.log", "docker.log"},
    "NCCL, RDMA and UCX variables": {"engine-processes.json", "nccl.conf", "ucx.conf", "container-interconnect.txt"},
    "GPUs in the container": {"gpus-in-container.txt"},
    "interconnect": {"ibv_devinfo.txt", "ip-link.txt", "rdma-link.txt", "nvlink.txt"},
    "host": {"lsmod.txt", "dkms.txt", "secure-boot.txt", "docker-info.json", "daemon.json", "engine-unit-file.txt"},
}


@pytest.fixture
def parts(project_root):
    role = project_root / "roles/evidence"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    variables = yaml.safe_load((role / "vars/main.yml").read_text())
    from ansible.parsing.dataloader import DataLoader  # noqa: PLC0415 - slow to import, needed here only
    from ansible.template import trust_as_template  # noqa: PLC0415 - as above

    trusted = {name: yaml.safe_load(yaml.safe_dump(value)) for name, value in {**SITE, **defaults, **variables}.items()}

    def trust(value):
        if isinstance(value, dict):
            return {key: trust(item) for key, item in value.items()}
        if isinstance(value, list):
            return [trust(item) for item in value]
        return trust_as_template(value) if isinstance(value, str) else value

    templar = Templar(loader=DataLoader(), variables=trust(trusted))
    return templar.template(trust("{{ __evidence_parts }}"))


def test_every_part_is_well_formed_and_bounded(parts):
    names = [part["name"] for part in parts]
    assert len(set(names)) == len(names)
    for part in parts:
        assert len({"argv", "file", "url", "processes"} & set(part)) == 1, part["name"]
        assert 1 <= part["priority"] <= 4, part["name"]
        assert set(part) <= {
            *("name", "argv", "file", "url", "processes", "priority", "timeout_s", "limit_kib"),
            *("format", "needs", "stderr", "exit"),
        }
        assert all(isinstance(word, str) for word in part.get("argv", []))
        Part.from_json({**part, "text": "x"})


@pytest.mark.parametrize("what", WANTED)
def test_what_has_to_be_kept_is_asked_for(parts, what):
    assert {part["name"] for part in parts} >= WANTED[what]


def test_commands_in_a_container_end_by_themselves(parts):
    inside = [part["argv"] for part in parts if part.get("argv", [])[:2] == ["docker", "exec"]]
    assert inside
    assert all(argv[3:6] == ["timeout", "--kill-after=5", "20"] for argv in inside)


def test_what_a_shell_was_told_survives_templating(parts):
    argv = {part["name"]: part.get("argv") for part in parts}
    assert argv["images.json"][-1] == "{{json .}}"
    compile(argv["vllm-installed.txt"][-1], "versions", "exec")


def plugin(project_root):
    path = project_root / "plugins/action/kimi_evidence.py"
    spec = importlib.util.spec_from_file_location("kimi_evidence", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def act(project_root, monkeypatch, tmp_path, answer):
    module = plugin(project_root)
    action = module.ActionModule.__new__(module.ActionModule)
    asked = {}

    args = {"run_dir": str(tmp_path / "runs/r1"), "parts": [{"name": "engine.log"}], "total_s": 9, "hide": ["users"]}

    def execute(module_name, module_args, task_vars):
        asked[module_name] = module_args
        return answer

    action._task = SimpleNamespace(args=args)
    monkeypatch.setattr(module.ActionBase, "run", lambda *_: {})
    monkeypatch.setattr(action, "_execute_module", execute)
    result = action.run(task_vars={"inventory_hostname": "k3-a", "groups": {"all": ["k3-a"]}})
    return asked, result


def row(name, text, **more):
    data = None if text is None else base64.b64encode(zlib.compress(text.encode())).decode()
    return {"name": name, "format": "text", "data": data, "reason": "", "notes": [], "skipped": False, **more}


def test_the_plugin_asks_writes_and_returns_no_text_of_the_node(project_root, monkeypatch, tmp_path):
    rows = [row("engine.log", "fine\npassword=opensesame\n"), row("x.txt", None, reason="exit 1: token=opensesame9")]
    asked, result = act(project_root, monkeypatch, tmp_path, {"parts": rows})
    question = asked["node_evidence"]
    assert question["total_s"] == 9
    assert "Traceback" in question["mark"]
    assert "NCCL" in question["env_shown"]
    assert result["kept"] == ["engine.log"]
    assert set(result["missing"]) == {"x.txt"}
    assert "opensesame" not in json.dumps(result)
    assert "opensesame" not in (tmp_path / "runs/r1/evidence/k3-a/engine.log").read_text()
    assert (tmp_path / "runs/.pseudonyms/r1").exists()
    assert scan_folder(tmp_path / "runs/r1") == []


def test_hosts_of_one_run_share_their_pseudonyms(project_root, monkeypatch, tmp_path):
    answer = {"parts": [row("engine.log", "password=opensesame")]}
    act(project_root, monkeypatch, tmp_path, answer)
    first = (tmp_path / "runs/r1/evidence/k3-a/engine.log").read_text()
    act(project_root, monkeypatch, tmp_path, answer)
    assert (tmp_path / "runs/r1/evidence/k3-a/engine.log").read_text() == first


def test_a_module_that_fails_shows_none_of_its_output(project_root, monkeypatch, tmp_path):
    answer = {"failed": True, "msg": "MODULE FAILURE", "rc": 1, "module_stdout": "password=opensesame"}
    _, result = act(project_root, monkeypatch, tmp_path, answer)
    assert result == {"failed": True, "msg": "MODULE FAILURE", "rc": 1}


def test_a_part_that_is_none_stops_with_what_to_correct(project_root, monkeypatch, tmp_path):
    with pytest.raises(AnsibleActionFail, match="Correct evidence_extra_parts"):
        act(project_root, monkeypatch, tmp_path, {"parts": [row("../x", "a")]})


def test_the_command_scans_a_run(tmp_path, capsys):
    (tmp_path / "record.json").write_text('{"password": "opensesame"}')
    assert cli.main(["scan", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "record.json:1: password\n"
    (tmp_path / "record.json").write_text("{}")
    assert cli.main(["scan", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert cli.main(["scan", str(tmp_path / "nowhere")]) == 2
