"""Records made for tests: the shape of real ones, every figure invented. ``python -m tests.unit.records`` writes them.

The plan is of two nodes of eight GPUs over InfiniBand; a bare endpoint has none of that. Nothing here was measured,
and each record says so where a report says what was simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.plan import STEP_NAMES, AcceptancePlan
from kimi_runbook.acceptance.result import StepResult, unknown
from kimi_runbook.campaign.fill import with_campaign
from kimi_runbook.record import Fingerprint, Record, with_verdict
from tests.unit.record_steps import (
    ADDRESSES,
    BLOCK,
    DIGEST,
    GPUS,
    NOMINAL,
    PEAK,
    REPOSITORY,
    UNIT,
    host_step,
    load_step,
    nodes_step,
    observation_step,
    prefix_step,
    short_request_step,
    start_step,
)

FOLDER = Path(__file__).parents[1] / "data" / "records"
STARTED = datetime(2026, 11, 30, 14, 45, 1, tzinfo=UTC)
MADE = "every figure of this record (made for tests)"
GPU_MIB = 275_040

_LOCK: dict[str, Any] = {
    "schema_version": 1,
    "platform": "b300",
    "os": "ubuntu 24.04",
    "kernel": "6.8.0-88-generic",
    "driver": {
        "branch": "580",
        "version": "580.178.04",
        "package_version": "580.178.04-1ubuntu1",
        "flavour": "open",
        "activation": "reboot",
        "allow_feature_branch": False,
        "companions": {"nvidia-fabricmanager": "580.178.04-1"},
    },
    "toolkit": {"version": "1.20.0-1", "packages": ["nvidia-container-toolkit"]},
    "container_runtime": {"package": "docker-ce", "version": None},
    "image": {
        "repository": REPOSITORY,
        "tag": "v0.33.0",
        "digest": DIGEST,
        "manifests": {"amd64": "sha256:" + "d" * 64},
        "engine": {"name": "vllm", "version": "0.33.0"},
        "size_bytes": 14_200_000_000,
        "cuda": "13.0",
        "insecure": False,
    },
    "model": {"name": "moonshotai/Kimi-K3", "revision": "9c1f4e7"},
    "recipe_facts_version": "2026-08-21",
}


def plan_json(*, steps: Sequence[int] = (0, 1, 2, 3, 4, 5), nodes: int = 2, **changes: Any) -> dict[str, Any]:
    """Return a plan's JSON; without a step that needs hosts it is one of a bare endpoint."""
    names = list(ADDRESSES)[:nodes] if {0, 1, 5} & set(steps) else []
    return {
        "schema_version": 1,
        "run_id": "20261130T144501Z-0a1b",
        "run_dir": "runs/20261130T144501Z-0a1b",
        "endpoint": "http://192.0.2.11:8000",
        "metrics": ["http://192.0.2.11:8000/metrics"],
        "model": "moonshotai/Kimi-K3",
        "steps": list(steps),
        "site": "prod" if names else "endpoint",
        "simulated": [MADE],
        "interconnect": "rdma-ib" if names else "unknown",
        "interface": "bond0" if names else "",
        "hosts": [
            {"name": name, "address": ADDRESSES[name], "rank": rank, "uri": "local://"}
            for rank, name in enumerate(names)
        ],
        "engine": {
            "container": "kimi-engine",
            "unit": "kimi-engine.service",
            "port": 8000,
            "nodes": max(1, len(names)),
            "engines": 1,
            "api_servers": 1,
            "parallelism": {"tensor": GPUS * len(names)} if names else {},
        },
        "launch": {name: _launch(rank, len(names)) for rank, name in enumerate(names)},
        "expected": {name: {"host": name, "address": ADDRESSES[name]} for name in names},
        "snapshots": {name: _snapshot(name) for name in names},
        "lock": _LOCK if names else None,
        "model_limits": {"max_tokens": 64, "abilities": {"tools": "required"}},
        "concurrency": NOMINAL,
        "peak_concurrency": PEAK,
        "observe_s": 600,
        **changes,
    }


def plan(**changes: Any) -> AcceptancePlan:
    """Return the plan; ``changes`` as for ``plan_json``."""
    return AcceptancePlan.from_json(plan_json(**changes))


def fingerprint(of: AcceptancePlan, **changes: Any) -> Fingerprint:
    """Return what a run of that plan observed when every step was looked at; ``changes`` replace fields."""
    hosts = bool(of.hosts)
    seen = Fingerprint(
        image_digest=DIGEST if hosts else None,
        engine_version="0.33.0",
        driver="580.178.04" if hosts else None,
        gpus={host.name: {"NVIDIA B300": GPUS} for host in of.hosts},
        interconnect=of.interconnect,
        parallelism=dict(of.engine.parallelism),
        nodes=of.engine.nodes,
        block_size_tokens=BLOCK,
        retention="0",
        prefix_caching=True,
        request_set="sha256:" + "c1fcbb5f" * 8,
        client="2",
    )
    return replace(seen, **changes)


