"""What step 3 asks of the engine before it sends anything: its geometry, its counters, and whether prompts fit."""

from __future__ import annotations

from pathlib import Path

from kimi_runbook.acceptance.capabilities import Presence, probe
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.geometry import Geometry, UnknownGeometryError, read_geometry
from kimi_runbook.acceptance.geometry_log import GeometryLog, marks, read_geometry_log
from kimi_runbook.acceptance.hit_rules import lengths
from kimi_runbook.acceptance.hosts import HostError
from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.launch_options import LaunchOptions
from kimi_runbook.acceptance.metrics import CACHE_CONFIG, HITS, KV_USAGE, QUERIES, Reading
from kimi_runbook.acceptance.result import Check, State, verify
from kimi_runbook.acceptance.shared_prefix.protocol import Sizes

METRICS = "Open the metrics URLs of acceptance.json: every engine has to answer there, not a router."
CACHE = "Compare --enable-prefix-caching, block size and retention in the launch with cache_config_info in /metrics."


def find_geometry(context: Context, reading: Reading) -> Geometry:
    """Return the engine's geometry; its log is read only where metrics and launch leave something open.

    Raises:
        UnknownGeometryError: When no source has a value the expectation rests on.
        ContradictedGeometryError: When the operator said something else than the engine.
    """
    version, launch, told = _version(context), _launch(context), context.plan.geometry
    try:
        found = read_geometry(reading, version=version, launch=launch, told=told)
    except UnknownGeometryError as error:
        log, why_not = _log(context)
        if log is None:
            raise UnknownGeometryError(f"{error}; {why_not}") from error
        return read_geometry(reading, version=version, log=log, launch=launch, told=told)
    if found.recurrent and found.retention != "0" and found.batch_tokens is None:
        log, _ = _log(context)  # states are kept where prefill steps end, so their length matters
        if log is not None:
            return read_geometry(reading, version=version, log=log, launch=launch, told=told)
    return found


def before_requests(context: Context, geometry: Geometry, reading: Reading) -> list[Check]:
    """Return what has to hold before anything is sent; raises EngineError when the models cannot be asked for."""
    plan, blocks = context.plan, geometry.block_size
    longest = next((card.max_model_len for card in context.client.models() if card.name == plan.model), None)
    needed = Sizes.of(geometry).longest + lengths().answer_tokens
    return [
        *_families(geometry, reading),
        verify(
            "engines-reporting",
            geometry.engines == plan.engine.engines,
            observed=f"{geometry.engines} {'engine reports' if geometry.engines == 1 else 'engines report'}",
            expected=f"{plan.engine.engines} (plan)",
            evidence=", ".join(plan.metrics),
            next_step=METRICS,
            otherwise=State.INCONCLUSIVE,
        ),
        verify(
            "one-cache",
            geometry.engines <= 1,
            observed=f"{geometry.engines} engines, each with a cache of its own",
            expected="one engine: which of several a request reaches is not known, so hits cannot be computed",
            evidence=QUERIES,
            next_step="Point the plan's endpoint at one engine, and name that engine's metrics once.",
            otherwise=State.INCONCLUSIVE,
        ),
        verify(
            "prefix-caching-on",
            geometry.prefix_caching is not False,
            observed="not told; hits will show it" if geometry.prefix_caching is None else _caching(geometry),
            expected="True",
            evidence=geometry.witnesses.get("prefix_caching", CACHE_CONFIG),
            next_step="Start the engine with --enable-prefix-caching: vLLM before 0.28 leaves it off for hybrids.",
        ),
        verify(
            "block-fits-context",
            longest is None or needed <= longest,
            observed=f"block {blocks} needs prompts of {needed} tokens; max_model_len is {longest or 'not told'}",
            expected="room for three blocks in a prompt",
            evidence=f"{geometry.witnesses.get('block_size', CACHE_CONFIG)}, GET /v1/models",
            next_step="Lower the block size or raise --max-model-len: shorter shared prefixes than a block never hit.",
        ),
    ]


def _caching(geometry: Geometry) -> str:
    return f"enable_prefix_caching={geometry.prefix_caching}"


def _families(geometry: Geometry, reading: Reading) -> list[Check]:
    """Counters that are not there stop the step; the gauge beside them is told."""
    found = probe(reading, geometry.version)
    counters = [found.families[family] for family in (HITS, QUERIES)]
    absent = [one for one in counters if one.presence is not Presence.PRESENT]
    usage = found.families[KV_USAGE]
    checks = [
        verify(
            "counters-present",
            not absent,
            observed="; ".join(f"{one.family} is {one.presence}: {one.why}" for one in absent)
            or f"{HITS} and {QUERIES} present, {counters[0].why}",
            expected="both on every metrics URL",
            evidence="/metrics, data/metrics.yml",
            next_step=METRICS,
            otherwise=State.INCONCLUSIVE,
        )
    ]
    if usage.presence is not Presence.PRESENT:
        checks.append(
            verify(
                "kv-usage-present",
                False,
                observed=f"{usage.family} is {usage.presence}: {usage.why}",
                expected="the gauge on every metrics URL",
                evidence="/metrics, data/metrics.yml",
                next_step=METRICS,
                otherwise=State.WARN,
            )
        )
    return checks


def _version(context: Context) -> str:
    """Return what the engine said its version is, asking it when no step did; empty when it does not say."""
    told = context.observed("engine_version")
    if told is not None:
        return told
    try:
        version = context.client.version()
    except EngineError:
        return ""
    context.note("engine_version", version)
    return version


def _launch(context: Context) -> LaunchOptions:
    """Return what the head was launched with; the other nodes have the same arguments as far as the cache goes."""
    plan = context.plan
    name = plan.head.name if plan.head else next(iter(plan.launch), None)
    launch = plan.launch.get(name) if name else None
    return LaunchOptions(argv=launch.argv, known=True) if launch else LaunchOptions()


def _log(context: Context) -> tuple[GeometryLog | None, str]:
    """Return what the engine's log says, or None with the reason: from the plan's files, else from the head."""
    plan, problems = context.plan, []
    for name, file in plan.engine.logs.items():
        try:
            with Path(file).open(encoding="utf-8", errors="replace") as stream:
                return read_geometry_log(stream), ""
        except OSError as error:
            problems.append(f"the log of {name} cannot be read ({error})")
    head = context.hosts.get(plan.head.name) if plan.head else None
    if head is not None:
        try:
            return read_geometry_log(head.log_lines(plan.engine.container, marks())), ""
        except HostError as error:
            problems.append(f"the log of {head.name} cannot be read ({error})")
    return None, "; ".join(problems) or "no engine log was given"
