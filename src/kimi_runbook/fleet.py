"""Findings about several hosts at once: a mixed fleet, unequal nodes of one engine, a model that does not fit. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kimi_runbook.fabric import NODES_FILE
from kimi_runbook.findings import FLEET, Finding, make_finding
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case
from kimi_runbook.rules.arguments import count, option
from kimi_runbook.rules.driver import settled
from kimi_runbook.rules.fabric import own_addresses, rewritten
from kimi_runbook.rules.service import improvised

_MIB = 2**20
_TB = 10**12
_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)
# Variables that differ from node to node by their nature. Source: vLLM, multi-node serving.
_OWN = ("VLLM_HOST_IP", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def fleet_findings(cases: Sequence[Case]) -> tuple[Finding, ...]:
    """Return the findings about all hosts together, then those about the nodes of each engine.

    Args:
        cases: The hosts with a snapshot, each with what is expected of it and the lock.
    """
    found = [*_mixed(cases), *_stacks(cases)]
    for nodes in replicas(cases):
        found += [*_unequal(nodes), *_domain(nodes), *_capacity(nodes)]
    return tuple(found)


def replicas(cases: Sequence[Case]) -> tuple[tuple[Case, ...], ...]:
    """Return the hosts of each engine: those whose command lines name one meeting place; a lone node is its own."""
    groups: dict[tuple[str | None, ...], list[Case]] = {}
    for case in cases:
        if case.expected.engine is None:
            continue
        args = case.expected.engine.args or ()
        place = (option(args, "--master-addr"), option(args, "--master-port"))
        if place[0] is None:
            place = (option(args, "--data-parallel-address", "-dpa"), option(args, "--data-parallel-rpc-port", "-dpp"))
        groups.setdefault(place if place[0] else (case.expected.host,), []).append(case)
    return tuple(tuple(group) for group in groups.values())


def _mixed(cases: Sequence[Case]) -> Iterator[Finding]:
    """The whole fleet: one lock describes hosts that are alike."""
    yield from _differ(cases, "fleet.gpu_models", _models)
    yield from _differ(cases, "fleet.drivers", lambda case: case.snapshot.driver.loaded)
    yield from _differ(cases, "fleet.kernels", lambda case: case.snapshot.os.kernel)


def _stacks(cases: Sequence[Case]) -> Iterator[Finding]:
    names = []
    for case in cases:
        stack = case.snapshot.image.stack if case.snapshot.image else None
        if stack is not None and case.lock.image.cuda is not None and improvised(stack, case.lock.image.cuda):
            names.append(case.expected.host)
    if len(names) > 1:
        yield _finding("fleet.images", f"an improvised stack on {_listed(names)}", "one published image on every host")


def _unequal(nodes: Sequence[Case]) -> Iterator[Finding]:
    """The nodes of one engine have to be alike in what a collective goes through, and in the weights."""
    yield from _differ(nodes, "fleet.replica_gpus", _gpus)
    yield from _differ(nodes, "fleet.replica_settings", _settings)
    yield from _differ(nodes, "fleet.mtu", _mtu)
    yield from _differing_weights(nodes)
    yield from _differ(nodes, "fleet.imex_nodes", _imex_nodes)


def _domain(nodes: Sequence[Case]) -> Iterator[Finding]:
    """NVLink ends at its domain. Only racks have one that goes beyond a host."""
    if not nodes or nodes[0].hardware.text("fabric") != "rack":
        return
    yield from _differ(nodes, "fleet.domain_split", _cliques)
    yield from _apart(nodes)


def _apart(nodes: Sequence[Case]) -> Iterator[Finding]:
    """Nodes of one engine whose IMEX daemons run and are not connected; what is still to be started comes first."""
    if not all(settled(case) and _imex_runs(case) for case in nodes):
        return
    names = {address: case.expected.host for case in nodes for address in own_addresses(case)}
    pairs: dict[frozenset[str], str] = {}
    for case in nodes:
        domain = case.snapshot.fabric.imex_domain
        for node in domain.nodes if domain else ():
            for address, _, status in (peer.partition(" ") for peer in node.apart):
                if node.host in names and address in names and names[node.host] != names[address]:
                    pair = f"{names[node.host]} - {names[address]}: {status}"
                    pairs.setdefault(frozenset((names[node.host], names[address])), pair)
    if pairs:
        yield _finding("fleet.imex_apart", "; ".join(sorted(pairs.values())[:4]), "CONNECTED, each with each")


def _imex_runs(case: Case) -> bool:
    service = case.snapshot.fabric.services.get("nvidia-imex")
    return service is not None and service.active == "active"


def _capacity(nodes: Sequence[Case]) -> Iterator[Finding]:
    """Whether the engine's nodes have the GPUs its command line asks for, and the memory the weights alone need."""
    first = nodes[0]
    engine = first.expected.engine
    gpus = [gpu for case in nodes for gpu in case.snapshot.gpus]
    if engine is None or first.simulated or any(not case.snapshot.gpus for case in nodes):
        return  # simulated GPUs hold nothing; a node that shows none has a finding of its own
    if len(nodes) < _node_count(engine.args or ()):
        return  # the others were not seen, which is a finding of theirs or the choice of who asked
    names = _listed([case.expected.host for case in nodes])
    asked = 1
    for option_names in _PARALLEL:
        asked *= count(engine.args or (), *option_names)
    if asked > len(gpus):
        yield _finding("fleet.gpus_short", f"{len(gpus)} GPUs on {names}", f"{asked}, by the engine's parallel sizes")
    if option(engine.args or (), "--load-format") == "dummy" or any(gpu.memory_total_mib is None for gpu in gpus):
        return
    model = data_file("models.yml").optional_fields(first.lock.model.name)
    if model is None:
        yield _finding("fleet.memory_unknown", f"{first.lock.model.name} is not in data/models.yml", "its size")
        return
    share = _share(engine.args or ())
    room = sum(gpu.memory_total_mib or 0 for gpu in gpus) * _MIB * share
    needed = model.integer("checkpoint_bytes")
    if room < needed:
        yield _finding(
            "fleet.memory_short",
            f"{room / _TB:.3f} TB on {names} ({len(gpus)} GPUs at {share:.2f})",
            f"{needed / _TB:.3f} TB for the weights of {first.lock.model.name} alone",
        )


