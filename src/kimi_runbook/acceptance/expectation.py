"""What a healthy prefix cache must do, computed before a request is sent. Pure: tokens and geometry in, tokens out.

Rules for engines whose layers are all attention, as vLLM works (v1/core/kv_cache_manager.py): a hit is whole blocks
and never covers the last token, because that one is recomputed for its logits. Seen on vLLM 0.32 on CPU with block
128: 1288 tokens resent give 1280, 1280 tokens resent give 1152.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runbook.acceptance.geometry import Geometry


class NoRuleError(Exception):
    """This engine's hits follow rules that are not known here; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One request's expectation.

    Attributes:
        label: Which request.
        prompt_tokens: Length of the prompt.
        shared_tokens: Longest prefix in common with an earlier prompt; 0 at a first sighting.
        hit_tokens: Tokens the cache must supply.
        rule: How ``hit_tokens`` follows from the rest.
    """

    label: str
    prompt_tokens: int
    shared_tokens: int
    hit_tokens: int
    rule: str

    def to_json(self) -> dict[str, Any]:
        """Return the expectation as JSON-ready values."""
        return {
            "label": self.label,
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "hit_tokens": self.hit_tokens,
            "rule": self.rule,
        }


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences share from their start."""
    shared = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        shared += 1
    return shared


def expect(geometry: Geometry, prompts: Sequence[tuple[str, Sequence[int]]]) -> tuple[Expected, ...]:
    """Return what the cache must supply for each prompt, sent one after the other and none of them sent before.

    Args:
        geometry: The engine's geometry.
        prompts: (label, token ids) in the order they will be sent.

    Raises:
        NoRuleError: When recurrent state is cached too: then a shared prefix hits at its third sighting at the
            earliest, where a state was kept, and whole-block arithmetic does not apply.
    """
    if geometry.recurrent:
        mode = geometry.labels.get("mamba_cache_mode", "?")
        raise NoRuleError(f"mamba_cache_mode={mode}: hits depend on where recurrent state was kept")
    block = geometry.block_size
    expected = []
    for position, (label, tokens) in enumerate(prompts):
        length = len(tokens)
        shared = max((common_prefix(tokens, earlier) for _, earlier in prompts[:position]), default=0)
        reusable = min(shared, length - 1) if shared else 0
        if not geometry.prefix_caching:
            hits, rule = 0, "prefix caching is off"
        elif shared == length:
            hits, rule = reusable // block * block, f"resent: floor(({length}-1)/{block})*{block}"
        elif shared:
            hits, rule = reusable // block * block, f"shared part: floor({shared}/{block})*{block}"
        else:
            hits, rule = 0, "first sighting"
        expected.append(Expected(label=label, prompt_tokens=length, shared_tokens=shared, hit_tokens=hits, rule=rule))
    return tuple(expected)
