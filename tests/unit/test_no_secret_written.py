"""One host full of planted secrets, audited and frozen: none is in any file that is written, nor on the screen."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from ansible.errors import AnsibleActionFail
from test_evidence_fuzz import KINDS

from kimi_runbook.cli import main
from kimi_runbook.evidence import scan_folder
from kimi_runbook.wishes import assemble
from tests.hosts.build import build
from tests.hosts.described import Host, load_host
from tests.hosts.snapshots import ROOT, snapshot
from tests.hosts.wanted import expected_of, lock_data, lock_of, questions_of

NAME = "hgx-h200-ib"
# Every secret is constructed. Letters, capitals and digits change places as in a token that was drawn at random.
PASSWORD = "Tr0ub4dor-and-3x"  # noqa: S105 - constructed


def token(place: str) -> str:
    """Return a token of a place's own, so that a leak says where it came from."""
    return f"{''.join(random.Random(place).choices('abcdEFGH0123wxYZ', k=9))}q7WkL2pZx9Rt4VbN8mYc"  # noqa: S311 - repeatable


PLACES = (
    *("environment", "unit file", "environment file", "command line", "process", "proxy", "log line", "log word"),
    *("daemon.json auth", "daemon.json option", "netrc", "authorization header", "hugging face", "kernel parameter"),
    *("nccl.conf", "preferences", "node list", "expectation"),
)
SECRETS = {place: token(place) for place in PLACES}


def append(tree: Path, path: str, text: str) -> None:
    """Put a text behind what a file of the tree holds."""
    place = tree / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a", encoding="utf-8") as stream:
        stream.write(text)


def answer(tree: Path, command: str) -> Path:
    """Return the file that answers a command, by how its words begin."""
    found = sorted(path for path in (tree / ".commands").iterdir() if path.name.startswith(command))
    return next(path for path in found if path.suffix not in (".rc", ".stderr"))


def plant(tree: Path) -> None:
    """Put a secret wherever people leave one on a host."""
    inspected = answer(tree, "docker container inspect")
    (container,) = json.loads(inspected.read_text(encoding="utf-8"))
    container["Config"]["Env"] += [f"VLLM_API_KEY={SECRETS['environment']}", f"HF_TOKEN=hf_{SECRETS['hugging face']}"]
    container["Config"]["Env"] += [f"AWS_SECRET_ACCESS_KEY={PASSWORD}", f"VLLM_NOTE={SECRETS['environment']}"]
    container["Args"] += ["--api-key", SECRETS["command line"], f"--hf-token=hf_{SECRETS['command line']}"]
    inspected.write_text(json.dumps([container]), encoding="utf-8")
    shown = answer(tree, "systemctl show")
    text = shown.read_text(encoding="utf-8")
    marked = f"VLLM_API_KEY={SECRETS['unit file']} NCCL_NOTE={SECRETS['unit file']}"
    for line in text.splitlines():
        if line.startswith("Environment=VLLM_HOST_IP"):
            text = text.replace(line, f"{line} {marked}\nEnvironmentFiles=/etc/kimi/engine.env (ignore_errors=no)")
    shown.write_text(text, encoding="utf-8")
    unit = (
        f"[Service]\nEnvironment=VLLM_API_KEY={SECRETS['unit file']}\nExecStart=docker run -e HF_TOKEN={PASSWORD} x\n"
    )
    append(tree, "/etc/systemd/system/kimi-engine.service", unit)
    append(tree, "/etc/kimi/engine.env", f"HF_TOKEN=hf_{SECRETS['environment file']}\nNCCL_AUTH={PASSWORD}\n")
    append(tree, "/proc/2040/cmdline", f"--api-key\0{SECRETS['process']}\0https://me:{SECRETS['process']}@x.example/\0")
    info = answer(tree, "docker info")
    told = json.loads(info.read_text(encoding="utf-8"))
    info.write_text(json.dumps(told | {"HttpProxy": f"http://me:{SECRETS['proxy']}@p.example"}), encoding="utf-8")
    daemon = {
        "auths": {"r.example": {"auth": base64.b64encode(f"me:{SECRETS['daemon.json auth']}".encode()).decode()}},
        "proxies": {"https-proxy": f"http://me:{SECRETS['proxy']}@p.example"},
        "log-opts": {"splunk-token": SECRETS["daemon.json option"]},
        "features": {"cdi": True},
    }
    (tree / "etc/docker/daemon.json").write_text(json.dumps(daemon), encoding="utf-8")
    append(tree, "/root/.netrc", f"machine x.example login me password {SECRETS['netrc']}\n")
    journal = answer(tree, "journalctl")
    stamp = "2026-11-20T07:00:00+0000 host kernel: "
    lines = [f"NVRM: Xid (PCI:0000:1b:00): 31, token={SECRETS['log line']}", f"NVRM: {SECRETS['log word']} lost"]
    lines += [f"NVRM: Authorization: Bearer {SECRETS['authorization header']}"]
    append(tree, f"/.commands/{journal.name}", "".join(f"{stamp}{line}\n" for line in lines))
    append(tree, "/proc/cmdline", f" site.key={SECRETS['kernel parameter']} {SECRETS['kernel parameter']}")
    append(tree, "/etc/nccl.conf", f"NCCL_NOTE={SECRETS['nccl.conf']}\nNCCL_TOKEN={PASSWORD}\n")
    pin = f"Package: nvidia-*\nPin: origin me:{SECRETS['preferences']}@mirror.example\nPin-Priority: -1\n"
    append(tree, "/etc/apt/preferences.d/site", pin)
    append(tree, "/etc/nvidia-imex/nodes_config.cfg", f"192.0.2.11\n{SECRETS['node list']}\n")


