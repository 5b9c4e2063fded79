"""report.md: the page to sign, for people who read it where they review code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kimi_runbook.figures import Figures
from kimi_runbook.record import Record
from kimi_runbook.report import tables
from kimi_runbook.report.summary import boxes, headline, older, step_name, unmet, verdict_of
from kimi_runbook.report.text import clean, told


def markdown(record: Record) -> str:
    """Return report.md."""
    verdict = verdict_of(record)
    lines = [f"# {_cell(headline(record))}", "", _cell(verdict.why[:1].upper() + verdict.why[1:]) + ".", ""]
    if record.simulated:
        what = _cell(", ".join(record.simulated))
        lines += [f"**Simulated: {what}.** Nothing here says anything about real ones; everything else is real.", ""]
    if older(record):
        lines += [f"**{older(record)}**", ""]
    lines += _scope(record)
    lines += ["## Steps", ""]
    lines += _table(
        ("step", "name", "state", "checks", "what did not pass"),
        [(step.step, step.name, step.state, len(step.checks), unmet(step) or "-") for step in record.steps],
    )
    lines += ["## Reasons", ""]
    lines += [f"- {_cell(reason.text)}" for reason in verdict.reasons] or ["Nothing to explain: no check failed."]
    lines += ["", f"Next: `{_cell(verdict.next_command)}`", ""]
    lines += _campaign(record)
    lines += _checklist(record)
    lines += _expectation(record)
    lines += _load(record)
    lines += ["## Fingerprint", ""]
    lines += _table(("what", "value"), [(n, told(v)) for n, v in record.to_json()["fingerprint"].items()])
    lines += ["## Figures", ""]
    for step in record.steps:
        if step.figures:
            lines += [f"### Step {step.step}, {_cell(step.name)}", ""]
            lines += _table(("figure", "value"), [(name, _figure(value)) for name, value in step.figures.items()])
    lines += ["## Checks", ""]
    lines += _table(
        ("step", "check", "state", "observed", "expected"),
        [(step.step, c.name, c.state, c.observed, c.expected) for step in record.steps for c in step.checks],
    )
    lines += ["## Signatures", ""]
    lines += [
        "| role | name | date | signature |",
        "|---|---|---|---|",
        "| platform | | | |",
        "| service owner | | | |",
    ]
    return "\n".join([*lines, ""])


def _scope(record: Record) -> list[str]:
    planned = ", ".join(map(step_name, record.planned))
    left_out = ", ".join(map(step_name, record.not_planned)) or "nothing"
    rows = [
        ("run", record.run_id),
        ("site", record.site),
        ("model", f"{record.model} at {record.endpoint}"),
        ("from, to", f"{record.started:%Y-%m-%d %H:%M:%S} UTC, {record.ended:%H:%M:%S} UTC"),
        ("planned", planned),
        ("not planned", left_out),
        ("observation", record.observation),
    ]
    return _table(("scope", ""), rows)


def _campaign(record: Record) -> list[str]:
    if not record.campaign:
        return []
    lines = ["## Campaign sheet", ""]
    rows = [
        (entry.title if first else "", part.name, part.shown, part.source)
        for entry in record.campaign
        for first, part in zip([True] + [False] * len(entry.parts), entry.parts, strict=False)
    ]
    return [*lines, *_table(("field", "what", "observed", "from"), rows)]


def _checklist(record: Record) -> list[str]:
    """Boxes as a task list: only a ticked one is checked, so a reader who skims cannot take open for done."""
    if not record.checklist:
        return []
    lines = ["## Checklist of an agent service", "", f"{boxes(record.checklist)}.", ""]
    for box in record.checklist:
        mark = "x" if box.state == "ticked" else " "
        lines.append(f"- [{mark}] {_cell(box.text)} **{box.state}**: {_cell(box.evidence)}")
    return [*lines, ""]


def _expectation(record: Record) -> list[str]:
    """The hits as they were computed beside the hits as they were seen."""
    if not record.expectation:
        return []
    seen: dict[str, Any] = {
        str(request.get("label")): request
        for step in record.steps
        for request in _rows(step.figures.get("requests"))
        if isinstance(request, dict)
    }
    rows = []
    for item in record.expectation:
        request = seen.get(str(item.get("label")), {})
        got = (request.get(key) for key in ("counted_hit_tokens", "cached_tokens", "first_token_s"))
        known = (item.get("label"), item.get("prompt_tokens"), item.get("hit_tokens"))
        rows.append(tuple("-" if value is None else value for value in (*known, *got)))
    head = ("request", "prompt tokens", "expected hits", "counted", "cached_tokens", "first token (s)")
    return ["## Prefix cache, computed before the first request", "", *_table(head, rows)]


def _rows(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _load(record: Record) -> list[str]:
    rungs = Figures.of(record.steps).ladder()
    if not rungs:
        return []
    ladder = tables.ladder(rungs)
    return ["## Load", "", f"{ladder.caption}.", "", *_table(ladder.head, list(ladder.rows))]


def _figure(value: Any) -> str:
    """Return a figure for its cell; rows of a table would make a cell of thousands of characters."""
    if isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        return f"{len(value)} rows, see record.json"
    return told(value)


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(_cell(str(value)) for value in row)} |" for row in rows]
    return [*lines, ""]


def _cell(text: str) -> str:
    """Return text that stays text: it cannot break out of a cell or a list, and is no code, tag, link or image."""
    for mark, instead in (("\\", "\\\\"), ("|", "\\|"), ("`", "'"), ("<", "&lt;"), ("[", "\\[")):
        text = text.replace(mark, instead)
    return " ".join(clean(text).split())
