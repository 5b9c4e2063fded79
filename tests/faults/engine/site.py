"""A two-node site on paper: plan, lock, snapshots, and hosts that answer the chain's questions from a table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.client import EngineClient
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.hosts import EngineHost
from kimi_runbook.acceptance.metrics import read
from kimi_runbook.acceptance.plan import AcceptancePlan

DIGEST = "sha256:" + "a" * 64
OTHER_DIGEST = "sha256:" + "b" * 64
REPOSITORY = "172.31.240.10:5000/vllm/vllm-openai-cpu"
DRIVER = "580.178.04"
NCCL_CONF = "/etc/nccl.conf"
NCCL_SHA = "c" * 64
_LOGS = Path(__file__).parents[2] / "data" / "engine_logs"
ADDRESSES = {"k3-a": "172.31.240.11", "k3-b": "172.31.240.12"}

LOCK: dict[str, Any] = {
    "schema_version": 1,
    "platform": "lab",
    "os": "debian 12",
    "kernel": None,
    "driver": {
        "branch": "580",
        "version": DRIVER,
        "package_version": f"{DRIVER}-1",
        "flavour": "open",
        "activation": "reboot",
        "allow_feature_branch": False,
        "companions": {},
    },
    "toolkit": {"version": "1.20.0-1", "packages": ["nvidia-container-toolkit"]},
    "container_runtime": {"package": "docker.io", "version": None},
    "image": {
        "repository": REPOSITORY,
        "tag": "v0.32.0",
        "digest": DIGEST,
        "manifests": {"amd64": "sha256:" + "d" * 64},
        "engine": {"name": "vllm", "version": "0.32.0"},
        "size_bytes": 1_000_000_000,
        "cuda": None,
        "insecure": True,
    },
    "model": {"name": "moonshotai/Kimi-K3", "revision": "lab"},
    "recipe_facts_version": "1",
}


def argv(rank: int) -> list[str]:
    """Return the arguments one node was launched with."""
    return [
        *("/var/lib/models/kimi-k3-lab", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)),
        *(["--headless"] if rank else []),
    ]


def engine_log(rank: int) -> str:
    """Return what a node's engine printed, as ``docker logs --timestamps`` shows vLLM 0.32 on CPU."""
    return (_LOGS / f"two_nodes_rank{rank}.log").read_text(encoding="utf-8")


@dataclass(slots=True)
class Clock:
    """A clock that can be set forward in place of waiting."""

    ahead_s: float = 0.0

    def now(self) -> float:
        return time.monotonic() + self.ahead_s

    def elapse(self, seconds: float) -> None:
        self.ahead_s += seconds


@dataclass(slots=True)
class Result:
    """What a command gave."""

    rc: int
    stdout: str
    stderr: str = ""


@dataclass(slots=True)
class FakeHost:
    """Answers `run` as a healthy node would; a test changes the fields it wants to be wrong."""

    name: str
    rank: int
    driver: str = DRIVER
    digests: list[str] = field(default_factory=lambda: [f"{REPOSITORY}@{DIGEST}"])
    running: bool = True
    restarts: int = 0
    unit_restarts: int = 0
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    nccl_sha: str = NCCL_SHA
    log: str = ""
    container: bool = True
    reachable: bool = True
    moved: Callable[[], int] = lambda: 0
    journal: str = ""
    unit_state: str = "active"
    told: list[str] = field(default_factory=list)
    on: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.argv = self.argv or argv(self.rank)
        self.env = self.env or {"VLLM_HOST_IP": ADDRESSES[self.name], "HF_HUB_OFFLINE": "1"}
        self.log = self.log or engine_log(self.rank)

    def run(self, command: str, *args: str) -> Result:
        """Answer one of the chain's questions."""
        if not self.reachable:
            raise RuntimeError("ssh: connect to host k3-b port 22: No route to host")
        if command.startswith("docker") and not self.container:
            return Result(1, "", "Error: No such container: kimi-engine")
        self.told.append(command % args if args else command)
        self.on(command)
        answers: dict[str, Callable[[], str]] = {
            "docker inspect": self._inspect,
            "docker image inspect": lambda: json.dumps(self.digests),
            "docker exec": lambda: f"{self.nccl_sha}  {args[-1]}\n",
            "docker logs": lambda: self.log,
            "cat /sys/module/nvidia/version": lambda: f"{self.driver}\n",
            "docker kill": lambda: "kimi-engine\n",
            "nvidia-smi": lambda: "410\n412\n--\nPID   RSS\n7   1024\n9   2048\n",
            "systemctl show --property NRestarts": lambda: f"{self.unit_restarts}\n",
            "systemctl show --property ActiveState": lambda: f"{self.unit_state}\n",
            "systemctl stop": lambda: "",
            "systemctl start": lambda: "",
            "systemctl reset-failed": lambda: "",
            "journalctl": lambda: self.journal,
            "date": lambda: "1796062377.855981226\n",
            "cat /sys/class/net/eth0/statistics/": lambda: f"{1_000_000 + self.moved()}\n5000\n",
        }
        for start, answer in answers.items():
            if command.startswith(start):
                return Result(0, answer())
        return Result(127, "", f"{command}: not found")

    def _inspect(self) -> str:
        return json.dumps(
            [
                {
                    "Id": f"{self.name}-container",
                    "Path": "vllm",
                    "Args": ["serve", *self.argv],
                    "Image": "sha256:" + "e" * 64,
                    "RestartCount": self.restarts,
                    "State": {"Running": self.running, "StartedAt": "2026-11-30T14:53:00.000000001Z"},
                    "Config": {
                        "Entrypoint": ["vllm", "serve"],
                        "Env": [f"{key}={value}" for key, value in self.env.items()],
                    },
                }
            ]
        )