def scatter(tree: Path, rng: random.Random) -> list[str]:
    """Put strings shaped like tokens into fields drawn at random; return them. A hexadecimal one is also a digest's."""
    fields = (
        lambda one: append(tree, "/proc/cmdline", rng.choice((f" {one}", f" site.{rng.random()}={one}"))),
        lambda one: append(tree, "/etc/nccl.conf", f"NCCL_X{rng.randrange(10**6)}={one}\n"),
        lambda one: append(
            tree, "/etc/modprobe.d/site.conf", f"options nvidia NVreg_Note{rng.randrange(10**6)}={one}\n"
        ),
        lambda one: append(tree, "/etc/security/limits.conf", f"# memlock\n* soft memlock {one}\n"),
        lambda one: append(tree, "/etc/nvidia-imex/nodes_config.cfg", f"{one}\n"),
        lambda one: append(
            tree, "/etc/apt/preferences.d/more", f"Package: nvidia-{rng.random()}\nPin: version {one}\n\n"
        ),
        lambda one: append(tree, f"/.commands/{answer(tree, 'dkms').name}", f"{one}/1.2, 6.8.0, x86_64: installed\n"),
        lambda one: append(tree, f"/.commands/{answer(tree, 'ibv_devinfo').name}", f"hca_id:\t{one}\n"),
        lambda one: append(
            tree, f"/.commands/{answer(tree, 'dpkg-query --show').name}", f"nvidia-{rng.random()}\tii \t{one}\n"
        ),
        lambda one: append(tree, f"/proc/{rng.randrange(5000, 9000)}/comm", one),
    )
    kinds = [kind for kind in KINDS if kind not in ("hex", "like-a-symbol")]
    planted = []
    for number in range(80):
        planted.append(KINDS[kinds[number % len(kinds)]](rng))
        rng.choice(fields)(planted[-1])
    return planted


def plugin(name: str) -> Any:
    """Load one of the project's action plugins."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "plugins/action" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wished(host: Host) -> dict[str, Any]:
    """Return what is expected of the host as the roles' wishes are added up: secrets of the inventory among them."""
    expected = expected_of(host)
    engine = expected["engine"] | {"env": {"NCCL_NET": "IB", "VLLM_API_KEY": SECRETS["expectation"]}}
    file = {"path": "/etc/nccl.conf", "mode": "0644", "content": f"NCCL_NET=IB\nNCCL_TOKEN={SECRETS['expectation']}\n"}
    parts = {"engine": {"engine": engine}, "interconnect": {"files": [file]}}
    added = assemble(parts, host.name, expected["address"], expected["supported_os"])
    return expected | {"host": host.name, "engine": added["engine"], "files": added["files"]}


