"""What a healthy prefix cache must supply, computed before a request is sent. Pure: tokens and geometry in, tokens out.

Nothing is hashed here: what two prompts have in common is their common prefix, and a prompt's history is the lengths at
which something of it was kept. The rules and how they are known are in data/hit_rules.yml.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.geometry import Geometry
from kimi_runbook.acceptance.hit_rules import Rule, checkpoint_alignment, rules
from kimi_runbook.acceptance.prompts import Prompt, common_prefix


class NoRuleError(Exception):
    """This engine's hits follow rules that are not known here; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One request's expectation.

    Attributes:
        label: Which request.
        family, sighting: Its series and its place in it.
        prompt_tokens: Length of the prompt.
        shared_tokens: Longest prefix in common with an earlier prompt; 0 at a first sighting.
        hit_tokens: Tokens the cache must supply.
        rule: How ``hit_tokens`` follows from the rest.
    """

    label: str
    family: str
    sighting: int
    prompt_tokens: int
    shared_tokens: int
    hit_tokens: int
    rule: str

    def to_json(self) -> dict[str, Any]:
        """Return the expectation as JSON-ready values."""
        return {
            "label": self.label,
            "family": self.family,
            "sighting": self.sighting,
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "hit_tokens": self.hit_tokens,
            "rule": self.rule,
        }


def rule_for(geometry: Geometry) -> Rule:
    """Return the rule for an engine.

    Raises:
        NoRuleError: When none was read for its cache mode or version, or its layers are of more kinds than rules know.
    """
    if geometry.sliding_window:
        raise NoRuleError("some layers see a sliding window only: what they keep is not modelled")
    if geometry.recurrent and geometry.attention_block != geometry.block_size:
        raise NoRuleError(
            f"blocks of attention are {geometry.attention_block} tokens and of recurrent state {geometry.block_size}: "
            "decode context parallelism is not modelled"
        )
    for rule in rules():
        if rule.recurrent == geometry.recurrent and geometry.cache_mode in rule.cache_modes:
            if rule.holds_for(geometry.version, draft=geometry.draft_drop):
                return rule
            since, draft = (
                rule.since_for(draft=geometry.draft_drop),
                " with a draft model" if geometry.draft_drop else "",
            )
            version = geometry.version or "a version that is not told"
            raise NoRuleError(f"rule {rule.name}{draft} is known for vLLM {since} and later, not for {version}")
    raise NoRuleError(f"mamba_cache_mode={geometry.cache_mode}: hits depend on where recurrent state was kept")


def expect(geometry: Geometry, prompts: Sequence[Prompt]) -> tuple[Expected, ...]:
    """Return what the cache must supply for each prompt, sent one after the other and none of them sent before.

    Args:
        geometry: The engine's geometry.
        prompts: In the order they will be sent.

    Raises:
        NoRuleError: When no rule is known for this engine, or something the engine does not tell would change a hit.
    """
    rule_for(geometry)
    shared = _shared(prompts)
    if geometry.prefix_caching is False:
        return tuple(_expected(prompt, 0, 0, "prefix caching is off") for prompt in prompts)
    if not geometry.recurrent:
        return tuple(
            _whole_blocks(geometry, prompt, max(row, default=0)) for prompt, row in zip(prompts, shared, strict=True)
        )
    found = [_KeptStates(geometry, unknown).run(prompts, shared) for unknown in _unknowns(geometry)]
    for outcomes in zip(*found, strict=True):
        if len({outcome.hit_tokens for outcome in outcomes}) > 1:
            hits = " or ".join(sorted({str(outcome.hit_tokens) for outcome in outcomes}))
            raise NoRuleError(f"{outcomes[0].label} would hit {hits} tokens: {_what_is_unknown(geometry)}")
    return found[0]


def _shared(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return, for each prompt, what it has in common with each one before it."""
    return [
        [common_prefix(prompt.tokens, earlier.tokens) for earlier in prompts[:position]]
        for position, prompt in enumerate(prompts)
    ]


def _expected(prompt: Prompt, shared: int, hits: int, rule: str) -> Expected:
    return Expected(
        label=prompt.label,
        family=prompt.family,
        sighting=prompt.sighting,
        prompt_tokens=len(prompt.tokens),
        shared_tokens=shared,
        hit_tokens=hits,
        rule=rule,
    )