def _node_count(args: Sequence[str]) -> int:
    """Return the nodes an engine spreads over, by its command line."""
    local = option(args, "--data-parallel-size-local", "-dpl")
    by_data = (
        count(args, "--data-parallel-size", "-dp") // int(local) if local and local.isdigit() and int(local) else 1
    )
    return max(count(args, "--nnodes"), by_data)


def _share(args: Sequence[str]) -> float:
    """Return the share of GPU memory the engine may use: as its command line says, else the highest in use for K3."""
    try:
        return float(option(args, "--gpu-memory-utilization") or data_file("models.yml").text("memory_share"))
    except ValueError:
        return 1.0


def _models(case: Case) -> str | None:
    return ", ".join(sorted({gpu.name for gpu in case.snapshot.gpus if gpu.name})) or None


def _gpus(case: Case) -> str | None:
    counted = Counter(gpu.name or "unknown" for gpu in case.snapshot.gpus)
    return ", ".join(f"{number} x {name}" for name, number in sorted(counted.items())) or None


def _settings(case: Case) -> str | None:
    """Return the NCCL and UCX variables of the running engine, those of a node's own left out."""
    container = case.snapshot.container
    if container is None or not container.running:
        return None
    chosen = {
        name: value
        for name, value in container.env.items()
        if name.startswith(("NCCL_", "UCX_", "GLOO_")) and name not in _OWN
    }
    return ", ".join(f"{name}={value}" for name, value in sorted(chosen.items())) or "none"


def _mtu(case: Case) -> str | None:
    network = case.snapshot.network
    for name, addresses in network.addresses.items():
        if case.expected.address in {address.partition("/")[0] for address in addresses}:
            mtu = network.mtu.get(name)
            return None if mtu is None else str(mtu)
    return None


def _differing_weights(nodes: Sequence[Case]) -> Iterator[Finding]:
    """Compare checksums of the files that every node has one recorded of; revisions where there are none of those."""
    sums = [case.snapshot.weights.checksums or {} for case in nodes if case.snapshot.weights is not None]
    common = sorted(set.intersection(*map(set, sums))) if sums else []
    if common:
        yield from _differ(nodes, "fleet.weights", lambda case: _sums(case, common))
    else:
        yield from _differ(nodes, "fleet.weights", _revision)


def _revision(case: Case) -> str | None:
    return case.snapshot.weights.revision if case.snapshot.weights else None


def _sums(case: Case, files: Sequence[str]) -> str | None:
    found = case.snapshot.weights.checksums if case.snapshot.weights else None
    return ", ".join(f"{file} {found[file][:12]}" for file in files) if found else None


def _imex_nodes(case: Case) -> str | None:
    """Return the IMEX node list; one that a role is to write anew says nothing yet."""
    return None if rewritten(case, NODES_FILE) else ", ".join(case.snapshot.fabric.imex_nodes or ()) or None


def _cliques(case: Case) -> str | None:
    domains = {f"{gpu.cluster_uuid}/{gpu.clique_id}" for gpu in case.snapshot.fabric.gpus or () if gpu.cluster_uuid}
    return ", ".join(sorted(domains)) or None


def _differ(cases: Sequence[Case], code: str, value: Callable[[Case], str | None]) -> Iterator[Finding]:
    """Yield one finding when the hosts that tell a value tell more than one; who tells none is left out."""
    told: dict[str, list[str]] = {}
    for case in cases:
        observed = value(case)
        if observed is not None:
            told.setdefault(observed, []).append(case.expected.host)
    if len(told) > 1:
        yield _finding(code, _told(told), "the same on all of them")


def _told(values: Mapping[str, Sequence[str]]) -> str:
    most = sorted(values.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{_listed(hosts)}: {_short(value)}" for value, hosts in most)


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _finding(code: str, observed: str, expected: str) -> Finding:
    return make_finding(code, host=FLEET, observed=observed, expected=expected)