def judge(host: Host, taken: Mapping[str, Any], run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the audit's action plugin; return what it prints and fails with."""
    module, told = plugin("kimi_judge"), []
    monkeypatch.setattr(module.ActionBase, "run", lambda *_: {})
    monkeypatch.setattr(module, "Display", lambda: SimpleNamespace(display=told.append))
    action = module.ActionModule.__new__(module.ActionModule)
    run = {"id": "r1", "dir": str(run_dir)}
    action._task = SimpleNamespace(args={"run": run, "lock": lock_data(host), "batches": [1], "settled_roles": []})
    variables = {
        host.name: {"__host_snapshot_taken": {"snapshot": taken}, "kimi_expected": wished(host)},
        "gone": {"__host_snapshot_taken": {"failed": True, "msg": f"no module x, token={token('failure')}"}},
    }
    variables["gone"]["engine_address"] = "192.0.2.12"
    play = {"ansible_play_hosts_all": [host.name, "gone"], "ansible_play_hosts": [host.name], "hostvars": variables}
    try:
        told.append(json.dumps(action.run(task_vars=play)))
    except AnsibleActionFail as error:
        told.append(str(error))
    return "\n".join(told)


PARTS = {  # what an evidence run asks for, from the tree: a file, or the answer of a command
    "engine-unit-file.txt": ("file", "etc/systemd/system/kimi-engine.service"),
    "engine.env": ("file", "etc/kimi/engine.env"),
    "nccl.conf": ("file", "etc/nccl.conf"),
    "daemon.json": ("file", "etc/docker/daemon.json"),
    "netrc": ("file", "root/.netrc"),
    "preferences": ("file", "etc/apt/preferences.d/site"),
    "engine-container.json": ("command", "docker container inspect"),
    "docker-info.json": ("command", "docker info"),
    "kernel.log": ("command", "journalctl"),
    "units.txt": ("command", "systemctl show"),
}
FORMS = {".json": "json", ".env": "env", ".yml": "yaml"}


def freeze(tree: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the evidence module on the tree's files and the plugin that keeps what it says; return its result."""
    sys.path.append(str(ROOT / "plugins/modules"))
    import node_evidence  # noqa: PLC0415 - found on the path set above

    def part(name: str, kind: str, place: str) -> dict[str, Any]:
        found = str(tree / place) if kind == "file" else str(answer(tree, place))
        asked = {"file": found} if kind == "file" else {"argv": ["cat", found]}
        return {"name": name, "format": FORMS.get(Path(name).suffix, "text"), **asked}

    def execute(module_args: dict[str, Any], **_: object) -> dict[str, Any]:
        limits = {"timeout_s": 20, "limit_kib": 512, "total_s": 60, "total_kib": 4096}
        return {"parts": [node_evidence.packed(row) for row in node_evidence.collect(limits | module_args)]}

    module = plugin("kimi_evidence")
    monkeypatch.setattr(module.ActionBase, "run", lambda *_: {})
    action = module.ActionModule.__new__(module.ActionModule)
    monkeypatch.setattr(action, "_execute_module", execute)
    rows = [part(name, *place) for name, place in PARTS.items()]
    rows.append(
        {"name": "fails.txt", "argv": ["sh", "-c", f"echo 'Bearer {SECRETS['authorization header']}' >&2; exit 3"]}
    )
    action._task = SimpleNamespace(args={"run_dir": str(run_dir), "parts": rows})
    return json.dumps(action.run(task_vars={"inventory_hostname": NAME, "groups": {"all": [NAME]}}))


def forms(secret: str) -> Iterator[str]:
    """Yield how a secret may look in a file: as it is, in a URL, in base64 wherever it begins there."""
    yield from (secret, quote(secret), json.dumps(secret)[1:-1])
    for lead in range(3):
        packed = base64.b64encode(b"x" * lead + secret.encode()).decode().rstrip("=")
        yield packed[4 if lead else 0 : -2]


@pytest.mark.parametrize("seed", range(6))
def test_no_secret_is_in_any_file_an_audit_or_an_evidence_run_writes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = load_host(NAME)
    tree = build(host, tmp_path)
    plant(tree)
    strewn = scatter(tree, random.Random(seed))  # noqa: S311 - repeatable, not secret
    run_dir = tmp_path / "runs" / "r1"
    run_dir.mkdir(parents=True)
    taken = json.loads(json.dumps(snapshot(tree, questions_of(host))))

    said = [judge(host, taken, run_dir, monkeypatch), freeze(tree, run_dir, monkeypatch)]
    expected = run_dir / "expected.json"
    (tmp_path / "lock.yml").write_text(json.dumps(lock_of(host).to_json()), encoding="utf-8")
    audit = [
        "audit",
        str(run_dir / "snapshots.json"),
        "--lock",
        str(tmp_path / "lock.yml"),
        "--expected",
        str(expected),
    ]
    for more in ([], ["--json"], ["--junit", str(run_dir / "audit.xml")]):
        assert main([*audit, *more]) == 1
        said.append("".join(capsys.readouterr()))

    files = {
        path.relative_to(run_dir): path.read_text(encoding="utf-8") for path in run_dir.rglob("*") if path.is_file()
    }
    names = {str(path) for path in files}
    assert {"snapshots.json", "expected.json", "findings.json", "plan.json", "audit.xml"} <= names
    assert {f"evidence/{NAME}/{name}" for name in ("daemon.json", "kernel.log", "engine-container.json")} <= names
    written = {
        **{str(path): text for path, text in files.items()},
        **{f"screen {n}": text for n, text in enumerate(said)},
    }
    leaks = [
        (place, where)
        for place, secret in [*SECRETS.items(), ("password", PASSWORD), ("failure", token("failure"))]
        for where, text in written.items()
        if any(form in text for form in forms(secret))
    ]
    leaks += [
        (one, where) for one in strewn for where, text in written.items() if one in text or one.rstrip("=") in text
    ]
    assert leaks == []
    assert written["snapshots.json"].count("(not shown)") >= 20  # they were seen, and hidden
    assert [str(found) for found in scan_folder(run_dir)] == []