def record(of: AcceptancePlan, steps: Sequence[StepResult], *, observation: str, **seen: Any) -> Record:
    """Return the record the chain would make of these results, sheet and checklist included."""
    ended = STARTED + timedelta(seconds=int(sum(step.figures.get("wall_s", 0) for step in steps)))
    found = fingerprint(of, **seen)
    bare = with_verdict(
        Record(
            run_id=of.run_id,
            site=of.site,
            started=STARTED,
            ended=ended,
            planned=of.steps,
            not_planned=of.not_planned,
            simulated=of.simulated,
            model=of.model,
            endpoint=of.endpoint,
            fingerprint=found,
            expectation=tuple(
                {
                    "label": row["label"],
                    "prompt_tokens": row.get("prompt_tokens", 0),
                    "shared_tokens": row.get("shared_tokens", 0),
                    "hit_tokens": row["expected_hit_tokens"],
                    "rule": "made for tests",
                }
                for step in steps
                for row in step.figures.get("requests", ())
            ),
            environment={host.name: {"NCCL_IB_HCA": "mlx5_0:1", "VLLM_HOST_IP": host.address} for host in of.hosts},
            steps=tuple(steps),
            observation=observation,
        )
    )
    return with_campaign(bare, of)


def accepted() -> Record:
    """A whole run with the drill and the observation, accepted with a warning."""
    of = plan(steps=(0, 1, 2, 3, 4, 5, 6), peer_loss_drill=True)
    hosts = list(ADDRESSES)
    steps = [
        host_step(hosts),
        start_step(hosts),
        short_request_step(),
        prefix_step(hosts),
        load_step(hosts),
        nodes_step(hosts),
        observation_step(),
    ]
    return record(of, steps, observation="complete")


def rejected() -> Record:
    """A run whose streams were cut in step 2, so that nothing above it was looked at."""
    of = plan()
    hosts = list(ADDRESSES)
    return record(
        of,
        [host_step(hosts), start_step(hosts), short_request_step(cut=True), *not_run(3, 4, 5, after=2, state="FAIL")],
        observation="pending",
        block_size_tokens=None,
        retention=None,
        prefix_caching=None,
    )


def endpoint() -> Record:
    """A run against an endpoint: steps 2 to 4, no node in sight."""
    of = plan(steps=(2, 3, 4))
    return record(of, [short_request_step(), prefix_step([]), load_step([])], observation="not planned")


def inconclusive() -> Record:
    """A run in which the cache's geometry could not be read."""
    of = plan()
    hosts = list(ADDRESSES)
    blind = StepResult.of(
        3,
        STEP_NAMES[3],
        [
            unknown(
                "geometry",
                "vllm:cache_config_info is absent from /metrics, so the block size is unknown",
                expected="the engine's block size",
                next_step="Give the engine's log, or --block-size, --match-unit and --retention.",
                evidence="http://192.0.2.11:8000/metrics",
            )
        ],
        {"wall_s": 0.4, "in_flight_s": 0.0},
    )
    return record(
        of,
        [
            *(host_step(hosts), start_step(hosts), short_request_step(), blind),
            *not_run(4, 5, after=3, state="INCONCLUSIVE"),
        ],
        observation="pending",
        block_size_tokens=None,
        retention=None,
        prefix_caching=None,
    )


def not_run(*numbers: int, after: int, state: str) -> list[StepResult]:
    """Return steps nobody looked at because the one below them did not hold."""
    why = f"step {after} ({STEP_NAMES[after]}) is {state}: one layer at a time"
    first, *rest = numbers
    results = [StepResult.not_run(first, STEP_NAMES[first], why)]
    for before, number in zip(numbers, rest, strict=False):
        note = f"step {before} ({STEP_NAMES[before]}) is NOT_RUN: one layer at a time"
        results.append(StepResult.not_run(number, STEP_NAMES[number], note))
    return results


def _launch(rank: int, nodes: int) -> dict[str, Any]:
    argv = [
        *("/srv/models/Kimi-K3", "--served-model-name", "moonshotai/Kimi-K3"),
        *("--tensor-parallel-size", str(GPUS * nodes), "--nnodes", str(nodes), "--node-rank", str(rank)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--prefix-match-unit", str(UNIT)),
        *("--load-format", "fastsafetensors", "--max-model-len", "1048576"),
    ]
    address = list(ADDRESSES.values())[rank]
    return {"argv": argv, "env": {"VLLM_HOST_IP": address}, "image": f"{REPOSITORY}@{DIGEST}"}


def _snapshot(name: str) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "taken_at": "2026-11-30T14:40:00Z",
        "hostname": name,
        "os": {
            "id": "ubuntu",
            "version_id": "24.04",
            "arch": "x86_64",
            "kernel": "6.8.0-88-generic",
            "pretty": "Ubuntu 24.04.3 LTS",
        },
        "packages": {"nvidia-container-toolkit": {"version": "1.20.0-1", "held": True}},
        "driver": {
            "on_disk": "580.178.04",
            "loaded": "580.178.04",
            "flavour": "open",
            "userspace": "580.178.04",
            "smi_rc": 0,
        },
        "gpus": [
            {
                "index": n,
                "name": "NVIDIA B300",
                "uuid": f"GPU-{name}-{n}",
                "memory_total_mib": GPU_MIB,
                "memory_used_mib": 0,
            }
            for n in range(GPUS)
        ],
        "engine": {"container": None},
        "errors": [],
    }


MAKERS: Mapping[str, Callable[[], Record]] = {
    "accepted.json": accepted,
    "rejected.json": rejected,
    "endpoint.json": endpoint,
    "inconclusive.json": inconclusive,
}
"""File of tests/data/records to what makes it."""


def main() -> None:
    """Write the records again."""
    for name, make in MAKERS.items():
        (FOLDER / name).write_text(make().dumps(), encoding="utf-8")


if __name__ == "__main__":
    main()
