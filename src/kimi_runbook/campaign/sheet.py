"""The campaign sheet: the facts the next person needs, each observed in this run or said not to be. Pure.

An inventory's wish or a lock's promise is no observation: where only those are known, the value is None and the source
says what they say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.result import StepResult
from kimi_runbook.campaign.load import concurrency_tested, errors_seen, memory_peak, remaining_margin, request_set
from kimi_runbook.campaign.run import Run, agreed
from kimi_runbook.campaign.values import Entry, Part
from kimi_runbook.figures import Figures, number
from kimi_runbook.reading import data_file
from kimi_runbook.record import Fingerprint

_LAUNCH = "arguments of the running processes, as launched (step 0)"
_TOOLKIT = "nvidia-container-toolkit"
# What a value keeps. Source: vLLM 0.29 to 0.33, config/cache.py, prefix_cache_retention_interval.
_RETENTION = {
    "0": "0: recurrent state is kept at the end of a prompt and where prompts were seen to part, nowhere between",
    "dense": "dense: recurrent state is kept at every block",
}
_OPERATOR = "the operator"  # witness of a value given by hand (acceptance/geometry.py)
_ATTENTION_ONLY = "whole-blocks"  # rule of data/hit_rules.yml for engines that keep no recurrent state


def campaign_of(
    plan: AcceptancePlan,
    steps: Sequence[StepResult],
    fingerprint: Fingerprint,
    *,
    started: datetime,
    ended: datetime,
) -> tuple[Entry, ...]:
    """Return the campaign sheet, one entry per field of data/campaign_sheet.yml, in its order.

    Args:
        plan: What was to be done.
        steps: Results of the planned steps.
        fingerprint: What was observed of the engine.
        started: When the run began.
        ended: When it ended.
    """
    run = Run(plan=plan, figures=Figures.of(steps), fingerprint=fingerprint)
    fields = data_file("campaign_sheet.yml").each("sheet")
    return tuple(
        Entry(id=field.text("id"), title=field.text("title"), parts=_parts(field.text("id"), run, started, ended))
        for field in fields
    )


def _parts(field: str, run: Run, started: datetime, ended: datetime) -> tuple[Part, ...]:
    return _date(started, ended) if field == "date" else FIELDS[field](run)


def _image_and_version(run: Run) -> tuple[Part, ...]:
    digest, lock = run.fingerprint.image_digest, run.plan.lock
    image = digest
    if digest and lock and digest == lock.image.digest:
        image = f"{lock.image.repository}:{lock.image.tag}@{digest}"
    return (
        Part(
            name="image",
            value=image,
            source="digest of the image the containers run (step 0)" if image else run.missing(0),
        ),
        Part(
            name="vLLM",
            value=run.fingerprint.engine_version,
            source="GET /version" if run.fingerprint.engine_version else f"GET /version: {run.missing(2)}",
        ),
    )


def _driver_and_cuda(run: Run) -> tuple[Part, ...]:
    driver, digest, lock = run.fingerprint.driver, run.fingerprint.image_digest, run.plan.lock
    library = agreed({name: shot.driver.userspace for name, shot in run.plan.snapshots.items()})
    packages = {name: shot.packages.get(_TOOLKIT) for name, shot in run.plan.snapshots.items()}
    toolkit = agreed({name: found.version if found else None for name, found in packages.items()})
    cuda, source = None, f"the image is not known: {run.missing(0)}"
    if digest and lock and digest == lock.image.digest:
        cuda, source = lock.image.cuda or "none: the image is built without", "lock, for the digest that runs"
    elif digest:
        source = "the digest that runs is not the lock's"
    return (
        Part(name="driver", value=driver, source="/sys/module/nvidia/version (step 0)" if driver else run.missing(0)),
        Part(name="NVML library", value=library, source=_snapshot(library)),
        Part(name="CUDA of the image", value=cuda, source=source),
        Part(name="container toolkit", value=toolkit, source=_snapshot(toolkit)),
    )


def _hardware(run: Run) -> tuple[Part, ...]:
    shots = {host.name: run.plan.snapshots[host.name] for host in run.plan.hosts}
    models = {
        name: ", ".join(f"{count} x {model}" for model, count in sorted(Counter(_names(shot.gpus)).items())) or None
        for name, shot in shots.items()
    }
    memory = {
        name: ", ".join(sorted({f"{gpu.memory_total_mib} MiB" for gpu in shot.gpus if gpu.memory_total_mib})) or None
        for name, shot in shots.items()
    }
    system = {
        name: ", ".join(part for part in (shot.os.pretty, shot.os.arch, shot.os.kernel) if part) or None
        for name, shot in shots.items()
    }
    each = " per node" if len(shots) > 1 and len(set(models.values())) == 1 else ""
    gpus = agreed(models)
    return (
        Part(name="GPUs", value=f"{gpus}{each}" if gpus else None, source=_snapshot(gpus)),
        Part(name="memory per GPU", value=agreed(memory), source=_snapshot(agreed(memory))),
        Part(name="system", value=agreed(system), source=_snapshot(agreed(system))),
    )


def _names(gpus: Sequence[object]) -> list[str]:
    return [str(getattr(gpu, "name", None) or "unnamed GPU") for gpu in gpus]


def _nodes_and_interconnect(run: Run) -> tuple[Part, ...]:
    names = [host.name for host in run.plan.hosts]
    running = [name for name in names if run.all_pass(5, f"{name}.rank") or run.all_pass(1, f"{name}.running")]
    nodes = f"{len(running)} ({', '.join(running)})" if running else None
    kind, source = None, f"no inventory: {run.missing(5)}"
    if len(names) == 1:
        kind, source = "none: one node", "plan"
    elif run.on_every_node(5, "traffic"):
        kind, source = run.plan.interconnect, "traffic seen on every node while a request ran (step 5)"
    elif names:
        source = f"the inventory says {run.plan.interconnect}; {run.missing(5)}"
    backends = run.figures.raw(5, "backends")
    told = ", ".join(str(backend) for backend in backends) if isinstance(backends, Sequence) and backends else None
    parts = [
        Part(name="nodes", value=nodes, source="containers running (steps 1 and 5)" if nodes else run.missing(1)),
        Part(name="interconnect", value=kind, source=source),
        Part(name="backend", value=told, source="backend= in the engine logs (step 5)" if told else run.missing(5)),
    ]
    return (*parts, *_peer_loss(run))


def _peer_loss(run: Run) -> tuple[Part, ...]:
    """What the drill showed; no part where none was run."""
    drill = run.figures.mapping(5, "peer_loss")
    if not drill:
        return ()
    noticed, restored = number(drill.get("noticed_s")), number(drill.get("restored_s"))
    seen = f"seen after {noticed:.1f} s" if noticed is not None else "not seen"
    back = f"serving again {restored:.0f} s after the restart" if restored is not None else "not restored"
    value = f"{drill.get('killed_host', '?')} killed, {seen}, {back}"
    return (Part(name="peer loss", value=value, source="drill of step 5"),)


def _parallelism(run: Run) -> tuple[Part, ...]:
    sizes = ", ".join(f"{kind} {size}" for kind, size in sorted(run.plan.engine.parallelism.items())) or None
    formed = run.all_pass(5, "world-size-formed")
    if sizes and run.on_every_node(0, "arguments"):
        source = f"{_LAUNCH}; {'ranks counted in the logs (step 5)' if formed else run.told(5)}"
        return (Part(name="sizes", value=sizes, source=source),)
    source = f"the plan says {sizes}; {run.missing(0)}" if sizes and run.plan.hosts else run.missing(0)
    return (Part(name="sizes", value=None, source=source),)


def _prefix_cache(run: Run) -> tuple[Part, ...]:
    caching, figures = run.fingerprint.prefix_caching, run.figures
    block, unit = run.fingerprint.block_size_tokens, figures.integer(3, "match_unit_tokens")
    blocks, tokens = figures.integer(3, "num_gpu_blocks"), figures.integer(3, "kv_cache_tokens")
    size = [f"{blocks} blocks"] if blocks is not None else []
    size += [f"{tokens} tokens"] if tokens is not None else []
    return (
        _read_back(run, "state", None if caching is None else ("on" if caching else "off"), "prefix_caching"),
        _read_back(run, "block", None if block is None else f"{block} tokens", "block_size"),
        _read_back(run, "hits land on", None if unit is None else f"multiples of {unit} tokens", "match_unit"),
        _read_back(run, "size", ", ".join(size) or None, "num_gpu_blocks"),
    )


def _read_back(run: Run, name: str, value: str | None, witness: str) -> Part:
    """One value of the cache's geometry with its witness; what only the operator said was not observed."""
    if value is None:
        return Part(name=name, value=None, source=run.missing(3))
    told = str(run.figures.mapping(3, "witnesses").get(witness) or "step 3")
    if told == _OPERATOR:
        return Part(name=name, value=None, source=f"the operator said {value}; the engine does not tell")
    return Part(name=name, value=value, source=told)


