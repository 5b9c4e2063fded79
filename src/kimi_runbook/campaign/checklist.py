"""The ten boxes of an agent service, ticked only by what this run measured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.result import State, StepResult
from kimi_runbook.campaign.run import Run, counted, fullest_gpu, gib, percent
from kimi_runbook.campaign.values import Box, BoxState
from kimi_runbook.figures import Figures, Rung
from kimi_runbook.reading import data_file
from kimi_runbook.record import Fingerprint

Answer = tuple[BoxState, str]
"""How a box stands and the evidence for it; what measures a box not measured is added from the data file."""


def checklist_of(plan: AcceptancePlan, steps: Sequence[StepResult], fingerprint: Fingerprint) -> tuple[Box, ...]:
    """Return the checklist, one box per entry of data/campaign_sheet.yml, in its order.

    Args:
        plan: What was to be done.
        steps: Results of the planned steps.
        fingerprint: What was observed of the engine.
    """
    run = Run(plan=plan, figures=Figures.of(steps), fingerprint=fingerprint)
    boxes = []
    for box in data_file("campaign_sheet.yml").each("checklist"):
        state, evidence = BOXES[box.text("id")](run)
        if state is BoxState.NOT_MEASURED:
            evidence = "; ".join(part for part in (evidence, f"measured by {box.text('by')}") if part)
        boxes.append(Box(id=box.text("id"), text=box.text("text"), state=state, evidence=evidence))
    return tuple(boxes)


def _started_before_load(run: Run) -> Answer:
    """The chain sends one request at a time until step 4; an endpoint that answers step 2 has finished starting."""
    for step, told in ((1, "the engine was ready"), (2, "single requests were answered")):
        if run.holds(step):
            return BoxState.TICKED, f"{told} in step {step}; the first parallel request is step 4's"
        if run.step(step) is not None:
            return BoxState.OPEN, run.told(step)
    return BoxState.NOT_MEASURED, run.told(2)


def _own_system_message(run: Run) -> Answer:
    return BoxState.NOT_MEASURED, ""


def _tools_and_results(run: Run) -> Answer:
    """One call of one tool is not the service's tools, and no result was sent back: it can only turn the box red."""
    tools = run.figures.mapping(2, "abilities").get("tools")
    if tools is None:
        return BoxState.NOT_MEASURED, run.told(2)
    if run.holds(2):
        return BoxState.NOT_MEASURED, f"step 2's one tool: {tools}"
    return BoxState.OPEN, f"{run.told(2)}; its one tool: {tools}"


def _longest_context_apart(run: Run) -> Answer:
    lengths = [request.prompt_tokens for request in run.figures.prefix_requests() if request.prompt_tokens is not None]
    return BoxState.NOT_MEASURED, f"the longest prompt sent has {max(lengths)} tokens" if lengths else ""


def _cache_on_and_off(run: Run) -> Answer:
    caching = run.fingerprint.prefix_caching
    return BoxState.NOT_MEASURED, "" if caching is None else f"this run saw it {'on' if caching else 'off'}"


def _hit_rate_with_memory(run: Run) -> Answer:
    if run.step(3) is None:
        return BoxState.NOT_MEASURED, run.told(3)
    if not run.holds(3):
        return BoxState.OPEN, run.told(3)
    requests = run.figures.prefix_requests()
    hits = [request.counted_hit_tokens for request in requests if request.counted_hit_tokens is not None]
    asked = [
        query
        for request in requests
        if (
            query := request.counted_query_tokens if request.counted_query_tokens is not None else request.prompt_tokens
        )
    ]
    rate = f"{percent(sum(hits) / sum(asked))} hits ({sum(hits)} of {sum(asked)} tokens)" if hits and asked else ""
    samples = [sample for sample in run.figures.memory() if sample.step in (3, 4)]
    fullest = fullest_gpu(samples)
    resident = [sample.engine_rss_bytes for sample in samples if sample.engine_rss_bytes is not None]
    if not rate:
        return BoxState.NOT_MEASURED, "step 3 counted no hits"
    if fullest:
        sample, index = fullest
        return BoxState.TICKED, f"{rate}; at most {sample.gpu_used_mib[index]} MiB on {sample.host} GPU {index}"
    if resident:
        return BoxState.TICKED, f"{rate}; at most {gib(max(resident))} resident"
    return BoxState.NOT_MEASURED, f"{rate}, without a memory peak"


