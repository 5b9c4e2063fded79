"""Which rule says what a healthy prefix cache supplies: data/hit_rules.yml, by kind of engine and version."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from kimi_runbook.acceptance.version import parse_version, within
from kimi_runbook.reading import Fields, data_file


class UnknownDraftError(Exception):
    """Nothing is known of what a method of speculation does to hits in this version; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: Stable name, for the record.
        recurrent: Whether it is for engines that keep recurrent state along with attention.
        cache_modes: ``mamba_cache_mode`` it holds for.
        since, until: vLLM versions it holds for, both included; empty for open.
        draft_since: The first version it holds for with a draft model that drops a unit; empty for ``since``.
        says: The rule in words.
        source: How it is known.
    """

    name: str
    recurrent: bool
    cache_modes: tuple[str, ...]
    since: str
    until: str
    draft_since: str
    says: str
    source: str

    def since_for(self, *, draft: bool) -> str:
        """Return the first version it holds for, with or without a draft model that drops a unit; empty for open."""
        return self.draft_since or self.since if draft else self.since

    def holds_for(self, version: str, *, draft: bool) -> bool:
        """Return whether the rule is known for a version; one that cannot be placed is in no limited range."""
        return _within(version, self.since_for(draft=draft), self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Limits of step 3's prompts, in tokens: the shortest shared part, and the longest answer."""

    least_shared: int
    answer_tokens: int


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules of data/hit_rules.yml."""
    return tuple(
        Rule(
            name=item.text("name"),
            recurrent=item.flag("recurrent", default=False),
            cache_modes=item.texts("cache_modes"),
            since=item.optional_text("since") or "",
            until=item.optional_text("until") or "",
            draft_since=item.optional_text("draft_since") or "",
            says=item.text("says"),
            source=item.text("source"),
        )
        for item in _data().each("rules")
    )


@cache
def lengths() -> Lengths:
    """Return the limits of step 3's prompts."""
    limits = _data().fields("prompts")
    return Lengths(least_shared=limits.integer("least_shared"), answer_tokens=limits.integer("answer_tokens"))


@cache
def slower_than() -> float:
    """Return the ratio of warm to cold first tokens above which a warm prompt contradicts its own hit."""
    return float(str(_data().fields("first_token").raw("slower")))


@cache
def checkpoint_alignment() -> int:
    """Return the tokens a checkpoint of a recurrent state is aligned to within a prefill step."""
    return _data().integer("checkpoint_alignment")


def drops_a_unit(method: str, version: str) -> bool:
    """Return whether a method of speculation makes the last matched unit be recomputed.

    Raises:
        UnknownDraftError: When data/hit_rules.yml does not know the method in this version.
    """
    for item in _data().each("drafts"):
        named = any(fnmatchcase(method.lower(), pattern) for pattern in item.texts("methods"))
        if named and _within(version, item.optional_text("since") or "", item.optional_text("until") or ""):
            return item.flag("drops", default=False)
    raise UnknownDraftError(
        f"speculation by {method!r} in vLLM {version or 'of unknown version'}: data/hit_rules.yml does not say whether "
        "a hit loses its last unit"
    )


def retention_default(version: str) -> str | None:
    """Return what the retention interval is when it is not set, or None where that is not known."""
    default = _data().fields("retention_default")
    return default.text("value") if _within(version, default.text("since"), "") else None


def _within(version: str, since: str, until: str) -> bool:
    placed = parse_version(version)
    if placed is None:
        return not since and not until
    return within(placed, since, until)


def _data() -> Fields:
    return data_file("hit_rules.yml")
