"""Step 0: the lock holds on every node: driver loaded, image running, arguments actual, settings effective.

Everything here is asked of what runs now. What the inventory wrote, and what lies on disk, prove nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.hosts import Container, EngineHost, HostError
from kimi_runbook.acceptance.plan import AcceptancePlan, Launch
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown, verify
from kimi_runbook.environment import shown
from kimi_runbook.judge import judge_host
from kimi_runbook.lock import Lock

STEP = 0
NAME = "host"

_PROVISION = "Run playbooks/provision.yml, then playbooks/accept.yml."
_SERVE = "Run playbooks/serve.yml, then playbooks/accept.yml."
_ABOVE_WARN = ("stop", "change")


def run(context: Context) -> StepResult:
    """Return whether every node is as the lock and the launch say."""
    plan = context.plan
    checks: list[Check] = []
    figures: dict[str, Any] = {"hosts": len(context.hosts)}
    for name, host in context.hosts.items():
        if plan.lock is not None:
            checks.append(_driver(context, host, plan.lock))
            checks.append(_findings(plan, plan.lock, name))
        try:
            container = host.container(plan.engine.container)
        except HostError as error:
            checks.append(_no_container(name, plan.engine.container, error))
            continue
        if plan.lock is not None:
            checks.append(_image(context, host, container, plan.lock))
        checks.append(_arguments(name, container, plan.launch[name]))
        checks.append(_environment(name, container, plan.launch[name]))
        checks.append(_own_address(host, container))
        checks += _files_inside(host, plan)
    checks.append(_same_topology(plan))
    figures["gpus"] = {name: _gpu_models(plan, name) for name in context.hosts}
    return StepResult.of(STEP, NAME, checks, figures)


def _driver(context: Context, host: EngineHost, lock: Lock) -> Check:
    name, wanted = f"{host.name}.driver-loaded", f"{lock.driver.version} (lock)"
    try:
        loaded = host.driver_loaded()
    except HostError as error:
        return unknown(name, str(error), expected=wanted, next_step=_PROVISION)
    context.note("driver", loaded)
    return verify(
        name,
        loaded == lock.driver.version,
        observed=f"driver {loaded} is loaded",
        expected=wanted,
        evidence="/sys/module/nvidia/version",
        next_step=_PROVISION,
    )


def _findings(plan: AcceptancePlan, lock: Lock, name: str) -> Check:
    """The audit's own judgement of the snapshot; what it would still change or stop for is not accepted."""
    found = [
        finding
        for finding in judge_host(plan.snapshots[name], plan.expected[name], lock)
        if finding.severity in _ABOVE_WARN
    ]
    told = "; ".join(f"{f.code}: {f.observed}, expected {f.expected}" for f in found[:3])
    return verify(
        f"{name}.findings",
        not found,
        observed=f"{len(found)} findings above warn" + (f" ({told})" if found else ""),
        expected="none",
        evidence="snapshot and lock in acceptance.json",
        next_step=found[0].next_step if found else "",
    )


def _no_container(name: str, container: str, error: HostError) -> Check:
    return Check(
        name=f"{name}.image-digest",
        state=State.FAIL,
        observed=f"container {container} cannot be inspected ({error})",
        expected="the engine's container, of the locked image",
        next_step=_SERVE,
    )


def _image(context: Context, host: EngineHost, container: Container, lock: Lock) -> Check:
    name, wanted = f"{host.name}.image-digest", f"{lock.image.reference} (lock)"
    try:
        digests = host.repo_digests(container.image_id)
    except HostError as error:
        return unknown(name, str(error), expected=wanted, next_step=_SERVE)
    for reference in digests:
        context.note("image_digest", reference.rpartition("@")[2])
    return verify(
        name,
        any(reference.endswith(f"@{lock.image.digest}") for reference in digests),
        observed=f"the container runs {', '.join(digests) or 'an image without a registry digest'}",
        expected=wanted,
        evidence=f"docker image inspect {container.image_id[:19]}",
        next_step=_SERVE,
    )


