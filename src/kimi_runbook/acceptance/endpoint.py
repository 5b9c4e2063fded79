"""An acceptance plan for an endpoint somebody else runs: what the operator said, and what the endpoint says. Pure.

There is no inventory, no lock and no host, so only the steps that need an HTTP connection can be planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kimi_runbook.acceptance.plan import (
    SCHEMA_VERSION,
    STEP_NAMES,
    Ability,
    AcceptancePlan,
    Access,
    GeometryOptions,
    Wanted,
)
from kimi_runbook.acceptance.plan_parts import default
from kimi_runbook.errors import RunbookError

REQUEST_SETS = ("smoke",)
"""Request sets that exist. ``smoke`` is what the steps send by themselves."""

STEPS = (2, 3, 4)
"""Steps that need nothing but the endpoint; step 6 joins them when seconds to observe are given."""

NOT_OBSERVED = "not observed"
"""What an endpoint does not tell about itself; a plan has a place for it all the same."""

_LOG_NAME = "endpoint"  # the host name under which the plan carries the log
_HELP = "Every option: kimi-runbook accept --help."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the operator said.

    Attributes:
        endpoint: Base URL of the OpenAI API; a ``/v1`` at its end is taken off.
        metrics: URLs of every API server's metrics; empty for ``ENDPOINT/metrics``.
        model: Served model name; empty to take the only one.
        request_set: One of ``REQUEST_SETS``.
        access: How the endpoint is reached.
        engine_log: A file with the engine's log on this machine; empty for none.
        geometry: What the operator knows of the cache.
        engines: Engines that have to report metrics; None for as many as do.
        concurrency: Streams at once at the nominal load of step 4.
        peak: Streams at once at its peak; None for ``concurrency``.
        required: Abilities whose absence fails the run; all others are looked for and told.
        observe_s: Seconds of step 6; 0 leaves it out.
        max_tokens: Tokens asked for per request.
        chat_template_kwargs: What the model's chat template is told.
    """

    endpoint: str
    metrics: tuple[str, ...] = ()
    model: str = ""
    request_set: str = REQUEST_SETS[0]
    access: Access = field(default_factory=Access)
    engine_log: str = ""
    geometry: GeometryOptions = field(default_factory=GeometryOptions)
    engines: int | None = None
    concurrency: int = field(default_factory=lambda: default("endpoint_concurrency"))
    peak: int | None = None
    required: tuple[Ability, ...] = ()
    observe_s: int = 0
    max_tokens: int = field(default_factory=lambda: default("max_tokens"))
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the endpoint said before anything was asked of its model.

    Attributes:
        models: Served model names.
        longest: Tokens of a prompt and its answer at most, by model, where the endpoint tells.
        version: What ``/version`` said.
        engines: Engines whose counters the metrics URLs show, or None when they could not be read.
        metrics_problem: Why they could not be read; empty otherwise.
    """

    models: tuple[str, ...]
    version: str
    engines: int | None
    metrics_problem: str = ""
    longest: Mapping[str, int] = field(default_factory=dict)


def checked(options: Options, environment: Mapping[str, str]) -> Options:
    """Return the options with URLs made whole; raises RunbookError naming the first that cannot be used.

    Args:
        options: As given on the command line.
        environment: Variables of this process; only the one that holds the API key is looked at.
    """
    if options.request_set not in REQUEST_SETS:
        raise _usage("--request-set", options.request_set, f"one of {', '.join(REQUEST_SETS)}")
    if options.peak is not None and options.peak < options.concurrency:
        raise _usage("--peak", str(options.peak), f"at least --concurrency {options.concurrency}")
    if options.access.proxy:
        proxy = _url("--proxy", options.access.proxy, schemes=("http",))
        if proxy.path not in ("", "/"):
            raise _usage("--proxy", f"has the path {proxy.path}", "http://host:port")
    for name, file in (("--ca-file", options.access.ca_file), ("--engine-log", options.engine_log)):
        if file:
            _readable(name, file)
    if options.access.api_key_env:
        api_key(options.access, environment)
    parts = _url("--endpoint", options.endpoint)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    endpoint = parts._replace(path=path).geturl()
    for url in options.metrics:
        _url("--metrics", url)
    return replace(options, endpoint=endpoint, metrics=options.metrics or (f"{endpoint}/metrics",))


def api_key(access: Access, environment: Mapping[str, str]) -> str:
    """Return the API key, empty where none is named; raises RunbookError, without its value, when it is unusable."""
    name = access.api_key_env
    if not name:
        return ""
    value = environment.get(name, "")
    if not value:
        expected = "the name of an environment variable that holds the key"
        raise _usage("--api-key-env", f"{name} is {'empty' if name in environment else 'not set'}", expected)
    if not value.isascii() or not value.isprintable() or " " in value:
        raise _usage("--api-key-env", f"{name} holds spaces or control characters", "a key that fits into a header")
    return value


def plan_of(options: Options, seen: Seen, run_id: str, run_dir: Path) -> AcceptancePlan:
    """Return the plan of one run; raises RunbookError when the model is not clear or the plan does not hold together.

    Args:
        options: As ``checked`` returned them.
        seen: What the endpoint said.
        run_id: The run's id.
        run_dir: Where the run's files will go.
    """
    longest = seen.longest.get(model_of(options, seen))
    if longest is not None and options.max_tokens >= longest:
        raise _usage(
            "--max-tokens", str(options.max_tokens), f"less than the model's longest context, {longest} tokens"
        )
    try:
        return AcceptancePlan.from_json(plan_json(options, seen, run_id, run_dir), source="kimi-runbook accept")
    except RunbookError as error:
        raise RunbookError(
            where=error.where, observed=error.observed, expected=error.expected, next_step=_HELP
        ) from error


def plan_json(options: Options, seen: Seen, run_id: str, run_dir: Path) -> dict[str, Any]:
    """Return the plan as the JSON that the acceptance role writes for a site; holds no secret."""
    parts = urlsplit(options.endpoint)
    observing = {6} if options.observe_s else set()
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "run_dir": str(run_dir),
        "endpoint": options.endpoint,
        "metrics": list(options.metrics),
        "model": model_of(options, seen),
        "steps": sorted({*STEPS, *observing}),
        "site": parts.netloc,
        "simulated": [],
        "interconnect": NOT_OBSERVED,
        "interface": None,
        "hosts": [],
        "engine": {
            "container": NOT_OBSERVED,
            "unit": None,
            "port": parts.port or (443 if parts.scheme == "https" else 80),
            "nodes": 1,
            "engines": options.engines or seen.engines or 1,
            "api_servers": len(options.metrics),
            "parallelism": {},
            "log": {_LOG_NAME: str(Path(options.engine_log).absolute())} if options.engine_log else None,
        },
        "launch": None,
        "expected": None,
        "snapshots": None,
        "lock": None,
        "model_limits": {
            "max_tokens": options.max_tokens,
            "chat_template_kwargs": dict(options.chat_template_kwargs),
            "abilities": {str(ability): str(Wanted.REQUIRED) for ability in options.required},
        },
        "concurrency": options.concurrency,
        "peak_concurrency": options.peak or options.concurrency,
        "observe_s": options.observe_s,
        "peer_loss_drill": False,
        "access": {
            "api_key_env": options.access.api_key_env,
            "ca_file": options.access.ca_file,
            "proxy": options.access.proxy,
        },
        "geometry": {
            "block_size": options.geometry.block_size,
            "match_unit": options.geometry.match_unit,
            "retention": options.geometry.retention,
            "cache_mode": options.geometry.cache_mode,
        },
    }


def model_of(options: Options, seen: Seen) -> str:
    """Return the model to ask: the one that was named, else the only one served; raises RunbookError."""
    served = ", ".join(seen.models) or "nothing"
    where = f"{options.endpoint}/v1/models"
    if options.model:
        if options.model not in seen.models:
            raise RunbookError(
                where=where,
                observed=f"serves {served}",
                expected=options.model,
                next_step="Name a served model with --model.",
            )
        return options.model
    if len(seen.models) != 1:
        raise RunbookError(
            where=where, observed=f"serves {served}", expected="one model", next_step="Name it with --model."
        )
    return seen.models[0]


def scope_lines(plan: AcceptancePlan, seen: Seen, requests: int) -> list[str]:
    """Return what will be done, for the operator to read before anything is sent.

    Args:
        plan: The run's plan.
        seen: What the endpoint said.
        requests: About how many requests the planned steps send.
    """
    planned = ", ".join(f"{step} {STEP_NAMES[step]}" for step in plan.steps)
    left_out = ", ".join(f"{step} {STEP_NAMES[step]}" for step in plan.not_planned)
    lines = [
        f"steps {planned}; not planned: {left_out}",
        f"{plan.model} at {plan.endpoint}, vLLM {seen.version}; {_engines(plan, seen)}",
    ]
    observing = f", then {plan.observe_s} s of watching" if 6 in plan.steps else ""
    lines.append(
        f"about {requests} requests for {plan.max_tokens} tokens each, up to {plan.peak_concurrency} at "
        f"once{observing}; other traffic meanwhile makes step 3 inconclusive"
    )
    return lines


def _engines(plan: AcceptancePlan, seen: Seen) -> str:
    where = f"on {len(plan.metrics)} metrics URL{'s' if len(plan.metrics) > 1 else ''}"
    if seen.engines is None:
        return f"metrics cannot be read ({seen.metrics_problem}), engines assumed: {plan.engine.engines}"
    if seen.engines == 0:
        return f"no engine reports yet {where}, engines assumed: {plan.engine.engines}"
    told = f"{seen.engines} engine{'s report' if seen.engines > 1 else ' reports'} {where}"
    if seen.engines != plan.engine.engines:
        told += f", {plan.engine.engines} required"
    return f"{told}; step 3 can judge the cache of one" if seen.engines > 1 else told


def _url(option: str, url: str, schemes: Sequence[str] = ("http", "https")) -> SplitResult:
    """Return the parts of a URL that can be written into a record: no user, no password, no query."""
    expected = f"a URL such as {schemes[0]}://host:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _usage(option, str(error), expected) from error
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        observed = "has a user, a password, a query or a fragment in it"
        raise _usage(option, observed, "a plain URL, since it is written into every report (keys: --api-key-env)")
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise _usage(option, f"{url!r} is no such URL", expected)
    return parts


def _readable(option: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            return
    except OSError as error:
        raise _usage(option, f"{file} cannot be read ({error.strerror or error})", "a readable file") from error


def _usage(option: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(where=option, observed=observed, expected=expected, next_step=_HELP)
