"""A record whose every text is hostile: markup, table and code marks, controls, half a surrogate pair, turned text."""

from __future__ import annotations

from dataclasses import replace

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.campaign.values import Box, Entry, Part
from kimi_runbook.record import Record, with_verdict
from tests.unit import records

EVIL = (
    "<script src=//evil.example>alert(1)</script><img src=http://evil.example/x onerror=alert(1)> | `x` "
    "\x00\x1b[31m\x85 \u202eevil\u2066 \ud800 \ufffe \"double\" 'single' & [link](http://evil.example) \\| "
    "{{ 7*7 }}\r\n# head"
)
LONG = EVIL * 4 + " word" * 60


def hostile() -> Record:
    """Return the accepted run with hostile text wherever a record holds text that came from elsewhere."""
    made = records.accepted()
    return with_verdict(
        replace(
            made,
            run_id=EVIL,
            site=LONG,
            model=LONG,
            endpoint=LONG,
            simulated=(EVIL, LONG),
            observation="pending",
            expectation=tuple({**item, "label": EVIL, "rule": EVIL} for item in made.expectation),
            environment={EVIL: {EVIL: LONG}},
            fingerprint=replace(
                made.fingerprint, engine_version=EVIL, image_digest=EVIL, gpus={EVIL: {EVIL: 1}}, client=EVIL
            ),
            steps=tuple(map(_spoiled, made.steps)),
            campaign=tuple(_entry(entry) for entry in made.campaign),
            checklist=tuple(
                Box(id=box.id, text=box.text + EVIL, state=box.state, evidence=LONG) for box in made.checklist
            ),
        )
    )


def _entry(entry: Entry) -> Entry:
    parts = tuple(Part(name=part.name + EVIL, value=LONG, source=LONG) for part in entry.parts)
    return Entry(id=entry.id, title=entry.title, parts=parts)


def _spoiled(step: StepResult) -> StepResult:
    red = [
        Check(name=f"{n}{EVIL}", state=State.FAIL, observed=LONG, expected=LONG, evidence=LONG, next_step=LONG)
        for n in range(8)
    ]
    figures = {**step.figures, EVIL: {EVIL: LONG}}
    if step.step == 1:
        figures["phases_s"] = {EVIL: {EVIL: 1.0}}
    if step.step == 3:
        figures["requests"] = [{**row, "label": EVIL, "family": EVIL} for row in step.figures["requests"]]
    result = StepResult.of(step.step, EVIL, [*step.checks, *red], figures)
    return replace(result, note=EVIL)
