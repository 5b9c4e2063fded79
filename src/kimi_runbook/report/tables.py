"""The tables of report.html as values: what stands in them, not how they look. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kimi_runbook.acceptance.plan import STEP_NAMES
from kimi_runbook.acceptance.result import State, StepResult
from kimi_runbook.campaign.values import Entry
from kimi_runbook.figures import QUANTILES, Figures, Rung, Sample
from kimi_runbook.record import Record
from kimi_runbook.report.plots import agrees, cold_and_warm, thinned
from kimi_runbook.report.summary import unmet
from kimi_runbook.report.text import clipped, rounded, told

_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")
_SHORT_DIGEST = "\\1\N{HORIZONTAL ELLIPSIS}"
_LINE_OF_A_STEP = 72  # what did not pass takes one line of paper
_MOST_SAMPLES = 31
_LINE_LENGTH = 96  # characters of a value on one line of paper, Letter or A4
_VALUE_LENGTHS = (160, 110, 80, 60, 40, 28)  # tried in this order
_TABLED = {3: ("requests",), 4: ("ladder",), 6: ("samples",)}  # figures that have a table of their own


class Planned(Enum):
    """The state of a step that is no part of the run."""

    NO = "not planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table.

    Attributes:
        caption: What it is a table of.
        head: Column names.
        rows: Cells; a State or a BoxState is shown as one.
        numeric: Columns of numbers, set flush right.
        quiet: Whether the caption is for readers of structure only, because a heading above says the same.
        stack: Whether a narrow screen shows each row as a block, since its cells hold sentences.
    """

    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    numeric: frozenset[int] = frozenset()
    quiet: bool = False
    stack: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One line of the sheet as page one shows it: short forms of digests, one word where nothing was observed."""

    title: str
    parts: Sequence[tuple[str, str, bool]]
    """(name, value, observed); the name is empty where there is only one."""

    @property
    def lines(self) -> int:
        """Lines it takes on paper, at most."""
        return -(-sum(len(name) + len(value) + 5 for name, value, _ in self.parts) // _LINE_LENGTH)


def fields(campaign: Sequence[Entry], room: int) -> tuple[Field, ...]:
    """Return the sheet's lines for page one: as much of each value as fits into so many lines of paper."""
    found: tuple[Field, ...] = ()
    for most in _VALUE_LENGTHS:
        found = tuple(_field(entry, most) for entry in campaign)
        if sum(field.lines for field in found) <= room:
            return found
    return tuple(_one_line(field) for field in found)


def _one_line(field: Field) -> Field:
    kept: list[tuple[str, str, bool]] = []
    for part in field.parts:
        if Field(title="", parts=[*kept, part]).lines > 1:
            return Field(title=field.title, parts=[*kept, ("", "\N{HORIZONTAL ELLIPSIS}", True)])
        kept.append(part)
    return field


def _field(entry: Entry, most: int) -> Field:
    parts = [
        (part.name, clipped(_DIGEST.sub(_SHORT_DIGEST, part.shown), most), part.value is not None)
        for part in entry.parts
    ]
    if not entry.observed:
        parts = [("", parts[0][1], False)]
    elif len(parts) == 1:
        parts = [("", parts[0][1], True)]
    return Field(title=entry.title, parts=parts)


def sources(campaign: Sequence[Entry]) -> Table:
    """Return every value of the sheet in full, with where it comes from."""
    rows = [(entry.title, part.name, part.shown, part.source) for entry in campaign for part in entry.parts]
    return Table(
        caption="Every value of the sheet and where it comes from",
        head=("field", "what", "observed", "from"),
        rows=rows,
        stack=True,
    )


def steps(record: Record) -> Table:
    """Return all steps of the chain, those left out of the plan included."""
    results = {step.step: step for step in record.steps}
    rows: list[tuple[Any, ...]] = []
    for number, name in STEP_NAMES.items():
        step = results.get(number)
        if step is None:
            rows.append((f"{number} {name}", Planned.NO, "", "", ""))
            continue
        passed = sum(check.state is State.PASS for check in step.checks)
        checks = f"{passed} of {len(step.checks)}" if step.checks else "none"
        seconds = rounded(Figures.of([step]).number(number, "wall_s"), 1)
        rows.append((f"{number} {name}", step.state, checks, seconds, clipped(unmet(step), _LINE_OF_A_STEP)))
    return Table(
        caption="Steps of the chain",
        head=("step", "state", "passed", "seconds", "what did not pass, or why"),
        rows=rows,
        numeric=frozenset({2, 3}),
        quiet=True,
        stack=True,
    )


