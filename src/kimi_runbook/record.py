"""The record: what was observed when the service was judged. JSON in and out, the same bytes for the same values.

Its form is data/record.schema.json (JSON Schema 2020-12), which ``schema()`` returns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.result import StepResult
from kimi_runbook.campaign.values import Box, Entry
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import parse_json, read_text
from kimi_runbook.verdict import Verdict, judge_steps

SCHEMA_VERSION = 2
"""What this version writes. 1 had neither campaign sheet nor checklist; it is still read."""

FILE_NAME = "record.json"
_READABLE = (1, SCHEMA_VERSION)
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What has to be equal before two records may be compared; None where it was not observed.

    Attributes:
        image_digest: Digest of the image the containers really run.
        engine_version: What ``/version`` said.
        driver: Loaded driver version.
        gpus: Host to GPU model to count.
        interconnect: Kind of the inventory.
        parallelism: Sizes by kind.
        nodes: Nodes of one engine.
        block_size_tokens: Read back from the engine.
        retention: ``prefix_cache_retention_interval`` as the engine writes it.
        prefix_caching: Read back from the engine.
        request_set: Hash over the shapes of all requests, their salts left out.
        client: Version of the client that measured.
    """

    image_digest: str | None
    engine_version: str | None
    driver: str | None
    gpus: Mapping[str, Mapping[str, int]]
    interconnect: str
    parallelism: Mapping[str, int]
    nodes: int | None
    block_size_tokens: int | None
    retention: str | None
    prefix_caching: bool | None
    request_set: str
    client: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of the chain.

    Attributes:
        run_id: The run's id.
        site: Inventory name.
        started: When the run began, UTC.
        ended: When it ended, UTC.
        planned: Planned steps.
        not_planned: Steps left out; the report's headline names them.
        simulated: What was a stand-in.
        model: Served model name.
        endpoint: Base URL that was asked.
        fingerprint: What this record may be compared by.
        expectation: Hits computed before the first request of step 3.
        environment: Allow-listed variables of the launch, by host.
        steps: Results of the planned steps, in order.
        observation: ``pending`` until step 6 has watched the service for a while, then ``complete``; ``not planned``
            where nobody will.
        campaign: The campaign sheet; empty in a record of schema version 1.
        checklist: The checklist's boxes; empty in a record of schema version 1.
        verdict: What it comes to; None only while the record is being made.
        schema_version: The form the record was written in.
    """

    run_id: str
    site: str
    started: datetime
    ended: datetime
    planned: tuple[int, ...]
    not_planned: tuple[int, ...]
    simulated: tuple[str, ...]
    model: str
    endpoint: str
    fingerprint: Fingerprint
    expectation: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Mapping[str, str]]
    steps: tuple[StepResult, ...]
    observation: str = "pending"
    campaign: tuple[Entry, ...] = ()
    checklist: tuple[Box, ...] = ()
    verdict: Verdict | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready values, in the form it was written in."""
        value: dict[str, Any] = {
            "schema_version": self.schema_version,
            "run_id": self.run_id,
            "site": self.site,
            "started": self.started.astimezone(UTC).strftime(_TIME),
            "ended": self.ended.astimezone(UTC).strftime(_TIME),
            "scope": {"planned": list(self.planned), "not_planned": list(self.not_planned)},
            "simulated": list(self.simulated),
            "model": self.model,
            "endpoint": self.endpoint,
            "fingerprint": asdict(self.fingerprint),
            "expectation": [dict(item) for item in self.expectation],
            "environment": {host: dict(env) for host, env in self.environment.items()},
            "steps": [step.to_json() for step in self.steps],
            "observation": self.observation,
            "verdict": self.verdict.to_json() if self.verdict else None,
        }
        if self.schema_version > 1:
            value["campaign"] = [entry.to_json() for entry in self.campaign]
            value["checklist"] = [box.to_json() for box in self.checklist]
        return value

    @classmethod
    def from_json(cls, value: object, source: str = FILE_NAME) -> Record:
        """Return the record in a JSON value; raises RunbookError when it is none, or of a version not known here."""
        if not isinstance(value, Mapping) or value.get("schema_version") not in _READABLE:
            version = value.get("schema_version", "none") if isinstance(value, Mapping) else "none"
            raise _bad(source, f"has schema version {version!r}", f"a record of schema version 1 to {SCHEMA_VERSION}")
        try:
            verdict, version = value["verdict"], int(value["schema_version"])
            newer = version > 1
            return cls(
                schema_version=version,
                run_id=str(value["run_id"]),
                site=str(value["site"]),
                started=_moment(value["started"]),
                ended=_moment(value["ended"]),
                planned=tuple(int(step) for step in value["scope"]["planned"]),
                not_planned=tuple(int(step) for step in value["scope"]["not_planned"]),
                simulated=tuple(str(item) for item in value["simulated"]),
                model=str(value["model"]),
                endpoint=str(value["endpoint"]),
                fingerprint=_fingerprint(value["fingerprint"]),
                expectation=tuple(dict(item) for item in value["expectation"]),
                environment={str(host): dict(env) for host, env in value["environment"].items()},
                steps=tuple(StepResult.from_json(step) for step in value["steps"]),
                observation=str(value["observation"]),
                campaign=tuple(Entry.from_json(entry) for entry in value["campaign"]) if newer else (),
                checklist=tuple(Box.from_json(box) for box in value["checklist"]) if newer else (),
                verdict=Verdict.from_json(verdict) if verdict else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _bad(source, f"does not hold together ({error!r})", "a record this project wrote") from error

    def dumps(self) -> str:
        """Return the record's text: keys sorted, two spaces, one newline at the end.

        What JSON or UTF-8 has no place for does not lose the run: a number that is not finite becomes null, half a
        surrogate pair in an engine's answer is written as its escape.
        """
        text = json.dumps(_finite(self.to_json()), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"

    def write(self, run_dir: Path) -> Path:
        """Write record.json into a run directory and return its path."""
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        path.write_text(self.dumps(), encoding="utf-8")
        return path


def load_record(path: Path) -> Record:
    """Read a record from a file, or from a run directory's record.json; raises RunbookError."""
    file = path / FILE_NAME if path.is_dir() else path
    return Record.from_json(parse_json(read_text(file), str(file)), str(file))


def with_verdict(record: Record) -> Record:
    """Return the record with the verdict its steps lead to."""
    return replace(record, verdict=judge_steps(record.steps))


def schema() -> dict[str, Any]:
    """Return the record's JSON schema (draft 2020-12)."""
    text = resources.files("kimi_runbook").joinpath("data", "record.schema.json").read_text(encoding="utf-8")
    value: dict[str, Any] = json.loads(text)
    return value


def _fingerprint(value: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint in a record; raises TypeError when a text in it is none."""
    found = Fingerprint(**value)
    for name in ("image_digest", "engine_version", "driver", "retention"):
        if not isinstance(getattr(found, name), str | None):
            raise TypeError(f"fingerprint: {name} is no text")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _moment(text: str) -> datetime:
    return datetime.strptime(text, _TIME).replace(tzinfo=UTC)


def _bad(source: str, observed: str, expected: str) -> RunbookError:
    return RunbookError(
        where=source,
        observed=observed,
        expected=expected,
        next_step="Run playbooks/accept.yml again, which writes a new one, or use the version that wrote it.",
    )
