"""Which metrics an engine offers, and whether what it lacks is normal for its version. Pure.

After an upgrade a renamed metric does not turn a dashboard red, it turns it empty (vllm#27133). So a family that is not
there is never read as "nothing happened": it is absent as expected, missing, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kimi_runbook.acceptance.metrics import Exposition, Reading
from kimi_runbook.acceptance.metrics_data import Family, families, oldest_read
from kimi_runbook.acceptance.version import parse_version, within


class Presence(StrEnum):
    """Whether a family is there, and if not, what that means."""

    PRESENT = "present"
    EXPECTED = "absent as expected"
    MISSING = "missing"
    UNKNOWN = "unknown"


class FrontEnd(StrEnum):
    """Which of vLLM's two API servers answers."""

    PYTHON = "python"
    RUST = "rust"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One family.

    Attributes:
        family: Its name as the chain calls it.
        presence: Whether it is there.
        why: What that rests on, for a message.
    """

    family: str
    presence: Presence
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine's metrics offer the chain.

    Attributes:
        version: The engine's version, as it says it.
        families: By family name, every family of data/metrics.yml.
    """

    version: str
    families: Mapping[str, Capability]

    def lacking(self, *wanted: str) -> tuple[Capability, ...]:
        """Return the wanted families that are missing or of which nothing is known.

        Raises:
            KeyError: When data/metrics.yml does not have one of them.
        """
        found = (self.families[family] for family in wanted)
        return tuple(one for one in found if one.presence in (Presence.MISSING, Presence.UNKNOWN))


def front_end(exposition: Exposition) -> FrontEnd:
    """Return who wrote an exposition: unasked, only the Rust front end answers in OpenMetrics (vLLM 0.33)."""
    return FrontEnd.RUST if exposition.openmetrics else FrontEnd.PYTHON


def probe(reading: Reading, version: str) -> Capabilities:
    """Return, for every family of data/metrics.yml, whether it is there and what its absence means.

    Args:
        reading: Every endpoint, read once.
        version: What ``GET /version`` says; empty when nobody asked.
    """
    found = (_capability(family, reading, version) for family in families())
    return Capabilities(version=version, families={one.family: one for one in found})


def _capability(family: Family, reading: Reading, version: str) -> Capability:
    lacking = [exposition for exposition in reading.expositions if family.name not in exposition.types]
    if not lacking:
        renamed = {one.renamed[family.name] for one in reading.expositions if family.name in one.renamed}
        why = f"written as {', '.join(sorted(renamed))}" if renamed else "declared on every metrics URL"
        return Capability(family=family.name, presence=Presence.PRESENT, why=why)
    presence, why = _absence(family, lacking, version)
    if len(lacking) < len(reading.expositions):
        why = f"absent on {', '.join(one.url for one in lacking)} only; {why}"
    return Capability(family=family.name, presence=presence, why=why)


def _absence(family: Family, lacking: list[Exposition], version: str) -> tuple[Presence, str]:
    """Return what it means that some endpoints do not declare a family."""
    servers = {front_end(exposition) for exposition in lacking}
    if not servers & {FrontEnd(name) for name in family.front_ends}:
        return Presence.EXPECTED, f"vLLM's {' and '.join(sorted(servers))} front end does not publish it"
    if family.absent_when:
        return Presence.EXPECTED, f"normal with: {family.absent_when}"
    placed = parse_version(version)
    if placed is None:
        return Presence.UNKNOWN, f"the engine calls its version {version!r}, so nothing says whether it should have it"
    if placed < oldest_read():
        return Presence.UNKNOWN, f"vLLM {version} is older than the versions data/metrics.yml was read from"
    if not any(within(placed, name.since, name.until) for name in family.names):
        return Presence.EXPECTED, f"vLLM {version} does not write it"
    return Presence.MISSING, f"vLLM {version} should write it (data/metrics.yml)"