def _retention(run: Run) -> tuple[Part, ...]:
    told = run.fingerprint.retention
    if told == "":
        return (Part(name="interval", value=None, source="the engine does not name it (vLLM before 0.29)"),)
    value = None if told is None else _RETENTION.get(told, f"{told}: recurrent state is kept every {told} tokens")
    if value and run.figures.raw(3, "rule") == _ATTENTION_ONLY:
        value = f"{told}, without effect: this engine keeps no recurrent state"
    return (_read_back(run, "interval", value, "retention"),)


def _date(started: datetime, ended: datetime) -> tuple[Part, ...]:
    began, end = started.astimezone(UTC), ended.astimezone(UTC)
    told = f"{end:%H:%M:%S}" if began.date() == end.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    return (Part(name="run", value=f"{began:%Y-%m-%d %H:%M:%S} to {told} UTC", source="clock of this machine"),)


def _model_and_load_format(run: Run) -> tuple[Part, ...]:
    served = run.plan.model if run.all_pass(2, "model-served") else None
    launched = run.on_every_node(0, "arguments")
    argv = next((launch.argv for launch in run.plan.launch.values()), ())
    weights = argv[0] if launched and argv else None
    format_ = run.option("--load-format")
    told = (format_ or "auto (the launch names none, vLLM's default)") if launched else None
    revision = run.plan.lock.model.revision if run.plan.lock else None
    return (
        Part(name="served as", value=served, source="GET /v1/models (step 2)" if served else run.missing(2)),
        Part(name="weights from", value=weights, source=_LAUNCH if weights else run.missing(0)),
        Part(name="load format", value=told, source=_LAUNCH if told else run.missing(0)),
        Part(
            name="revision",
            value=None,
            source=f"the lock says {revision}; no step compares the weights" if revision else "no lock",
        ),
    )


def _snapshot(value: str | None) -> str:
    return "snapshots of the nodes" if value else "no snapshot shows it"


FIELDS: Mapping[str, Callable[[Run], tuple[Part, ...]]] = {
    "image_and_version": _image_and_version,
    "driver_and_cuda": _driver_and_cuda,
    "hardware": _hardware,
    "nodes_and_interconnect": _nodes_and_interconnect,
    "parallelism": _parallelism,
    "prefix_cache": _prefix_cache,
    "retention": _retention,
    "request_set": request_set,
    "concurrency_tested": concurrency_tested,
    "memory_peak": memory_peak,
    "errors_seen": errors_seen,
    "remaining_margin": remaining_margin,
    "model_and_load_format": _model_and_load_format,
}
"""What fills each field of data/campaign_sheet.yml but the date, by its id."""
