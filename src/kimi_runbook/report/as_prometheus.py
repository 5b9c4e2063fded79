"""metrics.prom: the record in Prometheus' text format, for a textfile collector. Pure.

Every series carries the site and the model, so that files of several sites can lie in one folder. What was not observed
has no sample: absent is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import State
from kimi_runbook.campaign.values import BoxState
from kimi_runbook.figures import QUANTILES, Figures, number
from kimi_runbook.record import Record
from kimi_runbook.report.summary import verdict_of
from kimi_runbook.report.text import clean
from kimi_runbook.verdict import VerdictName

_PREFIX = "kimi_runbook_"
_MIB = 1024**2
_OBSERVATIONS = ("pending", "complete", "not planned")


@dataclass(slots=True)
class _Page:
    """Families in the order they were begun; a family without a sample is left out."""

    common: dict[str, str]
    families: dict[str, list[str]] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, help_: str, value: float | None, /, **labels: str) -> None:
        if value is None:
            return
        self.helps.setdefault(name, help_)
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**self.common, **labels}.items())
        self.families.setdefault(name, []).append(f"{_PREFIX}{name}{{{pairs}}} {_number(value)}")

    def states(self, name: str, help_: str, label: str, now: str, all_: Iterable[str], /, **labels: str) -> None:
        """Add a state set: one series per state, 1 for the one that holds."""
        for state in all_:
            self.add(name, help_, float(state == now), **labels, **{label: state})

    def text(self) -> str:
        lines = []
        for name, samples in self.families.items():
            lines += [f"# HELP {_PREFIX}{name} {self.helps[name]}", f"# TYPE {_PREFIX}{name} gauge", *samples]
        return "\n".join(lines) + "\n"


def prometheus(record: Record) -> str:
    """Return metrics.prom."""
    page = _Page(common={"site": record.site, "model": record.model})
    figures = Figures.of(record.steps)
    page.add(
        "record_info",
        "The run these values are of.",
        1,
        run_id=record.run_id,
        endpoint=record.endpoint,
        engine_version=record.fingerprint.engine_version or "",
        image_digest=record.fingerprint.image_digest or "",
    )
    page.add("run_start_timestamp_seconds", "When the run began.", record.started.timestamp())
    page.add("run_end_timestamp_seconds", "When the run ended.", record.ended.timestamp())
    verdict = verdict_of(record)
    page.states("verdict", "1 for the verdict of the run.", "verdict", str(verdict.name), map(str, VerdictName))
    for advice in verdict.advice:
        page.add("advice", "1 for each advice the acceptance carries.", 1, advice=advice)
    for what in record.simulated:
        page.add("simulated", "1 for each thing that was a stand-in.", 1, what=what)
    observation = "1 for how the observation over time stands."
    page.states("observation", observation, "observation", record.observation, _OBSERVATIONS)
    _steps(page, record)
    _prefix(page, figures)
    _load(page, figures)
    _nodes(page, figures)
    for state in BoxState if record.checklist else ():
        found = sum(box.state is state for box in record.checklist)
        page.add("checklist_boxes", "Boxes of the agent checklist by how they stand.", found, state=str(state))
    return page.text()


def _steps(page: _Page, record: Record) -> None:
    results = {step.step: step for step in record.steps}
    for step, name in STEP_NAMES.items():
        labels = {"step": str(step), "name": name}
        page.add("step_planned", "1 when the step was planned.", float(step in record.planned), **labels)
        result = results.get(step)
        if result is None:
            continue
        page.states(
            "step_state", "1 for the state the step ended in.", "state", str(result.state), map(str, State), **labels
        )
        for state in State:
            found = sum(check.state is state for check in result.checks)
            page.add("step_checks", "Checks of the step by state.", found, **labels, state=str(state))
        for key in ("wall", "in_flight"):
            seconds = Figures.of([result]).number(step, f"{key}_s")
            page.add(f"step_{key}_seconds", f"Seconds of the step ({key.replace('_', ' ')}).", seconds, **labels)


def _prefix(page: _Page, figures: Figures) -> None:
    expected, counted = figures.integer(3, "expected_hit_tokens"), figures.integer(3, "hit_tokens")
    page.add("prefix_expected_hit_tokens", "Hits computed before the first request of step 3.", expected)
    page.add("prefix_counted_hit_tokens", "Hits the engine's counters moved by in step 3.", counted)
    page.add("prefix_block_size_tokens", "Tokens per cache block.", figures.integer(3, "block_size_tokens"))
    first = figures.first_token()
    for state, median in (("cold", first.cold_median_s), ("warm", first.warm_median_s)):
        page.add(
            "prefix_ttft_median_seconds", "Median time to first token without and with hits.", median, prefix=state
        )


def _load(page: _Page, figures: Figures) -> None:
    for name in ("nominal", "peak", "knee"):
        help_ = "Concurrency that is nominal, that is the peak, and past which throughput stopped growing."
        page.add("concurrency", help_, figures.integer(4, name), kind=name)
    for rung in figures.ladder():
        at = str(rung.concurrency)
        latencies = {"ttft": rung.ttft_s, "tpot": rung.tpot_s, "itl": rung.itl_s, "e2e": rung.e2e_s}
        for name, table in latencies.items():
            for key, seconds in table.items():
                help_ = f"{name.upper()} of one rung, by quantile; failed requests are in it as step 4 counts them."
                page.add(f"{name}_seconds", help_, seconds, concurrency=at, quantile=QUANTILES[key])
        for outcome, count in (("complete", rung.complete), ("failed", rung.failed)):
            page.add("requests", "Requests of one rung by outcome.", count, concurrency=at, outcome=outcome)
        values = (
            ("output_tokens_per_second", "Output tokens per second of one rung.", rung.output_tokens_per_s),
            ("kv_cache_usage_peak_ratio", "Highest share of the KV cache in use.", rung.kv_usage_peak),
            ("requests_running_peak", "Most requests running at once.", rung.running_peak),
            ("requests_waiting_peak", "Most requests waiting at once.", rung.waiting_peak),
            ("preemptions", "Preemptions of one rung.", rung.preemptions),
        )
        for name, help_, value in values:
            page.add(name, help_, value, concurrency=at)
        lag = "How late the client read what had arrived."
        page.add("client_lag_seconds", lag, rung.client_lag_p99_s, concurrency=at, quantile=QUANTILES["p99"])


def _nodes(page: _Page, figures: Figures) -> None:
    for host, phases in figures.mapping(1, "phases_s").items():
        for phase, seconds in phases.items() if isinstance(phases, dict) else ():
            help_ = "Seconds to the phase's first line."
            page.add("start_phase_seconds", help_, number(seconds), host=str(host), phase=str(phase))
    used: dict[tuple[str, int], int] = {}
    resident: dict[str, int] = {}
    for sample in figures.memory():
        for gpu, mib in enumerate(sample.gpu_used_mib):
            used[sample.host, gpu] = max(mib, used.get((sample.host, gpu), 0))
        if sample.engine_rss_bytes is not None:
            resident[sample.host] = max(sample.engine_rss_bytes, resident.get(sample.host, 0))
    for (host, gpu), mib in used.items():
        help_ = "Highest sample of memory used on a GPU."
        page.add("gpu_memory_used_peak_bytes", help_, mib * _MIB, host=host, gpu=str(gpu))
    for host, size in resident.items():
        page.add(
            "engine_resident_peak_bytes", "Highest sample of the engine process's resident memory.", size, host=host
        )

    drill = figures.mapping(5, "peer_loss")
    for name, help_ in (
        ("noticed", "Seconds until the loss of a node showed."),
        ("restored", "Seconds to serve again."),
    ):
        page.add(f"peer_loss_{name}_seconds", help_, number(drill.get(f"{name}_s")))


def _escaped(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
