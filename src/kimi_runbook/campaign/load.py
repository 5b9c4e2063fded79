"""The sheet's entries about load: what was sent, what it took of the memory, what failed, what is left. Pure."""

from __future__ import annotations

from kimi_runbook.acceptance.result import State
from kimi_runbook.campaign.run import Run, counted, fullest_gpu, gib, listed, percent
from kimi_runbook.campaign.values import Part
from kimi_runbook.figures import Rung

_LOAD_STEPS = (2, 3, 4)


def request_set(run: Run) -> tuple[Part, ...]:
    """Return the hash of the requests, how many there were, and how many tokens each asked for."""
    ran = [step for step in _LOAD_STEPS if run.step(step)]
    digest = run.fingerprint.request_set if ran else None
    why = "; ".join(run.told(step) for step in _LOAD_STEPS)
    prefix, ladder = len(run.figures.prefix_requests()), run.figures.ladder()
    load = [rung.requests for rung in ladder if rung.requests is not None]
    sent = [f"{prefix} in step 3"] if prefix else []
    sent += [f"{sum(load)} in step 4"] if load else []
    return (
        Part(name="hash", value=digest, source="shapes of all requests, salts left out" if digest else why),
        Part(name="requests", value=", ".join(sent) or None, source="steps 3 and 4" if sent else why),
        Part(
            name="tokens asked per request",
            value=str(run.plan.max_tokens) if ran else None,
            source="plan, sent as max_tokens" if ran else why,
        ),
    )


def concurrency_tested(run: Run) -> tuple[Part, ...]:
    """Return the rungs that were run, which are nominal and peak, and where throughput stopped growing."""
    ladder, why = run.figures.ladder(), run.missing(4)
    tried = [rung.concurrency for rung in ladder]
    nominal, peak = run.figures.integer(4, "nominal"), run.figures.integer(4, "peak")
    knee, knee_told = run.figures.integer(4, "knee"), run.figures.has(4, "knee") and bool(tried)
    at = str(knee) if knee is not None else f"none up to {max(tried, default=0)}" if knee_told else None
    values = {
        "streams at once": listed(tried) or None,
        "nominal": str(nominal) if nominal in tried else None,
        "peak": str(peak) if peak in tried else None,
        "knee": at,
    }
    return tuple(
        Part(name=name, value=value, source=why if value is None else "ladder of step 4")
        for name, value in values.items()
    )


def memory_peak(run: Run) -> tuple[Part, ...]:
    """Return the highest memory seen: fullest GPU, largest engine process, fullest KV cache. Samples: lower bounds."""
    samples = run.figures.memory()
    fullest = fullest_gpu(samples)
    largest = max(
        (sample for sample in samples if sample.engine_rss_bytes is not None),
        key=lambda sample: sample.engine_rss_bytes or 0,
        default=None,
    )
    usage = run.figures.number(4, "kv_usage_peak")
    moments = len({(sample.step, sample.moment) for sample in samples})
    source = f"highest of {counted(moments, 'sample')} (steps 1, 3, 4 and 6)"
    why = "no step sampled the nodes' memory" if run.plan.hosts else "no node in the plan: an endpoint does not show it"
    gpu = rss = None
    if fullest:
        sample, index = fullest
        gpu = f"{sample.gpu_used_mib[index]} MiB on {sample.host} GPU {index}"
    if largest and largest.engine_rss_bytes is not None:
        rss = f"{gib(largest.engine_rss_bytes)} on {largest.host}"
    return (
        Part(name="GPU memory", value=gpu, source=source if gpu else why),
        Part(name="engine process", value=rss, source=f"{source}, resident" if rss else why),
        Part(
            name="KV cache",
            value=None if usage is None else f"{percent(usage)} used",
            source=run.missing(4) if usage is None else "vllm:kv_cache_usage_perc, highest sample of step 4",
        ),
    )


