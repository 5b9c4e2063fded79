"""Step 5: the nodes are one engine: every rank where the plan puts it, and proof of the way they talk.

The proof is bytes at the interface while a request runs; over NVLink, which has no such counters, NCCL's own lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.engine_log import EngineLog
from kimi_runbook.acceptance.hosts import EngineHost, HostError
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.prompts import chat, new_salt, words
from kimi_runbook.acceptance.result import Check, State, StepResult, unknown, verify
from kimi_runbook.acceptance.step1_start import node_log
from kimi_runbook.reading import Fields, data_file

STEP = 5
NAME = "multi-node"

_PROMPT_WORDS = 100  # a prefill that stands out from an idle interval
_SERVE = "Compare the nodes' launch files, then run playbooks/serve.yml."
_OBSERVE = (
    "Before the next start, run a collective test over the same GPUs with the engine's NCCL settings and "
    "NCCL_DEBUG=INFO, and read NCCL's lines there; NCCL_DEBUG itself must not stay in a service."
)
_PATH = "Find the way the traffic takes: ip route get ADDRESS on both nodes, then the interconnect role's settings."


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one node's interface moved, both directions together.

    Attributes:
        busy_bytes: While one request ran.
        idle_bytes: In an interval without a request, scaled to the same length.
    """

    busy_bytes: int
    idle_bytes: int


def run(context: Context) -> StepResult:
    """Return whether the nodes form one engine over the planned interconnect."""
    plan = context.plan
    checks: list[Check] = []
    logs: dict[str, EngineLog] = {}
    for name, host in context.hosts.items():
        checks.append(_rank(host, plan))
        try:
            logs[name] = node_log(context, host)
        except (HostError, OSError) as error:
            checks.append(unknown(f"{name}.log", str(error), expected="the engine's log", next_step=_SERVE))
    checks += [_world_size_asked(plan), _world_size_formed(plan, logs)]
    kind = _kind(plan.interconnect)
    checks.append(_backend(plan, logs, kind))
    figures: dict[str, Any] = {}
    if kind is not None and kind.text("counters") == "log":
        traffic_checks = [_transport(name, log, plan, kind) for name, log in logs.items()]
    else:
        traffic_checks, figures = _traffic(context, kind)
    figures["backends"] = sorted({rank.backend for log in logs.values() for rank in log.ranks})
    figures["nccl"] = next((log.nccl for log in logs.values() if log.nccl), None)
    return StepResult.of(STEP, NAME, [*checks, *traffic_checks], figures)


def argument(argv: Sequence[str], *names: str) -> str | None:
    """Return the value of a command-line option, written ``--name value`` or ``--name=value``; None when absent."""
    for position, item in enumerate(argv):
        if item in names:
            return argv[position + 1] if position + 1 < len(argv) else None
        for name in names:
            if item.startswith(f"{name}="):
                return item.split("=", 1)[1]
    return None


def _rank(host: EngineHost, plan: AcceptancePlan) -> Check:
    """One rank: its container on its node, under the node's own address, of the locked image."""
    name, rank = f"{host.name}.rank", host.plan.rank
    digest = plan.lock.image.digest if plan.lock else ""
    expected = f"rank {rank} running under {host.plan.address} from {digest[:19]} (plan, lock)"
    try:
        container = host.container(plan.engine.container)
        digests = host.repo_digests(container.image_id)
    except HostError as error:
        return Check(name=name, state=State.FAIL, observed=str(error), expected=expected, next_step=_SERVE)
    told = argument(container.arguments, "--node-rank")
    address = container.env.get("VLLM_HOST_IP")
    located = any(reference.endswith(f"@{digest}") for reference in digests)
    return verify(
        name,
        container.running and told == str(rank) and address == host.plan.address and located,
        observed=f"rank {told} {'running' if container.running else 'stopped'} under {address} from "
        f"{digest[:19] if located else ', '.join(digests) or 'an unknown image'}",
        expected=expected,
        evidence=f"docker inspect {container.id[:12]} on {host.name}",
        next_step=_SERVE,
    )