def snapshot(name: str) -> dict[str, Any]:
    """Return a healthy node's snapshot, as far as the chain looks at it."""
    return {
        "schema_version": 1,
        "taken_at": "2026-11-30T14:00:00Z",
        "hostname": name,
        "gpus": [
            {"index": n, "name": "NVIDIA H200 (stand-in)", "uuid": f"GPU-{name}-{n}", "memory_total_mib": 1}
            for n in range(2)
        ],
        "engine": {"container": {"name": "kimi-engine", "id": "x", "pid": 7, "files": {NCCL_CONF: NCCL_SHA}}},
        "errors": [],
    }


def plan_json(url: str, run_dir: Path, *, steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> dict[str, Any]:
    """Return a two-node plan; one without host steps has no hosts, as for a bare endpoint."""
    names = list(ADDRESSES) if {0, 1, 5} & set(steps) else []
    return {
        "schema_version": 1,
        "run_id": "20261130T144501Z-0a1b",
        "run_dir": str(run_dir),
        "endpoint": url,
        "metrics": [f"{url}/metrics"],
        "model": "moonshotai/Kimi-K3",
        "steps": list(steps),
        "site": "lab",
        "simulated": ["GPUs"],
        "interconnect": "ethernet",
        "interface": "eth0",
        "hosts": [
            {"name": name, "address": ADDRESSES[name], "rank": rank, "uri": "local://"}
            for rank, name in enumerate(names)
        ],
        "engine": {
            "container": "kimi-engine",
            "unit": "kimi-engine.service",
            "port": 8000,
            "nodes": 2,
            "engines": 1,
            "api_servers": 1,
            "parallelism": {"tensor": 2},
            "log": None,
        },
        "launch": {
            name: {
                "argv": argv(rank),
                "env": {"VLLM_HOST_IP": ADDRESSES[name], "HF_HUB_OFFLINE": "1"},
                "image": f"{REPOSITORY}@{DIGEST}",
            }
            for rank, name in enumerate(names)
        },
        "expected": {
            name: {
                "host": name,
                "address": ADDRESSES[name],
                "files": [{"role": "interconnect", "path": NCCL_CONF, "sha256": NCCL_SHA, "mode": "0644"}],
            }
            for name in names
        },
        "snapshots": {name: snapshot(name) for name in names},
        "lock": LOCK if names else None,
        "model_limits": {"max_tokens": 16},
        "concurrency": 4,
    }


def context(
    url: str, run_dir: Path, *hosts: FakeHost, steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5), **changes: Any
) -> Context:
    """Return a context on paper: fake hosts, a real client; ``changes`` replace keys of the plan."""
    plan = AcceptancePlan.from_json(plan_json(url, run_dir, steps=steps) | changes)
    clock = Clock()
    remotes = {host.name: host for host in hosts}
    return Context(
        plan=plan,
        client=EngineClient(url, timeout_s=5),
        read_metrics=lambda: read(plan.metrics),
        hosts={host.name: EngineHost(host, remotes[host.name]) for host in plan.hosts if host.name in remotes},
        now=clock.now,
        elapse=clock.elapse,
    )


def nodes() -> tuple[FakeHost, FakeHost]:
    """Return the site's two nodes, both healthy."""
    return FakeHost("k3-a", 0), FakeHost("k3-b", 1)