def errors_seen(run: Run) -> tuple[Part, ...]:
    """Return failed requests under load, fatal lines of the engine's log, and the chain's own count."""
    rungs = [rung for rung in run.figures.ladder() if rung.failed is not None and rung.requests is not None]
    failed, sent = sum(rung.failed or 0 for rung in rungs), sum(rung.requests or 0 for rung in rungs)
    requests = f"{failed} of {counted(sent, 'request')} failed under load" if rungs else None
    fatal = run.checks(1, "no-fatal-line")
    found = [check for check in fatal if check.state is State.FAIL]
    log = None
    if fatal and not any(check.state is State.INCONCLUSIVE for check in fatal):
        log = "; ".join(check.observed[:160] for check in found) or f"no fatal line in {counted(len(fatal), 'log')}"
    checks = [check for step in run.figures.steps.values() for check in step.checks]
    red = [check for check in checks if check.state is State.FAIL]
    chain = f"{len(red)} of {counted(len(checks), 'check')} failed" if checks else None
    parts = [
        Part(name="requests", value=requests, source="ladder of step 4" if requests else run.missing(4)),
        Part(name="engine log", value=log, source="step 1" if log else run.missing(1)),
        Part(name="chain", value=chain, source="all steps" if chain else "no step made a check"),
    ]
    if 6 in run.figures.steps:
        samples = run.figures.samples()
        errors = samples[-1].errors if samples else None
        watched = None if errors is None else f"{errors:g} in {samples[-1].at_s:g} s"
        parts.append(Part(name="while observed", value=watched, source="step 6" if watched else run.missing(6)))
    return tuple(parts)


def remaining_margin(run: Run) -> tuple[Part, ...]:
    """Return what is left at nominal load: share of the KV cache, of the fullest GPU, and concurrency above nominal.

    Formulas: 1 - peak KV usage of the rung; (total - highest sample) / total of the fullest GPU; highest rung that
    failed nothing before the knee, over nominal.
    """
    rungs = {rung.concurrency: rung for rung in run.figures.ladder()}
    nominal, peak = run.figures.integer(4, "nominal"), run.figures.integer(4, "peak")
    free = [
        f"{percent(max(0.0, 1 - usage))} free at {what} ({at})"
        for what, at in (("nominal", nominal), ("peak", peak if peak != nominal else None))
        if at is not None and (rung := rungs.get(at)) and (usage := rung.kv_usage_peak) is not None
    ]
    return (
        Part(
            name="KV cache",
            value=", ".join(free) or None,
            source="1 - highest sample of the rung (step 4)" if free else run.missing(4),
        ),
        _gpu_margin(run),
        _concurrency_margin(run, list(rungs.values()), nominal),
    )


def _gpu_margin(run: Run) -> Part:
    name, fullest = "GPU memory", fullest_gpu(run.figures.memory())
    if fullest is None:
        return Part(name=name, value=None, source="no GPU memory was sampled")
    sample, index = fullest
    shot = run.plan.snapshots.get(sample.host)
    gpu = next((gpu for gpu in shot.gpus if gpu.index == index), None) if shot else None
    if gpu is None or not gpu.memory_total_mib:
        return Part(name=name, value=None, source=f"the snapshot has no size of {sample.host} GPU {index}")
    free = max(0.0, 1 - sample.gpu_used_mib[index] / gpu.memory_total_mib)
    value = f"{percent(free)} free on {sample.host} GPU {index}"
    return Part(name=name, value=value, source=f"of {gpu.memory_total_mib} MiB, at the highest sample")


def _concurrency_margin(run: Run, rungs: list[Rung], nominal: int | None) -> Part:
    name, knee = "concurrency", run.figures.integer(4, "knee")
    good = [rung.concurrency for rung in rungs if rung.failed == 0 and (knee is None or rung.concurrency <= knee)]
    if not nominal or not good:
        return Part(name=name, value=None, source=run.missing(4) if not rungs else "no rung was without failures")
    most = max(good)
    value = f"{most / nominal:.2g} x nominal held ({most} of {nominal})"
    return Part(name=name, value=value, source="highest rung without failures, up to the knee, over nominal (step 4)")
