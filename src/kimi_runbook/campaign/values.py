"""The campaign sheet's entries and the checklist's boxes, as a record keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NOT_OBSERVED = "not observed"
"""What stands on paper where a value is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One value of an entry.

    Attributes:
        name: What it is, e.g. ``driver``.
        value: What was observed, with its unit; None when nobody observed it.
        source: Where the value comes from, or why there is none.
    """

    name: str
    value: str | None
    source: str

    @property
    def shown(self) -> str:
        """The value, or the words for none."""
        return NOT_OBSERVED if self.value is None else self.value

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON-ready values."""
        return {"name": self.name, "value": self.value, "source": self.source}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Part:
        """Return the part that ``to_json`` wrote; raises KeyError when it did not."""
        observed = value["value"]
        return cls(
            name=str(value["name"]),
            value=None if observed is None else str(observed),
            source=str(value["source"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the campaign sheet (data/campaign_sheet.yml): id, title, and what belongs to it."""

    id: str
    title: str
    parts: tuple[Part, ...]

    @property
    def observed(self) -> bool:
        """Whether any part of it was observed."""
        return any(part.value is not None for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON-ready values."""
        return {"id": self.id, "title": self.title, "parts": [part.to_json() for part in self.parts]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Entry:
        """Return the entry that ``to_json`` wrote; raises KeyError when it did not."""
        parts = tuple(Part.from_json(part) for part in value["parts"])
        return cls(id=str(value["id"]), title=str(value["title"]), parts=parts)


class BoxState(StrEnum):
    """How a box of the checklist stands."""

    TICKED = "ticked"  # measured in this run, and it holds
    OPEN = "open"  # measured in this run, and it does not hold or could not be told
    NOT_MEASURED = "not measured"  # this run did not measure it; the evidence says what would


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One box of the checklist (data/campaign_sheet.yml) with the measurement it stands on."""

    id: str
    text: str
    state: BoxState
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """Return the box as JSON-ready values."""
        return {"id": self.id, "text": self.text, "state": str(self.state), "evidence": self.evidence}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Box:
        """Return the box that ``to_json`` wrote; raises KeyError or ValueError when it did not."""
        return cls(
            id=str(value["id"]),
            text=str(value["text"]),
            state=BoxState(value["state"]),
            evidence=str(value["evidence"]),
        )