def _whole_blocks(geometry: Geometry, prompt: Prompt, shared: int) -> Expected:
    """Return the expectation where all layers are attention."""
    length, unit = len(prompt.tokens), geometry.match_unit
    dropped = f" - {unit} for the draft" if geometry.draft_drop else ""
    usable, text = (length - 1, f"({length}-1)") if shared == length else (shared, str(shared))
    hits = max(usable // unit * unit - unit * geometry.draft_drop, 0)
    if shared < unit:
        return _expected(prompt, shared, 0, _too_little(shared, unit))
    kind = "sent again" if shared == length else "shared part"
    return _expected(prompt, shared, hits, f"{kind}: floor({text}/{unit})*{unit}{dropped}")


def _too_little(shared: int, unit: int) -> str:
    return f"first sighting: {shared} shared tokens, and the least hit is {unit}" if shared else "first sighting"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unknown:
    """What an engine does not tell, as one guess at it."""

    batch_tokens: int
    writes_from_inside: bool


def _unknowns(geometry: Geometry) -> list[_Unknown]:
    """Return every guess at what the engine does not tell and what may matter; hits have to be the same for all.

    Where states are kept at an interval, it matters where prefill steps end. Where the match unit is finer than the
    block, it matters whether the prefill kernel writes the last state from inside a step, as FlashKDA does (vLLM 0.32).
    """
    batches = [geometry.batch_tokens] if geometry.batch_tokens else [geometry.block_size, 1 << 30]
    if geometry.retention == "0":
        batches = batches[:1]
    inside = [False, True] if geometry.match_unit < geometry.block_size else [False]
    return [_Unknown(batch_tokens=b, writes_from_inside=w) for b, w in itertools.product(batches, inside)]


def _what_is_unknown(geometry: Geometry) -> str:
    if geometry.retention != "0" and not geometry.batch_tokens:
        return "with retention other than 0 it matters how many tokens one prefill step takes, and nothing says it"
    return "it matters whether the prefill kernel writes its last state from inside a step, and nothing says it"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What one prompt left behind: how far its attention goes in finer units, and where its states stand."""

    attention_end: int
    states: frozenset[int]


class _KeptStates:
    """The expectation where recurrent state is kept along with attention (``mamba_cache_mode`` align)."""

    def __init__(self, geometry: Geometry, unknown: _Unknown) -> None:
        self.block, self.unit = geometry.block_size, geometry.match_unit
        self.drop = geometry.match_unit if geometry.draft_drop else 0
        self.interval = {"dense": self.block, "0": 0}.get(geometry.retention) or int(geometry.retention)
        self.unknown = unknown

    def run(self, prompts: Sequence[Prompt], shared: Sequence[Sequence[int]]) -> tuple[Expected, ...]:
        """Return what each prompt hits, given what it has in common with each one before it."""
        history: list[_Kept] = []
        expected = []
        for prompt, row in zip(prompts, shared, strict=True):
            length = len(prompt.tokens)
            matched = self._matched(length, row, history)
            hit = max((place for place in self._resumable(row, history) if place <= matched), default=0)
            junction = matched // self.block * self.block
            junction = junction if junction > hit else 0
            history.append(self._kept(length, hit, junction))
            reason = self._reason(max(row, default=0), matched, hit, junction)
            expected.append(_expected(prompt, max(row, default=0), hit, reason))
        return tuple(expected)

    def _matched(self, length: int, row: Sequence[int], history: Sequence[_Kept]) -> int:
        """Return how far attention alone would match."""
        limit = length if self.drop else length - 1
        whole = min(max(row, default=0), limit) // self.block * self.block
        finer = (
            kept.attention_end
            for common, kept in zip(row, history, strict=True)
            if whole < kept.attention_end < whole + self.block and kept.attention_end <= min(common, limit)
        )
        return max(max(finer, default=whole) - self.drop, 0)

    @staticmethod
    def _resumable(row: Sequence[int], history: Sequence[_Kept]) -> Iterable[int]:
        """Yield every place within the common part of an earlier prompt at which its state was kept."""
        for common, kept in zip(row, history, strict=True):
            yield from (place for place in kept.states if place <= common)

    def _kept(self, length: int, hit: int, junction: int) -> _Kept:
        proof = length if self.drop else length - 1
        fine_end = max(proof // self.unit * self.unit - self.drop, 0)
        block_end = max(proof // self.block * self.block - (self.block if self.drop else 0), 0)
        states, start = set(), hit
        while start < length:
            inside = self._inside(start, length, fine_end)
            end = self._step_end(start, length, junction, () if inside else (block_end, fine_end))
            if inside and end == length:
                states.add(fine_end)
            elif end % self.block == 0:
                wanted = end in (block_end, junction, fine_end) or (self.interval and end % self.interval == 0)
                states |= {end} if wanted else set()
            elif end == fine_end:
                states.add(end)
            start = end
        return _Kept(attention_end=fine_end + self.drop, states=frozenset(states))

    def _step_end(self, start: int, length: int, junction: int, ends: tuple[int, ...]) -> int:
        """Return where the prefill step that begins at ``start`` ends."""
        end = min(start + self.unknown.batch_tokens, length)
        whole = end // self.block * self.block
        if end < length and whole > start:
            end = whole
        next_block = (start // self.block + 1) * self.block if ends and start % self.block else 0
        return min((stop for stop in (junction, next_block, *ends) if start < stop < end), default=end)

    def _inside(self, start: int, length: int, fine_end: int) -> bool:
        """Return whether the prompt's last state is written from inside the step that begins at ``start``."""
        return (
            self.unknown.writes_from_inside
            and start + self.unknown.batch_tokens >= length
            and start % self.unit == 0
            and -(-length // self.block) - 2 > (start - 1) // self.block
            and start + self.unit <= fine_end
            and (fine_end - start) % checkpoint_alignment() == 0
        )

    def _reason(self, shared: int, matched: int, hit: int, junction: int) -> str:
        if shared < self.unit:
            return _too_little(shared, self.unit)
        if hit and not junction:
            return f"attention matches {matched} of {shared} shared tokens, and a state was kept at {hit}"
        if junction:
            kept = f"the last state kept within them is at {hit}" if hit else "no state was kept within them"
            return (
                f"attention matches {matched} of {shared} shared tokens, {kept}; one is kept at {junction} from now on"
            )
        return f"{shared} shared tokens hold nothing that attention matches"
