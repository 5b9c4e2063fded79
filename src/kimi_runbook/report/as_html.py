"""report.html: one file to read, print and sign. No network, no script; light and dark. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kimi_runbook.acceptance.result import State
from kimi_runbook.campaign.values import BoxState
from kimi_runbook.figures import Figures
from kimi_runbook.record import Record
from kimi_runbook.report import palette, plots, tables
from kimi_runbook.report.summary import boxes, headline, older, step_name, verdict_of, why_no
from kimi_runbook.report.tables import Planned, Table
from kimi_runbook.report.text import clean, clipped
from kimi_runbook.verdict import Verdict, VerdictName

# Page one has to hold sheet and signatures, on Letter as on A4: what is longer is cut there and stands in full in the
# appendix. The sheet gets the lines that reasons do not need.
_MOST_REASONS = 3
_MOST_REASON_CHARACTERS = 210
_MOST_WHY_CHARACTERS = 200
_MOST_FACT_CHARACTERS = 60
_MOST_NAME_CHARACTERS = 70
_LINES_OF_REASONS_AND_SHEET = 26
_REASON_LINE_LENGTH = 105
_ROLES = ("platform", "service owner")

_DASH = "\N{EN DASH}"

# A mark and a tone for each state: the mark and the word tell it, the tone only helps.
_LOOKS: dict[Any, tuple[str, str]] = {
    State.PASS: ("✓", "pass"),
    State.WARN: ("!", "warn"),
    State.FAIL: ("✕", "fail"),
    State.NOT_RUN: (_DASH, "unknown"),
    State.INCONCLUSIVE: ("?", "unknown"),
    BoxState.TICKED: ("✓", "pass"),
    BoxState.OPEN: ("○", "fail"),
    BoxState.NOT_MEASURED: (_DASH, "unknown"),
    Planned.NO: (_DASH, "muted"),
    VerdictName.ACCEPT: ("✓", "pass"),
    VerdictName.INCONCLUSIVE: ("?", "unknown"),
}
_NO = ("✕", "fail")  # every other verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """A picture with its table, or a sentence in their place."""

    id: str
    title: str
    picture: Markup | None
    table: Table
    instead: str
    about: str = ""


def html(record: Record) -> str:
    """Return report.html."""
    verdict = verdict_of(record)
    short = [clipped(reason.text, _MOST_REASON_CHARACTERS) for reason in verdict.reasons[:_MOST_REASONS]]
    cut = len(verdict.reasons) > _MOST_REASONS or any(
        " ".join(clean(reason.text).split()) != text for reason, text in zip(verdict.reasons, short, strict=False)
    )
    lines = sum(-(-len(text) // _REASON_LINE_LENGTH) for text in short)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            verdict=verdict,
            headline=headline(record),
            older=older(record),
            why=clipped(verdict.why[:1].upper() + verdict.why[1:], _MOST_WHY_CHARACTERS),
            model=clipped(record.model, _MOST_NAME_CHARACTERS),
            simulated=clipped(", ".join(record.simulated), _MOST_FACT_CHARACTERS),
            facts=_facts(record, verdict),
            reasons=short,
            more_reasons=len(verdict.reasons) - len(short),
            reasons_cut=cut,
            fields=tables.fields(record.campaign, _LINES_OF_REASONS_AND_SHEET - lines),
            boxes=boxes(record.checklist),
            steps=tables.steps(record),
            pace=_pace(record),
            roles=_ROLES,
            plots=_plots(record),
            sources=tables.sources(record.campaign),
            check_tables=[(step, tables.checks(step)) for step in record.steps],
            figure_tables=[(step, tables.figures(step)) for step in record.steps if step.figures],
            environment=tables.environment(record.environment),
            fingerprint=tables.fingerprint(record),
            light=palette.LIGHT,
            dark=palette.DARK,
        )
    )


def _facts(record: Record, verdict: Verdict) -> list[tuple[str, str]]:
    """What a reader has to know beside the verdict, in the order of weight."""
    found = [
        ("Advice", ", ".join(verdict.advice)),
        ("Not planned", ", ".join(map(step_name, record.not_planned))),
        ("Site", record.site),
        ("Endpoint", record.endpoint),
        ("Run", record.run_id),
        ("Time", f"{record.started:%Y-%m-%d %H:%M:%S} to {record.ended:%H:%M:%S} UTC"),
        ("Observation", record.observation),
    ]
    return [(name, clipped(value, _MOST_FACT_CHARACTERS)) for name, value in found if value]


def _pace(record: Record) -> str:
    """How much of steps 2 to 4 was the engine's time and how much the chain's own; empty when it was not timed."""
    figures = Figures.of(record.steps)
    timed = [(figures.number(step, "wall_s"), figures.number(step, "in_flight_s")) for step in (2, 3, 4)]
    pairs = [(wall, flight) for wall, flight in timed if wall is not None and flight is not None]
    wall, flight = sum(wall for wall, _ in pairs), sum(flight for _, flight in pairs)
    if not flight:
        return ""
    return f"Steps 2 to 4 took {wall:.1f} s; in {flight:.1f} s of it at least one request was in flight."


def _plots(record: Record) -> list[_Plot]:
    figures = Figures.of(record.steps)
    requests, rungs, samples = figures.prefix_requests(), figures.ladder(), figures.samples()
    at = {name: figures.integer(4, name) for name in ("nominal", "peak", "knee")}
    return [
        _Plot(
            id="prefix-cache",
            title="Prefix cache",
            picture=plots.tokens_plot(requests),
            table=tables.tokens(record),
            instead=why_no(record, 3, "requests with a shared prefix"),
            about="Expected tokens were computed and written down before the first request was sent.",
        ),
        _Plot(
            id="first-token",
            title="First token",
            picture=plots.first_token_plot(requests, figures.first_token()),
            table=tables.first_token(record),
            instead=why_no(record, 3, "first-token times"),
            about=plots.medians(figures.first_token()) if figures.mapping(3, "first_token_ratio") else "",
        ),
        _Plot(
            id="load",
            title="Load",
            picture=plots.ladder_plot(rungs, at["nominal"], at["peak"], at["knee"]),
            table=tables.ladder(rungs),
            instead=why_no(record, 4, "ladder"),
        ),
        _Plot(
            id="over-time",
            title="Over time",
            picture=plots.observation_plot(samples),
            table=tables.observation(samples),
            instead=why_no(record, 6, "samples over time"),
        ),
    ]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kimi_runbook.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_fit,
    )
    environment.tests["state"] = lambda value: isinstance(value, State | BoxState | Planned)
    environment.filters["mark"] = lambda value: _look(value)[0]
    environment.filters["tone"] = lambda value: _look(value)[1]
    environment.filters["word"] = lambda value: str(value.value)
    return environment


def _look(value: Any) -> tuple[str, str]:
    return _LOOKS.get(value, _NO)


def _fit(value: Any) -> Any:
    """Clean what a template prints; markup was cleaned when it was made."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