def _arguments(name: str, container: Container, launch: Launch) -> Check:
    actual, wanted = list(container.arguments), list(launch.argv)
    first = next((n for n, pair in enumerate(zip(actual, wanted, strict=False)) if pair[0] != pair[1]), None)
    if first is None and len(actual) != len(wanted):
        first = min(len(actual), len(wanted))
    observed = f"{len(actual)} arguments as launched" if first is None else f"argument {first} is {_at(actual, first)}"
    return verify(
        f"{name}.arguments",
        first is None,
        observed=observed,
        expected="the launch's" if first is None else _at(wanted, first),
        evidence="docker inspect, Args",
        next_step=_SERVE,
    )


def _at(items: list[str], position: int) -> str:
    return repr(items[position]) if position < len(items) else "missing"


def _environment(name: str, container: Container, launch: Launch) -> Check:
    differing = sorted(key for key, value in launch.env.items() if container.env.get(key) != value)
    return verify(
        f"{name}.environment",
        not differing,
        observed="; ".join(f"{key}={shown(key, container.env.get(key))}" for key in differing)
        or f"{len(launch.env)} variables as launched",
        expected="; ".join(f"{key}={shown(key, launch.env[key])}" for key in differing) or "the launch's",
        evidence="docker inspect, Config.Env",
        next_step=_SERVE,
    )


def _own_address(host: EngineHost, container: Container) -> Check:
    address = container.env.get("VLLM_HOST_IP")
    return verify(
        f"{host.name}.own-address",
        address == host.plan.address,
        observed=f"VLLM_HOST_IP={address or 'unset'}",
        expected=f"{host.plan.address}, the node's own address (inventory)",
        evidence="docker inspect, Config.Env",
        next_step=_SERVE,
    )


def _files_inside(host: EngineHost, plan: AcceptancePlan) -> list[Check]:
    """Settings are effective when the container sees the file the role wrote, not when the host has it."""
    checks = []
    for path, wanted in _effective_files(plan, host.name).items():
        name = f"{host.name}.inside{path}"
        try:
            seen = host.sha256_inside(plan.engine.container, path)
        except HostError as error:
            checks.append(unknown(name, str(error), expected=f"sha256 {wanted[:12]}", next_step=_SERVE))
            continue
        checks.append(
            verify(
                name,
                seen == wanted,
                observed=f"sha256 {seen[:12]} in the container",
                expected=f"sha256 {wanted[:12]} (interconnect role)",
                evidence=f"docker exec {plan.engine.container} sha256sum {path}",
                next_step=_SERVE,
            )
        )
    return checks


def _effective_files(plan: AcceptancePlan, name: str) -> Mapping[str, str]:
    """Return path and wanted SHA-256 of the files the container must see: the ones the snapshot looked for in it."""
    container = plan.snapshots[name].container
    inside = set(container.files) if container else set()
    return {
        str(item["path"]): str(item["sha256"])
        for item in plan.expected[name].get("files") or ()
        if item.get("sha256") and item["path"] in inside
    }


def _gpu_models(plan: AcceptancePlan, name: str) -> dict[str, int]:
    return dict(sorted(Counter(gpu.name or "unnamed" for gpu in plan.snapshots[name].gpus).items()))


def _same_topology(plan: AcceptancePlan) -> Check:
    seen = {host.name: _gpu_models(plan, host.name) for host in plan.hosts}
    told = {
        name: ", ".join(f"{count} x {model}" for model, count in models.items()) or "no GPU"
        for name, models in seen.items()
    }
    return verify(
        "same-topology",
        len(set(told.values())) == 1 and all(seen.values()),
        observed="; ".join(f"{name}: {models}" for name, models in told.items()),
        expected="the same GPUs on every node",
        evidence="snapshots in acceptance.json",
        next_step="Look for a lost GPU: nvidia-smi -L and dmesg on the node that shows fewer.",
    )