def _world_size_asked(plan: AcceptancePlan) -> Check:
    sizes = set()
    for launch in plan.launch.values():
        tensor = argument(launch.argv, "--tensor-parallel-size", "-tp") or "1"
        pipeline = argument(launch.argv, "--pipeline-parallel-size", "-pp") or "1"
        sizes.add(int(tensor) * int(pipeline) if tensor.isdecimal() and pipeline.isdecimal() else 0)
    wanted, nodes = plan.engine.world_size, plan.engine.nodes
    return verify(
        "world-size-asked",
        sizes == {wanted} and wanted % nodes == 0 and wanted >= nodes,
        observed=f"arguments make a world of {', '.join(map(str, sorted(sizes)))}",
        expected=f"{wanted} ranks over {nodes} nodes on every node (plan)",
        evidence="tensor and pipeline sizes in the launch",
        next_step=_SERVE,
    )


def _world_size_formed(plan: AcceptancePlan, logs: Mapping[str, EngineLog]) -> Check:
    """Each node's workers print the world they joined; together they must be every rank once."""
    wanted = plan.engine.world_size
    sizes = {rank.world_size for log in logs.values() for rank in log.ranks}
    ranks = {name: sorted({rank.rank for rank in log.ranks}) for name, log in logs.items()}
    everyone = sorted(rank for found in ranks.values() for rank in found)
    observed = "; ".join(f"{name}: ranks {', '.join(map(str, found)) or 'none'}" for name, found in ranks.items())
    return verify(
        "world-size-formed",
        sizes == {wanted} and everyone == list(range(wanted)) and all(ranks.values()),
        observed=f"world size {', '.join(map(str, sorted(sizes))) or 'not named'}; {observed}",
        expected=f"one world of {wanted}, every rank once, each node with its own",
        evidence="world_size= in the engine logs",
        next_step=_SERVE,
    )


def _kind(interconnect: str) -> Fields | None:
    return next((k for k in data_file("interconnect_proof.yml").each("kinds") if k.text("name") == interconnect), None)


def _backend(plan: AcceptancePlan, logs: Mapping[str, EngineLog], kind: Fields | None) -> Check:
    seen = sorted({rank.backend for log in logs.values() for rank in log.ranks})
    if kind is None:
        why = f"no rule for interconnect {plan.interconnect}; the log names {', '.join(seen) or 'no backend'}"
        return unknown(
            "backend", why, expected="a kind in data/interconnect_proof.yml", next_step="Set the interconnect's kind."
        )
    allowed = kind.texts("backends")
    return verify(
        "backend",
        len(seen) == 1 and seen[0] in allowed,
        observed=f"backend {', '.join(seen) or 'not named'}",
        expected=f"{' or '.join(allowed)} for {plan.interconnect} (data/interconnect_proof.yml)",
        evidence="backend= in the engine logs",
        next_step=_PATH,
    )


def _transport(name: str, log: EngineLog, plan: AcceptancePlan, kind: Fields) -> Check:
    """The way NCCL says it took. Without its lines nothing is known, which is told and keeps nobody from accepting."""
    one_node = kind.optional_text("about_one_node")
    lines = [line for line in log.transport if not one_node or one_node not in line]

    def first(key: str) -> str | None:
        parts = kind.texts(key)
        return next((line for line in lines if parts and all(part in line for part in parts)), None)

    refuted, proved = first("refutation"), first("proof")
    wanted = " ... ".join(part.strip() for part in kind.texts("proof"))
    expected = f"NCCL lines with {wanted} for {plan.interconnect} (data/interconnect_proof.yml)"
    if refuted is None and proved is None:
        return Check(
            name=f"{name}.traffic",
            state=State.WARN,
            observed=f"the transport was not observed: {plan.interconnect} has no counters, and NCCL did not tell",
            expected=expected,
            evidence=f"the engine's log on {name}",
            next_step=_OBSERVE,
        )
    return verify(
        f"{name}.traffic",
        refuted is None,
        observed=refuted or proved or "",
        expected=expected,
        evidence=f"the engine's log on {name}",
        next_step=_PATH,
    )