def _nominal_and_peak(run: Run) -> Answer:
    if run.step(4) is None:
        return BoxState.NOT_MEASURED, run.told(4)
    nominal, peak = run.figures.integer(4, "nominal"), run.figures.integer(4, "peak")
    tried = {rung.concurrency for rung in run.figures.ladder()}
    if nominal is None or peak is None or not {nominal, peak} <= tried:
        return BoxState.OPEN, f"{run.told(4)}; nominal {nominal}, peak {peak}, run at {sorted(tried)}"
    if peak <= nominal:
        return BoxState.OPEN, f"peak is nominal ({nominal}): nothing above it was tried"
    if not run.holds(4):
        return BoxState.OPEN, run.told(4)
    return BoxState.TICKED, f"step 4 ran at {nominal} (nominal) and at {peak} (peak)"


def _margin_after_retries(run: Run) -> Answer:
    rungs = [rung for rung in run.figures.ladder() if rung.kv_usage_peak is not None]
    if not rungs:
        return BoxState.NOT_MEASURED, run.told(4)
    top = rungs[-1]
    free = percent(max(0.0, 1 - (top.kv_usage_peak or 0.0)))
    if any(check.state is not State.PASS for check in run.checks(4, "kv-headroom")):
        return BoxState.OPEN, f"step 4's kv-headroom did not pass: {free} of the KV cache free at {top.concurrency}"
    return BoxState.NOT_MEASURED, f"{free} of the KV cache was free at {top.concurrency} short requests"


def _lower_concurrency_agreed(run: Run) -> Answer:
    return BoxState.NOT_MEASURED, ""


def _extend_when_limited(run: Run) -> Answer:
    """Stable at nominal as planned: nothing failed, none was preempted or held back, and throughput grew up to it."""
    if run.step(4) is None:
        return BoxState.NOT_MEASURED, run.told(4)
    nominal, knee = run.figures.integer(4, "nominal"), run.figures.integer(4, "knee")
    rung = next((rung for rung in run.figures.ladder() if rung.concurrency == nominal), None)
    if rung is None:
        return BoxState.OPEN, f"{run.told(4)} and has no rung at nominal"
    limits = _limits(rung)
    if knee is not None and knee < rung.concurrency:
        limits.append(f"the knee is at {knee}")
    if limits:
        return BoxState.OPEN, f"at nominal ({nominal}): {', '.join(limits)}; lower the load or extend"
    if not run.holds(4):
        return BoxState.OPEN, run.told(4)
    return (
        BoxState.TICKED,
        f"nominal ({nominal}) held unlowered: 0 failed, 0 preempted, none held back, no knee below it",
    )


def _limits(rung: Rung) -> list[str]:
    """What kept the rung from being free; a value nobody saw counts as a limit, since it cannot speak for the engine.

    A request that waits for one sample is how a scheduler works; waiting while fewer run than were sent is a limit.
    """
    found = []
    for what, value in (("failed", rung.failed), ("preempted", rung.preemptions)):
        if value is None:
            found.append(f"{what} not observed")
        elif value > 0:
            found.append(f"{counted(int(value), 'request')} {what}")
    if rung.waiting_peak and rung.running_peak is not None and rung.running_peak < rung.concurrency:
        found.append(f"at most {rung.running_peak:g} ran at once while {rung.waiting_peak:g} waited")
    return found


BOXES: Mapping[str, Callable[[Run], Answer]] = {
    "started-before-load": _started_before_load,
    "own-system-message": _own_system_message,
    "tools-and-results": _tools_and_results,
    "longest-context-apart": _longest_context_apart,
    "cache-on-and-off": _cache_on_and_off,
    "hit-rate-with-memory": _hit_rate_with_memory,
    "nominal-and-peak": _nominal_and_peak,
    "margin-after-retries": _margin_after_retries,
    "lower-concurrency-agreed": _lower_concurrency_agreed,
    "extend-when-limited": _extend_when_limited,
}
"""What decides each box of data/campaign_sheet.yml, by its id."""
