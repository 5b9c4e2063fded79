"""A prefix cache as vLLM keeps it, without an engine: prompts in, tokens supplied out. Content identifies a block.

Read in vLLM 0.32 (v1/core/single_type_kv_cache_manager.py, kv_cache_coordinator.py, sched/scheduler.py) and compared
with what its own scheduler supplied (tests/data/prefix_cache). Two kinds of engine:

* attention only: every whole block of a prompt is kept, a hit is whole blocks and never covers the last token;
* recurrent state kept along with attention (``mamba_cache_mode`` align, as Kimi K3): a prompt can resume only where a
  state was kept. States are kept where a prefill step ends on a block boundary, and of those only near the prompt's
  end, at a junction (where attention alone would have matched further) and at the retention interval.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_CHECKPOINT_ALIGNMENT = 16  # tokens; model_executor/layers/mamba/kda_checkpoint.py


class Flaw(StrEnum):
    """One way for a cache to be wrong."""

    NEVER_HITS = "nothing that was kept is ever found"
    STATE_LOST = "recurrent state is not kept, attention blocks are"
    JUNCTION_LOST = "no state is kept at a junction"
    BLOCK_SHORT = "every hit is one block too short"
    BLOCK_LONG = "every hit is one block too long, where the prompt has one"
    ANY_PREFIX = "a block is known by its length, whatever its tokens"


@dataclass(slots=True, kw_only=True)
class CacheModel:
    """One engine's cache.

    Attributes:
        block_size: Tokens per block; attention and recurrent state have the same.
        recurrent: Whether recurrent state is kept along with attention.
        match_unit: Finest boundary a hit can land on (``--prefix-match-unit``); None for the block.
        retention: Tokens between states kept beyond those near the end and at junctions; 0 for none, None for dense.
        draft_drop: Whether a draft model makes the last matched unit be recomputed (EAGLE, MTP).
        batch_tokens: Tokens of one prefill step at most (``--max-num-batched-tokens``).
        internal_checkpoint: Whether the prefill kernel writes the last state from inside a step (FlashKDA), so that a
            state at the last block boundary below a finer match unit is not kept.
        caching: Whether prefix caching is on.
        num_blocks: What the engine says of its size; nothing is ever evicted here.
        flaw: How it is wrong; None for a healthy cache.
    """

    block_size: int = 64
    recurrent: bool = False
    match_unit: int | None = None
    retention: int | None = 0
    draft_drop: bool = False
    batch_tokens: int = 8192
    internal_checkpoint: bool = False
    caching: bool = True
    num_blocks: int = 4096
    flaw: Flaw | None = None
    _attention: set[bytes] = field(default_factory=set)
    _states: set[bytes] = field(default_factory=set)

    @property
    def unit(self) -> int:
        """Tokens between two places a hit can land on."""
        return self.match_unit or self.block_size

    def clear(self) -> None:
        """Forget everything, as a new process does."""
        self._attention.clear()
        self._states.clear()

    def geometry_labels(self) -> dict[str, str]:
        """Return the labels of ``vllm:cache_config_info`` as vLLM 0.32 writes them; it says ``None`` for what is unset.

        The last two exist and are never filled in by the API server, whose copy of the configuration they miss.
        """
        block = str(self.block_size)
        return {
            "block_size": block,
            "enable_prefix_caching": str(self.caching),
            "mamba_cache_mode": "align" if self.recurrent and self.caching else "none",
            "mamba_block_size": block if self.recurrent else "None",
            "effective_attention_block_size": block,
            "num_gpu_blocks": str(self.num_blocks),
            "kv_cache_size_tokens": str(self.num_blocks * self.block_size),
            "prefix_match_unit": str(self.match_unit),
            "prefix_cache_retention_interval": str(self.retention),
            "sliding_window": "None",
            "hash_block_size": "None",
            "cache_hit_alignment_tokens": "None",
        }

    def look_up(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt the cache supplies, and keep what this prompt leaves behind."""
        if not self.caching:
            return 0
        keys = self._keys(tokens)
        matched = self._matched(tokens, keys)
        hit = self._resumable(matched, keys) if self.recurrent else matched
        self._keep(tokens, keys, hit, junction=matched if matched > hit else 0)
        return self._told(hit, len(tokens))

    def _keys(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """Return the identity of every prefix that ends on a unit, by its length."""
        if self.flaw is Flaw.ANY_PREFIX:
            return {end: str(end).encode() for end in range(self.unit, len(tokens) + 1, self.unit)}
        digest, keys = hashlib.sha256(), {}
        for end in range(self.unit, len(tokens) + 1, self.unit):
            digest.update(array("q", tokens[end - self.unit : end]).tobytes())
            keys[end] = digest.digest()
        return keys

    def _matched(self, tokens: Sequence[int], keys: dict[int, bytes]) -> int:
        """Return how far attention alone matches: whole blocks, then the one finer boundary a prompt's end leaves."""
        block, unit = self.block_size, self.unit
        # With a draft the unit after the candidate is matched too, to be dropped again, where recurrent state is kept.
        limit = len(tokens) if self.draft_drop and self.recurrent else len(tokens) - 1
        end = 0
        while end + block <= limit and keys[end + block] in self._attention:
            end += block
        for finer in range(min(end + block - unit, limit // unit * unit), end, -unit):
            if keys[finer] in self._attention:
                end = finer
                break
        return max(end - unit, 0) if self.draft_drop else end

    def _resumable(self, matched: int, keys: dict[int, bytes]) -> int:
        """Return the last place at or before ``matched`` at which a state was kept."""
        return next((end for end in range(matched, 0, -self.unit) if keys[end] in self._states), 0)

    def _keep(self, tokens: Sequence[int], keys: dict[int, bytes], hit: int, junction: int) -> None:
        if self.flaw is Flaw.NEVER_HITS:
            return
        whole = range(self.block_size, len(tokens) + 1, self.block_size)
        self._attention |= {keys[end] for end in whole}
        if not self.recurrent:
            return
        tail = self._last_boundary(len(tokens), self.unit)
        stop = 0 if self.flaw is Flaw.JUNCTION_LOST else junction // self.block_size * self.block_size
        # Attention keeps the prompt's end by the finer unit as well, one unit further where a draft drops it again.
        finer = tail + self.unit if self.draft_drop else tail
        if finer in keys:
            self._attention.add(keys[finer])
        if self.flaw is not Flaw.STATE_LOST:
            places = self._state_places(len(tokens), hit, stop, tail)
            self._states |= {keys[end] for end in places if end in keys}

    def _last_boundary(self, length: int, step: int) -> int:
        """Return where a prompt sent again would resume, on boundaries of ``step`` tokens."""
        if self.draft_drop:
            return max(length // step * step - step, 0)
        return (length - 1) // step * step

    def _state_places(self, length: int, hit: int, junction: int, tail: int) -> set[int]:
        """Return the prefix lengths at which this prompt's recurrent state is kept: some ends of its prefill steps."""
        block, start, kept = self.block_size, hit, set()
        last = self._last_boundary(length, block)
        while start < length:
            end = min(start + self.batch_tokens, length)
            if end < length and end // block * block > start:
                end = end // block * block
            inside = end == length and self._writes_from_inside(start, length, tail)
            stops = {junction} if inside else {junction, last, tail, -(-start // block) * block}
            end = min((stop for stop in stops if start < stop < end), default=end)
            if end == length and inside:
                kept.add(tail)
            elif end == tail or (end % block == 0 and (end in (last, junction) or self._retained(end))):
                kept.add(end)
            start = end
        return kept

    def _retained(self, end: int) -> bool:
        """Return whether a state is kept although nothing is known to resume there."""
        return self.retention is None or (self.retention > 0 and end % self.retention == 0)

    def _writes_from_inside(self, start: int, length: int, tail: int) -> bool:
        """Return whether the prompt's last state is written from inside the step that ends the prompt.

        The step has to begin on a unit, reach into a later block than it began in, and hold the state's place.
        """
        began, ends = (start - 1) // self.block_size, -(-length // self.block_size) - 2
        return (
            self.internal_checkpoint
            and start % self.unit == 0
            and ends > began
            and start + self.unit <= tail
            and (tail - start) % _CHECKPOINT_ALIGNMENT == 0
        )

    def _told(self, hit: int, length: int) -> int:
        """Return the hit as the engine reports it."""
        if self.flaw is Flaw.BLOCK_SHORT:
            return max(hit - self.block_size, 0)
        if self.flaw is Flaw.BLOCK_LONG:
            return hit + self.block_size if hit + self.block_size < length else hit
        return hit