def _counter_paths(plan: AcceptancePlan, name: str, kind: Fields | None) -> tuple[list[str], int]:
    """Return the counter files of a node and the bytes one count stands for; no files when there is no way to know."""
    if kind is not None and kind.text("counters") == "net" and plan.interface:
        base = f"/sys/class/net/{plan.interface}/statistics"
        return [f"{base}/rx_bytes", f"{base}/tx_bytes"], 1
    if kind is not None and kind.text("counters") == "infiniband":
        ports = [f"/sys/class/infiniband/{p.name}/ports/{p.port or 1}" for p in plan.snapshots[name].rdma_devices]
        files = [f"{port}/counters/{side}" for port in ports for side in ("port_rcv_data", "port_xmit_data")]
        return files, data_file("interconnect_proof.yml").integer("infiniband_word_bytes")
    return [], 1


def _traffic(context: Context, kind: Fields | None) -> tuple[list[Check], dict[str, Any]]:
    paths = {name: _counter_paths(context.plan, name, kind) for name in context.hosts}
    blind = [name for name, (files, _) in paths.items() if not files]
    if blind:
        why = f"no port counters are known for {context.plan.interconnect} on {', '.join(blind)}"
        return [unknown("traffic", why, expected="counters of the interface", next_step=_PATH)], {}
    body = context.chat_body(chat(words(new_salt(), _PROMPT_WORDS), "Go on."))
    context.requests.append({"step": STEP, "words": _PROMPT_WORDS})
    least_interval_s = data_file("interconnect_proof.yml").number("least_interval_s")

    def read() -> dict[str, int]:
        return {name: host.counters(paths[name][0]) * paths[name][1] for name, host in context.hosts.items()}

    try:
        before, began_s = read(), context.now()
        answer = context.client.chat(body)
        after, ended_s = read(), context.now()
        context.elapse(max(least_interval_s, ended_s - began_s))
        idle, idle_s = read(), context.now() - ended_s
    except (EngineError, HostError) as error:
        return [unknown("traffic", str(error), expected="one request and both nodes' counters", next_step=_SERVE)], {}
    busy_s = ended_s - began_s
    tokens = answer.usage.total_tokens if answer.usage else 0
    traffic = {
        name: Traffic(
            busy_bytes=after[name] - before[name], idle_bytes=round((idle[name] - after[name]) * busy_s / idle_s)
        )
        for name in context.hosts
    }
    figures = {
        "request_s": round(answer.total_s, 4),
        "request_tokens": tokens,
        "busy_bytes": {name: one.busy_bytes for name, one in traffic.items()},
        "idle_bytes": {name: one.idle_bytes for name, one in traffic.items()},
    }
    return [_moved(name, one, tokens, context.plan.interface) for name, one in traffic.items()], figures


def _moved(name: str, traffic: Traffic, tokens: int, interface: str) -> Check:
    data = data_file("interconnect_proof.yml")
    least = max(1, tokens * data.integer("min_bytes_per_token"))
    ratio = data.integer("min_ratio_over_idle")
    return verify(
        f"{name}.traffic",
        traffic.busy_bytes >= least and traffic.busy_bytes >= ratio * traffic.idle_bytes,
        observed=f"{traffic.busy_bytes} bytes on {interface or 'the ports'} during a request of {tokens} tokens, "
        f"{traffic.idle_bytes} in an equal idle interval",
        expected=f"at least {least} bytes and {ratio} times the idle interval (data/interconnect_proof.yml)",
        evidence="port counters before and after",
        next_step=_PATH,
    )