def tokens(record: Record) -> Table:
    """Return step 3's requests with all three witnesses."""
    rows = [
        (
            request.label,
            _count(request.prompt_tokens),
            _count(request.expected_hit_tokens),
            _count(request.counted_hit_tokens),
            _count(request.cached_tokens),
            rounded(request.first_token_s),
            "equal" if agrees(request) else "differ",
        )
        for request in Figures.of(record.steps).prefix_requests()
    ]
    return Table(
        caption="Requests of step 3 in the order they were sent, in tokens",
        head=("request", "prompt", "expected", "counted", "cached_tokens", "TTFT, s", "witnesses"),
        rows=rows,
        numeric=frozenset({1, 2, 3, 4, 5}),
    )


def first_token(record: Record) -> Table:
    """Return the first-token times of the requests whose families hit."""
    cold, warm = cold_and_warm(Figures.of(record.steps).prefix_requests())
    rows = [
        (request.label, name, rounded(request.first_token_s))
        for name, group in (("cold", cold), ("warm", warm))
        for request in group
    ]
    return Table(
        caption="Time to first token without hits (cold) and with hits (warm)",
        head=("request", "cache", "TTFT, s"),
        rows=rows,
        numeric=frozenset({2}),
    )


def ladder(rungs: Sequence[Rung]) -> Table:
    """Return step 4's rungs."""
    quantiles = tuple(QUANTILES)
    rows = [
        (
            str(rung.concurrency),
            f"{_count(rung.complete)}/{_count(rung.requests)}",
            rounded(rung.output_tokens_per_s, 1),
            *(rounded(rung.ttft_s.get(name)) for name in quantiles),
            *(rounded(rung.tpot_s.get(name), 4) for name in ("p50", "p99")),
            "-" if rung.kv_usage_peak is None else f"{rung.kv_usage_peak:.1%}",
            rounded(rung.preemptions),
            "-" if rung.client_lag_p99_s is None else f"{rung.client_lag_p99_s * 1000:.2f}",
        )
        for rung in rungs
    ]
    return Table(
        caption="Rungs of step 4's ladder; times in seconds. Lag: how late the client read what had arrived",
        head=(
            *("at once", "complete", "tokens/s"),
            *(f"TTFT {name}" for name in quantiles),
            *("TPOT p50", "TPOT p99", "KV peak", "preempted", "lag p99, ms"),
        ),
        rows=rows,
        numeric=frozenset(range(11)),
    )


def observation(samples: Sequence[Sample]) -> Table:
    """Return step 6's samples, thinned to a readable number."""
    shown, each = thinned(samples, _MOST_SAMPLES)
    rows = [
        (
            rounded(sample.at_s, 1),
            "-" if sample.kv_usage is None else f"{sample.kv_usage:.1%}",
            rounded(sample.running, 1),
            rounded(sample.waiting, 1),
            rounded(sample.ttft_s),
            "-"
            if not sample.query_tokens or sample.hit_tokens is None
            else f"{sample.hit_tokens / sample.query_tokens:.1%}",
            rounded(sample.errors),
        )
        for sample in shown
    ]
    of = f"; each row holds the highest of {each}" if each > 1 else ""
    return Table(
        caption=f"{len(samples)} samples of step 6{of}",
        head=("at, s", "KV cache", "running", "waiting", "TTFT, s", "hit rate", "errors"),
        rows=rows,
        numeric=frozenset(range(7)),
    )


def checks(step: StepResult) -> Table:
    """Return every check of a step."""
    rows = [
        (check.name, check.state, check.observed, check.expected, check.evidence, check.next_step)
        for check in step.checks
    ]
    return Table(
        caption=f"Checks of step {step.step}, {step.name}",
        head=("check", "state", "observed", "expected", "evidence", "next step"),
        rows=rows,
        quiet=True,
        stack=True,
    )


def figures(step: StepResult) -> Table:
    """Return every figure of a step but those that have a table of their own."""
    own = _TABLED.get(step.step, ())
    rows = [(name, told(value)) for name, value in step.figures.items() if name not in own or not value]
    return Table(
        caption=f"Figures of step {step.step}, {step.name}", head=("figure", "value"), rows=rows, quiet=True, stack=True
    )


def fingerprint(record: Record) -> Table:
    """Return what has to be equal before two records may be compared."""
    values = record.to_json()["fingerprint"]
    rows = [(name.replace("_", " "), told(value)) for name, value in values.items()]
    return Table(caption="Fingerprint", head=("what", "value"), rows=rows, quiet=True, stack=True)


def environment(variables: Mapping[str, Mapping[str, str]]) -> Table:
    """Return the launch's variables, by node."""
    rows = [(host, name, value) for host, env in variables.items() for name, value in env.items()]
    return Table(
        caption="Variables of the launch", head=("node", "variable", "value"), rows=rows, quiet=True, stack=True
    )


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
